"""Natural instructions: lists of tasks, and what is read of each.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (bad input is one line).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import read_task_lists, read_tasks
from fedlora.errors import DataError
from support.benchmark_files import one_line, task_file, write_tasks


def raw(**fields: Any) -> bytes:
    return json.dumps(task_file(2, **fields)).encode()


DAMAGE = {
    "not JSON": b'{"Definition": ',
    "a list": b"[]",
    "another schema": b'{"instruction": "say", "input": "", "output": ""}',
    "a definition that is no list": raw(Definition="Say."),
    "categories of numbers": raw(Categories=[1]),
    "an instance without output": raw(Instances=[{"input": "x"}]),
    "an output that is a string": raw(Instances=[{"input": "x", "output": "yes"}]),
    "a key twice": b'{"Definition": ["a"], "Definition": ["b"]}',
}


def test_what_is_no_task_is_said_in_one_line(tmp_path: Path) -> None:
    """DataError, with the file. Output "yes" must not become "y", "e", "s"."""
    for content in DAMAGE.values():
        (tmp_path / "task1_a.json").write_bytes(content)
        with pytest.raises(DataError, match=r"task1_a\.json (cannot be read|is not a task)") as error:
            read_tasks(tmp_path, ["task1_a"])
        one_line(error)
    with pytest.raises(DataError, match=r"task9_z\.json cannot be read"):
        read_tasks(tmp_path, ["task9_z"])


class TestReadTasks:
    def test_the_prompt_is_alpacas_with_input(self, tmp_path: Path) -> None:
        """The template of Stanford Alpaca (train.py, PROMPT_DICT), letter by letter; definitions joined by a blank."""
        raw = task_file(
            Definition=[" Answer the question.", "Be brief. "],
            Instances=[{"input": "Who?\nMe?", "output": ["You", "Thou", "Ye"]}, {"input": " x ", "output": [""]}],
        )
        task = read_tasks(write_tasks(tmp_path, {"task1_a": raw}), ["task1_a"])["task1_a"]
        assert task.data.text[0] == (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nAnswer the question. Be brief.\n\n### Input:\nWho?\nMe?\n\n### Response:\n"
        )
        assert task.data.responses == ("You", "")
        assert task.data.references == (("You", "Thou", "Ye"), ("",))
        assert (task.category, task.data.kind) == ("Reasoning", "instruction")

    def test_no_input_is_no_part_of_the_prompt(self, tmp_path: Path) -> None:
        """Alpaca's other template, for white space alone too; then nothing may be dropped."""
        raw = task_file(Instances=[{"input": text, "output": ["x"]} for text in ("", " \n\t")])
        data = read_tasks(write_tasks(tmp_path, {"task1_a": raw}), ["task1_a"])["task1_a"].data
        assert data.text[0] == data.text[1] and "describes a task. Write" in data.text[0]
        assert data.text[0].endswith("even.\n\n### Response:\n") and data.droppable == ((0, 0), (0, 0))

    def test_what_may_be_dropped_is_the_input(self, tmp_path: Path) -> None:
        """The span, cut out of the prompt, is the input: blanks included, and though the definition holds it too."""
        text = " Who? \n\n### Input:\n"
        raw = task_file(Definition=[f"Repeat: {text}"], Instances=[{"input": text, "output": ["x"]}])
        data = read_tasks(write_tasks(tmp_path, {"task1_a": raw}), ["task1_a"])["task1_a"].data
        ((start, end),) = data.droppable or ()
        assert data.text[0][start:end] == text
        assert data.text[0][:start].endswith("\n\n### Input:\n")
        assert data.text[0][end:] == "\n\n### Response:\n"


def test_the_lists_have_a_name_a_line(tmp_path: Path) -> None:
    """Blank lines, blanks and Windows line ends do not count; the order stays. No task twice or on both sides."""
    one, other = tmp_path / "a", tmp_path / "b"
    one.write_bytes(b"task2_b\r\n\r\n  task1_a \n")
    other.write_text("")
    assert read_task_lists(one, other) == (["task2_b", "task1_a"], [])
    for train, unseen, said in (("a\na\n", "b", "'a' twice"), ("a\nb", "c\nb", "'b' twice")):
        one.write_text(train)
        other.write_text(unseen)
        with pytest.raises(DataError, match=said) as error:
            read_task_lists(one, other)
        one_line(error)
    with pytest.raises(DataError, match="cannot be read"):
        read_task_lists(one, tmp_path / "nowhere")
