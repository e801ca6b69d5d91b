"""Turns a label column into class indices and names, by one rule for all sources (see `read_classification`)."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from fedlora.errors import DataError, counted

MAX_LABELS = 10_000  # a column with more distinct values holds ids or free text, not labels
_PASTED = 200  # the most names written out for the user to copy
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def decode_labels(
    source: str, cells: Sequence[tuple[str, object]], label_names: Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class indices and names, by the rule in `read_classification`, which also describes the arguments.

    Args:
        source: its name in error messages. cells: each row's (where, value).

    Raises:
        DataError: a value is no label, labels look alike, or one matches no name.
    """
    if label_names is not None and (not label_names or len(set(label_names)) < len(label_names)):
        raise DataError(f"label_names must be different names, at least one; got {tuple(label_names)}.")
    labels, rows = [], dict[str, str]()  # rows: label -> its first row
    for where, value in cells:
        if not isinstance(value, str | int | float):
            raise DataError(f"{source}, {where}: a label must be a name or a whole number; got {value!r}.")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        labels.append(text if text in (label_names or ()) else text.strip())  # a name may have blanks around it
        rows.setdefault(labels[-1], where)
    names = tuple(label_names or _found_names(source, rows))
    lookup = {name: k for k, name in enumerate(names)}
    if unknown := [label for label in labels if label not in lookup]:
        raise DataError(
            f"{source}, {rows[unknown[0]]}: label {unknown[0][:80]!r} is not among the {len(names)} classes of "
            f"data.label_names, {shown(names)} ({counted(len(unknown), 'such row')}). Write the row's class exactly "
            f"as in that list, or drop the row. If the list lacks a class, add it at all parties."
        )
    return tuple(lookup[label] for label in labels), names


def given(names: Sequence[str]) -> str:
    """What to type in a config to declare these classes; only the first ones if there are very many.

    Example:
        >>> given(["-1", "1"])
        'data.label_names = ["-1", "1"]'
    """
    listed = json.dumps(list(names[:_PASTED]), ensure_ascii=False)[:-1]
    return f"data.label_names = {listed}{', ...' * (len(names) > _PASTED)}]"


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

    Equal are names after Unicode normalisation (NFKC), case folding and removal of white space; numbers by their value.
    """
    seen: dict[str, str] = {}
    for name in names:
        plain = "".join(unicodedata.normalize("NFKC", name).casefold().split())
        if _NUMBER.fullmatch(plain):
            plain = str(Decimal(plain).normalize() + 0)  # + 0: -0 is 0
        if seen.setdefault(plain, name) != name:
            return seen[plain], name
    return None


def _found_names(source: str, rows: Mapping[str, str]) -> tuple[str, ...]:
    """Classes without given names: the values that occur, words alphabetically and integers by size."""
    names = in_order(rows)
    if same := look_alike(rows):
        one, other = (f"{label!r} ({rows[label]})" for label in same)
        raise DataError(
            f"{source}: the labels {one} and {other} look alike: it is unclear whether they mean one class. Write them "
            f"alike; if they are two classes, give {given(names)}, with the classes of the other files too."
        )
    odd = next((n for n in rows if _NUMBER.fullmatch(n) and (not _WHOLE.fullmatch(n) or Decimal(n) < 0)), None)
    if odd is not None:
        raise DataError(
            f"{source}, {rows[odd]}: label {odd} is no whole number from 0 on. Scores to regress on are not supported, "
            f"and GLUE marks the unlabelled rows of its test sets with -1: use the validation set. If the numbers are "
            f"names of classes, give {given(names)}."
        )
    if len(names) > MAX_LABELS:
        raise DataError(
            f"{source}: the label column would make {len(names)} classes (limit {MAX_LABELS}); first value "
            f"{next(iter(rows))!r}. Is it a column of ids or of text? If it is right, name all in data.label_names."
        )
    return names
