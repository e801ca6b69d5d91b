"""Files that a person names (data, settings, maps, ledgers): ordinary files of a bounded size, opened without waiting.

A pipe, a device, a folder and a file that is too large raise `OSError` with the reason as its `strerror`: a reader
words it as it words a missing file.
"""

from __future__ import annotations

import errno
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from fedlora.errors import ConfigError

SETTINGS = 4 * 2**20  # bytes of a file that people write by hand; ten thousand keys have one million
_HOW = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a writer would wait for ever
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


def read_given(path: Path, most: int = SETTINGS) -> bytes:
    """All bytes of a file.

    Args:
        path: links are followed, for a person named it. most: bytes that it may have.

    Raises:
        OSError: it cannot be opened, is no ordinary file, or has more than `most` bytes.
    """
    try:
        descriptor = os.open(path, _HOW)
    except ValueError as error:  # a NUL, or half a letter
        raise OSError(errno.EINVAL, f"no file can have that name ({error})", str(path)) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, and an ordinary file is needed", str(path))
        size, content = facts.st_size, bytearray()
        while size <= most and (piece := os.read(descriptor, 2**20)):  # it may grow, and files of /proc say 0
            content += piece
            size = max(size, len(content))
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are allowed", str(path))
        return bytes(content)
    finally:
        os.close(descriptor)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """A TOML file as nested tables. what: the file is, for errors ("the config").

    Raises:
        ConfigError: the file cannot be read (see `read_given`), or is not TOML.
    """
    try:
        return tomllib.loads(read_given(path).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{what} {path} is not TOML: {error}.") from error


def half_the_memory() -> int:
    """Bytes: half of what this machine, or the container around us, has; the rest is for everything else in it."""
    found = [2**33]
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError, AttributeError):  # no such system, no container, or "max"
        pass
    return max(min(n for n in found if n > 0), 2**28) // 2
