"""Turns a label column into class indices and names, by one rule for all sources (see `read_classification`)."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal

from fedlora.errors import DataError

MAX_LABELS = 10_000  # a column with more distinct values holds ids or free text, not labels
_PASTED = 200  # the most names written out for the user to copy
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_INDEX = re.compile(r"\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

Cells = Sequence[tuple[str, object]]  # (where, value)


class LabelError(DataError):
    """A label matches no class, or the classes are ambiguous. found: the row and label that match no class, if any."""

    def __init__(self, message: str, found: str = "") -> None:
        super().__init__(message)
        self.found = found


def decode_labels(
    source: object, cells: Cells, label_names: Sequence[str] | None, *, agreed: bool = False, key: str = "label_names"
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class indices and names, by the rule in `read_classification`, which also describes the arguments.

    Args:
        source: its name in error messages.

    Raises:
        DataError: a value is not a label, labels of several kinds have no names, or a label matches no name.
    """
    if label_names is not None and (not label_names or len(set(label_names)) < len(label_names)):
        raise DataError(f"{key} must be different names, at least one; got {tuple(label_names)}.")
    raw = []
    for where, value in cells:
        if not isinstance(value, str | int | float):
            raise DataError(f"{source}, {where}: a label must be a name or a whole number; got {value!r}.")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        raw.append(text if text in (label_names or ()) else text.strip())  # a name may have blanks around it
    names = _found_names(source, cells, raw, key) if label_names is None else tuple(label_names)
    lookup = {name: k for k, name in enumerate(names)}
    by_index = not agreed and not any(map(_WHOLE.fullmatch, names))
    labels: list[int] = []
    for (where, _), value in zip(cells, raw, strict=True):
        k = lookup.get(value)
        if k is None and by_index and _INDEX.fullmatch(value) and int(value) < len(names):
            k = int(value)
        if k is None:
            found = f"{source}, {where}: label {value[:80]!r}"
            cure = f"Add it to {key}, or drop the row."
            if agreed:
                cure = (
                    "Write the row's class exactly as in that list, or drop the row. If the list lacks a class, add it "
                    "at all parties."
                )
            raise LabelError(f"{found} is not among the {len(names)} classes of {key}, {shown(names)}. {cure}", found)
        labels.append(k)
    return tuple(labels), names


def given(key: str, names: Sequence[str]) -> str:
    """What to type to declare these classes; only the first ones if there are very many.

    Example:
        >>> given("data.label_names", ["-1", "1"])
        'data.label_names = ["-1", "1"]'
    """
    some, more = list(names[:_PASTED]), ", ..." * (len(names) > _PASTED)
    if key.startswith("--"):
        typed = ",".join(some).replace("'", "'\"'\"'")  # shell quoting
        return f"{key}='{typed}{more}'"
    return f"{key} = {json.dumps(some, ensure_ascii=False)[:-1]}{more}]"  # a list in TOML and in Python


def shown(names: Sequence[str]) -> str:
    """Classes for a message: at most twenty."""
    return f"{list(names[:20])}{', ...' if len(names) > 20 else ''}"


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Classes in default order: integers by size, anything else alphabetically. Each once."""
    every = set(names)
    if all(map(_WHOLE.fullmatch, every)):
        return tuple(sorted(every, key=lambda name: (Decimal(name), name)))  # int() fails beyond 4300 digits
    return tuple(sorted(every))


def look_alike(names: Iterable[str]) -> tuple[str, str] | None:
    """Two different names that a person would take for one class, such as "yes" and "Yes", or "1" and "01"; None if
    there are none.

    Equal are names after Unicode normalisation (NFKC), case folding, and removal of white space and of characters
    without width; numbers, by their value.
    """
    seen: dict[str, str] = {}
    for name in names:
        wide = unicodedata.normalize("NFKC", name).casefold()
        plain = "".join(c for c in wide if not c.isspace() and unicodedata.category(c) != "Cf")
        if _NUMBER.fullmatch(plain):
            plain = str(Decimal(plain).normalize() + 0)  # + 0: -0 is 0
        if seen.setdefault(plain, name) != name:
            return seen[plain], name
    return None


def _found_names(source: object, cells: Cells, raw: Sequence[str], key: str) -> tuple[str, ...]:
    """Classes without given names: the values that occur, words alphabetically and integers by size."""
    rows: dict[str, str] = {}  # label -> its first row
    for (where, _), text in zip(cells, raw, strict=True):
        rows.setdefault(text, where)
    names = in_order(rows)
    numbers = [name for name in rows if _NUMBER.fullmatch(name)]
    if 0 < len(numbers) < len(rows):
        word = next(name for name in rows if name not in numbers)
        raise LabelError(
            f"{source}: the labels are numbers ({rows[numbers[0]]}: {numbers[0]!r}) and names ({rows[word]}: {word!r})"
            f", so it is unclear whether they mean the same classes. Write all of them in one way, or give "
            f"{given(key, names)}."
        )
    if same := look_alike(rows):
        places = [f"{label!r} ({rows[label]})" for label in same]
        raise LabelError(
            f"{source}: the labels {places[0]} and {places[1]} look alike: it is unclear whether they mean one class. "
            f"Write them alike; if they are two classes, give {given(key, names)}."
        )
    odd = next((name for name in numbers if not _WHOLE.fullmatch(name) or Decimal(name) < 0), None)
    if odd is not None:
        raise LabelError(
            f"{source}, {rows[odd]}: label {odd} is no whole number from 0 on. Scores to regress on are not supported, "
            f"and GLUE marks the unlabelled rows of its test sets with -1: use the validation set. If the numbers are "
            f"names of classes, give {given(key, names)}."
        )
    if len(names) > MAX_LABELS:
        raise LabelError(
            f"{source}: the label column would make {len(names)} classes (limit {MAX_LABELS}); first value {raw[0]!r}. "
            f"Is it a column of ids or of text? If it is right, name every class in {key}."
        )
    return names


__all__ = ["LabelError", "decode_labels", "given", "in_order", "look_alike", "shown"]
