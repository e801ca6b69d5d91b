"""Configurations: TOML, overrides, defaults, digest. Kind of evidence: contract, of `config` and of `build`.

Expected values are what the test wrote into the file, or what the docstrings of `config` promise.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fedlora.errors import ConfigError, FedLoRAError, HyperparameterError
from fedlora.methods.fedit import FedIT
from fedlora.methods.glora import GLoRA
from fedlora.methods.registry import METHODS, build
from fedlora.runs.config import KEYS, RunConfig, load_config, parse_config
from fedlora.runs.identity import NO_NUMBER, differing, identity, later

MINIMAL = '[model]\nname = "hub/model"\n[data]\ntrain = "train.jsonl"\n'


def written(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def parsed(**tables: Mapping[str, Any]) -> RunConfig:
    """The smallest configuration, with tables merged over it."""
    raw: dict[str, Any] = {"model": {"name": "hub/model"}, "data": {"train": "train.jsonl"}}
    for name, table in tables.items():
        raw[name] = {**raw.get(name, {}), **table}
    return parse_config(raw)


# ---- what is wrong is said by name -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "key", "named", "nearest"),
    [
        ("run", "round", "run.round", "rounds"),
        ("model", "nam", "model.nam", "name"),
        ("train", "batchsize", "train.batchsize", "batch_size"),
        ("evaluate", "clients_at_ends", "evaluate.clients_at_ends", "clients_at_end"),
        ("clients", "rank", "clients.rank", "ranks"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(table: str, key: str, named: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{named}'; did you mean '{nearest}'\?"):
        parsed(**{table: {key: 1}})


def test_an_unknown_table_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(ConfigError, match=r"'servr'; did you mean 'server'\?"):
        parsed(servr={"quorum": 2})


def test_an_unknown_key_with_no_near_one_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'server\.zzzz'; known: weighting, heads"):
        parsed(server={"zzzz": 1})


@pytest.mark.parametrize(
    ("table", "key", "value", "says"),
    [
        ("run", "rounds", "ten", r"run\.rounds: .*whole number.*'ten'"),
        ("run", "rounds", 2.5, r"run\.rounds: .*whole number.*2\.5"),
        ("clients", "ranks", "8", r"clients\.ranks: .*list.*'8'"),
        ("clients", "ranks", True, r"clients\.ranks: .*list.*True"),
        ("clients", "ranks", [4, "x"], r"clients\.ranks\.1: .*whole number.*'x'"),
        ("model", "bf16", "maybe", r"model\.bf16: .*true or false.*'maybe'"),
        ("data", "clients", ["a.csv"], r"data\.clients: .*table.*a\.csv"),
        ("data", "clients", {"a": 3}, r"data\.clients\.a: .*text.*3"),
        ("attack", "clients", "site-1", r"attack\.clients: .*list.*'site-1'"),
    ],
)
def test_a_wrong_type_names_the_key_and_the_value(table: str, key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parsed(**{table: {key: value}})


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("run", "rounds", 0),
        ("run", "participation", 0.0),
        ("run", "participation", 1.1),
        ("run", "threads", -1),
        ("run", "checkpoint_every", 0),
        ("model", "task", "regression"),
        ("model", "dropout", 1.0),
        ("lora", "scaling", 0.0),
        ("lora", "lora_dropout", -0.1),
        ("server", "quorum", 0),
        ("server", "weighting", "size"),
        ("server", "heads", "global"),
        ("server", "stream", "often"),
        ("clients", "ranks", [4, 0]),
        ("clients", "ranks", 0),
        ("clients", "profile", "bell"),
        ("clients", "partition", "random"),
        ("clients", "dirichlet_alpha", 0.0),
        ("data", "max_length", 0),
        ("train", "learning_rate", 0.0),
        ("train", "learning_rate", float("nan")),
        ("train", "optimizer", "lion"),
        ("train", "lr_scheduler_type", "step"),
        ("train", "max_steps", -1),
        ("train", "num_train_epochs", 0.0),
        ("train", "accumulation", 0),
        ("train", "max_grad_norm", -1.0),
        ("evaluate", "every", 0),
        ("evaluate", "target", "unseen"),
    ],
)
def test_an_impossible_value_is_refused_by_key(table: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{table}\.{key}\b.*; got "):
        parsed(**{table: {key: value}})


def test_an_impossible_share_is_one_complaint_under_the_key_of_the_file() -> None:
    """`data.test` may also be a file's name; that union is no business of whoever wrote 1.5."""
    with pytest.raises(ConfigError, match=r"data\.test\b.*; got 1\.5") as caught:
        parsed(data={"test": 1.5})
    assert str(caught.value).startswith("data.test: ")
    assert str(caught.value).count("; got ") == 1


@pytest.mark.parametrize(
    ("table", "key", "value", "says"),
    [
        ("train", "class_weights", 3, "train.class_weights: .*'balanced'; got 3"),
        ("clients", "ranks", [{"attention": 2}, 4], "key 'clients.ranks.0.feed_forward' is missing"),
        ("clients", "ranks", {"attention": 2}, "key 'clients.ranks.feed_forward' is missing"),
        (
            "clients", "ranks", [4, {"attention": 2, "feedforward": 2, "feed_forward": 2}],
            ".*'clients.ranks.1.feedforward'; did you mean 'feed_forward'.*",
        ),
        ("clients", "ranks", [True, 4],
         "clients.ranks.0: .*whole number or .*table; got True"),
        ("run", "workers", 0, "run.workers: .* 1; got 0"),
        ("run", "workers", "all", "run.workers: .*whole number or 'auto'; got 'all'"),
        ("lora", "target_modules", ["q", 3], "lora.target_modules.1: .*text.*; got 3"),
        ("evaluate", "clients_at_end", "b",
         "evaluate.clients_at_end: .*true or false or 'both'; got 'b'"),
    ],
)  # fmt: skip
def test_of_several_types_the_one_that_was_given_says_what_is_wrong(
    table: str, key: str, value: object, says: str
) -> None:
    """A table is judged as a table and a number as a number; where it is none of them, all are named."""
    with pytest.raises(ConfigError) as caught:
        parsed(**{table: {key: value}})
    assert re.fullmatch(says, str(caught.value)) and str(caught.value).count("; ") < 2


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^key 'model\.name' is missing$"):
        parse_config({"model": {}, "data": {"train": "t.csv"}})
    with pytest.raises(ConfigError, match=r"^key 'model' .*; key 'data' [^;]*$"):
        parse_config({})


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(run={"rounds": 0, "sed": 1}, train={"learning_rate": -1.0})
    message = str(caught.value)
    assert "run.rounds" in message and "'run.sed'" in message and "train.learning_rate" in message
    assert "\n" not in message


@pytest.mark.parametrize("data", [{}, {"train": "t.csv", "clients": {"a": "a.csv"}}])
def test_data_come_from_one_file_or_from_one_for_each_client(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"one of data\.train .*data\.clients"):
        parse_config({"model": {"name": "m"}, "data": data})


def test_either_source_of_data_is_accepted() -> None:
    assert parse_config({"model": {"name": "m"}, "data": {"clients": {"a": "a.csv"}}}).data.train is None
    assert parsed().data.clients == {}


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml .*: No such file") as caught:
        load_config(tmp_path / "nowhere.toml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[model\nname = 1", b"[model]\nname = \xff\n", b"a = 1\na = 2\n"])
def test_what_is_no_toml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.toml is not TOML: ") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_data_paths_are_made_absolute_from_the_file_not_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = '[model]\nname = "model"\n[data]\ntrain = "../t.csv"\nvalidation = "v.csv"\ntest = 0.2\n'
    config = load_config(written(folder, text))
    assert config.model.name == str(folder / "model")
    assert config.data.train == str(tmp_path / "t.csv")
    assert config.data.validation == str(folder / "v.csv")
    assert config.data.test == 0.2

    text = f'[model]\nname = "hub/model"\n[data.clients]\na = "a.csv"\nb = "{elsewhere}/b.csv"\n'
    config = load_config(written(folder, text))
    assert config.data.clients == {"a": str(folder / "a.csv"), "b": str(elsewhere / "b.csv")}
    assert config.model.name == "hub/model", "no such directory: a hub id stays as it is"


def test_a_relative_config_path_gives_absolute_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("config.toml")).data.train == str(tmp_path / "train.jsonl")


def test_demo_stays_a_word_and_no_path() -> None:
    """The demo's config is as good as any other, and names what is built in."""
    config = load_config(Path(str(files("fedlora") / "demo.toml")))
    assert (config.model.name, config.data.train) == ("demo", "demo")
    assert config.clients.ranks == [2, 4, 4, 8, 8, 16]
    assert config.method.build() == GLoRA(rho=1.0, gamma=0.5)


# ---- --set -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "table", "key", "value"),
    [
        ("run.rounds=7", "run", "rounds", 7),
        ("run.rounds = 7", "run", "rounds", 7),
        ("train.learning_rate=5e-4", "train", "learning_rate", 5e-4),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("run.readouts=true", "run", "readouts", True),
        ("train.optimizer=sgd", "train", "optimizer", "sgd"),
        ('train.optimizer="sgd"', "train", "optimizer", "sgd"),
        ("clients.ranks=[2, 4]", "clients", "ranks", [2, 4]),
        ("clients.ranks=4", "clients", "ranks", [4]),
        ('lora.target_modules=["q", "v"]', "lora", "target_modules", ["q", "v"]),
        ("lora.target_modules=all-linear", "lora", "target_modules", "all-linear"),
        ("data.text=a=b", "data", "text", "a=b"),
    ],
)
def test_set_reads_numbers_words_lists_and_truth_values(
    tmp_path: Path, override: str, table: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_config(written(tmp_path), [override]), table), key) == value


def test_set_reaches_nested_tables_and_later_ones_win(tmp_path: Path) -> None:
    text = '[model]\nname = "m"\n[data.clients]\na = "a.csv"\n'
    config = load_config(written(tmp_path, text), ["data.clients.b=b.csv", "run.seed=1", "run.seed=2"])
    assert list(config.data.clients) == ["a", "b"]
    assert config.data.clients["b"] == str(tmp_path / "b.csv"), "a path given by --set is relative to the file as well"
    assert config.run.seed == 2


@pytest.mark.parametrize("override", ["run.rounds", "=5", "run.=5", ".rounds=5", "run..rounds=5"])
def test_set_without_key_or_value_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set takes KEY=VALUE .*got "):
        load_config(written(tmp_path), [override])


@pytest.mark.parametrize("more", ["[server]\nquorum=5", "x = 3", "run.seed = 3"])
def test_set_of_several_lines_loses_none_of_them(tmp_path: Path, more: str) -> None:
    with pytest.raises(ConfigError, match=r"--set 'run\.rounds=2.*more than one value"):
        load_config(written(tmp_path), [f"run.rounds=2\n{more}"])
    said = ["model.task=causal-lm", 'data.chat_template="""Q: {prompt}\nA:"""']
    assert load_config(written(tmp_path), said).data.chat_template == "Q: {prompt}\nA:", (
        "one text of two lines is one value"
    )


def test_a_table_is_not_set_in_place_of_one_with_other_keys(tmp_path: Path) -> None:
    """What the file says there would be lost."""
    with pytest.raises(ConfigError, match=r"without name.*model\.dropout"):
        load_config(written(tmp_path), ["model={dropout = 0.0}"])


def test_set_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model\.name\.x' .*model\.name is a value"):
        load_config(written(tmp_path), ["model.name.x=1"])


def test_set_is_checked_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'run\.round'; did you mean 'rounds'"):
        load_config(written(tmp_path), ["run.round=5"])
    with pytest.raises(ConfigError, match=r"run\.rounds: .*got 0"):
        load_config(written(tmp_path), ["run.rounds=0"])


# ---- digest ----------------------------------------------------------------------------------------------------------


def test_the_digest_is_the_same_for_the_same_run_however_it_was_written(tmp_path: Path) -> None:
    """Order of tables, defaults written out, and --set instead of the file make no difference."""
    a = load_config(written(tmp_path, MINIMAL + "[train]\nlearning_rate = 0.002\nmax_steps = 3\n"))
    b = load_config(
        written(tmp_path, "[train]\nmax_steps = 3\nlearning_rate = 2e-3\n" + MINIMAL + "[run]\nrounds = 10\n")
    )
    c = load_config(written(tmp_path), ["train.learning_rate=0.002", "train.max_steps=3"])
    assert a.digest() == b.digest() == c.digest()
    assert a.canonical() == b.canonical()
    assert len(a.digest()) == 16


def test_the_canonical_json_holds_every_field_and_makes_the_same_run_again() -> None:
    config = parsed(method={"name": "glora", "rho": 0.5}, data={"test": 0.3}, clients={"ranks": [2, 4]})
    raw = json.loads(config.canonical())
    assert set(raw) == set(RunConfig.model_fields)
    assert raw["method"] == {"name": "glora", "rho": 0.5}
    assert parse_config(raw) == config
    assert parse_config(raw).digest() == config.digest()


def other(key: str, value: Any) -> Any:
    """Another legal value of the same kind."""
    words = {
        "task": "causal-lm", "profile": "normal", "partition": "iid", "optimizer": "sgd", "schedule": "cosine",
        "weighting": "uniform", "heads": "local", "target": "clients",
        "name": "fedit", "keep_uploads": "last", "metric": "rouge-l",
        "task_lists": ["a", "b"], "max_train": 9, "max_test": 9, "gauge_stress": 10.0, "ranks": [4], "alpha": 0.5,
        "track": ["wandb"], "class_weights": "balanced", "own_test": 0.25, "patience": 2, "accumulation": 2,
        "labels": ["no", "yes"], "messages": "talk", "revision": "abc",
        "dtype": "bfloat16", "adapter": "a", "template": "Q: {prompt} A:",
        "kind": "sign-flip", "share": 0.2, "clients": ("a",), "strength": 2.0,  # of [attack]
        "byzantine": 1, "threshold": 0.5, "tau": 0.5, "tolerance": 0.25, "iterations": 2,
        "quorum": 2, "workers": 2, "count": 3, "pair": "second", "dropout": 0.25,
        "command": ["program"], "timeout": 60.0,
    }  # fmt: skip
    if key in words:
        return words[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 + 0.01
    if isinstance(value, list):
        return [*value, *(value or ["more"])]
    if isinstance(value, str):
        return value + "x"
    raise AssertionError(f"no other value known for {key} = {value!r}")


def test_every_key_is_of_the_digest_and_the_identity_or_in_a_named_set() -> None:
    """Each field of each table, changed alone: no run is taken for another, nor made twice for nothing."""
    base, facts = parsed(), {"model": {"sha256": {}}, "data": {}, "threads": 1}
    apart = {"data.clients", "data.task"}  # in place of data.train
    for name in {*KEYS} - apart:
        table, key = name.split(".")
        if table == "privacy":
            continue  # which may be left out: test_private_run.py
        section: BaseModel = getattr(base, table)
        moved = section.model_copy(update={key: other(key, getattr(section, key))})  # unchecked: each key alone
        config = base.model_copy(update={table: moved})
        assert (config.digest() == base.digest()) == (name in NO_NUMBER), name
        assert (identity(config, facts) == identity(base, facts)) == (name in later(config)), name
        assert [one[0] for one in differing(base, config)] == [name]
    assert parsed(method={"rho": 0.5}).digest() != parsed(method={"rho": 0.25}).digest()
    own = [parse_config({"model": {"name": "m"}, "data": {"clients": {"a": name}}}).digest() for name in ("x", "y")]
    assert own[0] != own[1]


def test_rounds_are_of_the_run_where_each_round_depends_on_their_number() -> None:
    assert "run.rounds" in later(parsed()) and "run.rounds" not in later(parsed(train={"lr_scheduler_type": "linear"}))


def test_one_rank_for_all_is_a_list_of_it() -> None:
    kinds = {"attention": 4, "feed_forward": 8}
    for one in (8, kinds):
        assert parsed(clients={"ranks": one}).digest() == parsed(clients={"ranks": [one]}).digest()


@pytest.mark.parametrize(
    "clients",
    [
        {},
        {"profile": "normal"},
        {"profile": "flexlora-heavy-tail"},
        {"ranks": [2, {"attention": 4, "feed_forward": 8}]},
        {"dirichlet_alpha": 0.1},
    ],
)
def test_the_canonical_form_read_back_is_the_same_run(clients: dict[str, Any]) -> None:
    """Nothing may hang on whether a key was written or left at its default: the canonical form writes them all."""
    config = parsed(clients=clients)
    again = parse_config(json.loads(config.canonical()))
    assert again.digest() == config.digest() and again.clients.types() == config.clients.types()


def test_the_digest_sees_which_client_gets_which_rank() -> None:
    """`clients.ranks` is "one for each client in that order", so the order of data.clients is part of the run."""
    there, back = (
        parse_config({"model": {"name": "m"}, "data": {"clients": clients}, "clients": {"ranks": [2, 8]}})
        for clients in ({"a": "a.csv", "b": "b.csv"}, {"b": "b.csv", "a": "a.csv"})
    )
    assert there.digest() != back.digest()


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parsed().run.rounds = 3  # type: ignore[misc]


# ---- methods ---------------------------------------------------------------------------------------------------------


def test_hyper_parameters_pass_through_to_the_method(tmp_path: Path) -> None:
    text = MINIMAL + '[method]\nname = "glora"\nrho = 0.75\nhistory = 5\n'
    config = load_config(written(tmp_path, text), ["method.gamma=0.25", "method.rank=6"])
    method = config.method.build()
    assert method == GLoRA(rho=0.75, history=5, gamma=0.25, rank=6)


@pytest.mark.parametrize(
    ("name", "hparams", "says"),
    [
        ("glora", {"gama": 0.5}, r"glora .*'gama'; did you mean 'gamma'\?"),
        ("fedit", {"rho": 1.0}, r"fedit has no hyper-parameter 'rho'.* It has: none"),
        ("gloro", {}, r"'gloro'; did you mean 'glora'\? Known: "),
        ("glora", {"rho": 2.0}, r"glora: rho is a share .*got 2\.0"),
        ("no_such_module:Method", {}, r"'no_such_module:Method' cannot be made: .*No module named"),
        ("fedlora.methods.fedit:Nope", {}, r"'fedlora\.methods\.fedit:Nope' cannot be made: .*has no attribute"),
        ("fedlora.methods.fedit:FedIT", {"rho": 1.0}, r"fedit:FedIT has no hyper-parameter 'rho'"),
    ],
)
def test_a_method_that_cannot_be_made_says_why(name: str, hparams: dict[str, Any], says: str) -> None:
    with pytest.raises(HyperparameterError, match=says):
        build(name, **hparams)


@pytest.mark.parametrize("hparams", [{"rho": "half"}, {"gamma": [0.5]}, {"rank": 2.5}])
def test_a_hyper_parameter_of_a_wrong_type_is_our_error_and_no_crash(hparams: dict[str, Any]) -> None:
    """`--set method.rho=half` is bad input like any other: the command line turns only FedLoRAError into one line."""
    with pytest.raises(FedLoRAError):
        build("glora", **hparams)


def test_an_own_class_is_made_by_module_and_name() -> None:
    assert build("fedlora.methods.fedit:FedIT") == FedIT()
    assert build("fedlora.methods.glora:GLoRA", rho=0.5) == GLoRA(rho=0.5)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_working_defaults(name: str) -> None:
    m = parsed(method={"name": name}).method
    assert m.build() == METHODS[name]()


# ---- agreement with what the tables stand for ------------------------------------------------------------------------


def test_the_demo_config_is_toml_with_known_keys_only() -> None:
    raw = tomllib.loads((files("fedlora") / "demo.toml").read_text(encoding="utf-8"))
    assert parse_config(raw).method.name == "glora"
