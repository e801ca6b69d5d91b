"""The output of all commands: results on stdout, everything else on stderr, errors as one line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleDimensions
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Table as _Table
from rich.text import Text

from fedlora.core.text import escaped, shown
from fedlora.doing import heard, stepped
from fedlora.errors import ConfigError

T = TypeVar("T")
_WIDE = 10_000  # characters: wider than any of our tables
NOT_WHOLE = 1  # the exit code of a result with missing runs
_LONGEST = 2_500  # letters of an error: one screen


class Screen(Console):
    """A console as wide as the terminal; in a pipe or a file, as wide as needed, so that nothing is cut.

    Whoever wrote the text, no control sequence reaches the terminal, and words between colons or in square brackets
    stay words, also in cells and titles of tables. Use `red` for red text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print without colouring words by their look; a line that is too long continues in the terminal's next."""
        words = all(isinstance(o, str) for o in objects)
        options = {"highlight": False, **({"soft_wrap": True} if words else {}), **options}
        super().print(*(_printable(o) if isinstance(o, str) else o for o in objects), **options)
        heard()

    def warn(self, *lines: str) -> None:
        """Print lines in yellow: what to know before using the result."""
        for line in lines:
            self.print(line, style="yellow")

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape every string, also in tables, which never pass `print`."""
        return super().render_str(_printable(text), **options)

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        return found if self.file.isatty() else ConsoleDimensions(_WIDE, found.height)

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self.width, self.height = new


class Table(_Table):
    """A table that wraps words on a narrow terminal. Rich's own cuts them: `balanc…`."""

    def add_column(self, header: Any = "", *args: Any, overflow: Any = "fold", **options: Any) -> None:
        super().add_column(header, *args, overflow=overflow, **options)


def _printable(text: str) -> str:
    return "\n".join(escaped(line) for line in text.split("\n"))


def cell(text: object) -> Text:
    """A stranger's text in a table: cut, on one line, never markup."""
    return Text(shown(text))


def red(text: object) -> Text:
    """Anybody's text, in red."""
    return Text(_printable(str(text)), style="red")


def byte_size(count: float) -> str:
    """Bytes in a readable unit: 999 bytes, 30.2 KB, 1.5 MB."""
    if count < 1e3:
        return f"{count:.0f} bytes"
    return f"{count / 1e3:.1f} KB" if count < 1e6 else f"{count / 1e6:.1f} MB"


console = Screen()
notes = Screen(stderr=True)


def say(line: str) -> None:
    """Print a line to stderr at once, with the time unless systemd's journal adds it."""
    at = "" if "JOURNAL_STREAM" in os.environ else time.strftime("%H:%M:%S ")
    notes.print(f"{at}{line}")


def print_json(value: Any) -> None:
    """Print JSON to stdout, for programs."""
    print(json.dumps(value, indent=2, sort_keys=True))


def tracked(steps: Iterable[T], what: str) -> Iterable[T]:
    """The steps behind a progress bar if the output is a terminal, and told to `fedlora.doing`."""
    return stepped(track(steps, what, console=notes, transient=True) if notes.is_terminal else steps, what)


def bar(*words: str) -> Progress:
    """A progress bar: a task's description and how many of how many are done, `words` about it, and times. In a log it
    stays silent."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
        *map(TextColumn, words), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=notes, refresh_per_second=2, disable=not notes.is_terminal)


def tell_remarks(remarks: Sequence[str]) -> None:
    """Print each assumption about sound adapters on its own line."""
    notes.warn(*(f"note: {remark}" for remark in remarks))


def complain(message: str) -> int:
    """Print one red line to stderr; returns the exit code for bad input."""
    message = escaped(message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ...")
    notes.print(f"error: {message}", style="red")
    return 2


def plotted(draw: Callable[[Any], Iterable[Path]]) -> None:
    """Draw and name the pictures; print a note if matplotlib is missing. draw: is given `fedlora.runs.plots`."""
    try:
        from fedlora.runs import plots

        for path in draw(plots):
            notes.print(f"plot: {path}")
    except ImportError:
        notes.print("no plots: matplotlib is missing (pip install 'fedlora[plot]')")
    except ValueError as error:  # matplotlib's, of an ending that it does not know
        raise ConfigError(str(error)) from error
