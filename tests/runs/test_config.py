"""Configurations: TOML, overrides, defaults, digest. Kind of evidence: contract, of `config` and of `build`.

Expected values are what the test wrote into the file, or what the docstrings of `config` promise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fedlora.errors import ConfigError
from fedlora.runs.config import KEYS, RunConfig, load_config, parse_config
from fedlora.runs.identity import NO_NUMBER, differing, digest, identity, later
from fedlora.runs.synonyms import SYNONYMS

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
    ("tables", "says"),
    [
        ({"run": {"round": 1}}, r"unknown key 'run\.round'; did you mean 'rounds'\?"),
        ({"run": {"rounds": 2.5}}, r"run\.rounds: .*whole number; got 2\.5"),
        ({"clients": {"ranks": "8"}}, r"clients\.ranks: .*list.*'8'"),
        ({"clients": {"ranks": [4, 0]}}, r"clients\.ranks\.1: .* at least 1; got 0"),
        ({"clients": {"profile": "flexlora-uniform", "ranks": 4}}, r".*flexlora-uniform.*clients\.ranks out"),
        ({"data": {"test": 1.5}}, r"data\.test: .*; got 1\.5"),  # of two types, the number's complaint alone
        ({"data": {"task": "sst2"}}, r"give one of data\.train .*"),
        ({"data": {"task": "superni", "train": None, "task_lists": ["a"]}}, r"data\.task_lists names two files.*"),
        ({"data": {"chat_template": "raw"}}, r"data\.chat_template is 'chat'.*"),
        ({"data": {"messages": "talk", "prompt": "q"}}, r"data\.messages = 'talk' .* data\.prompt .*"),
        ({"model": {"dtype": "bfloat16"}}, r"model\.dtype .* model\.bf16 = true.*"),
        ({"model": {"name": "a/b@main", "revision": "x"}}, r"model\.name .* leave out model\.revision"),
        ({"data": {"label_names": ["a", "a "]}}, r"data\.label_names: .*'a '.* twice.*"),
        ({"train": {"num_train_epochs": 5.0}}, r"train\.num_train_epochs = 5 .* train\.max_steps = -1.* 10"),
        # of several types, what was given says what is wrong; where it is none of them, all are named
        ({"clients": {"ranks": {"attention": 2}}}, r"key 'clients\.ranks\.feed_forward' is missing"),
        ({"clients": {"ranks": [True, 4]}}, r"clients\.ranks\.0: .*whole number or .*table; got True"),
        ({"lora": {"target_modules": ["q", 3]}}, r"lora\.target_modules\.1: .*text.*; got 3"),
    ],
)
def test_what_is_wrong_is_one_complaint_by_the_key_of_the_file(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**tables)
    assert re.fullmatch(says, str(caught.value)) and str(caught.value).count("; got ") < 2


def test_all_that_is_wrong_is_said_at_once_and_what_is_missing_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^key 'model\.name' is missing$"):
        parse_config({"model": {}, "data": {"train": "t.csv"}})
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path), ["run.rounds=0", "run.sed=1", "train.learning_rate=-1.0", "method.name=glroa"])
    said = ("run.rounds", "'run.sed'", "train.learning_rate", "glroa", "train.jsonl does not exist")
    assert all(str(caught.value).count(words) == 1 for words in said)


def test_every_synonym_names_a_key_and_is_none() -> None:
    """A table, or a key of one; a synonym that is a key would never be asked for."""
    ours = {*KEYS, *RunConfig.model_fields, "method.name"}
    assert {*SYNONYMS.values()} <= ours and not {*SYNONYMS} & ours


def test_an_unknown_key_is_answered_with_ours_also_one_that_is_needed() -> None:
    for table, key, ours in (("run", "num_rounds", "run.rounds"), ("lora", "r", "clients.ranks")):
        with pytest.raises(ConfigError, match=rf"unknown key '{table}\.{key}'; did you mean '{ours}'\?"):
            parsed(**{table: {key: 1}})
    with pytest.raises(ConfigError, match=r"^unknown key 'model\.nme'; did you mean 'name'\?$"):
        parse_config({"model": {"nme": "m"}, "data": {"train": "t.csv"}})
    with pytest.raises(ConfigError, match=r"^unknown key 'model\.path'; did you mean 'model\.name'\?$"):
        parse_config({"model": {"path": "m"}, "data": {"train": "t"}})


# ---- files -----------------------------------------------------------------------------------------------------------


def test_data_paths_are_made_absolute_from_the_file_not_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    (folder / "model").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "a" / "b@c").mkdir(parents=True)
    assert parsed(model={"name": "a/b@c"}).model.name == "a/b@c", "a folder, and no revision of the hub's"
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


# ---- --set -----------------------------------------------------------------------------------------------------------


def test_set_reaches_nested_tables_and_later_ones_win(tmp_path: Path) -> None:
    """Values as TOML has them; bare words are text."""
    text = '[model]\nname = "m"\n[data.clients]\na = "a.csv"\n'
    words = ["data.clients.b=b.csv", "run.seed=1", "run.seed = 2", "run.readouts=true", "train.optimizer=sgd"]
    config = load_config(written(tmp_path, text), [*words, 'lora.target_modules=["q", "v"]', "data.text=a=b"])
    assert (config.run.readouts, config.train.optimizer, config.data.text) == (True, "sgd", "a=b")
    assert config.lora.target_modules == ["q", "v"] and list(config.data.clients) == ["a", "b"]
    assert config.data.clients["b"] == str(tmp_path / "b.csv"), "a path given by --set is relative to the file as well"
    assert config.run.seed == 2


def test_set_takes_one_key_and_loses_nothing(tmp_path: Path) -> None:
    """Of several lines, and of a table in place of one with other keys. One text of two lines is one value."""
    for override in ("run.rounds", "=5", "run..rounds=5"):
        with pytest.raises(ConfigError, match=r"--set takes KEY=VALUE .*got "):
            load_config(written(tmp_path), [override])
    with pytest.raises(ConfigError, match=r"run\.rounds: must be a whole number"):
        load_config(written(tmp_path), ["run.rounds=2\n[server]\nquorum=5"])
    with pytest.raises(ConfigError, match=r"without name.*model\.dropout"):
        load_config(written(tmp_path), ["model={dropout = 0.0}"])
    text = ["model.task=causal-lm", 'data.chat_template="""Q: {prompt}\nA:"""']
    assert load_config(written(tmp_path), text).data.chat_template == "Q: {prompt}\nA:"


# ---- digest ----------------------------------------------------------------------------------------------------------


def test_the_digest_is_the_same_for_the_same_run_however_it_was_written(tmp_path: Path) -> None:
    """Order of tables, defaults written out, and --set instead of the file make no difference."""
    a = load_config(written(tmp_path, MINIMAL + "[train]\nlearning_rate = 0.002\nmax_steps = 3\n"))
    b = load_config(
        written(tmp_path, "[train]\nmax_steps = 3\nlearning_rate = 2e-3\n" + MINIMAL + "[run]\nrounds = 10\n")
    )
    c = load_config(written(tmp_path), ["train.learning_rate=0.002", "train.max_steps=3"])
    assert digest(a) == digest(b) == digest(c) and a.canonical() == b.canonical()
    for one in (8, {"attention": 4, "feed_forward": 8}):
        assert digest(parsed(clients={"ranks": one})) == digest(parsed(clients={"ranks": [one]}))


@pytest.mark.filterwarnings("ignore:Pydantic serializer:UserWarning")
def test_every_key_is_of_the_digest_and_the_identity_or_in_a_named_set() -> None:
    """Each field of each table, changed alone and unchecked: no run is taken for another, nor made twice for nothing.
    And whatever else was read."""
    private = {"clipping_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "population": "p", "ledger": "l"}
    base, facts = parsed(privacy=private), {"model": {"sha256": {}}, "data": {}, "threads": 1}
    for name in KEYS:
        table, key = name.split(".")
        section: BaseModel = getattr(base, table)
        value = {"a": "another"} if name == "data.clients" else "another"
        config = base.model_copy(update={table: section.model_copy(update={key: value})})
        assert (digest(config) == digest(base)) == (name in NO_NUMBER), name
        assert (identity(config, facts) == identity(base, facts)) == (name in later(config)), name
        assert [one[0] for one in differing(base, config)] == [name]
    read = [{**facts, "threads": 2}, {**facts, "data": {"a": 1}}, {**facts, "model": {"sha256": {"a": "1"}}}]
    read.append({**facts, "model": {"sha256": {}, "adapter": {"a": "1"}}})
    assert len({identity(base, facts), identity(base, facts, "s"), *(identity(base, one) for one in read)}) == 6
    assert digest(parsed(method={"rho": 0.5})) != digest(parsed(method={"rho": 0.25}))
    assert "run.rounds" in later(parsed()) and "run.rounds" not in later(parsed(train={"lr_scheduler_type": "linear"}))


@pytest.mark.parametrize("clients", [{"profile": "normal"}, {"ranks": [2, {"attention": 4, "feed_forward": 8}]}])
def test_the_canonical_form_read_back_is_the_same_run(clients: dict[str, Any]) -> None:
    """Nothing may hang on whether a key was written or left at its default: the canonical form writes them all."""
    config = parsed(clients=clients, method={"name": "glora", "rho": 0.5})
    raw = json.loads(config.canonical())
    again = parse_config(raw)
    assert set(raw) == set(RunConfig.model_fields) and again == config
    assert digest(again) == digest(config) and again.clients.types() == config.clients.types()


def test_the_digest_sees_which_client_gets_which_rank() -> None:
    """`clients.ranks` is "one for each client in that order", so the order of data.clients is part of the run."""
    there, back = (
        parse_config({"model": {"name": "m"}, "data": {"clients": clients}, "clients": {"ranks": [2, 8]}})
        for clients in ({"a": "a.csv", "b": "b.csv"}, {"b": "b.csv", "a": "a.csv"})
    )
    assert digest(there) != digest(back)
