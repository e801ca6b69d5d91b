"""The owner of a federation's folder, and the process that has it now: the server could not read what another user,
even root, writes there, and two servers at once would undo each other's work. A lock ends with its holder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path

from fedlora.core import files
from fedlora.core.text import shown
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder

log = logging.getLogger(__name__)


def owner(folder: Path) -> str:
    """The name of a folder's present or future owner. Raises `ConfigError` for an owner without a name."""
    uid = folder.stat().st_uid if folder.exists() else os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError as error:
        raise ConfigError(f"the owner of {folder}, user id {uid}, has no name, which a unit needs.") from error


def check_owner(there: FederationFolder) -> None:
    """Raises `ConfigError` if this process does not run as the folder's owner."""
    if there.path.stat().st_uid != os.getuid():
        name = owner(there.path)
        raise ConfigError(
            f"{there.path} belongs to the user {name!r}, and its server runs as {name!r}: it could not read files of "
            f"another user. Call this as {name!r}: sudo -u {name} ..."
        )


def opened_here(path: Path, how: int) -> int:
    """A descriptor of a lock or log below a written folder, created if missing; only for this user. how: as in
    `os.open`. The app can write there too, so links are refused: none may lead to another file of this user.

    Raises:
        ConfigError: it is a link, or its folder is one. OSError: the disk refuses.
    """
    try:
        if path.parent.is_symlink():
            raise OSError(errno.ELOOP, "its folder is a link")
        return os.open(path, how | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(
            f"{path} is a link, or lies in one, so a write there would go to another file. fedlora makes no such link: "
            f"find out who did, and remove it."
        ) from error


@contextlib.contextmanager
def locked(path: Path, refused: Callable[[str], str]) -> Iterator[int]:
    """Hold the lock at `path`, with this process's id in it; the lock ends with the process. Yields its descriptor.

    Args:
        refused: makes the message if another process has it, from its id.

    Raises:
        ConfigError: another process has it. OSError: it cannot be made.
    """
    descriptor = opened_here(path, os.O_RDWR)
    try:
        taken = files.hold(descriptor)
        if taken is False:
            raise ConfigError(refused(_holder_said(descriptor)))
        if taken is None:
            log.warning("%s: this file system has no locks; make sure that nobody else does the same here", path)
        with contextlib.suppress(OSError):  # on a full disk the id is missing, but the lock holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def serving(path: Path) -> Iterator[None]:
    """Allow one `fedlora flower serve` or `up` per folder: hold the lock at `path`, FED/state/serve.lock.

    Raises:
        ConfigError: another process holds it; the message has its id.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parents[1]
    with locked(path, lambda who: (
        f"process {who} already serves {folder}: two processes would run each round twice. Look with `fedlora flower "
        f"status {folder}`; end the other process first."
    )):  # fmt: skip
        yield


def holder(path: Path) -> int | None:
    """The id of the process that holds a lock; None if nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        said = _holder_said(descriptor)
        return int(said) if files.hold(descriptor) is False and said.isdigit() else None
    finally:
        os.close(descriptor)


def _holder_said(descriptor: int) -> str:
    """The id that a lock's holder wrote into it, in words."""
    return shown(os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown")


__all__ = ["check_owner", "holder", "locked", "opened_here", "owner", "serving"]
