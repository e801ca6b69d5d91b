"""The files of one run, and nothing else: what is where, and how it is written so that a crash at any point is safe.

config.json        the resolved configuration          metrics.jsonl     one line a round
manifest.json      versions, commit, device, hashes    checkpoints/      the newest states; best/ the best one's
summary.json       the result; written last            adapter/          the final server model, a PEFT directory
samples.jsonl, samples.md  a language model's answers to held-out prompts, before and after
plots/*.png                                            best/             the best one by validation, likewise
private/           of a private run: for the server alone (`private_releases`)
uploads/           what clients sent, on request (run.keep_uploads)
summary.before.json  the shorter run's summary, while a finished run is made longer
clients/ID/        each client's readout, on request (run.readouts), or where there is no server model

adapter/, best/, each of clients/ and each round of uploads/ appear whole (`core.folders`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import CheckpointError

# What each file has in every version, so that a damaged one is told from a whole one.
_HAS = {
    "summary.json": ("method", "metric", "rounds", "validation", "test"),
    "manifest.json": ("config_digest", "data"),
}
_SUMMARY_BEFORE = "summary.before.json"
_FOLDERS = frozenset(("adapter", "best", "clients", "plots"))
_RESULT = _FOLDERS | {"samples.jsonl", "samples.md"}  # what the end of a run makes, beside the summary


@dataclass(frozen=True)
class RunFolder:
    """A run's directory.

    Example:
        >>> folder = RunFolder(Path("runs/first"))
        >>> folder.exists(), folder.finished(), folder.metrics()
        (False, False, [])
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def best_checkpoint(self) -> Path:
        return self.path / "checkpoints" / "best"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def uploads(self, round: int) -> Path:
        """Where the uploads of a round are, if they were kept."""
        return self.path / "uploads" / f"round-{round:05d}"

    def newest_uploads(self) -> list[Path]:
        """The folders of the last round whose uploads were kept, one for each client; empty where none were."""
        rounds = sorted(path for path in (self.path / "uploads").glob("round-*") if path.is_dir() and not path.suffix)
        return sorted(path for path in rounds[-1].iterdir() if path.is_dir()) if rounds else []

    def exists(self) -> bool:
        return (self.path / "manifest.json").is_file()

    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    def create(self, config: str, manifest: Mapping[str, Any]) -> None:
        """A new run: its configuration and manifest. Raises `CheckpointError` where it cannot be made."""
        self._make()
        files.write(self.path / "config.json", json.dumps(json.loads(config), indent=2) + "\n")
        self.write_json("manifest.json", manifest)

    def reopen(self) -> None:
        """A finished run becomes an unfinished one. Its result stays for use until the new one is there: its adapters'
        cards say of which round they are, and its summary gets another name, since `finished` goes by the name."""
        if self.finished():
            os.replace(self.path / "summary.json", self.path / _SUMMARY_BEFORE)

    def finish(self, summary: Mapping[str, Any], made: Collection[Path]) -> None:
        """The result is whole. What an earlier one had and this one has not goes, and the summary is written last.

        made: everything of the result but the summary. Plots are drawn afterwards, from the summary.
        """
        keep = {path.relative_to(self.path).parts[0] for path in made}
        for name in sorted(_RESULT - keep):
            if name in _FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
            else:
                (self.path / name).unlink(missing_ok=True)
        self.write_json("summary.json", summary)
        (self.path / _SUMMARY_BEFORE).unlink(missing_ok=True)

    def read_json(self, name: str) -> Any:
        """The content of one of the folder's JSON files. Raises `CheckpointError` where it is missing or damaged."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}.") from error
        lacks = [key for key in _HAS.get(name, ()) if not isinstance(found, dict) or key not in found]
        if lacks or not isinstance(found, dict):
            what = f"it has no {lacks[0]!r}" if isinstance(found, dict) else "it is no table of keys"
            raise CheckpointError(f"{self.path / name} is damaged: {what}. Choose another --out.")
        return found

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Whole or not at all. NaN becomes null: JSON has no NaN."""
        files.write(self.path / name, json.dumps(plain(value), indent=2, sort_keys=True) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The finished rounds' lines; a half-written last one does not count.

        Raises:
            CheckpointError: a line that is damaged, missing or there twice. No number is told of a log with holes.
        """
        path, found = self.path / "metrics.jsonl", []
        whole, _, _ = path.read_bytes().rpartition(b"\n") if path.is_file() else (b"", b"", b"")
        for number, text in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                line = json.loads(text)
                if line["round"] != number:
                    raise ValueError(f"it is of round {line['round']}")
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(
                    f"{path} is damaged: line {number} is not that of round {number} ({error}). Restore it, or choose "
                    f"another --out."
                ) from error
            found.append(line)
        return found

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """One more round, flushed to disk."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(line), sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes to the run meanwhile; the system lets go of it when this process ends, however.

        Raises:
            CheckpointError: another process has it, or it cannot be made.
        """
        self._make()
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another process is at work on the run in {self.path}. Wait for it or end it, or choose another "
                    f"--out."
                ) from error
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(handle)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the run folder {self.path} cannot be made: {error.strerror}.") from error

    def sweep(self) -> None:
        """Remove what a killed process had half written."""
        for path in self.path.rglob("*.part"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Forget what comes after `round`: rounds that were logged, but whose state was lost. Returns what is left."""
        kept = [line for line in self.metrics() if line["round"] <= round]
        if [line["round"] for line in kept] != list(range(1, round + 1)):
            raise CheckpointError(
                f"{self.path / 'metrics.jsonl'} does not have the lines of rounds 1 to {round} once each, and a "
                f"checkpoint of round {round} is there: it was changed by hand, or two processes wrote to it. Sums and "
                f"curves would be wrong. Mend it, or choose another --out."
            )
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in kept)
        files.write(self.path / "metrics.jsonl", text)
        return kept


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
