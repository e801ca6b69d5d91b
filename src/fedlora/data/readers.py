"""Reads text data from a file (by its suffix), a hub data set ("hf://"), or a `datasets.Dataset`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedlora.data.labels import decode_labels
from fedlora.data.tables import Table, open_table, readable
from fedlora.data.text import ROLES, Message, TextData
from fedlora.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

CHAT = "messages"  # the default column for conversations


def read_classification(
    source: str | os.PathLike[str] | Dataset,
    *,
    text: str,
    label: str,
    pair: str | None = None,
    label_names: Sequence[str] | None = None,
    agreed: bool = False,
    key: str = "label_names",
) -> TextData:
    """Read a classification task, one example per row. Give `label_names` whenever you read several files of one task:
    without it, each file numbers the classes it happens to contain.

    Labels are names, whole numbers, or booleans; a column that mixes these is refused. Without label_names the classes
    are the values that occur: names alphabetically, whole numbers by size, "false" before "true"; a number that is
    negative or written in two ways is refused. With label_names, a label is looked up as a name; a whole number (false
    is 0, true is 1) is taken as an index, unless some label name is itself a number (then only names count). A
    ClassLabel column of `datasets` brings its own names.

    Args:
        source: a UTF-8 file, .jsonl or .json (one object per line), .csv or .tsv (a header row, Excel's quoting); with
            the extra `hub` also a .parquet file, one split as a `datasets.Dataset` (no stream), or a data set of the
            hub, "hf://owner/name?config=...&split=...&revision=...".
        text: the column of the sentence.
        label: the column of the class.
        pair: the column of the second sentence, if the task has one.
        label_names: the classes, by index.
        agreed: several parties agreed on label_names: each row must have one of these names; an index is refused,
            since it could follow another party's order.
        key: the user's name for label_names in error messages: "label_names" or "data.labels".

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, malformed row, missing column, missing or empty value,
            unknown label, no rows. The message names row and line.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> data.label_names
        ('blue', 'green', 'red')
    """
    columns = [text, label] if pair is None else [text, label, pair]
    table = open_table(source, columns).having(columns)
    given = table.classes.get(label) if label_names is None else label_names
    labels, names = decode_labels(table.name, table.cells(label), given, agreed=agreed, key=key)
    return TextData(
        kind="classification",
        text=table.texts(text),
        pair=None if pair is None else table.texts(pair),
        labels=labels,
        label_names=names,
    )


def read_instructions(
    source: str | os.PathLike[str] | Dataset,
    *,
    prompt: str = "prompt",
    response: str = "response",
    messages: str | None = None,
) -> TextData:
    """Read prompts with their wanted responses, or conversations, one per row. Texts are used as they are; the
    trainer's template adds what surrounds a prompt.

        {"prompt": "...", "response": "..."}
        {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

    A conversation is an instruction with a history: its last user message is the prompt, the assistant's answer to it
    the response. It may start with a system message, then has a user message, and ends with an assistant message. Two
    user messages may follow each other (the model's template may reject that later); two assistant messages may not.

    Args:
        source: as for `read_classification`; CSV cannot hold conversations.
        prompt: the column with the model's input.
        response: the column with its wanted answer.
        messages: the column of conversations. None: "messages", if the rows have it and not both of the others.

    Raises:
        DataError: as in `read_classification`; ambiguous rows; an unknown role, content that is empty or not a string,
            a conversation that starts with the assistant or does not end with an answer, tool calls. The message names
            row, line and message.

    Example:
        >>> _ = Path("ask.jsonl").write_text('{"prompt": "2 + 2?", "response": "4"}\\n')
        >>> read_instructions("ask.jsonl").responses
        ('4',)
    """
    table = open_table(source, [prompt, response, messages or CHAT])
    if messages is None and CHAT in table.columns:
        if prompt in table.columns and response in table.columns:
            raise DataError(
                f"{table.name} has the columns {prompt!r} and {response!r}, and conversations in {CHAT!r} too: say "
                f"which to read, with data.messages = {CHAT!r} (in Python messages={CHAT!r}), or by leaving one of "
                f"them out of the file."
            )
        messages = CHAT
    if messages is None:
        table.having([prompt, response])
        return TextData("instruction", table.texts(prompt), responses=table.texts(response), places=_places(table))
    found = [
        _conversation(f"{table.name}, {where}", value, messages)
        for where, value in table.having([messages]).cells(messages)
    ]
    history = tuple(turns[:-2] for turns in found)
    return TextData(
        kind="instruction",
        text=tuple(turns[-2][1] for turns in found),
        responses=tuple(turns[-1][1] for turns in found),
        history=history if any(history) else None,
        places=_places(table),
    )


def _places(table: Table) -> tuple[str, ...]:
    return tuple(f"{table.name}, {where}" for where, _ in table.rows)


def _conversation(where: str, value: object, column: str) -> tuple[Message, ...]:
    """Each message's (role, content), checked."""
    if not isinstance(value, list) or not value:
        what = f"a string, {value[:40]!r}" if isinstance(value, str) else "empty" if value == [] else repr(value)[:60]
        raise DataError(
            f"{where}: {column!r} must be a list of messages such as "
            f'[{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]; it is {what}.'
        )
    turns = tuple(_message(f"{where}, message {k + 1}", message) for k, message in enumerate(value))
    roles = [role for role, _ in turns]
    if "system" in roles[1:]:
        raise DataError(f"{where}, message {roles.index('system', 1) + 1}: a system message can only come first.")
    if "assistant" not in roles:
        raise DataError(f"{where}: there is no message from the assistant, so there is nothing to learn. Drop the row.")
    if roles[roles[0] == "system"] == "assistant":
        raise DataError(f"{where}: the assistant speaks first, so its answer has no prompt. Drop that message.")
    if roles[-1] != "assistant":
        raise DataError(f"{where}: the last message is the user's and has no answer. Drop it, or add the answer.")
    for k in range(1, len(roles)):
        if roles[k] == roles[k - 1] == "assistant":
            raise DataError(
                f"{where}, message {k + 1}: two messages from the assistant in a row, so it is unclear where the "
                f"first ends. "
                f"Join them, or drop one."
            )
    return turns


def _message(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f'{where} must be {{"role": ..., "content": ...}}; got {type(message).__name__} {message!r}.')
    missing = [key for key in ("role", "content") if message.get(key) is None]
    if missing:
        hint = " (ShareGPT's from and value? Rename them.)" if {"from", "value"} <= set(message) else ""
        raise DataError(f"{where} has no {missing[0]!r}; it has {sorted(message)}.{hint}")
    more = sorted(key for key, given in message.items() if key not in ("role", "content") and given)
    if more:
        raise DataError(
            f"{where} has {more}, but only role and content are read: tool calls, weights and names are not "
            f"supported. Drop them from the file if they mean nothing, or drop the row."
        )
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{where}: the role {role!r} is not one of {', '.join(ROLES)}.")
    content = readable(f"{where}: 'content'", message["content"])
    if not content.strip():
        raise DataError(f"{where}: the {role}'s content is empty. Fill it in, or drop the message.")
    return (role, content)
