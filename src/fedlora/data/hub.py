"""Data sets of the library `datasets` (`fedlora[hub]`): its objects, and those of the Hugging Face hub by name."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.data.chat import chat_of
from fedlora.data.labels import Cells, decode_labels
from fedlora.data.tables import Rows, checked, name_of_class
from fedlora.data.text import TextData, instructions_of, string
from fedlora.errors import DataError

PREFIX = "hf://"
_PARTS = ("config", "split", "revision")


def from_dataset(
    dataset: Any,
    *,
    text: str | None = None,
    label: str | None = None,
    pair: str | None = None,
    label_names: Sequence[str] | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    name: str = "the data set",
    agreed: bool = False,
) -> TextData:
    """The rows of a `datasets.Dataset` as text data, by the names of its columns.

    Say what the rows are: `text` and `label` (and `pair`) of a classification, `prompt` and `response` of instructions,
    or `messages` of conversations.

        from datasets import load_dataset
        parts = {"clinic": from_dataset(load_dataset("json", data_files="a.jsonl", split="train"), messages="messages")}
        trainer = LocalTrainer(model, parts, TrainSettings(), seed=0)

    Args:
        dataset: one split, in memory or on disk; not a DatasetDict, and not a stream.
        label_names: the classes by index. By default those that a ClassLabel column names. Where they hold all that the
            column names itself, labels go by name; otherwise they rename these by index. Of a column without names, as
            `read_classification` takes them.
        name: what error messages call it.
        agreed: label_names are of several parties' data: a row has one of these names, and no index.

    Raises:
        DataError: a missing column, an empty or wrong value (the message names the row), or columns of two tasks.

    Example:
        >>> from datasets import Dataset
        >>> rows = Dataset.from_dict({"text": ["dull", "fine"], "label": ["bad", "good"]})
        >>> from_dataset(rows, text="text", label="label").label_names
        ('bad', 'good')
    """
    kinds = {
        "text and label": (text, label),
        "prompt and response": (prompt, response),
        "messages": (messages,),
    }
    given = [kind for kind, columns in kinds.items() if any(columns)]
    if len(given) != 1 or not all(kinds[given[0]]):
        raise DataError(
            f"{name}: name the columns of one task, text and label, or prompt and response, or messages; got "
            f"{' beside '.join(given) or 'none'}{', and one of them is missing' if len(given) == 1 else ''}."
        )
    if (pair is not None or label_names is not None) and not text:
        raise DataError(f"{name}: pair and label_names belong to text and label; {given[0]} have none.")
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a dictionary of the splits {sorted(dataset)}; take one of them, as data['train'].")
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} is a {type(dataset).__name__}, and not a datasets.Dataset: a stream has no rows to count and "
            f"deal out. Load it without streaming=True."
        )
    columns = [column for column in (text, pair, label, prompt, response, messages) if column]
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise DataError(f"{name} has no column {missing[0]!r}; it has {list(dataset.column_names)}.")
    values = zip(*(list(dataset[column]) for column in columns), strict=True)
    rows: Rows = [(f"row {k + 1}", dict(zip(columns, row, strict=True))) for k, row in enumerate(values)]
    if not rows:
        raise DataError(f"{name} holds no rows.")
    checked(name, rows, columns)
    if messages:
        return chat_of(name, rows, messages)
    if prompt and response:
        return instructions_of(name, rows, prompt, response)
    assert text and label
    cells = [(where, _plain(row[label])) for where, row in rows]
    labels, names = _labels(name, cells, label, dataset.features[label], label_names, agreed)
    return TextData(
        kind="classification",
        text=tuple(string(name, where, text, row[text]) for where, row in rows),
        pair=None if pair is None else tuple(string(name, where, pair, row[pair]) for where, row in rows),
        labels=labels,
        label_names=names,
    )


def read_hub(
    name: str,
    config: str | None = None,
    split: str = "train",
    *,
    text: str | None = None,
    label: str | None = None,
    pair: str | None = None,
    label_names: Sequence[str] | None = None,
    prompt: str | None = None,
    response: str | None = None,
    messages: str | None = None,
    revision: str | None = None,
    agreed: bool = False,
) -> TextData:
    """One split of a data set of the hub, as `from_dataset` makes text data of it.

    Args:
        name, config, split, revision: as `datasets.load_dataset` takes them.
        The others: as `from_dataset` takes them.

    Raises:
        DataError: `datasets` is not installed, the hub cannot be reached (said within seconds), or as `from_dataset`.

    Example:
        >>> read_hub("fancyzhx/ag_news", None, "train", text="text", label="label")  # doctest: +SKIP
    """
    where = _shown(name, config, split)
    return from_dataset(
        load_split(name, config, split, revision=revision), text=text, label=label, pair=pair, label_names=label_names,
        prompt=prompt, response=response, messages=messages, name=where, agreed=agreed,
    )  # fmt: skip


def load_split(name: str, config: str | None, split: str, *, revision: str | None = None) -> Any:
    """A `datasets.Dataset` from the hub, or from its cache where HF_HUB_OFFLINE is set. Raises `DataError`."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("data from the hub needs the library datasets: pip install 'fedlora[hub]'.") from error
    where = _shown(name, config, split)
    try:
        _reach_the_hub()
        return load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # datasets raises whatever its transport raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{where} cannot be loaded from the hub: {reason}. Offline, give local files instead (a .parquet file of "
            f"the data set will do), or set HF_HUB_OFFLINE=1 to read what was loaded here before."
        ) from error


def hub_source(address: str) -> dict[str, Any]:
    """The arguments name, config, split and revision of `read_hub` from "hf://owner/name?config=...&split=...".

    The split is "train" where it is not named. Raises `DataError` for anything else behind the question mark.
    """
    name, _, query = address.removeprefix(PREFIX).partition("?")
    try:
        pairs = urllib.parse.parse_qsl(query, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        pairs = [(query, "")]
    odd = [key for key, value in pairs if key not in _PARTS or not value]
    if odd or not name or len(dict(pairs)) < len(pairs):
        raise DataError(
            f"{address!r} is no address of a data set: write hf://owner/name, and behind it, where needed, "
            f"?config=...&split=...&revision=..." + (f"; {odd[0]!r} is none of these, or has no value." if odd else ".")
        )
    return {"name": name, "config": None, "split": "train", "revision": None, **dict(pairs)}


def _shown(name: str, config: str | None, split: str) -> str:
    return f"the data set {'/'.join(part for part in (name, config) if part)}, split {split!r}"


def _reach_the_hub() -> None:
    """One question, once: without a network `datasets` would go on asking for half a minute."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        get_session().head(constants.ENDPOINT, timeout=5)


def _labels(
    source: str, cells: Cells, column: str, feature: Any, label_names: Sequence[str] | None, agreed: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Class indices and names, by the rule in `from_dataset`."""
    own = tuple(getattr(feature, "names", None) or ())
    if not own:
        return decode_labels(source, cells, label_names, agreed=agreed)
    named = [(where, name_of_class(source, where, column, value, own)) for where, value in cells]
    if agreed or label_names is None or set(own) <= set(label_names):
        return decode_labels(source, named, label_names or own, agreed=agreed)
    renamed = dict(zip(own, label_names, strict=False))  # by index
    beyond = next(((where, name) for where, name in named if name not in renamed), None)
    if beyond:
        raise DataError(
            f"{source}, {beyond[0]}: {column!r} is class {own.index(str(beyond[1]))}, {beyond[1]!r}, and label_names "
            f"renames {len(label_names)} of its {len(own)} classes: {list(label_names)}."
        )
    return decode_labels(source, [(where, renamed[str(name)]) for where, name in named], label_names)


def _plain(value: Any) -> Any:
    """A label as Python has it, also where the data set gives its values as NumPy's or torch's."""
    return value.item() if hasattr(value, "item") else value
