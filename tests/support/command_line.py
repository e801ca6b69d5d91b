"""`fedlora ARGS` in this process and as one of its own, and what it said."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

with warnings.catch_warnings():
    # typer < 0.21 asks click 8.3 for names that click 9 will drop, when it is imported.
    warnings.filterwarnings("ignore", r"'click\..* is deprecated", DeprecationWarning)
    import typer.main

    # typer builds all commands anew for every call, out of signatures that do not change: longer than most calls take.
    typer.main.get_command = functools.cache(typer.main.get_command)
    from typer.testing import CliRunner

    import fedlora.cli.audit
    import fedlora.cli.experiment_runs
    import fedlora.cli.formats
    import fedlora.cli.methods
    import fedlora.cli.run_words
    import fedlora.cli.runs
    import fedlora.cli.screen
    import fedlora.experiments.work
    import fedlora.runs.manifest


DRAWING = (fedlora.cli.audit, fedlora.cli.experiment_runs, fedlora.cli.runs)
for _module in DRAWING:  # pictures cost more than most runs of tiny models: they are drawn where a test asks for them
    _module.plotted = lambda draw: None


# After each run of a comparison Python looks for the models of the one before among all that the tests have imported.
fedlora.experiments.work.gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined,assignment]

fedlora.cli._leave = sys.exit  # the process of the tests goes on

# Each run asks git; while tests run, a commit has no meaning (tests of it say one).
fedlora.runs.manifest.commit_of_code = functools.cache(fedlora.runs.manifest.commit_of_code)


def invoke(*args: object, code: int = 0) -> Any:
    """The command line, in this process. For runs that go well; with code 1 for those whose result lacks something."""
    result = CliRunner().invoke(fedlora.cli.app, [str(a) for a in args])
    assert result.exception is None or code, (result.exception, result.stderr)
    assert result.exit_code == code, (result.exception, result.stderr)
    return result


@dataclass
class Said:
    code: int
    out: str
    err: str

    def error(self) -> str:
        """Our one line for what went wrong, the last one; a progress bar may stand before it."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err and "Traceback" not in self.out
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True], lines
        return lines[-1]

    def complaint(self) -> str:
        """All that bad input gets: one line."""
        assert len(self.err.splitlines()) == 1, self.err
        return self.error()


def call(args: Sequence[str]) -> None:
    """The entry point as a process of its own has it: ends with SystemExit."""
    sys.argv = ["fedlora", *args]
    fedlora.cli.main()


def entry_point(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The entry point `fedlora ARGS`, in this process, where errors become exit codes. The fixture `main`."""

    def call(*args: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedlora", *(str(a) for a in args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            fedlora.cli.main()
        out, err = capsys.readouterr()
        code = stopped.value.code
        return Said(code if isinstance(code, int) else int(code is not None), out, err)

    return call


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal as wide as it takes. The fixture `wide`."""
    for module in (fedlora.cli.run_words, fedlora.cli.formats, fedlora.cli.methods, fedlora.cli.audit):
        monkeypatch.setattr(module, "console", Console(width=300, markup=False))


def process(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedlora.cli", *(str(a) for a in args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def drawing() -> Iterator[None]:
    """Runs and comparisons draw again. The fixture `drawn`."""
    with pytest.MonkeyPatch.context() as patched:
        for module in DRAWING:
            patched.setattr(module, "plotted", fedlora.cli.screen.plotted)
        yield


def options(sets: Sequence[str]) -> list[str]:
    return [a for s in sets for a in ("--set", s)]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("│").split("│")]
