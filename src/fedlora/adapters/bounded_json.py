"""JSON from strangers: its depth, its number of values and its letters are known before anything is made of it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from fedlora.adapters.limits import Limits
from fedlora.core.echo import escaped, quoted

# Possessive, and one that is not closed ends with the text: each byte is looked at once, whatever is written.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_LONG_NUMBER = re.compile(rb"(?<!\d)\d{500}")
_HALF_LETTER = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(raw: bytes, limits: Limits) -> Any:
    """What the text means. The caller has bounded its length.

    Raises:
        ValueError: with the reason, in one line: not UTF-8, not JSON, a key twice, NaN or Infinity, a number that no
            float holds, half a letter (a lone surrogate), or beyond `limits`.
    """
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ValueError("it begins with a byte order mark, which JSON does not have")
    _bounded(raw, limits)
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start:,}") from None
    if _HALF_LETTER.search(raw):
        try:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half a letter (a lone surrogate), which is no text") from None
    return found


def reason(error: ValueError) -> str:
    """Why `parse` refused, in one line."""
    return escaped(str(error).partition("\n")[0][:200])


def _bounded(raw: bytes, limits: Limits) -> None:
    """Raises `ValueError` for what is too deep or too much, from the text alone, in linear time."""
    bare = _STRING.sub(b"", raw)
    values = 1 + bare.count(b",") + bare.count(b"[") + bare.count(b"{") + bare.count(b":")  # keys take memory too
    if values > limits.values:
        raise ValueError(
            f"it has {values:,} values, more than the {limits.values:,} allowed; --limit values={values} would take it"
        )
    if _LONG_NUMBER.search(bare):
        raise ValueError("it has a number of 500 digits or more")
    brackets = bare.translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(limits.depth):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")  # all innermost pairs at once, however many
    if b"[]" in brackets or brackets.count(b"[") > limits.depth:
        raise ValueError(
            f"it is nested too deeply, more than the {limits.depth} levels allowed (--limit depth raises them)"
        )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quoted(twice, 80)} is there twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"it has {text}, which JSON does not have")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {text[:40]}, which is beyond every float")
    return number
