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

        Lines that are no JSON (of an older version, or torn) are left out.

        Raises:
            CheckpointError: the disk refuses.
        """
        self._path = path
        self._lines: dict[int, dict[str, Any]] = {}
        text = read_given(path, RECORDS).decode(errors="replace") if path is not None and path.exists() else ""
        for line in text.split("\n"):
            found = _line(line)
            if found is not None and found["round"] <= upto:
                self._lines[found["round"]] = found  # twice in an older file: the later one was played on
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


def _line(text: str) -> dict[str, Any] | None:
    try:
        found = parse_json(text, nan_as_none=True)
    except ValueError:
        return None
    number = found.get("round") if isinstance(found, dict) else None
    return found if isinstance(number, int) and not isinstance(number, bool) and number >= 1 else None


__all__ = ["RoundLines"]
