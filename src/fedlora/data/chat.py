"""Conversations: rows whose `messages` are turns of a user and an assistant, as Hugging Face has them.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

A conversation is an instruction with a history: its last user's message is the prompt, the assistant's answer to it the
response, and what was said before them the history.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedlora.data.tables import Rows, read_table
from fedlora.data.text import Message, TextData, string
from fedlora.errors import DataError

ROLES = ("system", "user", "assistant")


def read_chat(path: str | os.PathLike[str], *, messages: str = "messages") -> TextData:
    """Read conversations, one a row, from JSONL (.jsonl, .json) or Parquet.

    Each is a list of {"role", "content"}: a system message or none, then a user's, and in the end an assistant's
    answer. Nothing is guessed or skipped. Two messages of a user may follow each other (whether the model's template
    takes them is said when it is applied); an assistant's may not.

    Args:
        path: a file, as for `read_classification`; CSV cannot hold lists.
        messages: the column of the conversations.

    Raises:
        DataError: an unknown role, content that is no string or is empty, an assistant that begins, a conversation
            without an answer at its end, calls of tools. The message names row, line and message.

    Example:
        >>> import json
        >>> turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> _ = Path("chat.jsonl").write_text(json.dumps({"messages": turns}))
        >>> len(read_chat("chat.jsonl"))
        1
    """
    return chat_of(path, read_table(path, [messages]), messages)


def chat_of(source: object, rows: Rows, column: str) -> TextData:
    """Conversations from rows that are there already; `source` is for error messages."""
    found = [_conversation(f"{source}, {where}", values[column], column) for where, values in rows]
    history = tuple(turns[:-2] for turns in found)
    return TextData(
        kind="instruction",
        text=tuple(turns[-2][1] for turns in found),
        responses=tuple(turns[-1][1] for turns in found),
        history=history if any(history) else None,
    )


def _conversation(where: str, value: object, column: str) -> tuple[Message, ...]:
    """(role, content) of each message, checked."""
    if not isinstance(value, list) or not value:
        what = f"a string, {value[:40]!r}" if isinstance(value, str) else "empty" if value == [] else repr(value)[:60]
        raise DataError(
            f"{where}: {column!r} must be a list of messages such as "
            f'[{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]; it is {what}.'
        )
    turns = tuple(_message(f"{where}, message {k + 1}", message) for k, message in enumerate(value))
    roles = [role for role, _ in turns]
    spoken = [role for role in roles if role != "system"]
    if "system" in roles[1:]:
        raise DataError(f"{where}, message {roles.index('system', 1) + 1}: a system message can only come first.")
    if "assistant" not in roles:
        raise DataError(f"{where}: no message is the assistant's, so there is nothing to learn. Drop the row.")
    if spoken[0] == "assistant":
        raise DataError(f"{where}: the assistant speaks first, so its answer has no prompt. Drop that message.")
    if roles[-1] != "assistant":
        raise DataError(f"{where}: the last message is the user's and has no answer. Drop it, or add the answer.")
    for k in range(1, len(roles)):
        if roles[k] == roles[k - 1] == "assistant":
            raise DataError(
                f"{where}, message {k + 1}: two messages of the assistant follow each other, and where the first ends "
                f"is not said. Join them, or drop one."
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
            f"{where} has {more}, and only role and content are read: calls of tools, weights and names are not "
            f"supported. Drop them from the file where they mean nothing, or the row."
        )
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{where}: the role {role!r} is not one of {', '.join(ROLES)}.")
    source, _, place = where.rpartition(", ")
    content = string(source, place, "content", message["content"])
    if not content.strip():
        raise DataError(f"{where}: the {role}'s content is empty. Fill it in, or drop the message.")
    return (role, content)
