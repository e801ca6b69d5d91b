"""Classification tasks from the Hugging Face hub, by the `datasets` library (`fedlora[hub]`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedlora.data.text import TextData
from fedlora.errors import DataError


def read_hub(
    name: str,
    config: str | None,
    split: str,
    *,
    text: str,
    label: str,
    pair: str | None = None,
    label_names: Sequence[str] | None = None,
    revision: str | None = None,
) -> TextData:
    """One split of a hub data set as text, or text pairs, with a class each.

    Args:
        name, config, split, revision: as `datasets.load_dataset` takes them.
        text, label, pair: columns. label_names: the classes by index; by default those that the data set names.

    Raises:
        DataError: `datasets` is not installed, the hub cannot be reached, or a column is missing.

    Example:
        >>> read_hub("fancyzhx/ag_news", None, "train", text="text", label="label")  # doctest: +SKIP
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("data from the hub needs the library datasets: pip install 'fedlora[hub]'.") from error
    where = "/".join(part for part in (name, config) if part) + f", split {split!r}"
    try:
        rows: Any = load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # datasets raises whatever its transport raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"the data set {where} cannot be loaded from the hub: {reason}. Offline, give local files instead."
        ) from error
    missing = [column for column in (text, label, pair) if column and column not in rows.column_names]
    if missing:
        raise DataError(f"the data set {where} has no column {missing[0]!r}; it has {rows.column_names}.")
    found = list(rows[label])
    if label_names is None:
        label_names = getattr(rows.features[label], "names", None) or _names(found)
    index = {name: k for k, name in enumerate(label_names)}
    try:
        labels = [index[y] if isinstance(y, str) and y in index else int(y) for y in found]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the data set {where} has a label that is no class of {list(label_names)}: {error}."
        ) from error
    if any(not 0 <= y < len(label_names) for y in labels):
        raise DataError(
            f"the data set {where} has labels outside 0..{len(label_names) - 1}: is it an unlabelled split?"
        )
    return TextData(
        kind="classification",
        text=tuple(rows[text]),
        pair=None if pair is None else tuple(rows[pair]),
        labels=tuple(labels),
        label_names=tuple(label_names),
    )


def _names(labels: Sequence[Any]) -> list[str]:
    """The classes of labels that nobody named: sorted words, or "0" to the largest number."""
    if any(isinstance(y, str) for y in labels):
        return sorted({str(y) for y in labels})
    return [str(k) for k in range(max((int(y) for y in labels), default=0) + 1)]
