"""Conversations as text data: what is read, what is refused and where.

Kinds of evidence: *oracle* (by hand), *contract* (bad input is one line that names row, line and message).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import TextData, read_instructions
from fedlora.errors import DataError

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief"}


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def test_a_conversation_is_history_prompt_and_response(tmp_path: Path) -> None:
    """Two users in a row are read; a prompt and its answer alone are the data, and the digest, of such columns."""
    data = read_instructions(written(tmp_path, talk(SYSTEM, ASK, ANSWER, ASK, ANSWER), talk(ASK, ANSWER)))
    before = (("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello"))
    assert data == TextData("instruction", ("Hi", "Hi"), responses=("Hello", "Hello"), history=(before, ()))
    assert data.messages(0) == (*before, ("user", "Hi"), ("assistant", "Hello"))
    assert read_instructions(written(tmp_path, talk(ASK, ASK, ANSWER))).history == ((("user", "Hi"),),)
    plain = read_instructions(written(tmp_path, {"prompt": "Hi", "response": "Hello"}))
    assert read_instructions(written(tmp_path, talk(ASK, ANSWER))) == plain


def test_which_columns_are_meant(tmp_path: Path) -> None:
    """messages where there is no prompt; an error that names both where there is; or as one says."""
    row = talk(SYSTEM, ASK, ANSWER)
    assert read_instructions(written(tmp_path, row | {"prompt": "a"})).history is not None
    path = written(tmp_path, row | {"prompt": "a", "response": "b"})
    with pytest.raises(DataError, match=r"'prompt'.*'response'.*'messages' too"):
        read_instructions(path)
    assert read_instructions(path, messages="messages").text == ("Hi",)
    assert read_instructions(written(tmp_path, {"talk": [ASK, ANSWER]}), messages="talk").text == ("Hi",)


def test_what_is_no_conversation(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ([], r"'messages' .* it is \[\]"),
        ([ASK, {"role": "bot", "content": "x"}], r"message 2: .*'bot'.* system, user, assistant"),
        ([ASK, {"role": "assistant", "content": [{"text": "x"}]}], "message 2 must be .* two strings"),
        ([ASK, {"role": "assistant", "content": " "}], "message 2: .*content is empty"),
        ([ANSWER, ASK, ANSWER], "begins with the user"),
        ([ASK, ANSWER, ASK], "ends with the assistant"),
        ([ASK, SYSTEM, ANSWER], "after a system message.* user system assistant"),
        ([ASK, ANSWER | {"tool_calls": [{"name": "f"}]}], r"message 2 has \['tool_calls'\]"),
    ]
    for messages, said in wrong:
        path = written(tmp_path, talk(ASK, ANSWER), {"messages": messages})
        with pytest.raises(DataError, match=r"row 2, line 2.*" + said) as error:
            read_instructions(path)
        assert "\n" not in str(error.value)
