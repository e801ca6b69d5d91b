"""What `serve` refuses when it starts, `doctor` refuses too; and systemd, which starts nothing again after exit code 2,
gets that code for faults of the folder alone. Kind: *contract*."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

pytest.importorskip("flwr")

from fedlora.core import checkpoint
from fedlora.errors import AdapterFormatError, BudgetSpent, ConfigError, LedgerError
from fedlora.flower import apps
from fedlora.flower.places import FederationFolder
from fedlora.flower.server import doctor
from fedlora.flower.server.journal import read_now
from fedlora.flower.server.opening import opening
from fedlora.flower.server.serve import Lost, Supervisor
from fedlora.flower.server.state import FederationState, run_identity
from fedlora.flower.server.superlink import SuperLinkError
from fedlora.server.state import RunState
from support.command_line import Said
from support.deployed_folders import federation_folder


def played(fed: FederationFolder, rounds: int) -> None:
    """Store the start as the state after so many rounds, and their lines."""
    first, begun = opening(fed.path)
    state = RunState(rounds, replace(begun.state.server, round=rounds), begun.state.clients)
    of = run_identity(first.settings.id, first.server, state.server)
    checkpoint.save(fed.checkpoints, rounds, FederationState(first.settings.id, state), of=of)
    fed.rounds.write_text("".join(f'{{"round": {k}, "fates": {{}}}}\n' for k in range(1, rounds + 1)))


@pytest.mark.parametrize(
    ("rounds", "tables", "words"),
    [(99, {}, "99 rounds .*run.rounds = 10 "), (0, {"data": {"label_names": ["no", "yes"], "validation": 0.0},
                                                    "evaluate": {"early_stopping_patience": 2}}, "patience = 2 ")],
)  # fmt: skip
def test_serve_refuses_before_it_waits_for_a_site_and_doctor_says_the_same(
    rounds: int, tables: dict[str, Any], words: str, tmp_path: Path, main: Callable[..., Said],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The folder has more rounds than run.rounds; patience has no scores. Code 2, and no SuperLink is started."""
    fed = federation_folder(tmp_path / "fed")
    assert [sound for what, _, sound in doctor.checked_folder(fed.path) if what == "serve"] == [True]
    if rounds:
        played(fed, rounds)
    fed.settings.write_text(tomli_w.dumps(tomllib.loads(fed.settings.read_text()) | tables))
    monkeypatch.setattr(Supervisor, "serve", lambda self: pytest.fail("it began"))
    assert main("flower", "serve", fed.path).code == 2
    [why] = [found for _, found, sound in doctor.checked_folder(fed.path) if sound is False]
    assert re.search(words, why)


def test_rounds_whose_states_are_gone_are_refused_and_not_played_again(tmp_path: Path) -> None:
    """Lines, which are written after a state, and no state or that of round 2: `serve` and doctor say the same."""
    fed = federation_folder(tmp_path / "fed")
    for state, lost in ((0, 1), (2, 4)):
        if state:
            fed.rounds.unlink()
            played(fed, state)
        lines = [f'{{"round": {k}, "fates": {{}}}}\n' for k in range(1, lost + 1)]
        fed.rounds.write_text("".join(lines))
        with pytest.raises(ConfigError, match=f"{lost} rounds?, .* round {state}.* from a backup") as refused:
            opening(fed.path)
        assert str(refused.value) in [found for _, found, sound in doctor.checked_folder(fed.path) if sound is False]
        assert fed.rounds.read_text() == "".join(lines)
        fed.rounds.write_text("".join(lines[:state]))
        assert opening(fed.path)[0].rounds == state


@pytest.mark.parametrize(
    ("error", "code"),
    [(Lost, 1), (SuperLinkError, 1), (OSError, 1), (MemoryError, 1), (ConfigError, 2), (LedgerError, 2)],
)
def test_serve_ends_with_2_for_the_folder_alone(
    error: type[Exception], code: int, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is a RuntimeError, of the system or of memory may be gone the next time; a ValueError is in the files."""

    def serve(self: Supervisor) -> None:
        raise error("it is so")

    fed = federation_folder(tmp_path / "fed")
    monkeypatch.setattr(Supervisor, "serve", serve)
    assert main("flower", "serve", fed.path).code == code


_FINAL = [ConfigError, AdapterFormatError, BudgetSpent, LedgerError]


@pytest.mark.parametrize("error", [*_FINAL, ValueError, MemoryError])
def test_the_app_says_what_would_fail_the_same_way_again(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the error's type, in now.json; and why stands in its log."""

    def play(grid: object, folder: Path) -> None:
        raise error("it is so")

    monkeypatch.setattr("fedlora.flower.server.federation.play", play)
    wrong = error in _FINAL
    context = SimpleNamespace(run_config={"folder": str(tmp_path)})
    with pytest.raises(error, match=r"^it is so$"):
        apps.main(SimpleNamespace(), context)  # type: ignore[arg-type]
    told = read_now(tmp_path / "server" / "now.json")
    assert (told["ended"] == {"kind": "refused", "why": "it is so"}) if wrong else not told
    log = tmp_path / "state" / "logs" / "serverapp.log"
    assert "it is so" in log.read_text() and "Traceback" in log.read_text()
