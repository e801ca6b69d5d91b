"""What is under way is told: a first word soon, then a line whenever the log was silent. Kind: end to end, shortened.

Times are shortened to fractions of a second.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedlora.__main__ as entry
import fedlora.cli
from fedlora import doing
from fedlora.training.loop import LocalTrainer
from support.command_line import options


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doing, "EVERY", 0.2)
    monkeypatch.setattr(doing, "_LOOK", 0.02)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shortened: None) -> Any:
    """The lines of `fedlora ARGS` on stderr that say what it is doing."""

    def call(*args: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["fedlora", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            entry.main()
        said = capsys.readouterr().err
        assert not ended.value.code, said
        return [line for line in said.splitlines() if " fedlora " in line]

    return call


def test_steps_are_told_from_the_outermost_and_none_inside_a_secret() -> None:
    assert doing.now() == ""
    with doing.doing("rounds", 9) as rounds, doing.doing("training"):
        rounds.done = 2
        assert doing.now() == "rounds: 2 of 9 done; training"
        rounds.closed = True
        assert doing.now() == "rounds: 2 of 9 done"
    assert doing.now() == ""
    assert [doing.now() for _ in doing.stepped("ab", "x")] == ["x: 0 of 2 done", "x: 1 of 2 done"]


def test_a_log_that_gets_lines_gets_no_others(shortened: None) -> None:
    lines: list[str] = []
    with doing.beating(lines.append, "fedlora run"):
        for _ in range(20):
            doing.heard()
            time.sleep(0.03)
        assert lines == []
        time.sleep(0.5)
    assert lines and lines[0].startswith("fedlora run: at work, ")


def test_a_program_that_waits_says_so_less_and_less(shortened: None) -> None:
    """Of one thing after 0.2 s and after 0.4 s more; then the next would come after 0.8 s. Of another after 0.2 s."""
    lines: list[str] = []
    doing.heard()
    with doing.beating(lines.append, "serve", most=0.8), doing.doing("rounds", 9) as rounds:
        doing.heard()
        time.sleep(1.0)
        rounds.done = 1
        time.sleep(0.35)
    assert [line.split(",")[0][-10:] for line in lines] == ["0 of 9 done"[-10:]] * 2 + ["1 of 9 done"[-10:]]


def test_the_first_word_comes_with_the_processor_time_of_the_imports(
    monkeypatch: pytest.MonkeyPatch, told: Callable[..., list[str]]
) -> None:
    """For every command, since it is the entry point that says it: here none has begun to work."""
    monkeypatch.setattr(doing, "EVERY", 60.0)
    monkeypatch.setattr(doing, "FIRST", time.process_time() + 0.2)

    def imports() -> None:
        until = time.process_time() + 0.4
        while time.process_time() < until:
            pass

    monkeypatch.setattr(fedlora.cli, "main", lambda: sys.exit(imports()))
    [line] = told("flower", "serve", "folder")
    assert " fedlora flower serve: importing libraries, " in line


def test_a_silent_run_says_what_is_done_and_what_is_left(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[..., list[str]]
) -> None:
    """Two rounds of three clients with two steps each, of which the last one is slow."""
    real, calls = LocalTrainer._losses, itertools.count(1)

    def losses(*args: Any, **named: Any) -> Any:
        if next(calls) == 12:
            time.sleep(0.7)
        return real(*args, **named)

    monkeypatch.setattr(LocalTrainer, "_losses", losses)
    sets = options(("run.rounds=2", "train.max_steps=2"))
    lines = told("run", project / "config.toml", "--out", tmp_path / "run", *sets)
    assert any("rounds: 1 of 2 done; clients: 2 of 3 done; training: 1 of 2 done" in line for line in lines), lines
