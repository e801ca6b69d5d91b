"""`fedlora compare --seeds`: intervals, two workers, searches, formats, kills. Kinds: oracle (scipy), end-to-end."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

import fedlora.runs.preparation
from fedlora.cli.grid_parts import parse_seeds
from fedlora.errors import ConfigError, DataError
from fedlora.runs.folder import RunFolder
from support.command_line import Said, cells, drawing, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import contents, pixels, without_seconds, written

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
METHODS = ("glora", "svd", "padded-average")


def compare(
    project: Path, out: Path, *more: object, methods: str = ",".join(METHODS), rounds: int = 2, steps: int = 2,
    code: int = 0,
) -> Any:  # fmt: skip
    sets = ("--set", f"run.rounds={rounds}", "--set", f"train.steps={steps}", "--set", "train.batch_size=8")
    return invoke("compare", project / "config.toml", "--methods", methods, "--out", out, *sets, *more, code=code)


@pytest.fixture(scope="module")
def compared(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Three methods on three seeds, with one worker; and FedIT, which cannot serve ranks 2, 4, 4."""
    out = tmp_path_factory.mktemp("compared") / "runs"
    with drawing():
        return out, compare(project, out, "--seeds", "0:3", methods="glora,fedit,svd,padded-average")


def stored(out: Path, method: str, seeds: Any, where: str = "test", which: str = "best") -> list[float]:
    summaries = [RunFolder(out / method / f"seed-{seed}").read_json("summary.json") for seed in seeds]
    return [s[where][which]["accuracy"] for s in summaries]


def test_means_and_paired_intervals_are_scipys(compared: tuple[Path, Any], project: Path) -> None:
    """Of the runs' own summary.json; p of the paired t test; the reference is the first, or the one that is named."""
    out, _ = compared
    for reference in ("glora", "svd"):
        said = json.loads(
            compare(project, out, "--seeds", "0:3", "--resume", "--json", "--reference", reference).stdout
        )
        for label, found in said["methods"].items():
            scores = stored(out, label, range(3))
            assert found["scores"] == {str(seed): pytest.approx(x, abs=1e-12) for seed, x in enumerate(scores)}
            assert (found["n"], found["mean"]) == (3, pytest.approx(statistics.fmean(scores)))
            assert found["sd"] == pytest.approx(statistics.stdev(scores))
        assert said["reference"] == reference
        assert [d["other"] for d in said["differences"]] == [m for m in METHODS if m != reference]
        for d in said["differences"]:
            test = stats.ttest_rel(stored(out, d["other"], range(3)), stored(out, reference, range(3)))
            interval = test.confidence_interval(0.95)
            if d["low"] < d["high"]:
                assert (d["low"], d["high"]) == pytest.approx((interval.low, interval.high))
                assert d["p"] == pytest.approx(test.pvalue) and d["decided"] == (test.pvalue < 0.05)


def test_places_in_json_have_the_direction_of_their_number(project: Path, tmp_path: Path) -> None:
    """By hand, of the runs' own files: of a loss the smaller is first, and of a number of rounds the fewer; who never
    gets there is last."""
    out, both = tmp_path / "runs", ("glora", "ffa-lora")
    loss = ("--seeds", "0:2", "--set", "evaluate.metric=loss", "--json", "--metric")

    def places(metric: str, *more: str) -> Any:
        said = compare(project, out, *loss, metric, *more, methods=",".join(both), steps=4)
        return json.loads(said.stdout)["places"]

    never = 99.0  # more than any loss here

    def counted(each: dict[str, list[float]]) -> dict[str, list[int]]:
        pairs = {m: list(zip(each[m], each[n], strict=True)) for m, n in (both, both[::-1])}
        first = {m: sum(x <= y and x < never for x, y in of) for m, of in pairs.items()}
        return {m: [first[m], 2 - first[m]] for m in both}

    found = places("test, last")
    last = {m: [RunFolder(out / m / f"seed-{s}").read_json("summary.json")["test"]["last"]["loss"] for s in range(2)]
            for m in both}  # fmt: skip
    assert found == counted(last) and found["glora"][0] != found["ffa-lora"][0], "they differ, so a direction shows"
    curves = {m: [[line["metrics"]["loss"] for line in RunFolder(out / m / f"seed-{s}").metrics()] for s in range(2)]
              for m in both}  # fmt: skip
    between = (min(c[0][0] for c in curves.values()) + max(c[0][0] for c in curves.values())) / 2
    rounds = {m: [next((k for k, x in enumerate(curve) if x <= between), never) for curve in curves[m]] for m in both}
    assert places(f"rounds to {between}", "--resume") == counted(rounds)


def test_what_people_see(compared: tuple[Path, Any]) -> None:
    """Every number whole off a terminal; the reference, undecided and the number of comparisons in words; a method that
    cannot run once, not once a seed."""
    out, result = compared
    said = result.stdout
    assert "…" not in said and said.count("fedit not run:") == 1
    assert "against glora" in said
    scores = stored(out, "svd", range(3))
    shown = f"{statistics.fmean(scores):.4f} ± {statistics.stdev(scores):.4f}"
    rows = [cells(line) for line in said.splitlines() if line.startswith("│ svd ")]
    assert [rows[0][k] for k in (0, 1, -1)] == ["svd", shown, "3"]
    assert len(rows) == 4, "scores, difference, places, costs"
    assert " 10 %" in said and rows[1][-1] in ("higher", "lower", "undecided", "no spread", "equal")
    assert "Smaller is better" not in said and sum(int(n) for n in rows[2][1:4]) == 3
    assert min(pixels(out / "comparison.png").shape[:2]) > 500
    assert sorted(path.name for path in (out / "svd").iterdir()) == ["seed-0", "seed-1", "seed-2"]


def test_csv_parses_and_markdown_is_whole(compared: tuple[Path, Any], project: Path) -> None:
    out, _ = compared
    again = ("--seeds", "0:3", "--resume", "--format")
    value = json.loads(compare(project, out, *again, "json").stdout)
    read = list(csv.DictReader(io.StringIO(compare(project, out, *again, "csv").stdout)))
    assert [row["method"] for row in read] == list(METHODS)
    assert {(row["metric"], row["score"]) for row in read} == {("test, best", "accuracy")}
    assert (value["metric"], value["score"], value["smaller_is_better"]) == ("test, best", "accuracy", False)
    for row in read:
        assert float(row["mean"]) == value["methods"][row["method"]]["mean"] and int(row["n"]) == 3
    assert read[0]["difference"] == "" and float(read[1]["difference"]) == value["differences"][0]["mean"]
    markdown = compare(project, out, *again, "markdown").stdout
    table = [line for line in markdown.splitlines() if line.startswith("| svd |")]
    assert len(table) == 4 and f"| {value['methods']['svd']['mean']:.4f} ± " in table[0]
    assert "| :--- | ---: |" in markdown and "against glora" in markdown


def test_more_seeds_extend_a_comparison(compared: tuple[Path, Any], project: Path) -> None:
    """Only seed 3 is run; without --resume nothing is."""
    out, _ = compared
    before = contents(out)
    said = json.loads(compare(project, out, "--seeds", "0:4", "--resume", "--json", methods="glora,svd").stdout)
    after = contents(out)
    gathered = before.pop("results.jsonl"), after.pop("results.jsonl")
    assert {name: after[name] for name in before} == before and gathered[0] != gathered[1]
    new = {name.rsplit("/", 1)[0].split("/")[1] for name in set(after) - set(before) if not name.startswith(".claims/")}
    assert new == {"seed-3"}
    assert said["seeds"] == [0, 1, 2, 3] and said["methods"]["svd"]["n"] == 4


def test_a_search_chooses_on_validation_and_on_seeds_of_its_own(project: Path, tmp_path: Path) -> None:
    """By the search's own summaries; the best at an end of the grid is said, and where both are level that."""
    out = tmp_path / "runs"
    result = compare(project, out, "--tune", "train.lr=1e-5,2e-2", "--seeds", "0", methods="glora,svd", rounds=1)
    for method in ("glora", "svd"):
        found = {
            value: stored(out, f"{method}/search/train.lr={value}", [1000], "validation")[0]
            for value in ("1e-05", "0.02")
        }
        best = max(found, key=lambda value: (found[value], -float(value)))
        assert sorted(path.name for path in (out / method).iterdir()) == ["search", f"train.lr={best}"]
        assert [path.name for path in (out / method / f"train.lr={best}").iterdir()] == ["seed-0"]
        end = "largest" if best == "0.02" else "smallest"
        told = "1e-05, 0.02 tie" if len({*found.values()}) == 1 else f"{best}, the {end} tried"
        assert re.search(rf"train\.lr = {told}.* for .*{method}", result.stdout)
    assert "on validation, on seed 1000, " in result.stdout


def test_a_failing_run_is_named_and_the_others_go_on(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of ours in one line; anything else kept with its traceback. No mean is taken of what is left, and the
    exit code says that a run is missing. --resume tries again."""
    real = fedlora.runs.preparation.prepare

    def prepare(config: Any, *rest: Any) -> Any:
        if (config.method.name, config.run.seed) == ("svd", 1):
            raise DataError("site-2 would have 3 examples.")
        if (config.method.name, config.run.seed) == ("glora", 0):
            raise RuntimeError("out of paper")
        return real(config, *rest)

    out = tmp_path / "runs"
    with monkeypatch.context() as patched:
        patched.setattr("fedlora.runs.preparation.prepare", prepare)
        more = ("--seeds", "0:2", "--reference", "svd")
        said = compare(project, out, *more, methods="glora,svd", rounds=1, code=1).stdout
    assert "Incomplete: 2 of 4 " in said and "svd failed on seed 1: site-2 " in said
    assert "glora failed on seed 0: RuntimeError: " in said
    rows = [cells(line) for line in said.splitlines() if line.startswith("│ glora ")]
    assert rows[0][-1] == "1 of 2" and "1 of 2 have a number" in rows[0][1] and "±" not in rows[0][1]
    assert [path.name for path in (out / "failures").iterdir()] == ["glora_seed-0.json"]
    assert "out of paper" in (out / "failures" / "glora_seed-0.json").read_text()
    again = json.loads(
        compare(project, out, "--seeds", "0:2", "--resume", "--json", methods="glora,svd", rounds=1).stdout
    )
    assert [found["n"] for found in again["methods"].values()] == [2, 2] and again["failed"] == []


def test_a_value_of_a_search_that_fails_is_dropped_and_the_method_goes_on(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train.lr = 1e30 diverges by itself: its uploads are refused. svd's others fail too, so that svd has nothing;
    glora goes on with the values that ran. Two values that agree to six digits have folders of their own."""
    real = fedlora.runs.preparation.prepare

    def prepare(config: Any, *rest: Any) -> Any:
        if config.method.name == "svd" and config.train.lr < 1:
            raise DataError("out of paper.")
        return real(config, *rest)

    monkeypatch.setattr("fedlora.runs.preparation.prepare", prepare)
    tune = ("--tune", "train.lr=0.01,0.0100000001,1e30", "--seeds", "0")
    result = compare(project, tmp_path / "runs", *tune, "--json", methods="glora,svd", rounds=1, code=1)
    said, search = json.loads(result.stdout), tmp_path / "runs" / "glora" / "search"
    assert {path.name for path in search.iterdir()} >= {"train.lr=0.01", "train.lr=0.0100000001"}
    assert list(said["methods"]) == ["glora"] and said["methods"]["glora"]["n"] == 1
    assert said["methods"]["glora"]["tuned"] in (0.01, 0.0100000001) and said["failed"] == []
    assert any(w.startswith("glora: train.lr = 1e+30 is dropped") for w in said["dropped"])
    assert any(w.startswith("svd: train.lr = 0.0100000001 is dropped") for w in said["dropped"])
    assert list(said["refused"]) == ["svd"] and "train.lr = 0.01, 0.0100000001, 1e+30 " in said["refused"]["svd"]
    assert "svd not run: " in result.stderr


def test_a_value_that_the_machine_failed_is_waited_for(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under one value of glora's search: nothing is chosen without it, svd goes on; --resume mends it."""
    real = fedlora.runs.preparation.prepare

    def prepare(config: Any, *rest: Any) -> Any:
        if config.method.name == "glora" and config.train.lr == 0.01:
            raise OSError(28, "No space left on device")
        return real(config, *rest)

    args = ("--tune", "train.lr=0.01,0.02", "--json")
    with monkeypatch.context() as patched:
        patched.setattr("fedlora.runs.preparation.prepare", prepare)
        result = compare(project, tmp_path / "runs", *args, methods="glora,svd", rounds=1, code=1)
    said = json.loads(result.stdout)
    assert list(said["methods"]) == ["svd"] and said["dropped"] == []
    assert said["failed"][0]["cell"] == {"method": "glora"} and "No space left" in said["failed"][0]["why"]
    assert re.search("glora: .* waits for train.lr = 0.01, .* seed 1000", result.stderr)
    again = json.loads(compare(project, tmp_path / "runs", *args, "--resume", methods="glora,svd", rounds=1).stdout)
    assert list(again["methods"]) == ["glora", "svd"] and again["failed"] == []


def test_by_loss_it_is_said_that_smaller_is_better(project: Path, tmp_path: Path) -> None:
    """The same method by two names is level on every seed: both first, the difference is equal, and ties are told."""
    more = ("--seeds", "0,1", "--set", "evaluate.metric=loss")
    said = compare(project, tmp_path / "runs", *more, methods="glora,glora rho=1.0", rounds=1, steps=1).stdout
    assert "Places by seed, by log-loss" in said and "Smaller is better" in said
    rows = [cells(line) for line in said.splitlines() if line.startswith("│ glora ")]
    assert ["glora", "2", "0", "1.00"] in rows and "share the better place" in said
    (gap,) = [cells(line) for line in said.splitlines() if line.startswith("│ glora rho=1.0 ") and "+0.0000" in line]
    assert gap == ["glora rho=1.0", "+0.0000", "none", "2", "equal"]


def test_runs_of_other_data_are_not_compared(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    """A file that changes between two calls: said before more is run; and where all is there, before anything is told.
    A finished run that cannot be read is named with what to do."""
    lines = (project / "train.jsonl").read_text().splitlines(keepends=True)
    data, out = tmp_path / "d.jsonl", tmp_path / "runs"
    data.write_text("".join(lines))
    args = ("--set", f"data.train={data}", "--set", "run.rounds=1", "--out", out)
    both = ("compare", project / "config.toml", "--methods", "glora,svd", *args)
    invoke("compare", project / "config.toml", "--methods", "glora", *args)
    data.write_text("".join(lines[1:]))
    before = contents(out)
    assert re.search("glora/seed-0/.*the data of ", main(*both, "--resume").complaint())
    assert contents(out) == before
    invoke("compare", project / "config.toml", "--methods", "svd", *args[:-1], tmp_path / "other")
    (tmp_path / "other" / "svd").rename(out / "svd")
    assert re.search("glora/seed-0/.*the data of ", main(*both, "--resume").complaint()), (
        "with nothing left to run, too"
    )
    data.rename(tmp_path / "aside.jsonl")  # what is finished is compared without its files
    assert re.search("glora, seed 0 and svd, seed 0 .*the data of ", main(*both, "--resume").error())
    (tmp_path / "aside.jsonl").rename(data)
    for name, text in (("metrics.jsonl", '{"round"\n'), ("summary.json", "{}")):
        (out / "svd" / "seed-0" / name).write_text(text)
        assert "Delete that folder" in main(*both, "--resume").complaint()
    (out / "svd" / "seed-0" / "manifest.json").write_text("[]")
    data.write_text("".join(lines))
    said = invoke(*both, "--resume", code=1).stdout
    assert "svd failed on seed 0: " in said and "manifest.json" in said


def test_a_result_without_its_digests_is_made_again(compared: tuple[Path, Any], project: Path, tmp_path: Path) -> None:
    """Another seed's summary in its place was believed where SHA256SUMS was gone, too. Reference: the runs before."""
    out, words = tmp_path / "runs", ("--seeds", "0,1", "--resume", "--json")
    shutil.copytree(compared[0] / "svd", out / "svd")
    before = json.loads(compare(project, out, *words, methods="svd").stdout)
    (out / "svd" / "seed-0" / "SHA256SUMS").unlink()
    shutil.copy(out / "svd" / "seed-1" / "summary.json", out / "svd" / "seed-0")
    after = json.loads(compare(project, out, *words, methods="svd").stdout)
    assert without_seconds(after) == without_seconds(before)
    assert (out / "svd" / "seed-0" / "SHA256SUMS").is_file()


def test_a_run_of_another_configuration_is_not_taken_for_the_one_that_is_asked(
    project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """With data files of one's own: more rounds are played, for a run may be extended; another rate is named."""
    words = ["compare", project / "config.toml", "--methods", "svd", "--out", tmp_path / "runs", "--json"]
    invoke(*words, "--set", "run.rounds=1")
    longer = json.loads(invoke(*words, "--set", "run.rounds=2", "--resume").stdout)
    fresh = json.loads(invoke(*words[:4], "--out", tmp_path / "fresh", "--json", "--set", "run.rounds=2").stdout)
    assert without_seconds(longer) == without_seconds(fresh)
    said = main(*words, "--set", "run.rounds=2", "--set", "train.lr=0.5", "--resume").complaint()
    assert re.search(r"svd.* train\.lr .*0\.5", said), "once, and before the first run is begun"


# ---- kills -----------------------------------------------------------------------------------------------------------


def workers(parent: int) -> list[int]:
    """The processes that work for `parent`: children of the server that it has them forked from."""
    servers = [child for child in children(parent) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [worker for server in servers for worker in children(server)]


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def until(child: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert child.poll() is None and time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.exhaustive  # quick: the same of a pool's workers in test_pool, of one run's in test_crew and test_resuming
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_worker_loses_nothing_and_an_interrupt_leaves_what_is_finished(project: Path, tmp_path: Path) -> None:
    """kill -9 on a worker in the middle of its run: it is replaced and the run goes on. Ctrl-C: code 130, one line, no
    worker is left. --resume ends it, with the numbers and bits of a comparison that nobody disturbed, with one worker.
    Whatever threads the config names: each run has one, and says so in its manifest."""
    sets = ("--set", "run.rounds=6", "--set", "evaluate.every=6", "--set", "run.threads=2")
    args = ("compare", project / "config.toml", "--methods", "glora,svd", "--seeds", "0:2", *sets)
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "fedlora.cli", *map(str, args), "--workers", "2", "--out", str(out)]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    until(child, lambda: len(list(out.glob("*/seed-0/metrics.jsonl"))) == 2)
    (first, second) = workers(child.pid)
    os.kill(first, signal.SIGKILL)
    until(child, lambda: len(list(out.glob("*/seed-0/summary.json"))) == 2)
    assert second in workers(child.pid) and first not in workers(child.pid)
    left = workers(child.pid)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does it: to all of them
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "Traceback" not in err, err
    assert "--resume" in err and "run.threads," in err
    assert not [process for process in left if Path(f"/proc/{process}").exists()]
    resumed = json.loads(invoke(*args, "--out", out, "--resume", "--json").stdout)
    whole = json.loads(invoke(*args, "--out", tmp_path / "whole", "--json").stdout)
    assert {m: f["scores"] for m, f in resumed["methods"].items()} == {
        m: f["scores"] for m, f in whole["methods"].items()
    }
    for name in ("glora/seed-0", "svd/seed-0", "svd/seed-1"):  # killed, of a worker that was not, and here
        ours, theirs = (RunFolder(folder / name) for folder in (out, tmp_path / "whole"))
        assert written(ours) == written(theirs) != {}
        assert ours.read_json("summary.json")["test"] == theirs.read_json("summary.json")["test"]
        assert ours.read_json("manifest.json")["threads"] == 1


# ---- words -----------------------------------------------------------------------------------------------------------


def test_seeds_as_they_are_typed() -> None:
    """By hand; half-open as Python's ranges."""
    assert [parse_seeds(text, "--seeds") for text in ("0:3", "0,3,5", "7")] == [[0, 1, 2], [0, 3, 5], [7]]
    for text, says in (("3:3", "names no seed"), ("1,1", "a seed twice"), ("a", "takes seeds as"), ("0:4:2", "takes"),
                       ("0:99999999999", "99,999,999,999 seeds")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            parse_seeds(text, "--seeds")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--seeds", "0:x"), "0:8, 0,3,5 or 7; got '0:x'"),
        (("--seeds", "0:2", "--set", "run.seed=1"), "--seeds and --set run.seed=... both"),
        (("--workers", "0"), "at least 1, or auto; got '0'"),
        (("--reference", "svd"), "methods: glora, flexlora"),
        (("--tune", "train.lr"), "train.lr=NUMBERS"),
        (("--tune", "train.rl=1,2"), "unknown key 'train.rl'; known: lr"),
        (("--tune", "train.lr=1e-3,1e-2", "--tune-seeds", "0"), "seed 0 is both"),
        (("--tune", "train.lr=1e-3,1e-2", "--set", "data.validation=0"), "data.validation = 0 leaves none"),
        (("--json", "--format", "csv"), "two formats"),
        (("--seeds", "0:2", "--set", "run.seed =1"), "--seeds and --set run.seed=... both"),
        (("--seeds", "0:2", "--set", "run={seed=1}"), "run.seed"),
        (("--tune", "train.lr=1e-3,1e-2", "--set", "train.lr=1"), "--tune and --set train.lr=... both"),
        (("--methods", "svd", "--set", "method.rho=0.5"), "--set method.... "),
        (("--tune-seeds", "77"), "--tune KEY=VALUES"),
        (("--tune", "train.lr=1e-3", "--tune-seeds", "77"), "one value"),
        (("--tune", "train.lr=1e-3,nan"), "finite number"),
        (("--tune", "train.lr=1e-3,0.001"), "names a value twice"),
        (("--tune", "train.lr.x=1,2"), "'train.lr.x' is no key"),
        (("--tune", "train.optimizer=1,2"), "train.optimizer"),
        (("--tune", "data.validation=0.1,0.2"), "data.validation is not"),
        (("--metric", "nonsense"), "'nonsense'; there are: test, best; test, last;"),
        (("--metric", "rounds to abc"), "called 'rounds to abc'"),
        (("--metric", "validation, last", "--set", "data.validation=0"), "data.validation = 0 leaves none"),
    ],
)
def test_what_contradicts_itself_is_one_line_and_runs_nothing(
    project: Path, tmp_path: Path, main: Callable[..., Said], args: tuple[str, ...], says: str
) -> None:
    command = ("compare", project / "config.toml", "--methods", "glora,flexlora", "--out", tmp_path / "runs")
    assert says in main(*command, *args).complaint() and not (tmp_path / "runs").exists()


def test_on_a_terminal_of_80_columns_no_number_is_cut(
    compared: tuple[Path, Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is too wide goes on in a second one, with the names again."""
    out, whole = compared
    file = io.StringIO()
    monkeypatch.setattr(fedlora.cli.formats, "console", Console(file=file, width=80))
    compare(project, out, "--seeds", "0:3", "--resume", methods="glora,svd,padded-average")
    said = file.getvalue()
    assert "…" not in said and max(len(line) for line in said.splitlines()) <= 80
    numbers = {cell for line in whole.stdout.splitlines() if line.startswith("│") for cell in cells(line)}
    assert {cell for cell in numbers if "±" in cell} <= {
        cell for line in said.splitlines() if line.startswith("│") for cell in cells(line)
    }
