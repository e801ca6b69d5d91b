"""What all commands print with: results on stdout, everything else on stderr, errors as one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, ConsoleDimensions
from rich.progress import track
from rich.table import Table as _Table
from rich.text import Text

from fedlora.core.echo import escaped, shown
from fedlora.errors import ConfigError

T = TypeVar("T")
_WIDE = 10_000  # characters: no table of ours is as wide
NOT_WHOLE = 1  # the exit code of a result that lacks runs
_LONGEST = 2_500  # letters of an error: a screen


class Screen(Console):
    """As wide as the terminal; off a terminal, in a pipe or a file, as wide as it takes, so that nothing is cut.

    Whoever wrote what is printed: no control sequence reaches the terminal, and words between colons or in square
    brackets stay words, also in the cells and titles of tables. What is to be red is `red`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Words are not coloured by what they look like, and a line that is too long goes on in the terminal's next."""
        words = all(isinstance(o, str) for o in objects)
        options = {"highlight": False, **({"soft_wrap": True} if words else {}), **options}
        super().print(*(_printable(o) if isinstance(o, str) else o for o in objects), **options)

    def warn(self, *lines: str) -> None:
        """Lines in yellow: what to know before the result is used."""
        for line in lines:
            self.print(line, style="yellow")

    def render_str(self, text: str, **options: Any) -> Text:
        """Of every string: also of those in tables, which no `print` sees."""
        return super().render_str(_printable(text), **options)

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        return found if self.file.isatty() else ConsoleDimensions(_WIDE, found.height)

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self.width, self.height = new


class Table(_Table):
    """One whose words go on in the next line where a terminal is narrow. Rich's own cuts them: `balanc…`."""

    def add_column(self, header: Any = "", *args: Any, overflow: Any = "fold", **options: Any) -> None:
        super().add_column(header, *args, overflow=overflow, **options)


def _printable(text: str) -> str:
    return "\n".join(escaped(line) for line in text.split("\n"))


def cell(text: object) -> Text:
    """A stranger's text in a table: cut, on one line, and never markup."""
    return Text(shown(text))


def red(text: object) -> Text:
    """Text of ours or of a stranger, in red."""
    return Text(_printable(str(text)), style="red")


console = Screen()
notes = Screen(stderr=True)


def print_json(value: Any) -> None:
    """On stdout, for programs."""
    print(json.dumps(value, indent=2, sort_keys=True))


def tracked(steps: Iterable[T], what: str) -> Iterable[T]:
    """The steps behind a progress bar, where somebody is looking."""
    return track(steps, what, console=notes, transient=True) if notes.is_terminal else steps


def can_write(out: Path) -> None:
    """Raises `ConfigError`, before any work is done, where a directory cannot be made at `out`."""
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}.") from error
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; name a directory.")


def tell_remarks(remarks: Sequence[str]) -> None:
    """A line each: what was taken for granted of adapters that are sound."""
    notes.warn(*(f"note: {remark}" for remark in remarks))


def tell_gone(gone: Sequence[str]) -> None:
    """One line where files that a finished run read are gone. gone: in words."""
    if gone:
        notes.warn(
            f"{', '.join(dict.fromkeys(gone))}: missing, so fedlora cannot check whether it changed since the run; the "
            f"result is shown as it is."
        )


def complain(message: str) -> int:
    """One red line on stderr; the exit code of bad input."""
    message = escaped(message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ...")
    notes.print(f"error: {message}", style="red")
    return 2


def plotted(draw: Callable[[], Iterable[Path]]) -> None:
    """Draw and name the pictures; without matplotlib say so."""
    try:
        for path in draw():
            notes.print(f"plot: {path}")
    except ImportError:
        notes.print("no plots: matplotlib is missing (pip install 'fedlora[plot]')")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture cannot be written: {error}.") from error


def import_plots() -> Any:
    """`fedlora.runs.plots`, or ImportError where matplotlib is missing: for inside `plotted`."""
    from fedlora.runs import plots

    return plots
