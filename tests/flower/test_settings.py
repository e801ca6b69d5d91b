"""A federation's settings and a site's own file. Kinds of evidence: *contract* (there and back; a site's run is the
same as `fedlora run`'s), *teaching errors* (each key that does not belong is named, with what to do)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.terms.one_machine import ELSEWHERE
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.settings_from_run import from_run, read_run_file
from fedlora.flower.terms.site_file import Site
from fedlora.runs.config import RunConfig, load_config, parse_config

RUN = """\
[model]
path = "base"
dropout = 0.0
[data]
labels = ["no", "yes"]
max_length = 32
[lora]
targets = ["q_proj"]
alpha = 16.0
[method]
name = "glora"
R = 4
[server]
quorum = 2
[train]
steps = 3
class_weights = "balanced"
[run]
rounds = 6
participation = 0.5
"""


def settings(tmp_path: Path, text: str = RUN) -> FederationSettings:
    (tmp_path / "run.toml").write_text(text)
    return read_run_file(tmp_path / "run.toml", id="fed-1")


def test_a_file_and_what_travels_come_back_as_they_were(tmp_path: Path) -> None:
    found = settings(tmp_path)
    (tmp_path / "federation.toml").write_text(found.toml())
    assert FederationSettings.load(tmp_path / "federation.toml") == found
    there = FederationSettings.from_travelling(found.travelling())
    assert there.travelling() == found.travelling()
    assert there == found.model_copy(update={"at_server": there.at_server})  # the model's place stays at home
    assert found.at_server.model == "base" and "base" not in found.travelling()
    assert "network" not in json.loads(found.travelling())


def test_defaults_travel_too(tmp_path: Path) -> None:
    """The other version may have other ones."""
    assert json.loads(settings(tmp_path).travelling())["train"]["lr"] == 3e-3


def test_a_site_trains_as_the_run_would(tmp_path: Path) -> None:
    """All that a trainer takes from a run's configuration is what the file of `fedlora run` says."""
    found = settings(tmp_path).for_site(Site(name="acme", data="/a.csv", model="/m"), rank=4)
    run = parse_config({**load_config_tables(RUN), "clients": {"ranks": [4]}})
    assert found.train == run.train and found.lora == run.lora and found.method == run.method
    assert found.data == run.data
    assert found.run.rounds == 6 and found.run.seed == run.run.seed  # schedules are of all rounds
    assert found.model == run.model
    assert found.server.quorum is None and found.run.participation == 1.0  # of one client there would be no round


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("rounds = 6", "rounds = true", r"run\.rounds: .*whole number; got True"),
        ("rounds = 6", 'rounds = "6"', r"run\.rounds: .*whole number; got '6'"),
        ("alpha = 16.0", "alpha = true", r"lora\.alpha: .*number; got True"),
        ("[run]", "[evaluate]\npatience = true\n[run]", r"evaluate\.patience: .*whole number; got True"),
    ],
)
def test_true_and_text_are_no_numbers(tmp_path: Path, was: str, now: str, says: str) -> None:
    assert was in RUN
    with pytest.raises(ConfigError, match=says):
        settings(tmp_path, RUN.replace(was, now))


def load_config_tables(text: str) -> dict[str, dict[str, object]]:
    import tomllib

    raw = tomllib.loads(text)
    raw["data"]["clients"] = {"acme": "/a.csv"}
    raw["model"]["path"] = "/m"
    return raw


def test_a_sites_columns_win(tmp_path: Path) -> None:
    site = Site(name="a", data="a.csv", model="m", text="note", label="seen", device="cpu", threads=3)
    found = settings(tmp_path).for_site(site)
    assert (found.data.text, found.data.label, found.model.device, found.run.threads) == ("note", "seen", "cpu", 3)
    spoken = FederationSettings(id="f", model={"task": "causal-lm"}, data={"prompt": "q", "response": "a"})  # type: ignore[arg-type]
    assert spoken.for_site(Site(name="a", data="a", model="m", messages="talk")).data.messages == "talk"
    talk = FederationSettings(id="f", model={"task": "causal-lm"}, data={"messages": "talk"})  # type: ignore[arg-type]
    own = talk.for_site(Site(name="a", data="a", model="m", prompt="q")).data
    assert (own.messages, own.prompt, own.response) == (None, "q", "response")


@pytest.mark.parametrize("key", sorted(set(ELSEWHERE) - {"model.path"}))
def test_what_belongs_to_one_machine_is_refused_by_name(tmp_path: Path, key: str) -> None:
    """In the file that `init` reads and in federation.toml alike, whatever its value."""
    table, name = key.split(".")
    text = (
        RUN.replace(f"[{table}]", f"[{table}]\n{name} = 3") if f"[{table}]" in RUN else RUN + f"[{table}]\n{name} = 3"
    )
    with pytest.raises(ConfigError, match=rf"{table}.{name} = 3 .*federation.*Leave it out"):
        settings(tmp_path, text)
    (tmp_path / "federation.toml").write_text('id = "f"\n' + text.replace('path = "base"', ""))
    with pytest.raises(ConfigError, match=f"{table}.{name} = 3 .*federation"):
        FederationSettings.load(tmp_path / "federation.toml")


def test_every_key_of_a_run_is_agreed_or_named_elsewhere() -> None:
    """A new key of `fedlora run` cannot be forgotten: it is in the settings, or it is said where it belongs."""
    ours = {f"{t}.{k}" for t, f in FederationSettings.model_fields.items() if hasattr(f.annotation, "model_fields")
            for k in f.annotation.model_fields}  # type: ignore[union-attr]  # fmt: skip
    tables = {t: f.annotation for t, f in RunConfig.model_fields.items() if t != "privacy"}  # refused as a whole
    theirs = {f"{t}.{k}" for t, kind in tables.items() for k in kind.model_fields}  # type: ignore[union-attr]
    assert theirs - ours - set(ELSEWHERE) == set()
    assert set(ELSEWHERE) <= theirs


def test_mistakes_are_told(tmp_path: Path) -> None:
    for text, said in {
        RUN.replace('labels = ["no", "yes"]\n', ""): r"data\.labels is missing.*init --labels",
        RUN.replace('"yes"]', '"no"]'): "'no' is named twice",
        RUN.replace('["no", "yes"]', '["no"]'): "at least two",
        RUN.replace("steps", "stepz"): r"'train\.stepz'; did you mean 'steps'",
        RUN.replace("rounds = 6", 'rounds = "six"'): r"run\.rounds",
        RUN.replace("max_length", "validation = 0.6\ntest = 0.4\nmax_length"): "nothing to train on",
        RUN + "[network]\nport = 70000\n": r"network\.port",
    }.items():
        with pytest.raises(ConfigError, match=said):
            settings(tmp_path, text)
    with pytest.raises(ConfigError, match="contradict each other"):
        read_run_file(tmp_path / "run.toml", labels=["yes", "no"])
    with pytest.raises(ConfigError, match=r"cannot be read here.*another version"):
        FederationSettings.from_travelling('{"id": "f", "newer": 1}')
    with pytest.raises(ConfigError, match="not JSON"):
        FederationSettings.from_travelling("{")


def test_files_to_measure_on_stay_at_the_server(tmp_path: Path) -> None:
    text = RUN.replace("max_length", 'test = "held.csv"\nmax_length')
    found = settings(tmp_path, text)
    assert (
        found.at_server.test == str(tmp_path / "held.csv") and found.data.test == 0.0 and found.data.validation == 0.1
    )
    assert "held.csv" not in found.travelling()
    config = found.for_server()
    assert config is not None and config.data.test == found.at_server.test and config.model.path == "base"
    (tmp_path / "f.toml").write_text('id = "f"\n' + text.replace('path = "base"', ""))
    with pytest.raises(ConfigError, match=r"data\.test = 'held.csv' .*at_server\.test"):
        FederationSettings.load(tmp_path / "f.toml")


def test_a_trial_takes_what_its_data_were_dealt_out_by(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        RUN.replace("labels = ", 'train = "all.csv"\nlabels = ') + "[clients]\ncount = 3\nranks = [2]\n"
    )
    config = load_config(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"data\.train = .*federation.*clients\.count = 3"):
        from_run(config)
    found = from_run(config, dealt=True, at_server={"test": "/held.jsonl"})
    assert found.data.test == 0.0 and found.at_server.test == "/held.jsonl" and found.run.rounds == 6
    assert found.at_server.model == config.model.path


# ---- site.toml -------------------------------------------------------------------------------------------------------


def test_a_site_file_comes_back(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    site = Site(name="acme", data="notes.csv", model="m", text="note")
    (tmp_path / "site.toml").write_text(site.toml())
    assert Site.read(tmp_path / "site.toml") == Site(
        name="acme", data=str(tmp_path / "notes.csv"), model=str(tmp_path / "m"), text="note"
    )
    (tmp_path / "site.toml").write_text('name = "b"\ndata = "hf://o/d"\nmodel = "org/name"\n')
    assert (Site.read(tmp_path / "site.toml").data, Site.read(tmp_path / "site.toml").model) == ("hf://o/d", "org/name")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'name = "a"\ndata = "d"\nmodel = "m"\nmax_length = 3\n',
            "unknown key 'max_length'.*come from the server",
        ),
        ('name = "a"\ndata = "d"\nmodel = "m"\nlabels = ["x"]\n', "unknown key 'labels'"),
        ('name = "a"\ndata = "d"\nmodel = "m"\nthreads = 0\n', "threads"),
        ('name = "../a"\ndata = "d"\nmodel = "m"\n', "the name of a site.* 63 letters"),
        ('name = "a"\nmodel = "m"\n', "key 'data' is missing"),
        ("name = ", "is not TOML"),
    ],
)
def test_a_site_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Site.read(tmp_path / "site.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Site.read(tmp_path / "none.toml")


def test_what_only_the_server_uses_is_no_fault_at_a_site(tmp_path: Path) -> None:
    """[at_server] does not travel: how often it measures, and when it stops, must not look idle where it is not."""
    here = '[at_server]\nmodel = "m"\nvalidation = "v.csv"\n'
    text = f'id = "f"\n{here}[data]\nlabels = ["a", "b"]\nvalidation = 0.0\ntest = 0.0\n' + (
        '[evaluate]\nevery = 2\npatience = 3\nmetric = "macro-f1"\nbatch_size = 4\ntarget = "server"\n'
    )
    (tmp_path / "federation.toml").write_text(text)
    found = FederationSettings.load(tmp_path / "federation.toml")
    there = FederationSettings.from_travelling(found.travelling())
    assert there.evaluate == found.evaluate
    config = there.for_site(Site(name="acme", data="a.csv", model="m"))
    assert config.data.validation == 0 and config.evaluate.every == 1


def _others(default: Any) -> Iterator[Any]:
    """Values that a key may have, other than its default."""
    yield from (value for value in (True, False, 2, 3, 0.25, 0.75, "macro-f1", "glora", "server", "clients", "steps",
                                    "factors", ["a"], ["x", "y"], {"a": 2.0}) if value != default)  # fmt: skip


def test_what_init_writes_can_be_read_whatever_is_set(tmp_path: Path) -> None:
    """Each key of a run's file alone, at any value that it takes: refused with its name, or written and read back."""
    written = 0
    for table, field in RunConfig.model_fields.items():
        for key, about in getattr(field.annotation, "model_fields", {}).items():
            for value in _others(about.default):
                raw: dict[str, Any] = {"model": {"path": "m"}, "lora": {"targets": ["q"]}, "data": {}}
                raw[table] = {**raw.get(table, {}), key: value}
                try:
                    found = from_run(raw, ["a", "b"], id="f")
                except ConfigError as error:
                    assert str(error)
                    continue
                (tmp_path / "federation.toml").write_text(found.toml())
                assert FederationSettings.load(tmp_path / "federation.toml").travelling() == found.travelling(), raw
                written += 1
    assert written > 40
