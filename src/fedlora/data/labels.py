"""Turns a label column into class indices and names, by one rule for all sources (see `read_classification`)."""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
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
    source: object,
    cells: Cells,
    label_names: Sequence[str] | None,
    *,
    agreed: bool = False,
    key: str = "label_names",
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class indices and names, by the rule in `read_classification`, which also describes the arguments.

    Args:
        source: its name in error messages.

    Raises:
        DataError: a value is not a label, labels of several kinds have no names, or a label matches no name.
    """
    if label_names is not None and (not label_names or len(set(label_names)) < len(label_names)):
        raise DataError(f"{key} must be different names, at least one; got {tuple(label_names)}.")
    raw = [_as_text(source, where, value, label_names or ()) for where, value in cells]
    names = _found_names(source, cells, raw, key) if label_names is None else tuple(label_names)
    lookup = {name: k for k, name in enumerate(names)}
    by_index = not agreed and not any(map(_WHOLE.fullmatch, names))
    labels: list[int] = []
    for (where, cell), value in zip(cells, raw, strict=True):
        k = lookup.get(value)
        index = str(int(cell)) if isinstance(cell, bool) else value
        if k is None and by_index and _INDEX.fullmatch(index) and int(index) < len(names):
            k = int(index)
        if k is None:
            raise _unknown(f"{source}, {where}: label {value[:80]!r}", value[:80], names, agreed, key)
        labels.append(k)
    return tuple(labels), names


def given(key: str, names: Sequence[str]) -> str:
    """What to type to declare these classes; only the first ones if there are very many.

    Example:
        >>> given("data.labels", ["-1", "1"])
        'data.labels = ["-1", "1"]'
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


def _unknown(found: str, value: str, names: Sequence[str], agreed: bool, key: str) -> LabelError:
    near = difflib.get_close_matches(value, names, n=1)
    hint = f" Is {near[0]!r} meant?" if near else ""
    cure = f"Add it to {key}, or drop the row."
    if agreed:
        cure = (
            "Write the row's class exactly as in that list, or drop the row. If the list lacks a class, add it at all "
            "parties."
        )
    return LabelError(f"{found} is not among the {len(names)} classes of {key}, {shown(names)}.{hint} {cure}", found)


def _as_text(source: object, where: str, value: object, names: Sequence[str]) -> str:
    """A label in lookup form. Surrounding blanks are kept only if a name has them."""
    if not isinstance(value, str | int | float):
        raise DataError(f"{source}, {where}: a label must be a name or a whole number; got {value!r}.")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text in names else text.strip()


def _found_names(source: object, cells: Cells, raw: Sequence[str], key: str) -> tuple[str, ...]:
    """Classes without given names: the values that occur, words alphabetically and integers by size."""
    kinds: dict[str, int] = {}  # kind -> its first row
    rows: dict[str, int] = {}  # label -> its first row
    for i, ((_, value), text) in enumerate(zip(cells, raw, strict=True)):
        kinds.setdefault(
            "true or false" if isinstance(value, bool) else "numbers" if _NUMBER.fullmatch(text) else "names", i
        )
        rows.setdefault(text, i)
    if len(kinds) > 1:
        seen = " and ".join(f"{kind} ({cells[i][0]}: {cells[i][1]!r})" for kind, i in kinds.items())
        raise LabelError(
            f"{source}: the labels are {seen}, so it is unclear whether they mean the same classes. Write all of them "
            f"in one way (a number that is a name like 'grade 1'), or name every class in {key}."
        )
    names = in_order(rows)
    if same := look_alike(rows):
        places = [f"{label!r} ({cells[rows[label]][0]})" for label in same]
        raise LabelError(
            f"{source}: the labels {places[0]} and {places[1]} look alike: it is unclear whether they mean one class. "
            f"Write them alike; if they are two classes, give {given(key, names)}."
        )
    if "numbers" in kinds:
        _check_numbers(source, {text: cells[i][0] for text, i in rows.items()}, names, key)
    if len(names) > MAX_LABELS:
        raise LabelError(
            f"{source}: the label column would make {len(names)} classes (limit {MAX_LABELS}); first value {raw[0]!r}. "
            f"Is it a column of ids or of text? If it is right, name every class in {key}."
        )
    return names


def _check_numbers(source: object, places: Mapping[str, str], names: Sequence[str], key: str) -> None:
    """Raise `LabelError` for numbers that are not classes. places: label -> its first row. names: all, in order."""
    broken = next((name for name in places if not _WHOLE.fullmatch(name)), None)
    if broken is not None:
        raise LabelError(
            f"{source}, {places[broken]}: label {broken} is not a whole number. Classes are 0, 1, 2, ... or names; "
            f"scores to regress on (STS-B) are not supported. If it is a name, name every class in {key}."
        )
    if Decimal(lowest := names[0]) < 0:
        raise LabelError(
            f"{source}, {places[lowest]}: label {lowest} is negative. GLUE marks the unlabelled rows of its test sets "
            f"with -1: use the validation set. If {lowest} is a class, give {given(key, names)}."
        )
