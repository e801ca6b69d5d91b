"""FED/server/rounds.jsonl: one JSON object for each finished round, in order, each round once.

The file is written anew as a whole each time, so that it is valid JSON at every moment, however a process ends. A
round's line is there before its checkpoint is: what a crash leaves too much is cut off when the run goes on, and none
is ever missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import CheckpointError
from fedlora.flower.rounds.events import json_line
from fedlora.given_files import RECORDS, parse_json, read_given


class RoundLines:
    """The lines of a federation's rounds. path: None keeps them in memory only."""

    def __init__(self, path: Path | None, upto: int = 0) -> None:
        """What the file holds of rounds 1 to `upto`; what it holds of later ones is cut off.

        Lines that are no JSON, torn by a crash, are left out.

        Raises:
            CheckpointError: the disk refuses.
        """
        self._path = path
        text = read_given(path, RECORDS).decode(errors="replace") if path is not None and path.exists() else ""
        self._lines = {number: line for number, line in _parsed(text).items() if number <= upto}
        if text != self._text():
            self._write()

    def put(self, line: Mapping[str, Any]) -> None:
        """The line of its round, in place of one that is there. Raises `CheckpointError`: the file is as it was."""
        before = dict(self._lines)
        self._lines[line["round"]] = dict(line)
        try:
            self._write()
        except BaseException:
            self._lines = before
            raise

    def get(self, round: int) -> Mapping[str, Any] | None:
        """The line of a round; None where there is none."""
        return self._lines.get(round)

    def all(self) -> list[Mapping[str, Any]]:
        """All lines, in the order of rounds."""
        return [self._lines[number] for number in sorted(self._lines)]

    def _text(self) -> str:
        return "".join(map(json_line, self.all()))

    def _write(self) -> None:
        if self._path is not None:
            try:
                files.write(self._path, self._text())
            except OSError as error:
                raise CheckpointError(f"{self._path} cannot be written: {error.strerror}; it is as it was.") from error


def rounds_done(path: Path) -> int:
    """How many rounds are stored, by rounds.jsonl."""
    try:
        return max(_parsed(read_given(path, RECORDS).decode(errors="replace")), default=0)
    except FileNotFoundError:
        return 0


def _parsed(text: str) -> dict[int, dict[str, Any]]:
    """Round -> its line; what a crash tore is left out."""
    lines = {}
    for line in text.split("\n"):
        try:
            found = parse_json(line, nan_as_none=True)
        except ValueError:
            continue
        number = found.get("round") if isinstance(found, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
            lines[number] = found
    return lines


__all__ = ["RoundLines", "rounds_done"]
