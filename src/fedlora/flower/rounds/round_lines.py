"""FED/server/rounds.jsonl: one JSON object for each finished round, in order, each round once; and the summary.

Each write replaces the whole file, so that it is valid JSON at every moment, however a process ends. A round's line is
written before its checkpoint: a surplus line after a crash is cut off when the run continues, and no line is ever
missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import CheckpointError
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.events import json_line
from fedlora.flower.terms.settings import FederationSettings
from fedlora.given_files import RECORDS, parse_json, read_given


class RoundLines:
    """The lines of a federation's rounds. path: None keeps them only in memory."""

    def __init__(self, path: Path | None, upto: int = 0) -> None:
        """Read the file's lines of rounds 1 to `upto`; later ones are cut off.

        Lines that are not JSON, because a disk damaged them, are left out.

        Raises:
            CheckpointError: the disk refuses.
        """
        self._path = path
        text = read_given(path, RECORDS).decode(errors="replace") if path is not None and path.exists() else ""
        self._lines = {round: line for round, line in _parsed(text).items() if round <= upto}
        if text != _text(self._lines):
            self._write(self._lines)

    def put(self, line: Mapping[str, Any]) -> None:
        """Add a round's line, or replace it. Raises `CheckpointError`; the file is then unchanged."""
        lines = self._lines | _parsed(json_line(line))  # as it would be read after a kill
        self._write(lines)
        self._lines = lines

    def get(self, round: int) -> Mapping[str, Any] | None:
        """The line of a round; None if there is none."""
        return self._lines.get(round)

    def all(self) -> list[Mapping[str, Any]]:
        """All lines, in the order of rounds."""
        return [line for _, line in sorted(self._lines.items())]

    def finished(self) -> list[Mapping[str, Any]]:
        """The lines of the rounds that are finished."""
        return [line for line in self.all() if is_finished(line)]

    def _write(self, lines: Mapping[int, Mapping[str, Any]]) -> None:
        if self._path is not None:
            try:
                files.write(self._path, _text(lines))
            except OSError as error:
                raise CheckpointError(f"{self._path} cannot be written: {error.strerror}; it is unchanged.") from error


def is_finished(line: Mapping[str, Any]) -> bool:
    """Whether this is a round's last line. The first, before the checkpoint, has no scores of the server's yet."""
    return "metrics" in line


def rounds_done(path: Path, *, finished: bool = False) -> int:
    """The number of stored rounds, from rounds.jsonl. finished: only those whose last line is there, so that their
    checkpoints were, too."""
    try:
        lines = _parsed(read_given(path, RECORDS).decode(errors="replace"))
    except FileNotFoundError:
        return 0
    return max((round for round, line in lines.items() if is_finished(line) or not finished), default=0)


def has_released(home: FederationFolder) -> bool:
    """Whether a noised sum was ever made here."""
    return any((home.private / "journal").glob("*"))


def fitting_summary(path: Path, settings: FederationSettings, rounds: int) -> dict[str, Any] | None:
    """A federation's summary, if it is of these settings and of this number of rounds; None: there is work left."""
    try:
        found = parse_json(read_given(path, RECORDS), nan_as_none=True)
        same = found["rounds"] == rounds and found["settings"] == json.loads(settings.travelling())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return dict(found) if same else None


def _text(lines: Mapping[int, Mapping[str, Any]]) -> str:
    return "".join(json_line(line) for _, line in sorted(lines.items()))


def _parsed(text: str) -> dict[int, dict[str, Any]]:
    """Round -> its line; torn lines are left out."""
    lines = {}
    for line in text.split("\n"):
        try:
            found = parse_json(line, nan_as_none=True)
        except ValueError:
            continue
        round = found.get("round") if isinstance(found, dict) else None
        if isinstance(round, int) and not isinstance(round, bool) and round >= 1:
            lines[round] = found
    return lines
