"""Conversations as text data: what is read, what is refused and where.

Kinds of evidence: *oracle* (by hand), *contract* (bad input is one line that names row, line and message).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import TextData, read_answers, read_chat, split
from fedlora.errors import DataError

ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief"}


def written(folder: Path, *rows: Any, name: str = "chat.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


class TestReading:
    def test_a_conversation_is_history_prompt_and_response(self, tmp_path: Path) -> None:
        path = written(tmp_path, talk(SYSTEM, ASK, ANSWER, ASK, ANSWER), talk(ASK, ANSWER))
        data = read_chat(path)
        before = (("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello"))
        assert data == TextData("instruction", ("Hi", "Hi"), responses=("Hello", "Hello"), history=(before, ()))
        assert data.messages(0) == (*before, ("user", "Hi"), ("assistant", "Hello"))
        assert data.select([1]).history == ((),)

    def test_two_messages_are_a_prompt_and_a_response(self, tmp_path: Path) -> None:
        """The same data, also by its digest, however it was written."""
        chat = read_chat(written(tmp_path, talk(ASK, ANSWER)))
        plain = read_answers(
            written(tmp_path, {"prompt": "Hi", "response": "Hello"}, name="p.jsonl"),
            prompt="prompt",
            response="response",
        )
        assert chat == plain and chat.digest() == plain.digest()

    def test_what_was_said_before_is_part_of_the_data(self, tmp_path: Path) -> None:
        one, two = (read_chat(written(tmp_path, talk(*m))) for m in ((ASK, ANSWER), (SYSTEM, ASK, ANSWER)))
        assert one.digest() != two.digest()
        both = TextData.concat([one, two])
        assert both.history == ((), (("system", "Be brief"),))

    def test_copies_of_a_conversation_stay_together_and_others_of_that_prompt_do_not(self, tmp_path: Path) -> None:
        """ "Go on" after 20 different beginnings is 20 inputs: half of them can be held out."""
        rows = [talk({"role": "user", "content": f"{k}"}, ANSWER, {"role": "user", "content": "Go on"}, ANSWER)
                for k in range(20)]  # fmt: skip
        train, _, test = split(read_chat(written(tmp_path, *rows)), validation=0, test=0.5, seed=0)
        assert (len(train), len(test)) == (10, 10)

    def test_which_columns_are_meant(self, tmp_path: Path) -> None:
        """messages where there is no prompt; an error that names both where there is; or as one says."""
        row = talk(SYSTEM, ASK, ANSWER)
        assert read_answers(written(tmp_path, row), prompt="prompt", response="response").history is not None
        path = written(tmp_path, row | {"prompt": "a", "response": "b"})
        with pytest.raises(DataError, match=r"'prompt'.*'response'.*'messages' too"):
            read_answers(path, prompt="prompt", response="response")
        assert read_answers(path, prompt="prompt", response="response", messages="messages").text == ("Hi",)
        assert read_answers(written(tmp_path, {"talk": [ASK, ANSWER]}), prompt="p", response="r", messages="talk").text

    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ([], "messages' .* it is empty"),
            ("Hi", "it is a string, 'Hi'"),
            (
                [ASK, {"role": "bot", "content": "x"}],
                r"message 2: .*'bot'.* system, user, assistant",
            ),
            ([ASK, {"role": "assistant", "content": 3}], "message 2: 'content' .*got int 3"),
            (
                [ASK, {"role": "assistant", "content": [{"text": "x"}]}],
                "message 2: 'content' .*got list",
            ),
            ([ASK, {"role": "assistant", "content": " "}], "message 2: .*content is empty"),
            ([ASK, {"from": "gpt", "value": "x"}], "message 2 has no 'role'.*ShareGPT"),
            ([ASK, "Hello"], "message 2 must be .* got str 'Hello'"),
            ([ASK, ASK], "no message .*assistant's"),
            ([ANSWER, ASK, ANSWER], "the assistant speaks first"),
            ([SYSTEM, ANSWER], "the assistant speaks first"),
            ([ASK, ANSWER, ASK], "last message .*no answer"),
            ([ASK, ANSWER, ANSWER], "message 3: two messages"),
            ([ASK, SYSTEM, ANSWER], "message 2: .*first"),
            ([ASK, ANSWER | {"tool_calls": [{"name": "f"}]}], r"message 2 has \['tool_calls'\]"),
            ([ASK, ANSWER | {"content": "\ud83d"}], "message 2: 'content' .*surrogate"),
        ],
    )
    def test_what_is_no_conversation(self, tmp_path: Path, messages: Any, said: str) -> None:
        path = written(tmp_path, talk(ASK, ANSWER), {"messages": messages})
        with pytest.raises(DataError, match=r"row 2, line 2.*" + said) as error:
            read_chat(path)
        assert "\n" not in str(error.value)

    def test_two_users_in_a_row_are_read(self, tmp_path: Path) -> None:
        """Whether they are taken is the template's to say."""
        assert read_chat(written(tmp_path, talk(ASK, ASK, ANSWER))).history == ((("user", "Hi"),),)

    def test_a_history_has_known_roles(self) -> None:
        with pytest.raises(DataError, match="system, user or assistant; got 'tool'"):
            TextData("instruction", ("a",), responses=("b",), history=((("tool", "x"),),))
