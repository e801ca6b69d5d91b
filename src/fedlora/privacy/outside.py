"""Records, outside its folder, facts about a ledger or a secret draw, by which a copy is recognised.

    STATE/ledgers/ID.json    the ledger's mark, its newest line, and its location
    STATE/draws/ID.json      the location of the folder for which the draw was made

STATE is FEDLORA_STATE_DIR, else XDG_STATE_HOME/fedlora, else ~/.local/state/fedlora. A file's location is this machine
(/etc/machine-id), its file system and its inode. A copy, a snapshot of one disk, a fresh file system that reuses the
inode and an older backup all differ from the record. Anything rolled back or copied together with STATE and machine-id,
as in a snapshot of a whole virtual machine, does not: nothing on one machine can detect that.
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

MACHINE_ID = Path("/etc/machine-id")  # one line, written when the system was installed; may be missing in a container
_VARIABLE = "FEDLORA_STATE_DIR"


def state_folder() -> Path:
    """Where this user's programs keep persistent state. Raises `LedgerError` if there is no such place."""
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
    """The record of one ledger or draw. state: its folder; None: `state_folder`."""

    kind: str
    id: str
    state: Path | None = None

    @property
    def path(self) -> Path:
        return (self.state or state_folder()) / self.kind / f"{Path(self.id).name}.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the ledger and its copies against other writers. Raises `LedgerError`."""
        self.check_writable()
        with held(self.path.with_suffix(".lock")):
            yield

    def read(self) -> dict[str, Any] | None:
        """The recorded facts; None if there are none. Raises `LedgerError` if they cannot be read."""
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
        """Record that it lies at `at`, with these `facts`. Durable when this returns. Raises `LedgerError`."""
        try:
            files.write(self.path, json.dumps({**facts, **_whereabouts(at)}) + "\n")
        except OSError as error:
            raise LedgerError(self._unwritable(error.strerror or str(error))) from error

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise `LedgerError` if STATE cannot be written. Creates nothing."""
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
    """How the location of `at` differs from the record, in words; "" if it is the same."""
    words = {
        "machine": "on another machine (/etc/machine-id)",
        "device": "on another file system",
        "inode": "as another file",
    }
    apart = [words[key] for key, value in _whereabouts(at).items() if known.get(key) != value]
    return f"it was written {' and '.join(apart)}" if apart else ""


def _whereabouts(at: Path) -> dict[str, Any]:
    """machine: a digest, because the id itself must be kept secret (machine-id(5)); "" if there is none. device: the
    file system's id, which unlike a device number survives a restart, and differs for each tmpfs."""
    try:
        id = MACHINE_ID.read_text().strip()
    except OSError:
        id = ""
    machine = hashlib.sha256(f"fedlora {id}".encode()).hexdigest()[:16] if id else ""
    return {"machine": machine, "device": os.statvfs(at).f_fsid, "inode": at.stat().st_ino}
