"""What is known of a ledger, or of a secret draw, outside of the folder that it lies in: by this a copy is recognised.

    STATE/ledgers/ID.json    which mark the ledger has, its newest line, and where it lies
    STATE/draws/ID.json      where the folder lies that was drawn for

STATE is FEDLORA_STATE_DIR, else XDG_STATE_HOME/fedlora, else ~/.local/state/fedlora. Where a file lies is this machine
(/etc/machine-id), its file system and its inode. A copy, a snapshot of one disk, a fresh file system that gives the
same inode again and an older backup all differ from what is known here. What was rolled back or copied together with
STATE, machine-id included, as by a snapshot of a whole virtual machine, does not: nothing on one machine can tell that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import LedgerError
from fedlora.given_files import parse_json, read_given
from fedlora.privacy.locked_file import held

MACHINE_ID = Path("/etc/machine-id")  # one line, made when the system was installed; may be missing in a container
_VARIABLE = "FEDLORA_STATE_DIR"


def state_folder() -> Path:
    """Where this user's programs keep what must outlive them. Raises `LedgerError` where no place is named."""
    if named := os.environ.get(_VARIABLE):
        return Path(named).absolute()
    if named := os.environ.get("XDG_STATE_HOME"):
        return Path(named).absolute() / "fedlora"
    try:
        return Path.home() / ".local" / "state" / "fedlora"
    except RuntimeError as error:
        raise LedgerError(f"this user has no home folder: set {_VARIABLE} to a folder that lasts.") from error


@dataclass(frozen=True)
class Outside:
    """Of one ledger or draw. state: where; None: `state_folder`."""

    kind: str
    id: str
    state: Path | None = None

    @property
    def path(self) -> Path:
        return (self.state or state_folder()) / self.kind / f"{Path(self.id).name}.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else has the ledger or a copy of it open to write meanwhile. Raises `LedgerError`."""
        self.check_writable()
        with held(self.path.with_suffix(".lock")):
            yield

    def read(self) -> dict[str, Any] | None:
        """What is known; None: nothing. Raises `LedgerError` where it cannot be read."""
        try:
            return dict(parse_json(read_given(self.path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            why = getattr(error, "strerror", None) or error
            raise LedgerError(
                f"{self.path} cannot be read ({why}). Restore it, or remove it; it then counts as lost."
            ) from error

    def write(self, at: Path, **facts: Any) -> None:
        """From now on it lies at `at`, and `facts` are so. Lasting when this returns. Raises `LedgerError`."""
        try:
            files.write(self.path, json.dumps({**facts, **_whereabouts(at)}) + "\n")
        except OSError as error:
            raise LedgerError(self._unwritable(error.strerror or str(error))) from error

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raises `LedgerError` where STATE cannot be written. Nothing is made."""
        there = next(place for place in (self.path, *self.path.parents) if os.path.lexists(place))
        if not os.access(there, os.W_OK) or (there != self.path and not there.is_dir()):
            raise LedgerError(self._unwritable(f"{there} is not writable"))

    def _unwritable(self, why: str) -> str:
        return (
            f"the record of a ledger outside its folder cannot be kept in {self.path.parent.parent} ({why}), and "
            f"without it a copy could spend the budget again. Nothing was charged. Set {_VARIABLE} to a folder that "
            f"lasts and that this user may write, the same one for every command on this ledger, best on another disk."
        )


def elsewhere(known: Mapping[str, Any], at: Path) -> str:
    """How the place of `at` differs from what is known, in words; "" where it is the same."""
    words = {
        "machine": "on another machine (/etc/machine-id)",
        "device": "on another file system",
        "inode": "as another file",
    }
    apart = [words[key] for key, value in _whereabouts(at).items() if known.get(key) != value]
    return f"it was written {' and '.join(apart)}" if apart else ""


def _whereabouts(at: Path) -> dict[str, Any]:
    """machine: a digest, for the id itself is to be kept secret (machine-id(5)); "" where there is none. device: the
    file system's id, which unlike a device's number outlives a restart, and is another one for each tmpfs."""
    try:
        id = MACHINE_ID.read_text().strip()
    except OSError:
        id = ""
    machine = hashlib.sha256(f"fedlora {id}".encode()).hexdigest()[:16] if id else ""
    return {"machine": machine, "device": os.statvfs(at).f_fsid, "inode": at.stat().st_ino}
