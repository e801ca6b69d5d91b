"""Benchmarks dealt out to clients as a configuration says.

Kinds of evidence: *oracle* (small files written here in the schema of the real ones, and what must come out of them,
by hand), *contract* (nothing lost, nothing leaked, same draw twice; bad input is one line).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedlora.data import TextData, read_glue
from fedlora.errors import ConfigError, DataError, FedLoRAError
from fedlora.runs.client_data import Dealt, deal
from fedlora.runs.config import RunConfig, load_config, parse_config
from fedlora.runs.manifest import straddling
from support.benchmark_files import glue_rows, one_line, task_file, write_glue, write_tasks


def config_of(
    data: Mapping[str, Any], *, task: str = "sequence-classification", seed: int = 0, **tables: Any
) -> RunConfig:
    raw = {"model": {"name": "m", "task": task}, "data": dict(data), "run": {"seed": seed}}
    return parse_config({**raw, **{name: dict(table) for name, table in tables.items()}})


def everything(parts: Mapping[str, TextData]) -> list[str]:
    return sorted(text for part in parts.values() for text in part.text)


CLIENTS = {"count": 3, "min_examples": 2}


class TestDealGlue:
    def test_train_is_dealt_and_the_official_validation_file_is_the_test_set(self, tmp_path: Path) -> None:
        """60 rows: a share of 0.2 is 12 to choose on, 48 to train on; the test set is untouched and whole."""
        root = write_glue(tmp_path, "sst2")
        dealt = deal(config_of({"task": "sst2", "validation": 0.2}, clients=CLIENTS), root)
        even = deal(config_of({"task": "sst2", "validation": 0.2}, clients={"count": 5, "partition": "iid"}), root)
        assert [len(part) for part in even.parts.values()] == [10, 10, 10, 9, 9], "iid: sizes differ by one at most"
        train, tests = read_glue("sst2", root)
        assert list(dealt.parts) == ["site-1", "site-2", "site-3"]
        assert (sum(map(len, dealt.parts.values())), len(dealt.validation[""])) == (48, 12)
        assert sorted([*everything(dealt.parts), *dealt.validation[""].text]) == sorted(train.text)
        assert dealt.validation[""].labels is not None and sorted(dealt.validation[""].labels) == [0] * 6 + [1] * 6
        assert dealt.test == {"": tests["validation"]}
        assert not (dealt.own_validation or dealt.own_test or dealt.probes or dealt.categories)

    def test_what_contradicts_a_benchmark_is_refused(self, tmp_path: Path) -> None:
        """Validation is a share, the test sets are the official ones, and their rows have classes."""
        root = write_glue(tmp_path, "sst2")
        for data, model, says in (
            ({"validation": "held_out.jsonl"}, "sequence-classification", "a share of train"),
            ({"test": 0}, "sequence-classification", "leave data.test out"),
            ({}, "causal-lm", "is a classification task; model.task is 'causal-lm'"),
        ):
            with pytest.raises(ConfigError, match=re.escape(says)) as error:
                deal(config_of({"task": "sst2", **data}, task=model, clients={"count": 3}), root)
            assert "'sst2'" in one_line(error)

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

    def test_mnlis_second_test_set_is_a_probe(self, tmp_path: Path) -> None:
        """methods.md 12.1: MNLI-m and -mm are two validation sets of one training run; matched is the test set."""
        (folder := tmp_path / "glue" / "mnli").mkdir(parents=True)
        for name, count in {"train": 90, "validation": 12, "validation_mismatched": 9}.items():
            rows = glue_rows("mnli", count, name)
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        dealt = deal(config_of({"task": "mnli", "max_test": 10}, clients=CLIENTS), tmp_path)
        assert list(dealt.probes) == ["validation_mismatched"] and list(dealt.probes["validation_mismatched"]) == [""]
        mismatched = dealt.probes["validation_mismatched"][""]
        assert (len(dealt.test[""]), len(mismatched), len(dealt.validation[""])) == (10, 9, 9)
        assert all(text.startswith("validation ") for text in dealt.test[""].text)
        assert all(text.startswith("validation_mismatched ") for text in mismatched.text)
        assert all(text.startswith("train ") for text in (*everything(dealt.parts), *dealt.validation[""].text))


def clients_of(folder: Path, files: Mapping[str, list[dict[str, Any]]], data: str = "") -> RunConfig:
    """A config with a file for each client."""
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = ", ".join(f'{name} = "{name}.jsonl"' for name in files if not name.startswith("_"))
    path = folder / "config.toml"
    path.write_text(f'[model]\nname = "m"\n[data]\nclients = {{{sources}}}\n{data}[clients]\nranks = [2]\n')
    return load_config(path)


def numbered(*numbers: int) -> list[dict[str, Any]]:
    return [{"text": f"Text  number {k}", "label": k % 2} for k in numbers]


def test_files_of_ones_own_are_taken_as_they_are_and_counted(tmp_path: Path) -> None:
    """By hand: 3 of 8 test texts are trained on, and 2 of 4 validation texts."""
    files = {"a": numbered(*range(20)), "b": numbered(*range(100, 120)), "_val": numbered(5, 105, 800, 901)}
    files["_test"] = numbered(0, 1, 100, 900, 901, 902, 903, 904)
    config = clients_of(tmp_path, files, 'validation = "_val.jsonl"\ntest = "_test.jsonl"\n')
    dealt = deal(config, None)
    assert (len(dealt.validation[""]), len(dealt.test[""])) == (4, 8)
    assert straddling(dealt) == {
        "validation": {"examples": 4, "copies": 2},
        "test": {"examples": 8, "copies": 3},
    }


def test_one_class_is_nothing_to_tell_apart(tmp_path: Path) -> None:
    """transformers would make a regression of it, and call its squared error the loss."""
    rows = [{"text": f"t {k}", "label": "only"} for k in range(20)]
    config = clients_of(tmp_path, {"a": rows, "b": rows})
    with pytest.raises(DataError, match=r"a\.jsonl.*b\.jsonl: .*one class, 'only'") as error:
        deal(config, None)
    one_line(error)


def labelled(*names: str) -> list[dict[str, Any]]:
    return [{"text": f"t {k} {name}", "label": name} for k in range(10) for name in names]


def test_with_labels_named_a_file_may_lack_a_class(tmp_path: Path) -> None:
    """Numbers are the places in the list, in every file and every split; by hand."""
    files = {"a": labelled("no", "yes", "maybe"), "b": labelled("yes"), "c": labelled("maybe", "no")}
    config = clients_of(tmp_path, files, 'label_names = ["yes", "no", "maybe"]\nvalidation = 0.1\ntest = 0.2\n')
    dealt = deal(config, None)
    sets = [*dealt.parts.values(), *dealt.validation.values(), *dealt.own_test.values(), *dealt.test.values()]
    for part in sets:
        assert part.label_names == ("yes", "no", "maybe") and part.labels is not None
        assert all(text.endswith(part.label_names[y]) for text, y in zip(part.text, part.labels, strict=True))
    assert set(dealt.parts["b"].labels or ()) == {0} and len(dealt.own_test["b"]) == 2


def numbers(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"t {k} {label}", "label": label} for k in range(10) for label in labels]


def test_without_labels_the_classes_are_the_numbers_that_occur_by_size(tmp_path: Path) -> None:
    """By hand; the text says it."""
    classes = ("8", "9", "10")
    dealt = deal(clients_of(tmp_path, {"a": numbers(10, "9"), "b": numbers("9", 8)}), None)
    for part in [*dealt.parts.values(), *dealt.validation.values(), *dealt.test.values()]:
        assert part.label_names == classes and part.labels is not None
        assert [text.split()[-1] for text in part.text] == [classes[y] for y in part.labels]


def test_files_without_a_class_in_common_are_named_with_the_way_out(tmp_path: Path) -> None:
    """Both files, what each has, and a line that makes it run where it is pasted; also one number in two spellings."""
    files = {"a": numbers(10, 2), "b": numbers(3)}
    with pytest.raises(ConfigError, match=r"b\.jsonl has \['3'\], .*a\.jsonl has \['2', '10'\]") as error:
        deal(clients_of(tmp_path, files), None)
    line = re.search(r"set (data\.label_names = \[.*\])\.", one_line(error))
    assert line is not None
    dealt = deal(clients_of(tmp_path, files, line[1].removeprefix("data.") + "\n"), None)
    assert dealt.parts["a"].label_names == ("2", "3", "10")
    with pytest.raises(ConfigError, match=r"b\.jsonl .*'\+1', .*a\.jsonl .*'1'"):
        deal(clients_of(tmp_path, {"a": numbers("0", "1"), "b": numbers("0", "+1")}), None)


SUPERNI = {"task": "superni", "tasks": 3, "unseen_tasks": 2, "task_lists": ["train.txt", "unseen.txt"]}


def superni_root(root: Path) -> Path:
    """Seven tasks, the last one short, of six categories; every question says which task it is of."""
    tasks = {}
    for k in range(7):
        raw = task_file(category=f"category {k % 6}")
        raw["Instances"] = [
            {"id": f"{k}-{j}", "input": f"task {k} asks {j}", "output": [f"{j}", f"number {j}"]}
            for j in range(20 if k == 6 else 100)
        ]
        tasks[f"task{k}_x"] = raw
    write_tasks(root, tasks)
    (root / "train.txt").write_text("task5_x\ntask6_x\ntask0_x\ntask1_x\n")
    (root / "unseen.txt").write_text("task2_x\ntask4_x\ntask3_x\n")
    return root


def input_of(prompt: str) -> str:
    return prompt.partition("### Input:\n")[2].partition("\n\n### Response:")[0]


def superni(data: Mapping[str, Any], root: Path) -> Dealt:
    return deal(config_of({**SUPERNI, **data}, task="causal-lm"), root)


class TestDealSuperni:
    def test_each_task_of_the_list_is_a_client_cut_8_to_1_to_1(self, tmp_path: Path) -> None:
        """The first `tasks` of the list, in its order (methods.md 12.5); each question says whose it is."""
        dealt = superni({}, superni_root(tmp_path))
        assert list(dealt.parts) == ["task5_x", "task6_x", "task0_x"]
        for name, count in (("task5_x", 100), ("task6_x", 20), ("task0_x", 100)):
            parts = (dealt.parts[name], dealt.validation[name], dealt.test[name])
            assert [len(part) for part in parts] == [count * 8 // 10, count // 10, count // 10]
            asked = [input_of(text) for part in parts for text in part.text]
            assert sorted(asked) == sorted(f"task {name[4]} asks {j}" for j in range(count))
            for part in parts:
                for text, said, right in zip(part.text, part.responses or (), part.references or (), strict=True):
                    j = input_of(text).split()[-1]
                    assert (said, right) == (j, (j, f"number {j}"))

    def test_what_a_client_is_measured_on_and_what_nobody_trains_on(self, tmp_path: Path) -> None:
        """Its own held-out sets are the common sets of its task; the unseen tasks are whole."""
        root = superni_root(tmp_path)
        dealt = superni({}, root)
        assert dealt.own_validation == dealt.validation and dealt.own_test == dealt.test
        assert set(dealt.validation) == set(dealt.test) == set(dealt.parts)
        assert {name: [*map(len, part.values())] for name, part in dealt.probes.items()} == {"unseen": [100, 100]}
        assert list(dealt.probes["unseen"]) == ["task2_x", "task4_x"]
        assert set(dealt.categories) == {*dealt.parts, *dealt.probes["unseen"]}
        assert all(category == f"category {int(name[4]) % 6}" for name, category in dealt.categories.items())
        assert superni({"unseen_tasks": 0}, root).probes == {}

    def test_what_cannot_be_dealt(self, tmp_path: Path) -> None:
        """One line each: no lists, more than they name, a task in both; no folder of files, and a classifier."""
        root = superni_root(tmp_path)
        (root / "both.txt").write_text("task0_x\ntask2_x\n")
        for data, says in (
            ({"task_lists": []}, r"needs data\.task_lists"), ({"tasks": 9}, "4 and 3 tasks, .* data.tasks = 9"),
            ({"task_lists": ["train.txt", "both.txt"]}, "'task0_x' twice"),
        ):  # fmt: skip
            with pytest.raises(FedLoRAError, match=says) as error:
                superni(data, root)  # type: ignore[arg-type]
            one_line(error)
        with pytest.raises(ConfigError, match="needs --data-root"):
            deal(config_of(SUPERNI, task="causal-lm"), None)
        with pytest.raises(ConfigError, match=r"model\.task = 'causal-lm'"):
            deal(config_of(SUPERNI), root)
