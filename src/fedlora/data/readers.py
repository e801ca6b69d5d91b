"""Reads text data from a file (by its suffix), or a `datasets.Dataset`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedlora.data.labels import decode_labels
from fedlora.data.tables import open_table
from fedlora.data.text import Message, TextData
from fedlora.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

CHAT = "messages"  # the default column for conversations


def read_classification(
    source: str | os.PathLike[str] | Dataset, *, text: str, label: str, text_pair: str | None = None,
    label_names: Sequence[str] | None = None,
) -> TextData:  # fmt: skip
    """Read a classification task, one example per row. Give `label_names` whenever you read several files of one task:
    without it, each file numbers the classes it happens to contain.

    A label is a name, as it is written; 0 and true are names too. Without label_names the classes are the values that
    occur: names alphabetically, whole numbers by size; labels that look alike are refused. With label_names, each row
    must have one of them. A ClassLabel column of `datasets` brings its own names.

    Args:
        source: a UTF-8 file, .jsonl or .json (one object per line), .csv or .tsv (a header row, Excel's quoting, the
            separator that the header has); with the extra `hub` also a .parquet file, or one split as a
            `datasets.Dataset` (no stream).
        text, label, text_pair: the columns of the sentence, of the class, and of the second sentence, if the task has
        one.
        label_names: the classes, by index.

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, malformed row, missing column, missing or empty value,
            unknown label, no rows. The message names row and line.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> data.label_names
        ('blue', 'green', 'red')
    """
    columns = [text, label] if text_pair is None else [text, label, text_pair]
    table = open_table(source, columns).having(columns)
    given = table.classes.get(label) if label_names is None else label_names
    labels, names = decode_labels(table.name, table.cells(label), given)
    return TextData(
        "classification", table.texts(text), pair=None if text_pair is None else table.texts(text_pair), labels=labels,
        label_names=names,
    )  # fmt: skip


def read_instructions(
    source: str | os.PathLike[str] | Dataset, *, prompt: str = "prompt", response: str = "response",
    messages: str | None = None,
) -> TextData:  # fmt: skip
    """Read prompts with their wanted responses, or conversations, one per row. Texts are used as they are; the
    trainer's template adds what surrounds a prompt.

        {"prompt": "...", "response": "..."}
        {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

    A conversation is an instruction with a history: its last user message is the prompt, the assistant's answer to it
    the response. It may start with a system message, then has a user message, and ends with an assistant message.

    Args:
        source: as for `read_classification`; CSV cannot hold conversations.
        prompt, response: the columns of the model's input and of its wanted answer.
        messages: the column of conversations. None: "messages", if the rows have it and not both of the others.

    Raises:
        DataError: as in `read_classification`; ambiguous columns; a message that is not a role and a text; a
            conversation that starts with the assistant or does not end with an answer, with row and message.

    Example:
        >>> _ = Path("ask.jsonl").write_text('{"prompt": "2 + 2?", "response": "4"}\\n')
        >>> read_instructions("ask.jsonl").responses
        ('4',)
    """
    table = open_table(source, [prompt, response, messages or CHAT])
    places = tuple(f"{table.name}, {where}" for where, _ in table.rows)
    if messages is None and CHAT in table.columns:
        if prompt in table.columns and response in table.columns:
            raise DataError(
                f"{table.name} has the columns {prompt!r} and {response!r}, and conversations in {CHAT!r} too: set "
                f"data.messages = {CHAT!r} (in Python messages={CHAT!r}) to read these, or leave them out."
            )
        messages = CHAT
    if messages is None:
        table.having([prompt, response])
        return TextData("instruction", table.texts(prompt), responses=table.texts(response), places=places)
    cells = table.having([messages]).cells(messages)
    found = [_conversation(place, value, messages) for place, (_, value) in zip(places, cells, strict=True)]
    history = tuple(turns[:-2] for turns in found)
    return TextData(
        "instruction", tuple(turns[-2][1] for turns in found), responses=tuple(turns[-1][1] for turns in found),
        history=history if any(history) else None, places=places,
    )  # fmt: skip


def _conversation(where: str, value: object, column: str) -> tuple[Message, ...]:
    """Each message's (role, content), checked."""
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: {column!r} must be a list of messages such as "
            f'[{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]; it is {value!r:.60}.'
        )
    turns = tuple(_message(f"{where}, message {k + 1}", message) for k, message in enumerate(value))
    roles = " ".join(role for role, _ in turns)
    if not re.fullmatch(r"(system )?(user )+(assistant (user )+)*assistant", roles):
        raise DataError(
            f"{where}: a conversation begins with the user (after a system message, if there is one), has one answer "
            f"at a time, and ends with the assistant's; its roles are {roles}."
        )
    return turns


def _message(where: str, message: object) -> Message:
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise DataError(f'{where} must be {{"role": ..., "content": ...}}, two strings; got {message!r:.80}.')
    if more := sorted(key for key, given in message.items() if key not in ("role", "content") and given):
        raise DataError(f"{where} has {more}, but only role and content are read: drop them, or the row.")
    role, content = message["role"], message["content"]
    if role not in ("system", "user", "assistant"):
        raise DataError(f"{where}: the role {role!r} is not one of system, user, assistant.")
    if not content.strip():
        raise DataError(f"{where}: the {role}'s content is empty. Fill it in, or drop the message.")
    return role, content
