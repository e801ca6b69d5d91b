"""Which process has which run, or a file: leases in a folder that several machines may share.

They need no locks of the file system, which on NFS or Lustre may hold on one machine only: a file is created or linked,
or it exists. A holder gives signs of life; another process takes over what gave none for a minute. The time is measured
by whoever waits, so clocks need not agree.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from filelock import SoftFileLease, SoftFileLockProtocolError, SoftReadWriteLock, Timeout

from fedlora.errors import CheckpointError, ConfigError

BEAT = 20.0  # seconds between two signs of life; a lease that misses three is free
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_BRIEF = 120.0  # seconds: rewriting a file of results takes a tenth of one


class Claims:
    """The runs that this process has, in a `with` block, at whose end it leaves them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._leases: dict[str, SoftReadWriteLock] = {}
        self._mine: set[str] = set()

    def take(self, name: str) -> bool:
        """Whether nobody else has it; then it is ours. Ask again to see whether its holder still lives.

        Raises:
            ConfigError: the file system has no hard links.
        """
        if name not in self._leases:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._leases[name] = SoftReadWriteLock(self._folder / name, is_singleton=False, heartbeat_interval=BEAT)
        try:
            self._leases[name].acquire_write(blocking=False)
        except Timeout:
            return False
        except (OSError, SoftFileLockProtocolError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LINKS:
                raise
            raise ConfigError(
                f"{self._folder} takes no hard links ({error}), by which processes say which runs they have. Name a "
                f"--work on another file system: ext4, xfs, NFS and Lustre have them."
            ) from error
        self._mine.add(name)
        return True

    def check(self) -> None:
        """Raises `CheckpointError` if another process took one over, because this one gave no sign of life."""
        if lost := [name for name in self._mine if self._leases[name].compromise is not None]:
            raise CheckpointError(
                f"this process gave no sign of life for {3 * BEAT:g} s, and another one may have taken over the run "
                f"{lost[0]}: the machine was asleep, or {self._folder} did not answer. Call the same command again."
            )

    def leave(self, name: str) -> None:
        if name in self._mine:
            self._mine.discard(name)
            self._leases.pop(name).release()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in [*self._mine]:
            self.leave(name)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the file for a moment: the others wait. It exists only while it is held.

    Raises:
        CheckpointError: somebody held it all the time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lease = SoftFileLease(path, timeout=_BRIEF)
    try:
        lease.acquire()
    except Timeout as error:
        owner = lease.owner
        who = f"process {owner.pid} of {owner.hostname}" if owner is not None else "another process"
        raise CheckpointError(
            f"{path} was held for {_BRIEF:g} s by {who}, which needs it for less than one. If that was killed, remove "
            f"the file."
        ) from error
    try:
        yield
    finally:
        lease.release()
