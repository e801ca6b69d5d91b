"""One way to read text data wherever it is: a file by its suffix, or a data set of the hub by "hf://"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlora.data.chat import chat_of
from fedlora.data.hub import PREFIX, from_dataset, hub_source, load_split, read_hub
from fedlora.data.tables import read_table
from fedlora.data.text import TextData, instructions_of, read_classification
from fedlora.errors import DataError

CHAT = "messages"  # the column of conversations, where nothing else is said


def is_hub(source: str | os.PathLike[str]) -> bool:
    """Whether a source is a data set of the hub, and no file."""
    return str(source).startswith(PREFIX)


def read_classes(
    source: str | os.PathLike[str],
    *,
    text: str,
    label: str,
    pair: str | None = None,
    label_names: Sequence[str] | None = None,
    agreed: bool = False,
) -> TextData:
    """`read_classification` of a file, or `read_hub` of "hf://owner/name?config=...&split=...&revision=...".

    Args:
        agreed: label_names are of several parties' files: a row has one of these names, and no index.

    Example:
        >>> read_classes("train.jsonl", text="text", label="label").label_names
        ('blue', 'green', 'red')
    """
    if not is_hub(source):
        return read_classification(source, text=text, label=label, pair=pair, label_names=label_names, agreed=agreed)
    address = hub_source(str(source))
    return read_hub(**address, text=text, label=label, pair=pair, label_names=label_names, agreed=agreed)


def read_answers(
    source: str | os.PathLike[str], *, prompt: str, response: str, messages: str | None = None
) -> TextData:
    """Instructions or conversations, from a file or from "hf://...".

    Args:
        prompt, response: columns of instructions.
        messages: the column of conversations. None: "messages", where the rows have it and no column `prompt`.

    Raises:
        DataError: as `read_instructions`, `read_chat` and `read_hub`; or the rows could be read in two ways.

    Example:
        >>> _ = Path("asked.jsonl").write_text('{"prompt": "2 + 2?", "response": "4"}')
        >>> read_answers("asked.jsonl", prompt="prompt", response="response").responses
        ('4',)
    """
    if is_hub(source):
        address = hub_source(str(source))
        rows: Any = load_split(address["name"], address["config"], address["split"], revision=address["revision"])
        chosen = messages or _chosen(source, list(rows.column_names), prompt, response)
        columns: dict[str, Any] = {"messages": chosen} if chosen else {"prompt": prompt, "response": response}
        return from_dataset(rows, **columns, name=str(source))
    table = read_table(source, [])
    present = list(dict.fromkeys(name for _, row in table for name in row))
    chosen = messages or _chosen(source, present, prompt, response)
    file = Path(source)
    if chosen:
        return chat_of(file, read_table(file, [chosen]), chosen)
    return instructions_of(file, read_table(file, [prompt, response]), prompt, response)


def _chosen(source: object, present: Sequence[str], prompt: str, response: str) -> str | None:
    if CHAT not in present:
        return None
    if prompt in present and response in present:
        raise DataError(
            f"{source} has the columns {prompt!r} and {response!r}, and conversations in {CHAT!r} too: say which ones "
            f"are meant, with data.messages = {CHAT!r}, or by leaving one of them out of the file."
        )
    return CHAT
