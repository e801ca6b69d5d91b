"""A column of labels as class indices and names: one rule, for files and for data sets of the library `datasets`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from fedlora.errors import DataError

MAX_LABELS = 10_000  # more classes than this is a column of ids or free text, not of labels
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NAME, _NUMERAL, _TRUTH = "names", "numbers", "true or false"

Cells = Sequence[tuple[str, object]]  # (where, value)


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
    by_index = not agreed and (label_names is None or not any(_WHOLE.fullmatch(name) for name in names))
    labels: list[int] = []
    for (where, given), value in zip(cells, raw, strict=True):
        k = lookup.get(value)
        index = str(int(given)) if isinstance(given, bool) else value
        if k is None and by_index and _WHOLE.fullmatch(index) and 0 <= int(index) < len(names):
            k = int(index)
        if k is None:
            listed = f"{list(names[:20])}{', ...' if len(names) > 20 else ''}"
            if agreed:
                near = difflib.get_close_matches(value, names, n=1)
                hint = f" Is {near[0]!r} meant?" if near else ""
                raise DataError(
                    f"{source}, {where}: label {value[:80]!r} is not among the {len(names)} classes of data.labels, "
                    f"{listed}.{hint} Write the row's class as it is written there, or drop the row; or the list lacks "
                    f"a class, which then all parties need."
                )
            raise DataError(
                f"{source}, {where}: label {value!r} is not among the {len(names)} label_names {listed}. Add it to "
                f"label_names, or drop the row."
            )
        labels.append(k)
    return tuple(labels), names


def _as_text(source: object, where: str, value: object, names: Sequence[str]) -> str:
    """A label as it is looked up. Blanks around it count only where a name has them."""
    if not isinstance(value, str | int | float):
        raise DataError(f"{source}, {where}: a label is a name or a whole number; got {value!r}.")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if text in names else text.strip()


def _found_names(source: object, cells: Cells, raw: Sequence[str]) -> tuple[str, ...]:
    """The classes of labels that nobody named: sorted words, or "0" to the largest number."""
    first: dict[str, int] = {}  # kind -> its first row
    for i, ((_, value), text) in enumerate(zip(cells, raw, strict=True)):
        kind = _TRUTH if isinstance(value, bool) else _NUMERAL if _NUMBER.fullmatch(text) else _NAME
        first.setdefault(kind, i)
    if len(first) > 1:
        shown = " and ".join(f"{kind} ({cells[i][0]}: {cells[i][1]!r})" for kind, i in first.items())
        raise DataError(
            f"{source}: the labels are {shown}, and whether they mean the same classes is not said. Write all of them "
            f"in one way (a number that is a name, as 'grade 1'), or pass label_names to the reader."
        )
    for (where, _), value in zip(cells, raw, strict=True):
        if _NUMBER.fullmatch(value) and not value.lstrip("+-").isdecimal():
            raise DataError(
                f"{source}, {where}: label {value} is not a whole number. Classes are 0, 1, 2, ... or names; scores "
                f"to regress on (STS-B) are not supported. If it is a name, pass label_names."
            )
    if all(_WHOLE.fullmatch(value) for value in raw):
        low = min(range(len(raw)), key=lambda i: int(raw[i]))
        if int(raw[low]) < 0:
            raise DataError(
                f"{source}, {cells[low][0]}: label {raw[low]} is negative. GLUE marks the unlabelled rows of its "
                f"test sets with -1: use the validation set. If -1 is a class, pass label_names=('-1', '0', '1')."
            )
        count = max(int(value) for value in raw) + 1
        names = tuple(str(k) for k in range(min(count, MAX_LABELS + 1)))
    else:
        names = tuple(sorted(set(raw)))
        count = len(names)
    if count > MAX_LABELS:
        raise DataError(
            f"{source}: the label column would make {count} classes (limit {MAX_LABELS}); first value {raw[0]!r}. "
            f"Is it a column of ids or of text? If it is right, pass label_names."
        )
    return names
