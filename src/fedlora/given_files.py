"""Files from a person or a stranger (data, settings, ledgers, adapters), opened and parsed within bounds.

`opened` opens them all: only an ordinary file, and without waiting. For a pipe, a device, a folder or a file that is
too large it raises `OSError` with the reason as `strerror`, so that readers can report it like a missing file.
`parse_json` and `parse_toml` are the only parsers: they raise `ValueError` with the reason for what Python would accept
leniently, silently or without a bound.
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

from fedlora.errors import ConfigError, escaped, repeated

SETTINGS = 4 * 2**20  # bytes of a handwritten file; ten thousand keys take one million
RECORDS = 2**28  # bytes of a run's or federation's record; a line for each of 100,000 rounds
DATA = 2**32  # bytes of a table of text; as rows it takes some six times as much
_PART = r'(?:[\w-]++|"[^"\n]*+"|\'[^\'\n]*+\')'
_MANY_DOTS = re.compile(rf"(?:^|[{{,\[])[ \t]*+{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{32}}", re.MULTILINE)
_HALF_LETTER = re.compile(rb"\\u[dD][89a-fA-F]")
_HOW = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # otherwise a pipe without a writer would wait for ever


def opened(path: Path, *, links: bool = True) -> io.BufferedReader:
    """Open an ordinary file for reading, also through a link. It does not wait for a pipe. links: follow links.

    Raises:
        OSError: the file does not exist, cannot be opened, or is not an ordinary file.
    """
    try:
        descriptor = os.open(path, _HOW if links else _HOW | os.O_NOFOLLOW)
    except ValueError as error:  # a NUL, or half a letter
        raise OSError(errno.EINVAL, f"no file can have that name ({error})", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, but must be an ordinary file", str(path))
    return open(descriptor, "rb")


def read_given(path: Path, most: int = SETTINGS) -> bytes:
    """All bytes of a file.

    Args:
        path: links are followed, because a person named it. most: the largest allowed size in bytes.

    Raises:
        OSError: the file cannot be opened, is not an ordinary file, or has more than `most` bytes.
    """
    with opened(path) as file:
        size, content = os.fstat(file.fileno()).st_size, bytearray()
        while size <= most and (piece := file.read(2**20)):  # the file may grow, and files in /proc report size 0
            content += piece
            size = max(size, len(content))
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are allowed", str(path))
        return bytes(content)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """A TOML file as nested tables. what: the file's role, for errors ("the config").

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
    """TOML as nested tables. tomllib's memory grows with the square of a key's dots: 90 KB of them would take 8 GB.

    Raises:
        ValueError: the text is not TOML, is nested too deep, has a key of more than 32 parts, or a number of thousands
            of digits.
    """
    if _MANY_DOTS.search(text):
        raise ValueError("it has a key of more than 32 parts with dots between")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def parse_json(text: str | bytes, *, nan_as_none: bool = False) -> Any:
    """JSON as dicts and lists. It takes some thirty times the text's bytes at most, so bound those.

    Args:
        nan_as_none: NaN, infinities and numbers beyond every float become None, for records of programs that cannot
            write them.

    Raises:
        ValueError: with the reason, in one line: not UTF-8, not JSON, a repeated key, NaN or Infinity, a number that no
            float holds, half a letter (a lone surrogate), nested deeper than Python's stack.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ValueError("it begins with a byte order mark, which JSON does not have")

    def number(text: str) -> float | None:
        value = float(text)
        if math.isfinite(value):
            return value
        if nan_as_none:
            return None
        raise ValueError(f"it has {text[:40]}, which is no number of JSON, or beyond every float")

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=number, parse_float=number)
        if _HALF_LETTER.search(raw):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start:,}") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a letter (a lone surrogate), which is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(escaped(str(error).partition("\n")[0][:200])) from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {escaped(repeated(name for name, _ in pairs)[0][:80])!r} occurs twice")
    return found
