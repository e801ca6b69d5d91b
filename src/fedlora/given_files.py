"""Files that a person names (data, settings, maps, ledgers): ordinary files of a bounded size, opened without waiting.

A pipe, a device, a folder and a file that is too large raise `OSError` with the reason as its `strerror`: a reader
words it as it words a missing file.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

from fedlora.errors import ConfigError

SETTINGS = 4 * 2**20  # bytes of a file that people write by hand; ten thousand keys have one million
RECORDS = 2**28  # bytes of a record that a run or a federation keeps; a line for each of 100,000 rounds
_PART = r'(?:[\w-]++|"[^"\n]*+"|\'[^\'\n]*+\')'
_MANY_DOTS = re.compile(rf"(?:^|[{{,\[])[ \t]*+{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{32}}", re.MULTILINE)
_HOW = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a writer would wait for ever
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


def opened(path: Path) -> io.BufferedReader:
    """An ordinary file, or what a link to one leads to, to read. A pipe is not waited for.

    Raises:
        OSError: it is not there, cannot be opened, or is no ordinary file.
    """
    try:
        descriptor = os.open(path, _HOW)
    except ValueError as error:  # a NUL, or half a letter
        raise OSError(errno.EINVAL, f"no file can have that name ({error})", str(path)) from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        said = f"it is {_KINDS.get(kind, 'something else')}, and an ordinary file is needed"
        raise OSError(errno.EINVAL, said, str(path))
    return open(descriptor, "rb")


def read_given(path: Path, most: int = SETTINGS) -> bytes:
    """All bytes of a file.

    Args:
        path: links are followed, for a person named it. most: bytes that it may have.

    Raises:
        OSError: it cannot be opened, is no ordinary file, or has more than `most` bytes.
    """
    with opened(path) as file:
        size, content = os.fstat(file.fileno()).st_size, bytearray()
        while size <= most and (piece := file.read(2**20)):  # it may grow, and files of /proc say 0
            content += piece
            size = max(size, len(content))
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are allowed", str(path))
        return bytes(content)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """A TOML file as nested tables. what: the file is, for errors ("the config").

    Raises:
        ConfigError: the file cannot be read (see `read_given`), or is not TOML.
    """
    try:
        return parse_toml(read_given(path).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not TOML: {error}.") from error


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as nested tables. tomllib takes memory by the square of a key's dots: 90 KB of them would take 8 GB.

    Raises:
        ValueError: no TOML, nested too deep, a key of more than 32 parts, a number of thousands of digits.
    """
    if _MANY_DOTS.search(text):
        raise ValueError("it has a key of more than 32 parts with dots between")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def parse_json(text: str | bytes) -> Any:
    """JSON as dicts and lists, of what another program may have written: NaN and infinities become None.

    Raises:
        ValueError: no JSON, or nested too deep.
    """
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def half_the_memory() -> int:
    """Bytes: half of what this machine, or the container around us, has; the rest is for everything else in it."""
    found = [2**33]
    try:
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError, AttributeError):  # no such system, no container, or "max"
        pass
    return max(min(n for n in found if n > 0), 2**28) // 2
