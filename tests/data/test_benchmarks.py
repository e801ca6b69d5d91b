"""Benchmarks as data: GLUE and the hub, natural instructions, and how a configuration deals them out.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (nothing lost, nothing leaked, same draw twice; bad input is one line). No network: the library
`datasets` is a stand-in here, whose rows answer as its own do.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.data import (
    GLUE,
    Selection,
    TextData,
    list_tasks,
    read_glue,
    read_hub,
    read_selection,
    read_tasks,
    select_tasks,
    split,
)
from fedlora.errors import ConfigError, DataError, FedLoRAError
from fedlora.runs.client_data import Dealt, deal
from fedlora.runs.config import RunConfig, load_config, parse_config

# ---- small copies of the real files ----------------------------------------------------------------------------------

Rows = list[dict[str, Any]]

# Columns of nyu-mll/glue, and its classes in the order of its ClassLabel, as the data set's page has them.
SCHEMA: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "sst2": ("sentence", None, ("negative", "positive")),
    "qqp": ("question1", "question2", ("not_duplicate", "duplicate")),
    "qnli": ("question", "sentence", ("entailment", "not_entailment")),
    "mnli": ("premise", "hypothesis", ("entailment", "neutral", "contradiction")),
}


def glue_rows(task: str, count: int, prefix: str = "x") -> Rows:
    """Rows of a GLUE task, the classes in turn."""
    text, pair, names = SCHEMA[task]
    second = {} if pair is None else {pair: "{} second {}"}
    return [
        {text: f"{prefix} first {k}", **{c: form.format(prefix, k) for c, form in second.items()}, "idx": k}
        | {"label": k % len(names)}
        for k in range(count)
    ]


def write_glue(root: Path, task: str, train: int = 60, validation: int = 20) -> Path:
    """ROOT/glue/TASK/{train,validation}.jsonl. Returns the root."""
    folder = root / "glue" / task
    folder.mkdir(parents=True)
    for name, rows in (("train", glue_rows(task, train, "t")), ("validation", glue_rows(task, validation, "v"))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def task_file(count: int = 100, category: str = "Reasoning", **fields: Any) -> dict[str, Any]:
    """A task of natural-instructions v2, with the fields of the real files that we read and some that we do not."""
    instances = [{"id": f"t-{k}", "input": f"Is {k} even?", "output": [str(k % 2 == 0)]} for k in range(count)]
    return {
        "Contributors": ["nobody"], "Source": ["here"], "Categories": [category], "Reasoning": [],
        "Definition": ["Say whether the number is even."], "Input_language": ["English"],
        "Output_language": ["English"], "Positive Examples": [], "Negative Examples": [], "Instances": instances,
    } | fields  # fmt: skip


def write_tasks(root: Path, tasks: Mapping[str, dict[str, Any]]) -> Path:
    """ROOT/superni/NAME.json. Returns that folder."""
    folder = root / "superni"
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(raw))
    return folder


def catalogue(*sizes: int) -> dict[str, str]:
    """Task -> category: sizes[0] tasks in category c00, and so on."""
    return {f"task{c:02d}{k:02d}": f"c{c:02d}" for c, size in enumerate(sizes) for k in range(size)}


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    """What the command line would print: a single line, not empty."""
    text = str(error.value)
    assert text and "\n" not in text
    return text


# ---- references and droppable spans ----------------------------------------------------------------------------------

CHAT = TextData(
    "instruction",
    ("ask a", "ask b", "ask c"),
    responses=("1", "2", "3"),
    references=(("1",), ("2", "two"), ("3", "three", "III")),
    droppable=((4, 5), (0, 0), (0, 3)),
)


class TestScoringFields:
    """`TextData.references` and `.droppable`; the other fields are in test_text.py."""

    @pytest.mark.parametrize("field", ["references", "droppable"])
    def test_they_need_one_entry_for_each_example(self, field: str) -> None:
        """The docstring: N tuples, N pairs."""
        with pytest.raises(DataError, match=rf"'text': 2.*'{field}': 1"):
            TextData("instruction", ("a", "b"), responses=("1", "2"), **{field: ((0, 1),)})

    @pytest.mark.parametrize("field", ["references", "droppable"])
    def test_a_class_has_neither(self, field: str) -> None:
        """They are of generated text; `kind` says which fields belong."""
        with pytest.raises(DataError, match="references and droppable are of instruction data"):
            TextData("classification", ("a",), labels=(0,), label_names=("x",), **{field: ((0, 1),)})

    def test_select_takes_them_along(self) -> None:
        """Written out by hand, in the asked order with a repeat."""
        assert CHAT.select([2, 0, 2]) == TextData(
            "instruction",
            ("ask c", "ask a", "ask c"),
            responses=("3", "1", "3"),
            references=(("3", "three", "III"), ("1",), ("3", "three", "III")),
            droppable=((0, 3), (4, 5), (0, 3)),
        )

    def test_concat_undoes_a_cut(self) -> None:
        """The whole from its parts, an empty one among them."""
        assert TextData.concat([CHAT.select([0]), CHAT.select([]), CHAT.select([1, 2])]) == CHAT

    @pytest.mark.parametrize("field", ["references", "droppable"])
    def test_concat_of_parts_with_and_without_them(self, field: str) -> None:
        """Neither dropped nor made up: parts must be of one task."""
        bare = TextData("instruction", ("d",), responses=("4",))
        more = TextData("instruction", ("d",), responses=("4",), **{field: (getattr(CHAT, field)[0],)})
        with pytest.raises(DataError, match="got 2 different"):
            TextData.concat([bare, more])

    def test_split_takes_them_along(self) -> None:
        """Each example keeps its own: the number stands in all four fields."""
        count = 40
        data = TextData(
            "instruction", tuple(f"q{k}" for k in range(count)), responses=tuple(str(k) for k in range(count)),
            references=tuple((str(k), f"no. {k}") for k in range(count)),
            droppable=tuple((k, k + 1) for k in range(count)),
        )  # fmt: skip
        parts = split(data, validation=0.2, test=0.2, seed=0)
        assert sorted(int(r) for part in parts for r in part.responses or ()) == list(range(count))
        for part in parts:
            for text, said, right, span in zip(
                part.text, part.responses or (), part.references or (), part.droppable or (), strict=True
            ):
                k = int(said)
                assert (text, right, span) == (f"q{k}", (said, f"no. {k}"), (k, k + 1))

    def test_digest_is_the_documented_hash(self) -> None:
        """The lines that the docstring of `digest` lists, written out by hand."""
        lines = (
            '["instruction", []]\n["ask a", null, null, "1"]\n["ask b", null, null, "2"]\n["ask c", null, null, "3"]\n'
            '["references", [["1"], ["2", "two"], ["3", "three", "III"]]]\n["droppable", [[4, 5], [0, 0], [0, 3]]]\n'
        )
        assert CHAT.digest() == hashlib.sha256(lines.encode()).hexdigest()

    def test_digest_sees_them_and_old_digests_stand(self) -> None:
        """All different; and without them the hash is the one from before there were any (test_text.py)."""
        bare = TextData("instruction", CHAT.text, responses=CHAT.responses)
        others = [
            CHAT,
            bare,
            TextData("instruction", CHAT.text, responses=CHAT.responses, references=CHAT.references),
            TextData("instruction", CHAT.text, responses=CHAT.responses, droppable=CHAT.droppable),
            TextData(
                "instruction", CHAT.text, responses=CHAT.responses, references=(("1",), ("2",), ("3",)),
                droppable=CHAT.droppable,
            ),
            TextData(
                "instruction", CHAT.text, responses=CHAT.responses, references=CHAT.references,
                droppable=((4, 5), (0, 0), (0, 2)),
            ),
        ]  # fmt: skip
        assert len({data.digest() for data in others}) == len(others)
        lines = '["instruction", []]\n' + "".join(
            f'["{text}", null, null, "{said}"]\n' for text, said in zip(bare.text, bare.responses or (), strict=True)
        )
        assert bare.digest() == hashlib.sha256(lines.encode()).hexdigest()

    def test_lists_become_tuples(self) -> None:
        """The class says "Lists are turned into tuples", so that equal data are equal and hashable."""
        data = TextData("instruction", ["ask a"], responses=["1"], references=[["1", "one"]], droppable=[[4, 5]])  # type: ignore[arg-type]
        assert data == TextData(
            "instruction", ("ask a",), responses=("1",), references=(("1", "one"),), droppable=((4, 5),)
        )
        assert isinstance(hash(data), int)

    def test_an_example_without_any_reference_is_refused(self) -> None:
        """What nothing counts as right for cannot be scored; the reader of tasks refuses it too."""
        with pytest.raises(DataError):
            TextData("instruction", ("ask a",), responses=("1",), references=((),))


# ---- the hub, by a stand-in ------------------------------------------------------------------------------------------


class HubRows:
    """What `datasets.load_dataset(..., split=...)` gives: columns by name, and features with or without class names."""

    def __init__(self, rows: Rows, names: Mapping[str, Sequence[str]] | None = None) -> None:
        self._rows = rows
        self.column_names = list(rows[0])
        named = names or {}
        self.features = {
            column: SimpleNamespace(names=list(named[column])) if column in named else SimpleNamespace()
            for column in self.column_names
        }

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self._rows]


Asked = list[tuple[Any, ...]]
Hub = Callable[..., Asked]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Puts a stand-in `datasets` in place that answers with the given rows (by split), or raises; returns the asks."""

    def put(answers: Mapping[str, HubRows] | Exception) -> Asked:
        asked: Asked = []

        def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> HubRows:
            asked.append((name, config, split, revision))
            if isinstance(answers, Exception):
                raise answers
            return answers[split]

        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        return asked

    return put


FILMS: Rows = [{"review": "good", "mood": 1, "by": "a"}, {"review": "bad", "mood": 0, "by": "b"}]


class TestHub:
    def test_columns_and_the_names_of_the_data_set(self, hub: Hub) -> None:
        """Read off the rows; the ask is what `datasets.load_dataset` documents."""
        asked = hub({"train": HubRows(FILMS, {"mood": ("neg", "pos")})})
        data = read_hub("me/films", None, "train", text="review", label="mood", revision="abc")
        assert data == TextData("classification", ("good", "bad"), labels=(1, 0), label_names=("neg", "pos"))
        assert asked == [("me/films", None, "train", "abc")]

    def test_names_that_are_given_win_and_a_pair_is_read(self, hub: Hub) -> None:
        """The docstring: label_names are the classes by index; by default those that the data set names."""
        hub({"train": HubRows(FILMS, {"mood": ("neg", "pos")})})
        data = read_hub("f", "c", "train", text="review", label="mood", pair="by", label_names=("no", "yes"))
        assert data == TextData("classification", ("good", "bad"), ("a", "b"), (1, 0), None, ("no", "yes"))

    def test_classes_without_names_are_called_by_their_numbers(self, hub: Hub) -> None:
        """As `read_classification` does with whole numbers."""
        hub({"train": HubRows(FILMS)})
        assert read_hub("f", None, "train", text="review", label="mood").label_names == ("0", "1")

    @pytest.mark.parametrize("wrong", ["text", "label", "pair"])
    def test_a_missing_column_is_named_with_those_there_are(self, hub: Hub, wrong: str) -> None:
        """Whichever column it is; the message has the data set, its configuration and the split."""
        hub({"test": HubRows(FILMS)})
        columns = {"text": "review", "label": "mood", "pair": "by"} | {wrong: "moood"}
        with pytest.raises(DataError, match=r"f/c, split 'test' has no column 'moood'; it has \['review', ") as error:
            read_hub("f", "c", "test", **columns)  # type: ignore[arg-type]
        one_line(error)

    def test_an_unlabelled_split_is_refused(self, hub: Hub) -> None:
        """GLUE's public test sets hold -1 in place of each label."""
        rows = [row | {"mood": -1} for row in FILMS]
        hub({"test": HubRows(rows, {"mood": ("neg", "pos")})})
        with pytest.raises(DataError, match=r"labels outside 0\.\.1: is it an unlabelled split\?") as error:
            read_hub("f", None, "test", text="review", label="mood")
        one_line(error)

    def test_a_label_beyond_the_given_names_is_refused(self, hub: Hub) -> None:
        """Two names are the classes 0 and 1."""
        hub({"train": HubRows([*FILMS, {"review": "so-so", "mood": 2, "by": "c"}])})
        with pytest.raises(DataError, match=r"labels outside 0\.\.1"):
            read_hub("f", None, "train", text="review", label="mood", label_names=("neg", "pos"))

    def test_labels_that_are_strings_are_read_or_refused(self, hub: Hub) -> None:
        """Many hub data sets have a string column; the docstring promises classes, or a DataError."""
        hub({"train": HubRows([{"review": "good", "mood": "pos"}, {"review": "bad", "mood": "neg"}])})
        try:
            data = read_hub("f", None, "train", text="review", label="mood")
        except DataError:
            return
        assert (data.labels, data.label_names) == ((1, 0), ("neg", "pos"))

    def test_a_split_without_names_in_which_a_class_does_not_occur(self, hub: Hub) -> None:
        """As `read_classification`: whole numbers are the class indices, and the names "0".."max"."""
        hub({"train": HubRows([row | {"mood": 2 * row["mood"]} for row in FILMS])})
        data = read_hub("f", None, "train", text="review", label="mood")
        assert (data.labels, data.label_names) == ((2, 0), ("0", "1", "2"))

    @pytest.mark.parametrize(
        ("raised", "reason"),
        [
            (ConnectionError("no route to huggingface.co\nand forty lines more"), "no route to huggingface.co. "),
            (FileNotFoundError("Couldn't find 'me/films'"), "Couldn't find 'me/films'. "),
            (TimeoutError(), "TimeoutError. "),
        ],
    )
    def test_whatever_the_transport_raises_is_one_line(self, hub: Hub, raised: Exception, reason: str) -> None:
        """Its first line, or its type where it says nothing; the cause is chained."""
        hub(raised)
        with pytest.raises(DataError, match="the data set me/films/c, split 'train' cannot be loaded") as error:
            read_hub("me/films", "c", "train", text="review", label="mood")
        assert f"from the hub: {reason}" in one_line(error)
        assert error.value.__cause__ is raised

    def test_without_the_library_it_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """None in sys.modules is how Python spells a module that cannot be imported."""
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=re.escape("pip install 'fedlora[hub]'")) as error:
            read_hub("me/films", None, "train", text="review", label="mood")
        one_line(error)

    def test_the_extras_that_error_messages_name_bring_the_library(self) -> None:
        """hub.py and generation.py tell the reader what to install: pyproject.toml must agree."""
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
        extras = project["project"]["optional-dependencies"]
        for extra, library in (("hub", "datasets"), ("train", "rouge-score")):
            assert any(need.startswith(library) for need in extras[extra]), (extra, library)


# ---- GLUE ------------------------------------------------------------------------------------------------------------


class TestGlue:
    def test_the_table_is_the_hubs(self) -> None:
        """Columns and classes of nyu-mll/glue, as SCHEMA above has them from the data set's page."""
        assert {task: (c.text, c.pair, c.label_names) for task, c in GLUE.items()} == SCHEMA

    @pytest.mark.parametrize("task", SCHEMA)
    def test_local_files(self, tmp_path: Path, task: Any) -> None:
        """Every row of the two files, by hand; the one test set is the official validation file."""
        root = write_glue(tmp_path, task, train=7, validation=5)
        train, tests = read_glue(task, root)
        names = SCHEMA[task][2]
        for data, count, prefix in ((train, 7, "t"), (tests["validation"], 5, "v")):
            pairs = None if SCHEMA[task][1] is None else tuple(f"{prefix} second {k}" for k in range(count))
            assert data == TextData(
                "classification", tuple(f"{prefix} first {k}" for k in range(count)), pairs,
                tuple(k % len(names) for k in range(count)), None, names,
            )  # fmt: skip
        assert list(tests) == ["validation"]

    def test_a_class_that_does_not_occur_still_counts(self, tmp_path: Path) -> None:
        """The classes are the task's, not the file's: one row of mnli has three."""
        root = write_glue(tmp_path, "mnli", train=1, validation=1)
        assert read_glue("mnli", root)[0].label_names == ("entailment", "neutral", "contradiction")

    def test_no_folder(self, tmp_path: Path) -> None:
        """The message says where it looked and what else one can do."""
        with pytest.raises(DataError, match=r"glue/sst2 does not exist.*--data-root") as error:
            read_glue("sst2", tmp_path)
        assert "nyu-mll/glue" in one_line(error)

    def test_no_test_file(self, tmp_path: Path) -> None:
        """Both files are needed."""
        root = write_glue(tmp_path, "sst2")
        (root / "glue" / "sst2" / "validation.jsonl").unlink()
        with pytest.raises(DataError, match=r"validation\.jsonl does not exist"):
            read_glue("sst2", root)

    def test_files_of_another_task(self, tmp_path: Path) -> None:
        """qnli's sentence is the second one of its pair; there is no `question` in sst2."""
        write_glue(tmp_path, "sst2")
        (tmp_path / "glue" / "sst2").rename(tmp_path / "glue" / "qnli")
        with pytest.raises(DataError, match="no column 'question'"):
            read_glue("qnli", tmp_path)

    def test_an_unlabelled_file(self, tmp_path: Path) -> None:
        """GLUE's test.jsonl taken for its validation.jsonl: every label is -1."""
        root = write_glue(tmp_path, "sst2")
        rows = [row | {"label": -1} for row in glue_rows("sst2", 3)]
        (root / "glue" / "sst2" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(DataError, match="label '-1' is not among the 2 label_names"):
            read_glue("sst2", root)

    @pytest.mark.parametrize(
        ("task", "tests"),
        [
            ("sst2", ["validation"]),
            ("qqp", ["validation"]),
            ("qnli", ["validation"]),
            ("mnli", ["validation_matched", "validation_mismatched"]),
        ],
    )
    def test_from_the_hub(self, hub: Hub, task: Any, tests: list[str]) -> None:
        """The splits that nyu-mll/glue has: one validation set, two for mnli, matched first."""
        rows = {name: HubRows(glue_rows(task, 4, name)) for name in ("train", *tests)}
        asked = hub(rows)
        train, found = read_glue(task, None)
        assert asked == [("nyu-mll/glue", task, name, None) for name in ("train", *tests)]
        assert list(found) == tests
        for name, data in (("train", train), *found.items()):
            assert data.text == tuple(f"{name} first {k}" for k in range(4))
            assert (data.pair is not None) == (task != "sst2")
            assert data.label_names == SCHEMA[task][2]


# ---- natural instructions --------------------------------------------------------------------------------------------


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

    def test_a_hundred_instances_by_default(self, tmp_path: Path) -> None:
        """methods.md 12.5: at least one English task with at least 100 instances."""
        folder = write_tasks(tmp_path, {"task1_a": task_file(99), "task2_b": task_file(100)})
        assert list(list_tasks(folder)) == ["task2_b"]

    def test_no_tasks(self, tmp_path: Path) -> None:
        """A folder without any, one that is not there, and one with too small ones."""
        folder = write_tasks(tmp_path, {"task1_a": task_file(3)})
        for where in (tmp_path, tmp_path / "nowhere", folder):
            with pytest.raises(DataError, match=r"holds no task files .* with 100 English") as error:
                list_tasks(where)
            one_line(error)


DAMAGE: dict[str, tuple[bytes, str]] = {
    "not JSON": (b'{"Definition": ', "cannot be read"),
    "not UTF-8": (b'{"Definition": ["\xff"]}', "cannot be read"),
    "a list": (b"[]", "is not a task of natural-instructions v2"),
    "a number": (b"1", "is not a task of natural-instructions v2"),
    "another schema": (b'{"instruction": "say", "input": "", "output": ""}', "is not a task"),
    "a definition that is no list": (json.dumps(task_file(2, Definition="Say.")).encode(), "it needs lists Definition"),
    "no category": (json.dumps(task_file(2, Categories=[])).encode(), "it needs lists Definition"),
    "no instances": (json.dumps(task_file(0)).encode(), "it needs lists Definition"),
    "an instance without output": (json.dumps(task_file(2, Instances=[{"input": "x"}])).encode(), "output: "),
    "an instance with no outputs": (
        json.dumps(task_file(2, Instances=[{"input": "x", "output": []}])).encode(), "output: ",
    ),
    "an input that is no string": (
        json.dumps(task_file(2, Instances=[{"input": 1, "output": ["x"]}])).encode(), "output: ",
    ),
    "an instance that is no object": (json.dumps(task_file(2, Instances=["x"])).encode(), "output: "),
}  # fmt: skip

LOOSE: dict[str, dict[str, Any]] = {
    "an output that is a string": {"Instances": [{"input": "x", "output": "yes"}]},
    "a definition of numbers": {"Definition": [1]},
    "categories of numbers": {"Categories": [1]},
    "no language at all": {"Input_language": None},
    "a language that is a string": {"Input_language": "English"},
}


class TestDamagedTasks:
    @pytest.mark.parametrize(("content", "says"), DAMAGE.values(), ids=DAMAGE)
    @pytest.mark.parametrize("read", [list_tasks, lambda folder: read_tasks(folder, ["task1_a"])], ids=["list", "read"])
    def test_what_is_no_task_is_said_in_one_line(
        self, tmp_path: Path, content: bytes, says: str, read: Callable[[Path], Any]
    ) -> None:
        """The promise of both docstrings: DataError; the message names the file."""
        (tmp_path / "task1_a.json").write_bytes(content)
        with pytest.raises(DataError, match=re.escape(says)) as error:
            read(tmp_path)
        assert "task1_a.json" in one_line(error)

    @pytest.mark.parametrize("fields", LOOSE.values(), ids=LOOSE)
    def test_a_task_of_nearly_the_schema_is_refused(self, tmp_path: Path, fields: dict[str, Any]) -> None:
        """Output "yes" must not become the references "y", "e", "s"; and no TypeError reaches the user."""
        folder = write_tasks(tmp_path, {"task1_a": task_file(2, **fields)})
        with pytest.raises(DataError, match="is not a task of natural-instructions v2"):
            list_tasks(folder, min_instances=1)
        with pytest.raises(DataError, match="is not a task of natural-instructions v2"):
            read_tasks(folder, ["task1_a"])

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        """A name of a task list with no file."""
        with pytest.raises(DataError, match=r"task9_z\.json cannot be read"):
            read_tasks(tmp_path, ["task9_z"])


class TestReadTasks:
    def test_the_prompt_is_alpacas_with_input(self, tmp_path: Path) -> None:
        """The template of Stanford Alpaca (train.py, PROMPT_DICT), letter by letter; definitions joined by a blank."""
        raw = task_file(
            Definition=[" Answer the question.", "Be brief. "],
            Instances=[{"input": "Who?\nMe?", "output": ["You", "Thou", "You"]}, {"input": " x ", "output": [""]}],
        )
        task = read_tasks(write_tasks(tmp_path, {"task1_a": raw}), ["task1_a"])["task1_a"]
        assert task.data.text[0] == (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\nAnswer the question. Be brief.\n\n### Input:\nWho?\nMe?\n\n### Response:\n"
        )
        assert task.data.responses == ("You", "")
        assert task.data.references == (("You", "Thou", "You"), ("",))
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

    @settings(max_examples=25, deadline=None)
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

    def test_the_named_tasks_in_that_order(self, tmp_path: Path) -> None:
        """Others in the folder are not read: one is damaged."""
        folder = write_tasks(tmp_path, {"task1_a": task_file(3, "one"), "task2_b": task_file(2, "two"), "task3_c": {}})
        tasks = read_tasks(folder, ["task2_b", "task1_a"])
        assert [(name, t.category, len(t.data)) for name, t in tasks.items()] == [
            ("task2_b", "two", 2),
            ("task1_a", "one", 3),
        ]


class TestSelectTasks:
    @pytest.mark.parametrize("seed", range(5))
    def test_the_papers_rule(self, seed: int) -> None:
        """methods.md 12.5: 76 categories; one task of each of 50; 20 unseen ones of 20 of the 26 others."""
        tasks = catalogue(*(1 + k % 5 for k in range(76)))
        chosen = select_tasks(tasks, 50, 20, seed=seed)
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

    def test_nothing_unseen(self) -> None:
        """With as many clients as tasks, all are chosen."""
        tasks = catalogue(2, 2)
        assert select_tasks(tasks, 4, 0, seed=0) == Selection(tuple(sorted(tasks)), ())

    @pytest.mark.parametrize(
        ("sizes", "train", "unseen"), [((3, 3), 6, 1), ((2, 2, 2), 7, 0), ((1,) * 5, 4, 2), ((9,), 1, 1), ((), 1, 0)]
    )
    def test_not_enough(self, sizes: tuple[int, ...], train: int, unseen: int) -> None:
        """Each impossible by counting: a category is on one side only."""
        with pytest.raises(DataError, match=f"cannot give {train} clients and {unseen} unseen") as error:
            select_tasks(catalogue(*sizes), train, unseen, seed=0)
        assert f"{sum(sizes)} tasks in {len(sizes)} categories" in one_line(error)

    @pytest.mark.parametrize(("sizes", "train", "unseen"), [((10, 1), 10, 1), ((1, 1, 1, 1, 3), 4, 3)])
    def test_what_exists_is_found_with_every_seed(self, sizes: tuple[int, ...], train: int, unseen: int) -> None:
        """Only one category can be the unseen one here: the error "cannot give" would be untrue."""
        for seed in range(10):
            chosen = select_tasks(catalogue(*sizes), train, unseen, seed=seed)
            assert (len(chosen.train), len(chosen.unseen)) == (train, unseen)


class TestReadSelection:
    def test_a_name_a_line(self, tmp_path: Path) -> None:
        """Blank lines, spaces around and Windows line ends do not count; the order stays."""
        (tmp_path / "a").write_bytes(b"task2_b\r\n\r\n  task1_a \n")
        (tmp_path / "b").write_text("")
        assert read_selection(tmp_path / "a", tmp_path / "b") == Selection(("task2_b", "task1_a"), ())

    def test_a_list_that_is_not_there(self, tmp_path: Path) -> None:
        """Whichever of the two."""
        (tmp_path / "a").write_text("task1_a\n")
        for pair in ((tmp_path / "a", tmp_path / "none"), (tmp_path / "none", tmp_path / "a")):
            with pytest.raises(DataError, match=r"the task list .*none cannot be read: No such file") as error:
                read_selection(*pair)
            one_line(error)

    def test_a_list_that_is_not_utf8(self, tmp_path: Path) -> None:
        """Raises DataError, says the docstring."""
        (tmp_path / "a").write_bytes(b"task1_caf\xe9\n")
        with pytest.raises(DataError, match="the task list"):
            read_selection(tmp_path / "a", tmp_path / "a")


# ---- dealt out by a configuration ------------------------------------------------------------------------------------


def config_of(data: Mapping[str, Any], *, task: str = "classification", seed: int = 0, **tables: Any) -> RunConfig:
    raw = {"model": {"path": "m", "task": task}, "data": dict(data), "run": {"seed": seed}}
    return parse_config({**raw, **{name: dict(table) for name, table in tables.items()}})


def everything(parts: Mapping[str, TextData]) -> list[str]:
    return sorted(text for part in parts.values() for text in part.text)


CLIENTS = {"count": 3, "min_size": 2}


class TestDealGlue:
    def test_train_is_dealt_and_the_official_validation_file_is_the_test_set(self, tmp_path: Path) -> None:
        """60 rows: a share of 0.2 is 12 to choose on, 48 to train on; the test set is untouched and whole."""
        root = write_glue(tmp_path, "sst2")
        dealt = deal(config_of({"task": "sst2", "validation": 0.2}, clients=CLIENTS), root)
        train, tests = read_glue("sst2", root)
        assert list(dealt.parts) == ["site-1", "site-2", "site-3"]
        assert (sum(map(len, dealt.parts.values())), len(dealt.validation[""])) == (48, 12)
        assert sorted([*everything(dealt.parts), *dealt.validation[""].text]) == sorted(train.text)
        assert dealt.validation[""].labels is not None and sorted(dealt.validation[""].labels) == [0] * 6 + [1] * 6
        assert dealt.test == {"": tests["validation"]}
        assert not (dealt.own_validation or dealt.own_test or dealt.probes or dealt.categories)

    def test_the_partition_is_the_configured_one(self, tmp_path: Path) -> None:
        """iid sizes differ by one at most: 48 over 3 clients is 16 each, and over 5 is 9 or 10."""
        root = write_glue(tmp_path, "qqp")
        for count, sizes in ((3, [16, 16, 16]), (5, [10, 10, 10, 9, 9])):
            clients = {"count": count, "partition": "iid"}
            dealt = deal(config_of({"task": "qqp", "validation": 0.2}, clients=clients), root)
            assert [len(part) for part in dealt.parts.values()] == sizes
            assert all(part.pair is not None for part in dealt.parts.values())

    def test_at_most_so_many_examples(self, tmp_path: Path) -> None:
        """max_train of all clients together, max_test of the validation and the test set; drawn, in their order."""
        root = write_glue(tmp_path, "sst2")
        whole = deal(config_of({"task": "sst2", "validation": 0.2}, clients=CLIENTS), root)
        limited = {"task": "sst2", "validation": 0.2, "max_train": 20, "max_test": 5}
        dealt = deal(config_of(limited, clients=CLIENTS), root)
        assert sum(map(len, dealt.parts.values())) == 20
        assert set(everything(dealt.parts)) <= set(everything(whole.parts))
        for less, more in ((dealt.validation[""], whole.validation[""]), (dealt.test[""], whole.test[""])):
            places = [more.text.index(text) for text in less.text]
            assert len(places) == 5 and places == sorted(set(places))
        tests = [deal(config_of(limited, clients=CLIENTS, seed=seed), root).test[""].text for seed in range(6)]
        assert tests[0] == dealt.test[""].text and len(set(tests)) > 1, "drawn by the seed"

    def test_a_limit_that_is_not_reached_changes_nothing(self, tmp_path: Path) -> None:
        """At most 20 of 20 is all of them in their order."""
        root = write_glue(tmp_path, "sst2")
        config = config_of({"task": "sst2", "validation": 0.2, "max_train": 48, "max_test": 20}, clients=CLIENTS)
        plain = deal(config_of({"task": "sst2", "validation": 0.2}, clients=CLIENTS), root)
        dealt = deal(config, root)
        assert (dealt.parts, dealt.validation, dealt.test) == (plain.parts, plain.validation, plain.test)

    def test_mnlis_second_test_set_is_a_probe(self, hub: Hub) -> None:
        """methods.md 12.1: MNLI-m and -mm are two validation sets of one training run; matched is the test set."""
        sizes = {"train": 90, "validation_matched": 12, "validation_mismatched": 9}
        hub({name: HubRows(glue_rows("mnli", count, name)) for name, count in sizes.items()})
        dealt = deal(config_of({"task": "mnli", "max_test": 10}, clients=CLIENTS), None)
        assert list(dealt.probes) == ["validation_mismatched"] and list(dealt.probes["validation_mismatched"]) == [""]
        mismatched = dealt.probes["validation_mismatched"][""]
        assert (len(dealt.test[""]), len(mismatched), len(dealt.validation[""])) == (10, 9, 9)
        assert all(text.startswith("validation_matched ") for text in dealt.test[""].text)
        assert all(text.startswith("validation_mismatched ") for text in mismatched.text)
        assert all(text.startswith("train ") for text in (*everything(dealt.parts), *dealt.validation[""].text))

    def test_without_a_root_it_is_the_hub_that_is_asked(self, hub: Hub) -> None:
        """And what the hub's transport says arrives in one line."""
        hub(ConnectionError("offline"))
        with pytest.raises(DataError, match="nyu-mll/glue/sst2, split 'train' cannot be loaded") as error:
            deal(config_of({"task": "sst2"}, clients=CLIENTS), None)
        one_line(error)

    @pytest.mark.parametrize(
        ("data", "model", "says"),
        [
            ({"validation": 0}, "classification", "brings its own test set"),
            ({"validation": "held_out.jsonl"}, "classification", "validation is a share of train"),
            ({"test": 0.2}, "classification", "leave data.test out"),
            ({"test": 0}, "classification", "leave data.test out"),
            ({"test": "test.jsonl"}, "classification", "leave data.test out"),
            ({}, "causal-lm", "is a classification task; model.task is 'causal-lm'"),
        ],
    )
    def test_impossible_combinations(self, tmp_path: Path, data: dict[str, Any], model: str, says: str) -> None:
        """What config.py says of GLUE: validation is a share, and the test sets are the official ones."""
        root = write_glue(tmp_path, "sst2")
        with pytest.raises(ConfigError, match=re.escape(says)) as error:
            deal(config_of({"task": "sst2", **data}, task=model, clients=CLIENTS), root)
        assert "'sst2'" in one_line(error)

    def test_too_little_for_so_many_clients(self, tmp_path: Path) -> None:
        """20 training examples are not 8 for each of 3."""
        root = write_glue(tmp_path, "sst2")
        with pytest.raises(DataError, match="3 clients with at least 8 examples each need 24") as error:
            deal(config_of({"task": "sst2", "max_train": 20}, clients={"count": 3}), root)
        one_line(error)

    def test_the_canonical_configuration_is_the_same_run(self, tmp_path: Path) -> None:
        """test_config.py promises it: "the canonical JSON holds every field and makes the same run again"."""
        root = write_glue(tmp_path, "sst2")
        config = config_of({"task": "sst2"}, clients=CLIENTS)
        again = parse_config(json.loads(config.canonical()))
        assert again.digest() == config.digest()
        assert deal(again, root).parts == deal(config, root).parts


class TestDealFiles:
    @pytest.mark.parametrize("source", ["train", "clients"])
    def test_at_most_so_many_examples(self, tmp_path: Path, source: str) -> None:
        """config.py says "at most so many examples" of all sources; to ignore it silently would train on more."""
        rows = "".join(json.dumps({"text": f"t {k}", "label": k % 2}) + "\n" for k in range(60))
        (tmp_path / "d.jsonl").write_text(rows)
        sources: dict[str, str] = {"train": 'train = "d.jsonl"', "clients": 'clients = {a = "d.jsonl"}'}
        path = tmp_path / "config.toml"
        path.write_text(
            f'[model]\npath = "m"\n[data]\nmax_train = 20\nmax_test = 3\n{sources[source]}\n'
            "[clients]\nranks = [2]\ncount = 1\nmin_size = 1\n"
        )
        dealt = deal(load_config(path), None)
        assert sum(map(len, dealt.parts.values())) == 20
        assert len(dealt.test[""]) == 3


SUPERNI = {"task": "superni", "tasks": 3, "unseen": 2}


def superni_root(root: Path, instances: int = 100) -> Path:
    """Six categories, of one or two tasks; every question says which task it is of."""
    tasks = {}
    for k in range(9):
        raw = task_file(category=f"category {k % 6}")
        raw["Instances"] = [
            {"id": f"{k}-{j}", "input": f"task {k} asks {j}", "output": [f"{j}", f"number {j}"]}
            for j in range(instances)
        ]
        tasks[f"task{k}_x"] = raw
    write_tasks(root, tasks)
    return root


def input_of(prompt: str) -> str:
    return prompt.partition("### Input:\n")[2].partition("\n\n### Response:")[0]


def superni(data: Mapping[str, Any], root: Path, seed: int = 0) -> Dealt:
    return deal(config_of({**SUPERNI, **data}, task="causal-lm", seed=seed), root)


class TestDealSuperni:
    def test_each_task_is_a_client_cut_8_to_1_to_1(self, tmp_path: Path) -> None:
        """methods.md 12.5: 8:1:1 within a task; and each question says whose it is."""
        root = superni_root(tmp_path)
        dealt = superni({}, root)
        chosen = select_tasks(list_tasks(root / "superni"), 3, 2, seed=0)
        assert tuple(dealt.parts) == chosen.train
        for name in chosen.train:
            number = name.removeprefix("task").removesuffix("_x")
            parts = (dealt.parts[name], dealt.validation[name], dealt.test[name])
            assert [len(part) for part in parts] == [80, 10, 10]
            asked = [input_of(text) for part in parts for text in part.text]
            assert sorted(asked) == sorted(f"task {number} asks {j}" for j in range(100))
            for part in parts:
                for text, said, right in zip(part.text, part.responses or (), part.references or (), strict=True):
                    j = input_of(text).split()[-1]
                    assert (said, right) == (j, (j, f"number {j}"))

    def test_what_a_client_is_measured_on_and_what_nobody_trains_on(self, tmp_path: Path) -> None:
        """Its own held-out sets are the common sets of its task; the unseen tasks are whole, and of other categories.

        tasks 0..8 are of categories 0..5, 0..2: as `superni_root` writes them.
        """
        dealt = superni({}, superni_root(tmp_path))
        assert dealt.own_validation == dealt.validation and dealt.own_test == dealt.test
        assert set(dealt.validation) == set(dealt.test) == set(dealt.parts)
        assert list(dealt.probes) == ["unseen"]
        unseen = dealt.probes["unseen"]
        assert [len(part) for part in unseen.values()] == [100, 100]
        assert set(dealt.categories) == {*dealt.parts, *unseen}
        for name, category in dealt.categories.items():
            assert category == f"category {int(name[4]) % 6}"
        theirs = {dealt.categories[name] for name in dealt.parts}
        assert len(theirs) == 3 and not theirs & {dealt.categories[name] for name in unseen}

    def test_at_most_so_many_of_each_task(self, tmp_path: Path) -> None:
        """max_train of each client's, max_test of each validation, test and unseen set; the same draw again."""
        root = superni_root(tmp_path)
        whole = superni({}, root)
        dealt = superni({"max_train": 12, "max_test": 4}, root)
        sets = (
            (dealt.parts, whole.parts, 12), (dealt.validation, whole.validation, 4), (dealt.test, whole.test, 4),
            (dealt.probes["unseen"], whole.probes["unseen"], 4),
        )  # fmt: skip
        for less, more, limit in sets:
            assert list(less) == list(more)
            for name, part in less.items():
                places = [more[name].text.index(text) for text in part.text]
                assert len(places) == limit and places == sorted(set(places))
        assert dealt.own_test == dealt.test and dealt.own_validation == dealt.validation
        assert superni({"max_train": 12, "max_test": 4}, root).parts == dealt.parts
        assert len({tuple(input_of(t).split()[-1] for t in part.text) for part in dealt.probes["unseen"].values()}) == 2

    def test_the_seed_draws_the_tasks_and_the_cut(self, tmp_path: Path) -> None:
        """Over ten seeds more than one choice of clients comes out."""
        root = superni_root(tmp_path, 100)
        assert len({tuple(superni({}, root, seed).parts) for seed in range(10)}) > 3

    def test_nothing_unseen_is_no_probe(self, tmp_path: Path) -> None:
        """data.unseen = 0."""
        dealt = superni({"unseen": 0}, superni_root(tmp_path))
        assert dealt.probes == {} and set(dealt.categories) == set(dealt.parts)

    def test_task_lists_name_the_tasks(self, tmp_path: Path) -> None:
        """In their order, the first `tasks` and `unseen` of them; a short task that a draw would not take goes too."""
        root = superni_root(tmp_path)
        write_tasks(root, {"task9_x": task_file(20, "tiny")})
        (root / "train.txt").write_text("task5_x\ntask9_x\ntask0_x\ntask1_x\n")
        (root / "unseen.txt").write_text("task8_x\ntask7_x\n")
        lists = {"task_lists": ["train.txt", "unseen.txt"]}
        dealt = superni({**lists, "unseen": 1}, root)
        assert list(dealt.parts) == ["task5_x", "task9_x", "task0_x"]
        assert [len(part) for part in dealt.parts.values()] == [80, 16, 80]
        assert list(dealt.probes["unseen"]) == ["task8_x"]
        assert superni({**lists, "unseen": 0}, root).probes == {}

    def test_no_root(self) -> None:
        """The tasks are files; the hub is not asked."""
        with pytest.raises(ConfigError, match="needs --data-root with a folder superni") as error:
            deal(config_of(SUPERNI, task="causal-lm"), None)
        one_line(error)

    def test_a_classifier(self, tmp_path: Path) -> None:
        """Instructions need a language model."""
        with pytest.raises(ConfigError, match=r"set model\.task = 'causal-lm'") as error:
            deal(config_of(SUPERNI), superni_root(tmp_path))
        one_line(error)

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            ({"tasks": 9, "unseen": 1}, "9 tasks in 6 categories cannot give 9 clients and 1 unseen"),
            ({"task_lists": ["none", "none"]}, "the task list"),
            ({"task_lists": ["gone.txt", "unseen.txt"]}, r"task99_x\.json cannot be read"),
        ],
    )
    def test_what_cannot_be_dealt(self, tmp_path: Path, data: dict[str, Any], says: str) -> None:
        """Too many asked for, no such list, no such task: one line each."""
        root = superni_root(tmp_path)
        (root / "gone.txt").write_text("task99_x\n")
        (root / "unseen.txt").write_text("task8_x\n")
        with pytest.raises(DataError, match=says) as error:
            superni(data, root)
        one_line(error)

    def test_a_folder_without_tasks(self, tmp_path: Path) -> None:
        """The root is there, its folder superni is not."""
        with pytest.raises(DataError, match="superni holds no task files") as error:
            superni({}, tmp_path)
        one_line(error)

    def test_two_lists_or_none(self) -> None:
        """One list alone does not say what is unseen: refused when the configuration is read."""
        with pytest.raises(ConfigError, match=r"data\.task_lists names two files") as error:
            config_of({**SUPERNI, "task_lists": ["a"]}, task="causal-lm")
        one_line(error)

    @pytest.mark.parametrize("others", [{"train": "a.jsonl"}, {"clients": {"a": "a.jsonl"}}])
    def test_a_benchmark_and_files_at_once(self, others: dict[str, Any]) -> None:
        """One source, says config.py."""
        for task in ("sst2", "superni"):
            with pytest.raises(ConfigError, match=r"give one of data\.train") as error:
                config_of({"task": task, **others})
            one_line(error)

    @pytest.mark.parametrize("data", [{"validation": 0.3}, {"test": 0.3}, {"test": "held_out.jsonl"}])
    def test_other_shares_are_honoured_or_refused(self, tmp_path: Path, data: dict[str, Any]) -> None:
        """config.py: "validation, test: a share to hold out (of each file), or a file of its own"."""
        root = superni_root(tmp_path)
        try:
            dealt = superni(data, root)
        except FedLoRAError:
            return
        asked = {"validation": 0.1, "test": 0.1} | data
        for part in ("validation", "test"):
            assert all(len(held) == 100 * asked[part] for held in getattr(dealt, part).values())

    def test_a_task_that_is_trained_on_is_not_unseen(self, tmp_path: Path) -> None:
        """Selection: "those that nobody trains on". A task in both lists would be reported as unseen."""
        root = superni_root(tmp_path)
        (root / "train.txt").write_text("task5_x\ntask0_x\n")
        (root / "unseen.txt").write_text("task0_x\n")
        with pytest.raises(FedLoRAError):
            superni({"task_lists": ["train.txt", "unseen.txt"]}, root)

    def test_an_empty_list_of_clients(self, tmp_path: Path) -> None:
        """Nobody to train: bad input, which is one line and no StopIteration."""
        root = superni_root(tmp_path)
        (root / "train.txt").write_text("\n")
        (root / "unseen.txt").write_text("task0_x\n")
        with pytest.raises(FedLoRAError):
            superni({"task_lists": ["train.txt", "unseen.txt"]}, root)

    def test_a_task_that_is_named_twice(self, tmp_path: Path) -> None:
        """Three clients were asked for and three names are there: two clients would be another run."""
        root = superni_root(tmp_path)
        (root / "train.txt").write_text("task5_x\ntask5_x\ntask1_x\n")
        (root / "unseen.txt").write_text("task8_x\n")
        with pytest.raises(FedLoRAError):
            superni({"task_lists": ["train.txt", "unseen.txt"]}, root)
