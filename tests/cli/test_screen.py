"""What commands print with: whole in a pipe, as wide as the terminal on one. Kinds: contract, end-to-end."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from pathlib import Path

import pytest

import fedlora

Screen, Table = fedlora.cli.screen.Screen, fedlora.cli.screen.Table


def test_a_file_gets_the_whole_table_whatever_the_terminal_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich would take the width of stdin's terminal, of COLUMNS, or 80; and colours do not make a pipe a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table(*(f"column {k}" for k in range(40)))
    table.add_row(*(f"{k}.123456789" for k in range(40)))
    with (tmp_path / "out.txt").open("w") as file:
        Screen(file=file, no_color=True).print(table)
    said = (tmp_path / "out.txt").read_text()
    assert all(f"{k}.123456789" in said for k in range(40)) and "…" not in said


def test_on_a_terminal_its_width_counts() -> None:
    """A pseudo-terminal of 72 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 72, 0, 0))
    with os.fdopen(theirs, "w") as file, pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "72")  # rich asks the standard streams, which are pytest's here
        assert Screen(file=file, _environ=os.environ).width == 72
    os.close(ours)


def test_a_narrow_terminal_cuts_no_word() -> None:
    """The letters of a word that is wider than its column are all there; rich's own table puts `…` for some."""
    table = Table("name", "a", title="t")
    table.add_column("b")
    table.add_row("abcdefghijklmnop", "qrstuvwxyz", "0123456789")
    with io.StringIO() as file:
        Screen(file=file, no_color=True).print(table, width=20)
        said = file.getvalue()
    assert "…" not in said
    assert all(said.count(letter) == 1 for letter in "ghijklopqrsuvwxyz0123456789")


def test_no_control_sequence_reaches_a_terminal() -> None:
    """Whoever wrote the text, in a line and in a table; lines stay lines."""
    table = Table("name")
    table.add_row("b\x1b[31mc")
    with io.StringIO() as file:
        Screen(file=file, no_color=True).print("a\x1b[2J\nsecond")
        Screen(file=file, no_color=True).print(table)
        said = file.getvalue()
    assert "\x1b" not in said and r"a\x1b[2J" in said and r"b\x1b[31mc" in said and "second" in said.splitlines()
