"""A run's files: where each is, and how it is written so that a crash at any point is safe.

config.json        the resolved configuration          metrics.jsonl     one line per round
manifest.json      versions, commit, device, hashes    checkpoints/      the newest states; best/ the best one's
summary.json       the result; written last            adapter/          the final server model, a PEFT directory
samples.jsonl      a language model's answers to held-out prompts, before and after
plots/*.png                                            best/             the best one by validation, likewise
private/           of a private run: for the server only (`private_releases`)
uploads/           what clients sent, if requested (run.keep_uploads)
clients/ID/        each client's readout, if requested (run.readouts), or if there is no server model

A run is finished if there is a summary. Each file, adapter/, best/, each of clients/ and each round of uploads/ appear
whole (`core.files`, `core.folders`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.folders import check_target, place
from fedlora.core.text import quoted, shown
from fedlora.errors import CheckpointError, ConfigError, counted

_BEFORE = ("private", "checkpoints", "manifest.json")  # what a start makes before config.json, with which a run begins


@dataclass(frozen=True)
class RunFolder:
    """A run's directory.

    Example:
        >>> folder = RunFolder(Path("runs/first"))
        >>> folder.exists(), folder.finished(), folder.metrics()
        (False, False, [])
    """

    path: Path

    checkpoints, best_checkpoint, plots = place("checkpoints"), place("checkpoints/best"), place("plots")

    def uploads(self, round: int) -> Path:
        """Where a round's uploads are, if they were kept."""
        return self.path / "uploads" / f"round-{round:05d}"

    def newest_uploads(self) -> tuple[int, list[Path]]:
        """The last round whose uploads were kept, which need not be the run's last, and a folder for each client; round
        0 if none were kept."""
        named = [(re.fullmatch(r"round-(\d{5,})", path.name), path) for path in (self.path / "uploads").glob("round-*")]
        round, newest = max([(int(match[1]), path) for match, path in named if match], default=(0, None))
        return round, sorted(path for path in newest.iterdir() if path.is_dir()) if newest else []

    def exists(self) -> bool:
        """Whether a run was begun here; true even if a file of it is a pipe or a dangling link."""
        return all(os.path.lexists(self.path / name) for name in ("manifest.json", "config.json"))

    def finished(self) -> bool:
        return os.path.lexists(self.path / "summary.json")

    def check_place(self, resume: bool) -> None:
        """Check, before long work, that a run may be written here: the place is free, an empty folder, has a run that
        is to be resumed, or has what a start left that was killed. Writes nothing.

        Raises:
            ConfigError: the folder holds other files, cannot be created, or cannot be written. CheckpointError: it
                holds a run, and `resume` is off.
        """
        if self.exists():
            if not resume:
                raise CheckpointError(
                    f"{self.path} already holds a run; add --resume to continue it, or choose another --out."
                )
            return
        found = sorted(os.listdir(self.path)) if self.path.is_dir() else []
        if not found:
            check_target(self.path)
            return
        ours = {*_BEFORE, *(path.name for path in files.leftovers(self.path))}
        if "manifest.json" in found and "config_digest" not in self.read_json("manifest.json"):
            ours.remove("manifest.json")
        if theirs := [name for name in found if name not in ours]:
            raise ConfigError(
                f"{shown(self.path)} is not empty and holds no run: {counted(len(found), 'entry', 'entries')}, the "
                f"first is {quoted(theirs[0])}. Name a new or an empty directory with --out; if a run's manifest.json "
                f"was lost, restore it."
            )

    def create(self, config: str, manifest: Mapping[str, Any]) -> None:
        """Write a run's manifest, then its configuration, replacing existing ones."""
        self.write_json("manifest.json", manifest)
        files.write(self.path / "config.json", json.dumps(json.loads(config), indent=2) + "\n")

    def reopen(self) -> None:
        """Turn a finished run into an unfinished one."""
        (self.path / "summary.json").unlink(missing_ok=True)

    def read_json(self, name: str) -> dict[str, Any]:
        """The table in one of the folder's JSON files. Raises `CheckpointError` if it is missing or damaged."""
        try:
            return dict(json.loads(files.read(self.path / name)))
        except (OSError, ValueError, TypeError) as error:
            raise _unread(self.path / name, error) from error

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write atomically. NaN becomes null, since JSON has no NaN."""
        files.write(self.path / name, json.dumps(plain(value), indent=2, sort_keys=True) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The finished rounds' lines; a half-written last line does not count. Raises `CheckpointError`."""
        path = self.path / "metrics.jsonl"
        try:
            whole, _, _ = files.read(path).rpartition(b"\n") if os.path.lexists(path) else (b"", b"", b"")
            return [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError) as error:
            raise _unread(path, error) from error

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Append a round, flushed to disk."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(_as_line(plain(line)))
            file.flush()
            os.fsync(file.fileno())

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Drop lines after `round`, whose state was lost. Returns those up to it.

        Raises:
            CheckpointError: there are fewer.
        """
        path, lines = self.path / "metrics.jsonl", self.metrics()
        if len(lines) < round:
            raise CheckpointError(
                f"{path} has the lines of {counted(len(lines), 'round')}, but there is a checkpoint of round {round}: "
                f"sums and curves would be wrong. Restore it, or choose another --out."
            )
        files.write(path, "".join(map(_as_line, lines[:round])))
        return lines[:round]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run against other writers; the kernel releases the lock however this process ends.

        Raises:
            CheckpointError: another process has it, or it cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the run folder {self.path} cannot be created: {error.strerror}.") from error
        handle = os.open(self.path, os.O_RDONLY)
        try:
            if files.hold(handle) is False:
                raise CheckpointError(f"another process is working on the run in {self.path}. Wait for it or end it.")
            yield
        finally:
            os.close(handle)

    def sweep(self) -> None:
        """Remove files that a killed process left half-written."""
        for path in self.path.rglob("*.part"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _unread(path: Path, error: Exception) -> CheckpointError:
    why = getattr(error, "strerror", None) or error
    return CheckpointError(f"{path} cannot be read: {why}. Restore it, or choose another --out.")


def _as_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True) + "\n"


def plain(value: Any) -> Any:
    """`value` in JSON types: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
