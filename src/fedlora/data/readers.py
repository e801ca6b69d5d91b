"""Reads text data from a file (by its suffix), a hub data set ("hf://"), or a `datasets.Dataset`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fedlora.data.labels import decode_labels
from fedlora.data.tables import open_table
from fedlora.data.text import ROLES, Message, TextData
from fedlora.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

CHAT = "messages"  # the default column for conversations


def read_classification(
    source: str | os.PathLike[str] | Dataset, *, text: str, label: str, text_pair: str | None = None,
    label_names: Sequence[str] | None = None, agreed: bool = False, key: str = "label_names",
) -> TextData:  # fmt: skip
    """Read a classification task, one example per row. Give `label_names` whenever you read several files of one task:
    without it, each file numbers the classes it happens to contain.

    Labels are names or whole numbers; true and false are names. Without label_names the classes are the values that
    occur: names alphabetically, whole numbers by size; labels that look alike, or are of both kinds, are refused. With
    label_names, a label is looked up as a name; a whole number is taken as an index, unless some label name is itself a
    number (then only names count). A ClassLabel column of `datasets` brings its own names.

    Args:
        source: a UTF-8 file, .jsonl or .json (one object per line), .csv or .tsv (a header row, Excel's quoting, the
            separator that the header has); with the extra `hub` also a .parquet file, one split as a
            `datasets.Dataset` (no stream), or a data set of the hub,
            "hf://owner/name?config=...&split=...&revision=...".
        text, label, text_pair: the columns of the sentence, of the class, and of the second sentence, if the task has
        one.
        label_names: the classes, by index.
        agreed: several parties agreed on label_names: each row must have one of these names; an index is refused,
            since it could follow another party's order.
        key: the user's name for label_names in error messages: "label_names" or "data.label_names".

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
    labels, names = decode_labels(table.name, table.cells(label), given, agreed=agreed, key=key)
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
        DataError: as in `read_classification`; ambiguous rows; a message that is not a role and a text; a conversation
            that starts with the assistant or does not end with an answer. The message names row, line and message.

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
                f"{table.name} has the columns {prompt!r} and {response!r}, and conversations in {CHAT!r} too: say "
                f"which to read, with data.messages = {CHAT!r} (in Python messages={CHAT!r}), or leave one of them out."
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
    roles = [role for role, _ in turns]
    spoken = roles[1:] if roles[0] == "system" else roles
    if "system" in spoken:
        raise DataError(f"{where}: a system message can only come first.")
    if spoken[:1] != ["user"] or spoken[-1] != "assistant":
        raise DataError(
            f"{where}: a conversation begins with the user (after a system message, if there is one) and ends with the "
            f"assistant's answer, which is learned; its roles are {', '.join(roles)}. Drop what stands outside."
        )
    if any(pair == ("assistant", "assistant") for pair in pairwise(spoken)):
        raise DataError(f"{where}: two messages from the assistant in a row, so it is unclear where the first ends.")
    return turns


def _message(where: str, message: object) -> Message:
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise DataError(f'{where} must be {{"role": ..., "content": ...}}, two strings; got {message!r:.80}.')
    if more := sorted(key for key, given in message.items() if key not in ("role", "content") and given):
        raise DataError(
            f"{where} has {more}, but only role and content are read: tool calls, weights and names are not "
            f"supported. Drop them from the file if they mean nothing, or drop the row."
        )
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise DataError(f"{where}: the role {role!r} is not one of {', '.join(ROLES)}.")
    if not content.strip():
        raise DataError(f"{where}: the {role}'s content is empty. Fill it in, or drop the message.")
    return role, content


__all__ = ["read_classification", "read_instructions"]
