"""Which settings may change between rounds. Kind of evidence: *contract* (each table of federation.toml, by name)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.errors import CheckpointError, ConfigError
from fedlora.flower.rounds.settings_history import History
from fedlora.flower.terms.settings import FederationSettings


def settings(**tables: Any) -> FederationSettings:
    said: dict[str, Any] = {"id": "fed-1", "data": {"labels": ["no", "yes"]}}
    return FederationSettings.model_validate({**said, **{k: {**said.get(k, {}), **v} for k, v in tables.items()}})


def played(rounds: int = 3) -> History:
    return History().with_(settings(), 0, "sites:0.1").with_(settings(), rounds, "sites:0.1")


@pytest.mark.parametrize(
    ("table", "said", "both"),
    [
        ("lora", {"scaling": 4.0}, ("lora.scaling", "2.0", "4.0")),
        ("lora", {"targets": ["key"]}, ("lora.targets", '["query", "value"]', '["key"]')),
        ("method", {"name": "svd"}, ("method.name", "'glora'", "'svd'")),
        ("model", {"bf16": True}, ("model.bf16", "false", "true")),
        ("data", {"labels": ["yes", "no"]}, ("data.labels", '["no", "yes"]', '["yes", "no"]')),
        (
            "data",
            {"validation": 0.2},
            ("data.validation", "0.1", "0.2"),
        ),
        ("data", {"test": 0.0}, ("data.test", "0.1", "0.0")),
        ("data", {"text": "note"}, ("data.text", "'text'", "'note'")),
        ("run", {"seed": 7}, ("run.seed", "0", "7")),
    ],
)
def test_what_would_mix_two_federations_is_refused_with_both_values(
    table: str, said: dict[str, Any], both: tuple[str, str, str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        played().with_(settings(**{table: said}), 3, "sites:0.1")
    key, before, after = both
    assert f"{key} was {before} and is {after} now" in str(refused.value) and "3 rounds are played" in str(
        refused.value
    )
    assert History().with_(settings(), 0, "x").with_(settings(**{table: said}), 0, "x").entries, (
        "before any round: fine"
    )


def test_what_may_change_is_told_and_kept_in_the_history(tmp_path: Path) -> None:
    longer = settings(run={"rounds": 20, "participation": 0.5}, train={"lr": 0.1})
    history = played().with_(longer, 3, "sites:0.1")
    told = [("run.rounds", "10", "20"), ("run.participation", "1.0", "0.5"), ("train.lr", "0.003", "0.1")]
    assert sorted(history.told()) == sorted(f"after round 3: {k} is {new} in place of {old}" for k, old, new in told)
    assert played().told() == () and all(key in played().waiting(longer, 3) for key, _, _ in told)
    assert history.waiting(longer, 3) == "" and "data.test" in history.waiting(settings(data={"test": 0.2}), 3)
    history.write(tmp_path / "settings.json")
    again = History.read(tmp_path / "settings.json")
    assert again == history and again.entries[-1]["settings"]["run"]["rounds"] == 20 and len(again.entries) == 2
    assert again.with_(longer, 5, "sites:0.1") == again
    assert again.entries[-1]["changed"]["run.rounds"] == [10, 20] and again.entries[-1]["rounds"] == 3


def test_the_servers_own_paths_are_not_in_it(tmp_path: Path) -> None:
    mine = settings(at_server={"model": "/secret/model", "test": "/secret/t.csv"}, network={"name": "fl.example.org"})
    History().with_(mine, 0, "x").write(tmp_path / "settings.json")
    assert "secret" not in (tmp_path / "settings.json").read_text()


def test_more_rounds_under_a_schedule_are_others_from_the_first_on() -> None:
    before = History().with_(settings(train={"schedule": "linear"}), 0, "x")
    with pytest.raises(ConfigError, match=r"run.rounds was 10 .* 20 .*'linear'"):
        before.with_(settings(train={"schedule": "linear"}, run={"rounds": 20}), 2, "x")


def test_rounds_that_were_measured_on_other_examples_are_not_compared() -> None:
    history = played().with_(settings(), 5, "server:ab")
    assert (played().comparable_since(), history.comparable_since()) == (0, 5)
    assert history.with_(settings(), 9, "server:ab").comparable_since() == 5
    assert history.with_(settings(), 9, "server:cd").comparable_since() == 9
    assert any(line.startswith("after round 5: ") for line in history.told())


def test_a_change_is_told_however_often_the_server_starts_before_its_first_round() -> None:
    """A start that ends before a round is over plays nothing: what changed is what changed since the last round that
    was played, all of it, and nothing if it was set back."""
    slower = played().with_(settings(train={"lr": 0.1}), 3, "sites:0.1")
    both = slower.with_(settings(train={"lr": 0.1}, run={"rounds": 20}), 3, "sites:0.1")
    assert {key: new for key, (_, new) in both.entries[-1]["changed"].items()} == {"train.lr": 0.1, "run.rounds": 20}
    assert len(both.entries) == 2 and any("train.lr is 0.1" in line for line in both.told())
    back = slower.with_(settings(), 3, "sites:0.1")
    assert len(back.entries) == 1 and not back.told()
    assert both.with_(settings(train={"lr": 0.1}, run={"rounds": 20}), 3, "sites:0.1") == both


@pytest.mark.parametrize(
    ("said", "since"),
    [({"max_length": 64}, 5), ({"loss_on": "all"}, 5), ({"template": "none"}, 5), ({"max_train": 9}, 0)],
)
def test_rounds_that_were_measured_otherwise_are_not_compared(said: dict[str, Any], since: int) -> None:
    """The same model has another score on the same rows, if they are cut, wrapped or counted otherwise."""
    history = played().with_(settings(data=said), 5, "sites:0.1")
    assert history.comparable_since() == since == history.with_(settings(data=said), 9, "sites:0.1").comparable_since()
    assert any("not compared" in line for line in history.told()) == bool(since)
    assert history.with_(settings(data=said, train={"lr": 0.1}), 9, "sites:0.1").comparable_since() == since


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '[{"rounds": "x", "settings": {}}]', "[{"])
def test_a_damaged_history_is_no_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(CheckpointError, match="restore it from a backup"):
        History.read(tmp_path / "s.json")
    assert History.read(tmp_path / "none.json") == History() and json.dumps([]) == "[]"
