"""Natural instructions: tasks, selections of them, and what is read of each.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (bad input is one line).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data import Selection, list_tasks, read_selection, read_tasks, select_tasks
from fedlora.errors import DataError
from support.benchmark_files import catalogue, one_line, task_file, write_tasks


class TestListTasks:
    def test_english_tasks_with_enough_instances(self, tmp_path: Path) -> None:
        """By hand: one to take, and one against each condition; the limit itself is enough; no language is English."""
        mute = task_file(5, "mute")
        del mute["Input_language"], mute["Output_language"]
        folder = write_tasks(
            tmp_path,
            {
                "task001_a": task_file(5, "first", Categories=["first", "second"]),
                "task002_b": task_file(4),
                "task003_c": task_file(9, Input_language=["French"]),
                "task004_d": task_file(9, Output_language=["German"]),
                "task005_e": task_file(9, Input_language=["English", "Hindi"]),
                "task006_f": mute,
                "notes": {"not": "a task"},
            },
        )
        (folder / "README.md").write_text("read me")
        assert list_tasks(folder, min_instances=5) == {"task001_a": "first", "task006_f": "mute"}

    def test_no_tasks(self, tmp_path: Path) -> None:
        """A folder without any, one that is not there, and one with too small ones."""
        folder = write_tasks(tmp_path, {"task1_a": task_file(3)})
        for where in (tmp_path, tmp_path / "nowhere", folder):
            with pytest.raises(DataError, match=r"holds no task files .* with 100 English") as error:
                list_tasks(where)
            one_line(error)


def raw(**fields: Any) -> bytes:
    return json.dumps(task_file(2, **fields)).encode()


DAMAGE = {
    "not JSON": b'{"Definition": ',
    "not UTF-8": b'{"Definition": ["\xff"]}',
    "a list": b"[]",
    "a number": b"1",
    "another schema": b'{"instruction": "say", "input": "", "output": ""}',
    "a definition that is no list": raw(Definition="Say."),
    "a definition of numbers": raw(Definition=[1]),
    "no category": raw(Categories=[]),
    "categories of numbers": raw(Categories=[1]),
    "a language that is a string": raw(Input_language="English"),
    "no instances": raw(Instances=[]),
    "an instance without output": raw(Instances=[{"input": "x"}]),
    "an instance with no outputs": raw(Instances=[{"input": "x", "output": []}]),
    "an output that is a string": raw(Instances=[{"input": "x", "output": "yes"}]),
    "an input that is no string": raw(Instances=[{"input": 1, "output": ["x"]}]),
    "an instance that is no object": raw(Instances=["x"]),
    "a key twice": b'{"Definition": ["a"], "Definition": ["b"]}',
}


def test_what_is_no_task_is_said_in_one_line(tmp_path: Path) -> None:
    """The promise of both docstrings: DataError, with the file. Output "yes" must not become "y", "e", "s"."""
    for content in DAMAGE.values():
        (tmp_path / "task1_a.json").write_bytes(content)
        for read in (lambda: list_tasks(tmp_path, min_instances=1), lambda: read_tasks(tmp_path, ["task1_a"])):
            with pytest.raises(DataError, match=r"task1_a\.json (cannot be read|is not a task)") as error:
                read()
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
        assert (task.name, task.category, task.data.kind) == ("task1_a", "Reasoning", "instruction")

    def test_the_prompt_is_alpacas_without_input(self, tmp_path: Path) -> None:
        """Its other template, for no input and for white space alone; then nothing may be dropped."""
        raw = task_file(Instances=[{"input": text, "output": ["x"]} for text in ("", " \n\t")])
        task = read_tasks(write_tasks(tmp_path, {"task1_a": raw}), ["task1_a"])["task1_a"]
        assert set(task.data.text) == {
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\nSay whether the number is even.\n\n### Response:\n"
        }
        assert task.data.droppable == ((0, 0), (0, 0))

    @settings(max_examples=15, deadline=None)
    @given(text=st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip))
    def test_what_may_be_dropped_is_the_input(self, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
        """The span, cut out of the prompt, is the input: whatever it holds, and though the definition holds it too."""
        raw = task_file(Definition=[f"Repeat: {text}"], Instances=[{"input": text, "output": ["x"]}])
        folder = write_tasks(tmp_path_factory.mktemp("tasks"), {"task1_a": raw})
        data = read_tasks(folder, ["task1_a"])["task1_a"].data
        ((start, end),) = data.droppable or ()
        assert data.text[0][start:end] == text
        assert data.text[0][:start].endswith("\n\n### Input:\n")
        assert data.text[0][end:] == "\n\n### Response:\n"


class TestSelectTasks:
    def test_the_papers_rule(self) -> None:
        """methods.md 12.5: 76 categories; one task of each of 50; 20 unseen ones of 20 of the 26 others."""
        tasks = catalogue(*(1 + k % 5 for k in range(76)))
        chosen = select_tasks(tasks, 50, 20, seed=4)
        train, unseen = ([tasks[name] for name in names] for names in (chosen.train, chosen.unseen))
        assert (len(train), len(unseen)) == (50, 20)
        assert len(set(train)) == 50 and len(set(unseen)) == 20 and not set(train) & set(unseen)
        assert list(chosen.train) == sorted(chosen.train) and list(chosen.unseen) == sorted(chosen.unseen)

    @settings(max_examples=60, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 6), min_size=2, max_size=12),
        train=st.integers(1, 20),
        unseen=st.integers(0, 8),
        seed=st.integers(0, 2**40),
    )
    def test_whatever_is_asked_for_nothing_leaks(self, sizes: list[int], train: int, unseen: int, seed: int) -> None:
        """Unseen tasks are of other categories, no task twice, clients as evenly spread as the categories allow."""
        tasks = catalogue(*sizes)
        try:
            chosen = select_tasks(tasks, train, unseen, seed=seed)
        except DataError as error:
            assert train + unseen > len(sizes)  # one task for each of so many categories always goes
            assert "\n" not in str(error)
            return
        assert (len(set(chosen.train)), len(set(chosen.unseen))) == (train, unseen)
        per_category = Counter(tasks[name] for name in chosen.train)
        assert not set(per_category) & {tasks[name] for name in chosen.unseen}
        available = Counter(tasks.values())
        most = max(per_category.values())
        assert all(n >= most - 1 or n == available[c] for c, n in per_category.items())
        if len(sizes) >= train + unseen:
            assert most == 1

    def test_the_seed_decides_and_nothing_else(self) -> None:
        """Same again, whatever the order of the folder; other seeds choose others, and each task has its chance."""
        tasks = catalogue(*[3] * 10)
        first = select_tasks(tasks, 5, 3, seed=0)
        assert first == select_tasks(dict(reversed(tasks.items())), 5, 3, seed=0)
        draws = [select_tasks(tasks, 5, 3, seed=seed) for seed in range(200)]
        assert len(set(draws)) > 150
        for part in ("train", "unseen"):
            seen = Counter(name for draw in draws for name in getattr(draw, part))
            assert set(seen) == set(tasks)  # expected 33 and 20 visits each

    def test_few_categories(self) -> None:
        """4 categories of 5 tasks for 12 and 4: one set aside holds 4 unseen, the others give 4 each."""
        tasks = catalogue(5, 5, 5, 5)
        chosen = select_tasks(tasks, 12, 4, seed=0)
        assert sorted(Counter(tasks[name] for name in chosen.train).values()) == [4, 4, 4]
        assert len({tasks[name] for name in chosen.unseen}) == 1

    def test_not_enough(self) -> None:
        """Each impossible by counting: a category is on one side only."""
        for sizes, train, unseen in (
            ((3, 3), 6, 1), ((2, 2, 2), 7, 0), ((1,) * 5, 4, 2), ((9,), 1, 1), ((), 1, 0)
        ):  # fmt: skip
            with pytest.raises(DataError, match=f"{train} clients and {unseen} unseen") as error:
                select_tasks(catalogue(*sizes), train, unseen, seed=0)
            assert f"{sum(sizes)} tasks in {len(sizes)} categories" in one_line(error)


class TestReadSelection:
    def test_a_name_a_line(self, tmp_path: Path) -> None:
        """Blank lines, spaces around and Windows line ends do not count; the order stays."""
        (tmp_path / "a").write_bytes(b"task2_b\r\n\r\n  task1_a \n")
        (tmp_path / "b").write_text("")
        assert read_selection(tmp_path / "a", tmp_path / "b") == Selection(("task2_b", "task1_a"), ())

    def test_lists_that_are_none(self, tmp_path: Path) -> None:
        """A task twice, on both sides, and nobody to train."""
        for train, unseen, said in (("a\na\n", "b", "'a' twice"), ("a\nb", "c\nb", "'b' twice"), ("\n", "b", "empty")):
            (tmp_path / "a").write_text(train)
            (tmp_path / "b").write_text(unseen)
            with pytest.raises(DataError, match=said) as error:
                read_selection(tmp_path / "a", tmp_path / "b")
            one_line(error)
