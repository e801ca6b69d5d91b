"""Policy files, and the limits in them. Kind of evidence: contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

pytest.importorskip("flwr")

from fedlora import Kept, Server, build
from fedlora.errors import ConfigError
from fedlora.flower.records import record_parcel
from fedlora.flower.terms.policy import Policy
from support.flower_grid import RANKS, fates, play
from support.toy_federations import toy_federation, write_policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "clients: Field required"),
        ("[clients]\n", "nobody could take part"),
        ("[clients]\na = 0\n", "whole number from 1"),
        ("[clients]\na = {q = true}\n", "whole number from 1"),
        ("colour = 1\n[clients]\na = 8\n", "colour: Unexpected keyword argument"),
        ("[clients\n", "is not TOML"),
    ],
)
def test_a_bad_policy_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        Policy.read(tmp_path / "policy.toml")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "4", True])
def test_an_uploads_limit_is_a_positive_number(value: object) -> None:
    with pytest.raises(ValidationError, match="max_upload_mb"):
        Policy({"a": 1}, max_upload_mb=value)  # type: ignore[arg-type]


def test_a_policy_that_changes_holds_from_the_next_round_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One is removed, another gets a lower rank, and one comes back as a client that is new but for its own state; a
    file that cannot be used changes nothing, and is told once."""
    strategy, grid = toy_federation(tmp_path, Server(build("glora"), round=Kept(quorum=2)))

    def played(rounds: int, text: dict[str, int]) -> dict[str, str]:
        write_policy(tmp_path, text)
        play(strategy, grid, rounds)
        return fates(strategy)

    assert played(1, RANKS) == dict.fromkeys(RANKS, "trained")
    assert played(2, {"one": 2, "three": 2}) == {"one": "trained", "three": "trained"}
    assert set(strategy.state.clients) == {"one", "three"} and strategy.kept.receipts["two"].counted == 1
    ranks = [record_parcel(m.content)[0].client.rank for m in grid.sent if m.metadata.message_type == "train"]
    assert ranks == [2, 4, 3, 2, 2]
    assert played(3, RANKS) == dict.fromkeys(RANKS, "trained")
    caplog.clear()
    assert played(5, {"one": 2}) == dict.fromkeys(RANKS, "trained"), "the quorum can never be met by one"
    assert caplog.text.count("policy.toml is not taken") == 1 and "can never be met" in caplog.text
