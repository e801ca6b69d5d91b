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

from fedlora.data import TextData, list_tasks, read_glue, select_tasks
from fedlora.errors import ConfigError, DataError, FedLoRAError
from fedlora.runs.client_data import Dealt, deal
from fedlora.runs.config import RunConfig, load_config, parse_config
from fedlora.runs.manifest import straddling
from support.benchmark_files import glue_rows, one_line, task_file, write_glue, write_tasks
from support.stand_in_hub import Hub, HubRows


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


SUPERNI = {"task": "superni", "tasks": 3, "unseen_tasks": 2}


@pytest.mark.parametrize(
    ("data", "task", "says"),
    [
        ({"task": "sst2", "validation": 0}, "sequence-classification", "its own test set"),
        ({"task": "sst2", "test": 0.2}, "sequence-classification", "leave data.test out"),
        ({"task": "sst2"}, "causal-lm", "is a classification task; model.task is 'causal-lm'"),
        ({"task": "sst2", "max_train": 9}, "sequence-classification", "8 examples"),  # too few for 3 clients of 8 each
        ({**SUPERNI, "test": "t.jsonl"}, "causal-lm", "must be shares"),
        (SUPERNI, "classification", "set model.task = 'causal-lm'"),
        (SUPERNI, "causal-lm", "no task files"),
        ({"train": "demo", "label_names": ["no", "yes"]}, "sequence-classification", "the demo's classes are"),
    ],
)
def test_what_cannot_be_dealt_is_one_line(tmp_path: Path, data: dict[str, Any], task: str, says: str) -> None:
    root = write_glue(tmp_path, "sst2")
    with pytest.raises(FedLoRAError, match=re.escape(says)) as error:
        deal(config_of(data, task=task, clients={"count": 3}), root)
    one_line(error)


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
    """By hand: 3 of 8 test texts are trained on, 2 of 4 validation texts, and one is in both held-out files."""
    files = {"a": numbered(*range(20)), "b": numbered(*range(100, 120)), "_val": numbered(5, 105, 800, 901)}
    files["_test"] = numbered(0, 1, 100, 900, 901, 902, 903, 904)
    config = clients_of(tmp_path, files, 'validation = "_val.jsonl"\ntest = "_test.jsonl"\n')
    dealt = deal(config, None)
    assert (len(dealt.validation[""]), len(dealt.test[""])) == (4, 8)
    assert straddling(dealt) == {
        "validation": {"examples": 4, "in training": 2},
        "test": {"examples": 8, "in training": 3, "in validation": 1},
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


@pytest.mark.parametrize("kind", [int, str])
def test_without_labels_the_classes_are_those_that_occur_numbers_by_size(tmp_path: Path, kind: type) -> None:
    """By hand; the text says its class. At most 20 to train on, and 3 to test on, of each client."""
    files = {"a": numbers(*map(kind, (10, 9))), "b": numbers(*map(kind, (9, 8)))}
    dealt = deal(clients_of(tmp_path, files, "max_train = 12\nmax_test = 1\n"), None)
    assert [len(part) for part in (*dealt.parts.values(), *dealt.own_test.values())] == [12, 12, 1, 1]
    for part in [*dealt.parts.values(), *dealt.validation.values(), *dealt.test.values()]:
        assert part.label_names == ("8", "9", "10") and part.labels is not None
        assert [text.split()[-1] for text in part.text] == [part.label_names[y] for y in part.labels]


def test_files_without_a_class_in_common_are_told_with_the_way_out(tmp_path: Path) -> None:
    """Both files, what each has, and a line that makes it run where it is pasted."""
    files = {"a": numbers(10, 2), "b": numbers(3)}
    with pytest.raises(ConfigError, match=r"a\.jsonl has \['2', '10'\], .*b\.jsonl|b\.jsonl has .*a\.jsonl") as error:
        deal(clients_of(tmp_path, files), None)
    line = re.search(r"set (data\.label_names = \[.*\])\.", one_line(error))
    assert line is not None
    dealt = deal(clients_of(tmp_path, files, line[1].removeprefix("data.") + "\n"), None)
    assert dealt.parts["a"].label_names == ("2", "3", "10")


@pytest.mark.parametrize("value", ["Yes", 0, True])
def test_a_class_that_nobody_named_is_an_error_with_its_row(tmp_path: Path, value: Any) -> None:
    """Also a number: by itself it does not say whose numbering it is of."""
    rows = [*labelled("no", "yes"), {"text": "t", "label": value}]
    says = r"a\.jsonl, row 21, line 21: label .* 2 classes .*data\.label_names, \['no', 'yes'\]"
    with pytest.raises(DataError, match=says) as error:
        deal(clients_of(tmp_path, {"a": rows}, 'label_names = ["no", "yes"]\n'), None)
    assert "label_names" not in one_line(error), "the reader's own argument is nothing that a config has"


def test_one_number_in_two_spellings_in_two_files(tmp_path: Path) -> None:
    config = clients_of(tmp_path, {"a": numbers("0", "1"), "b": numbers("0", "+1")})
    with pytest.raises(ConfigError, match=r"b\.jsonl .*'\+1', .*a\.jsonl .*'1'") as error:
        deal(config, None)
    assert 'data.label_names = ["0", "+1", "1"]' in one_line(error)


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

    def test_task_lists_name_the_tasks(self, tmp_path: Path) -> None:
        """In their order, the first `tasks` and `unseen` of them; a short task that a draw would not take goes too."""
        root = superni_root(tmp_path)
        write_tasks(root, {"task9_x": task_file(20, "tiny")})
        (root / "train.txt").write_text("task5_x\ntask9_x\ntask0_x\ntask1_x\n")
        (root / "unseen.txt").write_text("task8_x\ntask7_x\n")
        lists = {"task_lists": ["train.txt", "unseen.txt"]}
        dealt = superni({**lists, "unseen_tasks": 1}, root)
        assert list(dealt.parts) == ["task5_x", "task9_x", "task0_x"]
        assert [len(part) for part in dealt.parts.values()] == [80, 16, 80]
        assert list(dealt.probes["unseen"]) == ["task8_x"]
        assert superni({**lists, "unseen_tasks": 0}, root).probes == {}

    @pytest.mark.parametrize(
        ("clients", "unseen"), [("task5_x task0_x", "task0_x"), ("", "task0_x"), ("task5_x task5_x task1_x", "task8_x")]
    )
    def test_lists_that_are_no_selection_are_refused(self, tmp_path: Path, clients: str, unseen: str) -> None:
        """A task that is trained on is not unseen; nobody to train; a task that is named twice."""
        root = superni_root(tmp_path)
        for name, tasks in (("train.txt", clients), ("unseen.txt", unseen)):
            (root / name).write_text("".join(f"{task}\n" for task in tasks.split()))
        with pytest.raises(FedLoRAError):
            superni({"task_lists": ["train.txt", "unseen.txt"]}, root)
        assert superni({"unseen_tasks": 0}, root).probes == {}, (
            "without lists the seed draws, and nothing unseen is no probe"
        )
