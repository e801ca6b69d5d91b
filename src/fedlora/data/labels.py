"""A column of labels as class indices and names: one rule, for files and for data sets of the library `datasets`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum

from fedlora.errors import DataError

_PASTED = 200  # so many names are written out for the reader to copy
MAX_LABELS = 10_000  # more classes than this is a column of ids or free text, not of labels
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_INDEX = re.compile(r"\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NAME, _NUMERAL, _TRUTH = "names", "numbers", "true or false"

Cells = Sequence[tuple[str, object]]  # (where, value)


class _Blank(Enum):
    """What a message has another word for in a run, in a command and in Python."""

    KEY = "what names the classes"
    GIVEN = "that with names, to type"


class LabelError(DataError):
    """Labels of no class, or whose classes are not clear. Classes are named by an argument, a key or an option.

    Args:
        parts: the message, with blanks. names: the classes to give, for the blank GIVEN. key: what names the classes
            there: "label_names", "data.labels" or "--labels".
    """

    def __init__(self, *parts: str | _Blank, names: Sequence[str] = (), key: str = "label_names") -> None:
        self._parts, self._names = parts, tuple(names)
        words = {_Blank.KEY: key, _Blank.GIVEN: given(key, names)}
        super().__init__("".join(words[part] if isinstance(part, _Blank) else part for part in parts))

    def worded(self, key: str) -> LabelError:
        """The same for somebody who names classes by `key`."""
        return LabelError(*self._parts, names=self._names, key=key)


def given(key: str, names: Sequence[str]) -> str:
    """What to type, so that these are the classes; of very many the first ones.

    Example:
        >>> given("data.labels", ["-1", "1"])
        'data.labels = ["-1", "1"]'
    """
    some, more = list(names[:_PASTED]), ", ..." * (len(names) > _PASTED)
    if key.startswith("--"):
        typed = ",".join(some).replace("'", "'\"'\"'")  # as a shell has it
        return f"{key}='{typed}{more}'"
    listed = json.dumps(some, ensure_ascii=False)[:-1] if key == "data.labels" else str(some)[:-1]
    return f"{key}{' = ' if key == 'data.labels' else '='}{listed}{more}]"


def decode_labels(
    source: object, cells: Cells, label_names: Sequence[str] | None, *, agreed: bool = False
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class indices and names, by the rule in `read_classification`.

    Args:
        source: what error messages call it.
        agreed: label_names are data.labels, on which several parties agreed: a cell is one of these names, and its
            index is not, for whose index it was nobody could tell.

    Raises:
        DataError: a value that is no label, labels of several kinds without names, a label that no name is of.
    """
    if label_names is not None and (not label_names or len(set(label_names)) < len(label_names)):
        raise DataError(f"label_names must be different names, at least one; got {tuple(label_names)}.")
    raw = [_as_text(source, where, value, label_names or ()) for where, value in cells]
    names = _found_names(source, cells, raw) if label_names is None else tuple(label_names)
    lookup = {name: k for k, name in enumerate(names)}
    by_index = not agreed and not any(_WHOLE.fullmatch(name) for name in names)
    labels: list[int] = []
    for (where, given), value in zip(cells, raw, strict=True):
        k = lookup.get(value)
        index = str(int(given)) if isinstance(given, bool) else value
        if k is None and by_index and _INDEX.fullmatch(index) and int(index) < len(names):
            k = int(index)
        if k is None:
            listed = shown(names)
            if agreed:
                near = difflib.get_close_matches(value, names, n=1)
                hint = f" Is {near[0]!r} meant?" if near else ""
                raise LabelError(
                    f"{source}, {where}: label {value[:80]!r} is not among the {len(names)} classes of data.labels, "
                    f"{listed}.{hint} Write the row's class as it is written there, or drop the row; or the list lacks "
                    f"a class, which then all parties need."
                )
            raise LabelError(
                f"{source}, {where}: label {value!r} is not among the {len(names)} ", _Blank.KEY,
                f" {listed}. Add it to ", _Blank.KEY, ", or drop the row.",
            )  # fmt: skip
        labels.append(k)
    return tuple(labels), names


def shown(names: Sequence[str]) -> str:
    """Classes for a message: the first twenty."""
    return f"{list(names[:20])}{', ...' if len(names) > 20 else ''}"


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Classes that nobody gave an order: whole numbers by size, anything else by the alphabet. Each once."""
    every = set(names)
    if all(map(_WHOLE.fullmatch, every)):
        return tuple(sorted(every, key=lambda name: (Decimal(name), name)))  # int() takes 4300 digits and no more
    return tuple(sorted(every))


def one_number(names: Iterable[str]) -> tuple[str, str] | None:
    """Two spellings of one whole number, such as "1" and "+1", "01" or "1.0"; None where there are none."""
    whole: dict[Decimal, str] = {}
    others: list[str] = []
    for name in names:
        if not _WHOLE.fullmatch(name):
            others += [name] if _NUMBER.fullmatch(name) else []
        elif whole.setdefault(Decimal(name), name) != name:
            return whole[Decimal(name)], name
    rough = {float(number): name for number, name in whole.items()} if others else {}
    return next(((rough[float(name)], name) for name in others if float(name) in rough), None)


def _as_text(source: object, where: str, value: object, names: Sequence[str]) -> str:
    """A label as it is looked up. Blanks around it count only where a name has them."""
    if not isinstance(value, str | int | float):
        raise DataError(f"{source}, {where}: a label is a name or a whole number; got {value!r}.")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text in names else text.strip()


def _found_names(source: object, cells: Cells, raw: Sequence[str]) -> tuple[str, ...]:
    """The classes of labels that nobody named: what occurs, words by the alphabet and whole numbers by size."""
    first: dict[str, int] = {}  # kind -> its first row
    rows: dict[str, int] = {}  # label -> its first row
    for i, ((_, value), text) in enumerate(zip(cells, raw, strict=True)):
        kind = _TRUTH if isinstance(value, bool) else _NUMERAL if _NUMBER.fullmatch(text) else _NAME
        first.setdefault(kind, i)
        rows.setdefault(text, i)
    if len(first) > 1:
        seen = " and ".join(f"{kind} ({cells[i][0]}: {cells[i][1]!r})" for kind, i in first.items())
        raise LabelError(
            f"{source}: the labels are {seen}, and whether they mean the same classes is not said. Write all of them "
            f"in one way (a number that is a name, as 'grade 1'), or name every class in ", _Blank.KEY, ".",
        )  # fmt: skip
    names = in_order(rows)
    if _NUMERAL in first:
        _check_numbers(source, cells, rows, names)
    if len(names) > MAX_LABELS:
        raise LabelError(
            f"{source}: the label column would make {len(names)} classes (limit {MAX_LABELS}); first value {raw[0]!r}. "
            f"Is it a column of ids or of text? If it is right, name every class in ", _Blank.KEY, ".",
        )  # fmt: skip
    return names


def _check_numbers(source: object, cells: Cells, rows: Mapping[str, int], names: Sequence[str]) -> None:
    """Raises `LabelError` for numbers that are no classes. rows: label -> its first row. names: all of them."""
    if same := one_number(rows):
        one, other = same
        raise LabelError(
            f"{source}: the labels {one!r} ({cells[rows[one]][0]}) and {other!r} ({cells[rows[other]][0]}) are one "
            f"number written in two ways, and whether they mean one class is not said. Write them alike; if they are "
            f"two classes, give ", _Blank.GIVEN, ".", names=names,
        )  # fmt: skip
    for value, i in rows.items():
        if not _WHOLE.fullmatch(value):
            raise LabelError(
                f"{source}, {cells[i][0]}: label {value} is not a whole number. Classes are 0, 1, 2, ... or names; "
                f"scores to regress on (STS-B) are not supported. If it is a name, name every class in ", _Blank.KEY,
                ".",
            )  # fmt: skip
    lowest = names[0]
    if Decimal(lowest) < 0:
        raise LabelError(
            f"{source}, {cells[rows[lowest]][0]}: label {lowest} is negative. GLUE marks the unlabelled rows of its "
            f"test sets with -1: use the validation set. If {lowest} is a class, give ", _Blank.GIVEN, ".", names=names,
        )  # fmt: skip
