"""`fedlora compare`: several methods on one configuration, as an experiment of one axis.

Kinds: *end-to-end* (real runs on tiny transformers), *contract* (bad input is one line and exit code 2).
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedlora
from fedlora import build
from fedlora.cli.typed import parse_only, parse_seeds
from fedlora.errors import ConfigError
from fedlora.experiments.results import read
from fedlora.runs.folder import RunFolder
from support.command_line import Said, drawing, invoke
from support.projects import contents, without_seconds

LEFT = {"runs", "results.jsonl", "comparison.png", "comparison-differences.png"}
METHODS = ("glora", "svd", "glora rho=0.5")
JSON = ("--format", "json")


def compare(project: Path, out: Path, *more: object, methods: str = ",".join(METHODS), code: int = 0) -> Any:
    sets = ("--set", "run.rounds=2", "--set", "train.max_steps=2")
    return invoke("compare", project / "config.toml", "--methods", methods, "--out", out, *sets, *more, code=code)


@pytest.fixture(scope="module")
def compared(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Three methods on three seeds; and FedIT, which cannot serve ranks 2, 4, 4."""
    out = tmp_path_factory.mktemp("compared") / "runs"
    with drawing():
        return out, compare(project, out, "--seeds", "0:3", methods="glora,fedit,svd,glora  rho=0.5")


def summaries(out: Path) -> dict[tuple[str, int], Any]:
    """Method and seed -> what the run's own folder says."""
    found = {}
    for digest, line in read(out / "results.jsonl").items():
        found[line["cell"]["method"], line["seed"]] = RunFolder(out / "runs" / digest).read_json("summary.json")
    return found


def table(said: Any, about: str) -> dict[str, dict[str, Any]]:
    """Method -> its row of the table that begins so; from JSON."""
    each = [one for one in json.loads(said.stdout)["tables"] if about in one["about"]]
    return {row["method"]: row for row in each[0]["rows"]}


def test_means_and_differences_are_those_of_the_runs_own_files(compared: tuple[Path, Any], project: Path) -> None:
    """Paired with the first method. Intervals: tests/experiments."""
    out, own = compared[0], summaries(compared[0])
    said = compare(project, out, "--seeds", "0:3", "--resume", *JSON, methods="svd,glora,glora rho=0.5")
    scores, gaps = table(said, "mean over seeds"), table(said, "less that of svd")
    mean = {m: statistics.fmean(own[m, seed]["test"]["best"]["accuracy"] for seed in range(3)) for m in METHODS}
    assert {m: scores[m]["mean"] for m in METHODS} == pytest.approx(mean)
    others = [m for m in METHODS if m != "svd"]
    assert {m: gaps[m]["difference"] for m in gaps} == pytest.approx({m: mean[m] - mean["svd"] for m in others})


def test_what_cannot_run_is_named_before_the_others_take_hours(compared: tuple[Path, Any]) -> None:
    out, result = compared
    assert "fedit not run: " in result.stderr and result.stdout.count("fedit not run: ") == 1
    assert result.stderr.index("fedit not run: ") < result.stderr.index("glora, seed 0 done")
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == LEFT
    assert (out / "comparison.png").stat().st_size > 5000
    assert "…" not in result.stdout, "every number whole off a terminal"


def test_every_method_has_the_same_clients_data_and_start_and_one_thread(compared: tuple[Path, Any]) -> None:
    out = compared[0]
    mine = [digest for digest, line in read(out / "results.jsonl").items() if line["seed"] == 0]
    manifests = [RunFolder(out / "runs" / digest).read_json("manifest.json") for digest in mine]
    assert len(mine) == 3
    for key in ("data", "clients", "model", "seed"):
        assert all(manifest[key] == manifests[0][key] for manifest in manifests)
    assert {manifest["threads"] for manifest in manifests} == {1}
    first = [RunFolder(out / "runs" / digest).metrics()[0]["losses"] for digest in mine]
    assert first[0] == first[1] == first[2], "in the first round all methods hand out the same start"
    assert {manifest["method"] for manifest in manifests} == {
        *map(repr, (build("glora"), build("svd"), build("glora", rho=0.5)))
    }


def test_more_seeds_extend_a_comparison_and_nothing_is_run_twice(compared: tuple[Path, Any], project: Path) -> None:
    out = compared[0]
    before = contents(out / "runs")
    said = compare(project, out, "--seeds", "0:4", "--resume", *JSON, methods="glora,svd")
    after = contents(out / "runs")
    assert {name: after[name] for name in before} == before and len({*after} - {*before}) > 0
    assert {row["n"] for row in table(said, "mean over seeds").values()} == {4}
    runs = fedlora.results(out)
    assert sorted(runs[runs.method == "svd"].seed) == [0, 1, 2, 3]
    again = compare(project, out, "--seeds", "0:4", "--resume", *JSON, methods="glora,svd")
    assert without_seconds(json.loads(again.stdout)) == without_seconds(json.loads(said.stdout))


def test_a_folder_with_runs_and_a_picture_of_others_stay_as_they_are(
    compared: tuple[Path, Any], project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    words = ("compare", project / "config.toml", "--methods", "glora", "--out")
    before = contents(compared[0])
    assert "already holds a run" in main(*words, compared[0]).complaint()
    assert contents(compared[0]) == before
    (tmp_path / "comparison.png").write_bytes(b"of a paper")
    assert "did not draw it" in main(*words, tmp_path).complaint()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of a paper"]


def test_csv_parses_and_a_verdict_needs_a_margin(compared: tuple[Path, Any], project: Path) -> None:
    again = ("--seeds", "0:3", "--resume", "--format", "csv")
    said = compare(project, compared[0], *again, "--margin", "0.5")
    rows = list(csv.DictReader(io.StringIO(said.stdout)))
    assert [row["method"] for row in rows] == list(METHODS) and rows[0]["difference"] == ""
    assert {row["verdict"] for row in rows[1:]} <= {"equivalent", "undecided", "better", "worse"}
    assert "verdict" not in compare(project, compared[0], *again).stdout and "Holm" in said.stderr


def test_a_search_is_on_a_seed_of_its_own(project: Path, tmp_path: Path) -> None:
    """A rate of 1e30 diverges: its uploads are refused, and it is never chosen. The chosen value is a column."""
    more = ("--tune", "train.learning_rate=1e-2,1e30", "--seeds", "0", *JSON)
    said = compare(project, tmp_path / "runs", *more, methods="svd")
    lines = read(tmp_path / "runs" / "results.jsonl").values()
    assert {(line["seed"], line["stage"]) for line in lines} == {(1000, "search"), (0, "run")}
    assert table(said, "mean over seeds")["svd"]["train.learning_rate"] == 1e-2 and "failed: " in said.stdout


def test_nothing_that_can_run_is_an_error(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    said = main("compare", project / "config.toml", "--methods", "fedit,fedrot-lora", "--out", tmp_path / "runs")
    assert "no method could run: fedit not run: " in said.error() and "fedrot-lora not run: " in said.error()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--methods", "glora,glroa,svd rho=1"), "did you mean 'glora'"),
        (("--methods", "svd", "--set", "method.rho=0.5"), "--set method.... "),
        (("--seeds", "0:2", "--set", "run={seed=1}"), "run.seed"),
        (("--tune", "train.learning_rate=1,2", "--set", "data.validation=0"), "data.validation = 0 leaves nothing"),
        (("--tune", "train.learning_rate=1,2", "--set", "train.learning_rate=1"), "train.learning_rate is set twice"),
        (("--tune", "train.learning_rate=1e-3,0.001"), "names 0.001 twice"),
    ],
)
def test_what_contradicts_itself_is_one_line_and_runs_nothing(
    project: Path, tmp_path: Path, main: Callable[..., Said], args: tuple[str, ...], says: str
) -> None:
    command = ("compare", project / "config.toml", "--methods", "glora,flexlora", "--out", tmp_path / "runs")
    assert says in main(*command, *args).error() and not (tmp_path / "runs").exists()


def test_seeds_and_labels_as_they_are_typed() -> None:
    """By hand; half-open as Python's ranges. A label may have commas."""
    assert [parse_seeds(text, "--seeds") for text in ("0:3", "0,3,5", "7")] == [[0, 1, 2], [0, 3, 5], [7]]
    for text, says in (("3:3", "names no seed"), ("1,1", "a seed twice"), ("a", "takes seeds as"),
                       ("0:99999999999", "99,999,999,999 seeds")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            parse_seeds(text, "--seeds")
    axes = {"task": (), "method": ()}
    assert parse_only("task=a, b,method=c,method=d", axes) == {"task": ["a, b"], "method": ["c", "d"]}
    with pytest.raises(ConfigError, match="AXIS=LABEL"):
        parse_only("nothing", axes)
