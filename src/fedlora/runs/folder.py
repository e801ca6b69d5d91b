"""A run's files: where each is, and how it is written so that a crash at any point is safe.

config.json        the resolved configuration          metrics.jsonl     one line per round
manifest.json      versions, commit, device, hashes    checkpoints/      the newest states; best/ the best one's
summary.json       the result; written last            SHA256SUMS        digests of all files of a finished run
                                                       adapter/          the final server model, a PEFT directory
samples.jsonl, samples.md  a language model's answers to held-out prompts, before and after
plots/*.png                                            best/             the best one by validation, likewise
private/           of a private run: for the server only (`private_releases`)
uploads/           what clients sent, if requested (run.keep_uploads)
summary.before.json  the shorter run's summary, while a finished run is extended
clients/ID/        each client's readout, if requested (run.readouts), or if there is no server model

adapter/, best/, each of clients/ and each round of uploads/ appear whole (`core.folders`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.folders import check_target, place
from fedlora.core.text import quoted, shown
from fedlora.errors import CheckpointError, ConfigError, counted
from fedlora.runs.sums import SUMS, compared, write_sums

# Keys that each file has in every version; without them it is damaged.
_HAS = {
    "summary.json": ("method", "metric", "rounds", "validation", "test"),
    "manifest.json": ("config_digest", "data"),
}
_SUMMARY_BEFORE = "summary.before.json"
_CHAIN = "digest"  # key in each line of metrics.jsonl: `_link`
_SEAL = "digest"  # key in manifest.json: `_sealed`
_BEGUN = frozenset(("run.json", "content.json", "config.json"))  # private/ before there is a manifest
_TABLES = ("model", "data", "method", "run")  # in every run's config.json, but in no model's
_SAMPLES = ("samples.jsonl", "samples.md")
PICTURES = ("bytes.png", "spectrum.png", "metric.png")  # drawn by the run itself: `plots.plot_run`


@dataclass(frozen=True)
class KeptUploads:
    """One round's uploads: a folder for each client."""

    round: int
    folders: list[Path]


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

    def newest_uploads(self) -> KeptUploads | None:
        """The last round whose uploads were kept, which need not be the run's last; None if there is none."""
        named = [(re.fullmatch(r"round-(\d{5,})", path.name), path) for path in (self.path / "uploads").glob("round-*")]
        rounds = [(int(match[1]), path) for match, path in named if match and path.is_dir()]
        if not rounds:
            return None
        round, newest = max(rounds)
        return KeptUploads(round, sorted(path for path in newest.iterdir() if path.is_dir()))

    def exists(self) -> bool:
        """Whether a run was begun here; true even if its manifest is a pipe or a dangling link."""
        return os.path.lexists(self.path / "manifest.json")

    def finished(self) -> bool:
        return os.path.lexists(self.path / "summary.json")

    def ended(self) -> int | None:
        """The number of rounds the run ended with, even while it is being extended; None if it never ended."""
        for name in ("summary.json", _SUMMARY_BEFORE):
            if os.path.lexists(self.path / name):
                rounds = self.read_json(name).get("rounds")
                return rounds if isinstance(rounds, int) else None
        return None

    @property
    def sums(self) -> Path:
        """Where the digests of a finished run's files are."""
        return self.path / "private" / SUMS if (self.path / "private").is_dir() else self.path / SUMS

    def lacking(self) -> list[str]:
        """Files of a finished run that are missing.

        Raises:
            CheckpointError: a file differs from what the run wrote; the message names it.
        """
        missing, changed = compared(self.path, self.sums)
        for name, why in changed.items():
            place = re.match(r"adapter/|best/|clients/[^/]+/", name)
            again = f"move {place[0]} away, and --resume rebuilds it from the last checkpoint; " if place else ""
            raise CheckpointError(
                f"{self.path / name} is not what the run wrote: {why} ({len(changed)} of the files in "
                f"{self.sums.name} differ). It is damaged, belongs to another run, or was changed. Restore it; {again}"
                f"or choose another --out."
            )
        return missing

    def whole(self) -> bool:
        """Whether the run has finished, and its results are all there and unchanged. A resume rebuilds what is missing,
        even if only the list of digests; until then no file of the folder is trusted.

        Raises:
            CheckpointError: as in `lacking`.
        """
        return self.finished() and all(name.startswith("checkpoints/") for name in self.lacking())

    def check_place(self) -> None:
        """Check, before long work, that a run may be written here: the place is free, an empty folder, has a run, or
        has what a start left that was killed before its manifest. Writes nothing.

        Raises:
            ConfigError: the folder holds other files, cannot be created, or cannot be written.

        Example:
            >>> Path("mine").mkdir()
            >>> _ = Path("mine/config.json").write_text("{}")
            >>> try:
            ...     RunFolder(Path("mine")).check_place()
            ... except ConfigError as error:
            ...     print(str(error).partition(".")[0])
            mine is not empty and holds no run: 1 entry, the first is 'config
        """
        try:
            if self.exists():
                return
            if not self.path.is_dir():
                check_target(self.path)
                return
            found = sorted(os.listdir(self.path))
            theirs = [name for name in found if not self._left_by_start(name)]
            if not theirs and not os.access(self.path, os.W_OK | os.X_OK):
                raise ConfigError(f"{shown(self.path)} cannot be written: Permission denied.")
        except OSError as error:
            raise ConfigError(f"{shown(self.path)} cannot be written: {error.strerror or error}.") from error
        if theirs:
            entries = counted(len(found), "entry", "entries")
            raise ConfigError(
                f"{shown(self.path)} is not empty and holds no run: {entries}, the first is {quoted(theirs[0])}. A run "
                f"would overwrite files that have its names. Nothing was written. Name a new or an empty "
                f"directory with --out; if a run's manifest.json was lost, restore it."
            )

    def _left_by_start(self, name: str) -> bool:
        """Whether a start that was killed before its manifest left this entry."""
        path = self.path / name
        if path.is_symlink():
            return False
        if path.is_dir():
            allowed = {"private": _BEGUN, "checkpoints": frozenset[str]()}.get(name)
            if allowed is None:
                return False
            return set(os.listdir(path)) <= allowed | {left.name for left in files.leftovers(path)}
        if name != "config.json":
            return name.startswith((".config.json.", ".manifest.json.")) and path in files.leftovers(self.path)
        try:
            value = json.loads(path.read_bytes()) if path.is_file() else None
        except (ValueError, RecursionError):  # our own file appears whole
            return False
        return isinstance(value, dict) and all(isinstance(value.get(table), dict) for table in _TABLES)

    def create(self, config: str, manifest: Mapping[str, Any]) -> None:
        """Write a run's configuration and manifest, replacing existing ones.

        Raises:
            ConfigError: as in `check_place`. CheckpointError: the folder cannot be created.
        """
        self._make()
        files.write(self.path / "config.json", json.dumps(json.loads(config), indent=2) + "\n")
        self.write_json("manifest.json", manifest)

    def reopen(self) -> None:
        """Turn a finished run into an unfinished one. Its result stays usable until the new one is there: its adapters'
        cards name their round, and its summary is renamed, because `finished` looks for the name."""
        if self.finished():
            os.replace(self.path / "summary.json", self.path / _SUMMARY_BEFORE)
            self.sums.unlink(missing_ok=True)

    def finish(self, summary: Mapping[str, Any], made: Collection[Path]) -> None:
        """Complete the result, writing the summary last. Removes an earlier result's samples and pictures; its adapters
        are already gone (`exported.clear_exports`). Files that the run did not make stay, even in plots/.

        made: all files of the result except the summary. Plots are drawn later, from the summary.
        """
        stale = [self.path / name for name in _SAMPLES if self.path / name not in made]
        for path in [*stale, *(self.plots / name for name in PICTURES)]:
            path.unlink(missing_ok=True)
        if self.plots.is_dir() and not any(self.plots.iterdir()):
            self.plots.rmdir()
        text = _text(summary)
        own = [self.path / name for name in ("config.json", "manifest.json", "metrics.jsonl")]
        for part in ("checkpoints", "uploads", "private/journal"):
            own += [path for path in (self.path / part).rglob("*") if path.is_file()]
        own += [self.path / "private" / name for name in _BEGUN if (self.path / "private" / name).is_file()]
        write_sums(self.path, self.sums, [*own, *made], {"summary.json": hashlib.sha256(text.encode()).hexdigest()})
        files.write(self.path / "summary.json", text)
        (self.path / _SUMMARY_BEFORE).unlink(missing_ok=True)

    def read_json(self, name: str) -> Any:
        """The content of one of the folder's JSON files. Raises `CheckpointError` if it is missing or damaged."""
        try:
            found = json.loads(files.read(self.path / name))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"{self.path / name} cannot be read: {why}. Restore it, or choose another --out."
            ) from error
        lacks = [key for key in _HAS.get(name, ()) if not isinstance(found, dict) or key not in found]
        if lacks or not isinstance(found, dict):
            what = f"it has no {lacks[0]!r}" if isinstance(found, dict) else "it is not a table of keys"
            raise CheckpointError(f"{self.path / name} is damaged: {what}. Restore it, or choose another --out.")
        if name == "manifest.json":
            seal = found.pop(_SEAL, None)
            if _sealed(found)[_SEAL] != seal:
                raise CheckpointError(
                    f"{self.path / name} is damaged: its content does not match its digest. Restore it, or choose "
                    f"another --out."
                )
        return dict(found)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write atomically; a manifest gets its seal. NaN becomes null, since JSON has no NaN."""
        files.write(self.path / name, _text(_sealed(plain(value)) if name == "manifest.json" else value))

    def metrics(self) -> list[dict[str, Any]]:
        """The finished rounds' lines; a half-written last line does not count.

        Raises:
            CheckpointError: a line is damaged, missing or repeated. A log with holes yields no numbers.
        """
        return [{key: value for key, value in line.items() if key != _CHAIN} for line in self._lines()]

    def _lines(self) -> list[dict[str, Any]]:
        """As `metrics`, with each line's chain link."""
        path, found = self.path / "metrics.jsonl", []
        try:
            whole, _, _ = files.read(path).rpartition(b"\n") if os.path.lexists(path) else (b"", b"", b"")
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}. Restore it, or choose another --out."
            ) from error
        for number, text in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                line = json.loads(text)
                if line["round"] != number:
                    raise ValueError(f"it belongs to round {line['round']}")
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{path} is damaged: line {number} is not for round {number} ({error}). Restore it, or choose "
                    f"another --out."
                ) from error
            found.append(line)
        return found

    def append_metrics(self, line: Mapping[str, Any], before: str) -> str:
        """Append a round, flushed to disk. before: the previous round's link, or the run's identity. Returns this
        round's link: a digest of the line and the previous link, which binds the lines to each other and to the run."""
        link = _link(before, plain(line))
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**plain(line), _CHAIN: link}, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return link

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run against other writers; the kernel releases the lock however this process ends.

        Raises:
            ConfigError: as in `check_place`. CheckpointError: another process has it, or it cannot be created.
        """
        self._make()
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another process is working on the run in {self.path}. Wait for it or end it, or choose another "
                    f"--out."
                ) from error
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(handle)

    def _make(self) -> None:
        self.check_place()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the run folder {self.path} cannot be created: {error.strerror}.") from error

    def sweep(self) -> None:
        """Remove files that a killed process left half-written."""
        for path in self.path.rglob("*.part"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def upto(self, round: int, of: str) -> tuple[list[dict[str, Any]], str]:
        """The lines of rounds 1 to `round`, and the last one's link. of: the run's identity.

        Raises:
            CheckpointError: a line is missing, or this run did not write it.
        """
        kept, link, path = self._lines()[:round], of, self.path / "metrics.jsonl"
        if len(kept) < round:
            raise CheckpointError(
                f"{path} has the lines of {counted(len(kept), 'round')}, but there is a checkpoint of round {round}: "
                f"it is an older copy, or was changed. Sums and curves would be wrong. Restore it, or choose another "
                f"--out."
            )
        for line in kept:
            said = line.pop(_CHAIN, None)
            link = _link(link, line)
            if said != link:
                raise CheckpointError(
                    f"{path} is not what this run wrote, from line {line['round']} on: it is another run's, or was "
                    f"changed. Restore it, or choose another --out."
                )
        return kept, link

    def rewind(self, round: int, of: str) -> tuple[list[dict[str, Any]], str]:
        """Drop lines after `round`, whose state was lost. Returns `upto`."""
        found = self.upto(round, of)
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in self._lines()[:round])
        files.write(self.path / "metrics.jsonl", text)
        return found


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(plain(value), indent=2, sort_keys=True) + "\n"


def _link(before: str, line: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{before} {json.dumps(line, sort_keys=True)}".encode()).hexdigest()[:16]


def _sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of the value itself, which reveals a flipped bit."""
    return {**value, _SEAL: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()}


def plain(value: Any) -> Any:
    """`value` in JSON types: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
