"""A key that would do nothing is refused by name, with the reason. Kind of evidence: contract, of every key.

Expected values are what the code that reads a key does with it (`client_data`, `sections`, `training`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig, load_config, parse_config
from fedlora.runs.preparation import prepare
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES

pytestmark = FUTURE_NAMES

FILE = {"model": {"path": "m"}, "data": {"train": "t.csv"}}
OWN = {"model": {"path": "m"}, "data": {"clients": {"a": "a.csv"}}}
DEMO = {"model": {"path": "demo"}, "data": {"train": "demo"}}
GLUE = {"model": {"path": "m"}, "data": {"task": "sst2"}}
NI = {"model": {"path": "m", "task": "causal-lm"}, "data": {"task": "superni"}}
TEXT = {"model": {"path": "m", "task": "causal-lm"}, "data": {"train": "t.csv"}}


def changed(base: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """`base` with table__key=value."""
    raw = deepcopy(base)
    for key, value in keys.items():
        table, name = key.split("__")
        raw.setdefault(table, {})[name] = value
    return raw


MEDIAN = changed(FILE, defence__rule="geometric-median")
PROGRAM = changed(FILE, train__command=["python", "mine.py"])
UNTESTED = changed(FILE, data__validation=0, data__test=0)
ASKED = changed(TEXT, evaluate__samples=0)
HERE = {"model": {"path": "/of/this/machine"}, "data": {"train": "t.csv"}}

OF_OWN_LOOP: dict[str, Any] = {
    "train.lr": 1e-4, "train.optimizer": "sgd", "train.weight_decay": 0.1, "train.steps": 3, "train.batch_size": 4,
    "train.accumulation": 1, "train.clip": 0.5, "train.schedule": "linear", "train.class_weights": "balanced",
    "lora.dropout": 0.1, "model.dropout": 0.1, "model.checkpointing": True,
}  # fmt: skip

# key -> (value, where it works, where it would do nothing)
SOMETIMES: dict[str, tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "clients.count": (3, [FILE, DEMO, GLUE, TEXT], [OWN, NI]),
    "model.revision": ("v1", [FILE, OWN, TEXT], [DEMO, HERE]),
    "clients.profile": ("normal", [FILE, changed(FILE, clients__ranks=[2, 4])], [changed(FILE, clients__ranks=8)]),
    "clients.partition": ("iid", [FILE, DEMO, GLUE, TEXT], [OWN, NI]),
    "clients.alpha": (0.5, [FILE, DEMO, GLUE], [OWN, NI, changed(FILE, clients__partition="iid")]),
    "clients.min_size": (2, [FILE, DEMO, GLUE], [OWN, NI, TEXT, changed(FILE, clients__partition="iid")]),
    "data.text": ("sentence", [FILE, OWN, changed(DEMO, data__test="t.csv")], [DEMO, GLUE, NI, TEXT]),
    "data.pair": ("second", [FILE, OWN], [DEMO, GLUE, NI, TEXT]),
    "data.label": ("topic", [FILE, OWN], [DEMO, GLUE, NI, TEXT]),
    "data.labels": (["no", "yes"], [FILE, OWN, changed(DEMO, data__test="t.csv")], [DEMO, GLUE, NI, TEXT]),
    "data.prompt": ("question", [TEXT], [FILE, OWN, DEMO, GLUE, NI]),
    "data.response": ("answer", [TEXT], [FILE, OWN, DEMO, GLUE, NI]),
    "data.messages": ("talk", [TEXT], [FILE, OWN, DEMO, GLUE, NI]),
    "data.template": ("{prompt}", [TEXT, NI], [FILE, OWN, DEMO, GLUE]),
    "data.max_test": (9, [FILE, GLUE, NI, changed(NI, data__validation=0, data__test=0)], [UNTESTED]),
    "data.revision": ("abc", [GLUE], [FILE, OWN, DEMO, NI, TEXT]),
    "data.tasks": (3, [NI], [FILE, OWN, DEMO, GLUE, TEXT]),
    "data.unseen": (3, [NI], [FILE, OWN, DEMO, GLUE, TEXT]),
    "data.task_lists": (["a", "b"], [NI], [FILE, OWN, DEMO, GLUE, TEXT]),
    "defence.liars": (1, [changed(FILE, defence__rule="clip")], [FILE]),
    "defence.mixing": (True, [changed(FILE, defence__rule="clip", defence__liars=1)], [FILE]),
    "defence.threshold": (0.5, [changed(FILE, defence__rule="clip")], [FILE, MEDIAN]),
    "defence.tau": (0.5, [changed(FILE, defence__rule="centred-clipping")], [FILE, MEDIAN]),
    "defence.tolerance": (1e-6, [MEDIAN], [FILE, changed(FILE, defence__rule="clip")]),
    "defence.iterations": (9, [MEDIAN, changed(FILE, defence__rule="centred-clipping")], [FILE]),
    "train.epochs": (3.0, [changed(FILE, train__steps=0)], [FILE, changed(FILE, train__steps=5), PROGRAM]),
    "train.time_limit": (60.0, [PROGRAM], [FILE]),
    **{key: (value, [FILE], [PROGRAM]) for key, value in OF_OWN_LOOP.items()},
    "evaluate.max_new_tokens": (8, [TEXT, NI, changed(ASKED, evaluate__metric="rouge-l")], [FILE, OWN, DEMO, ASKED]),
    "evaluate.samples": (8, [TEXT, NI], [FILE, OWN, DEMO, GLUE, changed(TEXT, data__validation=0, data__test=0)]),
    "evaluate.target": ("clients", [FILE, NI], [UNTESTED]),
    "evaluate.clients_at_end": (True, [FILE, NI], [changed(FILE, data__test=0), changed(NI, data__test=0)]),
    "evaluate.every": (2, [FILE, NI], [UNTESTED, changed(FILE, data__validation=0)]),
    "evaluate.metric": ("rouge-l", [FILE, NI, changed(NI, data__validation=0, data__test=0)], [UNTESTED]),
    "evaluate.batch_size": (7, [FILE, NI], [UNTESTED]),
    "attack.share": (0.2, [changed(FILE, attack__kind="sign-flip")], [FILE]),
    "attack.clients": (["a"], [changed(FILE, attack__kind="sign-flip")], [FILE]),
    "attack.strength": (2.0, [changed(FILE, attack__kind="sign-flip", attack__share=0.2)], [FILE]),
    "attack.noise": (True, [changed(FILE, attack__kind="free-rider", attack__share=0.2)], [FILE]),
}
ALWAYS = {  # what they cannot do with others is an error of its own, at the latest before the first round
    "run": "rounds participation seed threads workers checkpoint_every keep_checkpoints readouts keep_uploads track",
    "model": "path task device adapter dtype bf16 four_bit checkpointing dropout",
    "lora": "targets scaling alpha rslora dropout saved",
    "method": "*",
    "server": "weighting heads quorum stream gauge_stress",
    "clients": "ranks own_test",
    "defence": "rule",
    "data": "train clients task max_train validation test max_length",
    "train": "command",
    "evaluate": "patience min_delta test_along",
    "privacy": "*",
    "attack": "kind",
}  # fmt: skip


def test_of_every_key_it_is_known_whether_it_can_be_without_effect() -> None:
    """A new key is put into one of the two tables above, and into `idle_keys` where it belongs there."""
    for table, field in RunConfig.model_fields.items():
        if ALWAYS[table] == "*":
            continue
        keys = set(field.annotation.model_fields)  # type: ignore[union-attr]
        sometimes = {key.split(".")[1] for key in SOMETIMES if key.startswith(f"{table}.")}
        loop = {key.split(".")[1] for key in OF_OWN_LOOP if key.startswith(f"{table}.")} if table != "train" else set()
        assert set(ALWAYS[table].split()) - loop == keys - sometimes


def test_a_key_without_effect_is_refused_and_where_it_has_one_it_is_not() -> None:
    for key, (value, works, idle) in SOMETIMES.items():
        name = key.replace(".", "__")
        for base in works:
            parse_config(changed(base, **{name: value}))
        for base in idle:
            with pytest.raises(ConfigError, match=rf"^{re.escape(key)} = .* has no effect: .*Leave it out") as said:
                parse_config(changed(base, **{name: value}))
            assert str(said.value).count("has no effect") == 1 and "\n" not in str(said.value)


@pytest.mark.parametrize("base", [FILE, OWN, DEMO, GLUE, NI, TEXT, UNTESTED], ids=str)
def test_a_resolved_configuration_names_every_key_and_is_none_the_worse(base: dict[str, Any]) -> None:
    config = parse_config(base)
    assert parse_config(json.loads(config.canonical())) == config


def test_epochs_beside_steps_are_refused_even_at_their_default() -> None:
    """[train] epochs = 1 alone would train ten steps; beside steps = 20 it would train twenty, whatever was meant."""
    with pytest.raises(ConfigError, match=r"train\.epochs = 1\.0 .*train\.steps = 10 .*steps = 0"):
        parse_config(changed(FILE, train__epochs=1.0))
    with pytest.raises(ConfigError, match=r"train\.epochs = 1\.0 .*train\.steps = 20 "):
        parse_config(changed(FILE, train__epochs=1.0, train__steps=20))
    assert parse_config(changed(FILE, train__epochs=1.0, train__steps=0)).train.epochs == 1.0


def test_a_revision_of_what_proves_to_be_a_folder_is_refused(tmp_path: Path) -> None:
    """A relative path is a folder, or a hub id: only the place of the config file tells."""
    (tmp_path / "m").mkdir()
    (tmp_path / "c.toml").write_text('[model]\npath = "m"\nrevision = "v1"\n[data]\ntrain = "t.csv"\n')
    with pytest.raises(ConfigError, match=r"model\.revision = 'v1' has no effect"):
        load_config(tmp_path / "c.toml")


def test_what_only_the_clients_show_is_refused_before_the_first_round(project: Path) -> None:
    """0.9 of three clients are three."""
    config = load_config(project / "config.toml", ["run.participation=0.9"])
    with pytest.raises(ConfigError, match=r"run.participation = .* has no effect"):
        prepare(config)


def test_set_on_the_command_line_is_held_to_the_same(project: Path, main: Callable[..., Said]) -> None:
    said = main("run", project / "config.toml", "--set", "data.tasks=3", "--set", "data.prompt=x").complaint()
    assert "data.tasks = 3 has no effect" in said and "data.prompt = 'x' has no effect" in said
