"""Grids of runs: plans, the search, results by digest, paired intervals. Kinds: oracle, end-to-end."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.curve_pictures import handles_of
from fedlora.experiments.grid import Choice, Grid
from fedlora.experiments.pictures import figures_of
from fedlora.experiments.places import Places
from fedlora.experiments.result import Result
from fedlora.experiments.runner import run_all
from fedlora.experiments.spec import Experiment, Tune, load_experiment, names_in
from fedlora.experiments.store import as_lines, read_results_of
from fedlora.experiments.tables import CellScore, difference, paired, score_cells
from fedlora.runs.config import parse_config
from fedlora.runs.inputs import contents, digest_of
from support.command_line import Said, invoke
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.made_results import bare
from support.training_data import classification, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
ROOT = Path(__file__).parents[2]
EXPERIMENT = """
title = "Tiny"
question = "Does it run?"
rows = "method"
reference = "FedIT"
paper = "tiny"

[run.model]
path = "{model}"
dropout = 0.0
[run.clients]
count = 2
ranks = [2]
[run.data]
task = "sst2"
validation = 0.2
max_length = 16
[run.train]
steps = 2
batch_size = 4
[run.run]
rounds = 2
threads = 1

[axes.split]
skewed = {{ "clients.alpha" = 0.5, "clients.min_size" = 4 }}
even = {{ "clients.partition" = "iid" }}
[axes.method]
FedIT = {{ "method.name" = "fedit" }}
GLoRA = {{ "method.name" = "glora" }}

[tune]
values = [1e-3, 1e-2]
over = ["method"]
at = {{ split = "skewed" }}
seeds = [7]

[profiles.mini]
seeds = [0, 1]
[profiles.one]
seeds = [0]
tune = [1e-2]
axes = {{ split = ["skewed"] }}
set = {{ "run.rounds" = 2 }}
"""
PAPER = """
[tiny]
caption = "Tiny."
times = 100
blocks = "split"
columns = [{ head = "SST-2" }]
[tiny.rows.skewed]
FedIT = ["50.0 <b>&"]
"""


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """glue/sst2 with the columns of the hub, of made-up sentences of two classes."""
    folder = tmp_path_factory.mktemp("data") / "glue" / "sst2"
    folder.mkdir(parents=True)
    for name, size, seed in (("train", 120, 0), ("validation", 30, 1)):
        made = classification(size, seed)
        lines = [
            json.dumps({"sentence": text, "label": min(y, 1), "idx": k}) + "\n"
            for k, (text, y) in enumerate(zip(made.text, made.labels or (), strict=True))
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder.parent.parent


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    folder = tmp_path_factory.mktemp("experiments")
    save_encoder(folder / "model")
    (folder / "tiny.toml").write_text(EXPERIMENT.format(model=folder / "model"))
    return load_experiment(folder / "tiny.toml")


def result(digest: str, seed: int, best: float, last: float = 0.5) -> Result:
    history = [{"round": k + 1, "metrics": {"accuracy": x, "loss": 1.0}} for k, x in enumerate((0.4, best, last))]
    return bare(
        digest, history, best_round=2, test={"last": {"accuracy": last}, "best": {"accuracy": best}},
        probes={"last": {"unseen": {"accuracy": 0.25}}, "best": {}},
        clients_at_end={"a": {"accuracy": 0.2}, "b": {"accuracy": 0.6}},
    )  # fmt: skip


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_the_product_of_its_axes_and_seeds(experiment: Experiment) -> None:
    """By hand: 2 splits x 2 methods x 2 seeds once the search (2 methods x 2 values, on one split and seed) is done."""
    search = Grid(experiment, "mini").searches
    assert len(search) == 4 and {r.cell["split"] for r in search} == {"skewed"} and {r.seed for r in search} == {7}
    assert Grid(experiment, "mini").runs == []
    best = {r.digest: result(r.digest, 7, {1e-3: 0.6, 1e-2: 0.7}[r.tuned or 0]) for r in search}
    runs = Grid(experiment, "mini", best).runs
    assert len(runs) == 8 and len({r.digest for r in runs}) == 8
    assert all(r.config.train.lr == 1e-2 and r.config.run.seed == r.seed for r in runs)
    assert {(r.cell["split"], r.config.clients.partition) for r in runs} == {("skewed", "dirichlet"), ("even", "iid")}


def test_the_search_chooses_by_validation_for_each_method_and_ties_go_to_the_smaller(experiment: Experiment) -> None:
    """By hand: FedIT is better at 1e-3, GLoRA level; test scores have no say."""
    scores = {("FedIT", 1e-3): 0.8, ("FedIT", 1e-2): 0.7, ("GLoRA", 1e-3): 0.6, ("GLoRA", 1e-2): 0.6}
    search = Grid(experiment, "mini").searches
    done = {r.digest: result(r.digest, 7, scores[r.cell["method"], r.tuned or 0], last=0.1) for r in search}
    chosen = {c["method"]: Grid(experiment, "mini", done).choice(c).value for c in experiment.cells("mini")}
    assert chosen == {"FedIT": 1e-3, "GLoRA": 1e-3}
    done.pop(search[0].digest)
    assert Grid(experiment, "mini", done).choice(search[0].cell).value is None, "not before all of it is there"
    right = {(1e-3, 7): 4, (1e-3, 8): 5, (1e-2, 7): 1, (1e-2, 8): 8}  # of 31, which results have in six digits
    level = experiment.model_copy(update={"tune": Tune(values=[1e-3, 1e-2], at={"split": "skewed"}, seeds=[7, 8])})
    done = {
        r.digest: result(r.digest, r.seed, float(f"{right[r.tuned or 0, r.seed] / 31:.6g}"))
        for r in Grid(level, "mini").searches
    }
    cell = next(level.cells("mini"))
    assert Grid(level, "mini", done).choice(cell) == Choice(1e-3, level=(1e-3, 1e-2))


def test_by_loss_the_search_chooses_the_least_and_thresholds_are_reached_from_above(experiment: Experiment) -> None:
    """By hand on the same numbers as losses: what was worst is best. A run without a number is never chosen."""

    def by_loss(digest: str, best: float | None) -> Result:
        history = [{"round": k + 1, "metrics": {"loss": x}} for k, x in enumerate((0.9, best, 0.7))]
        return bare(digest, history, metric="loss", best_round=2)

    search = Grid(experiment, "mini").searches
    losses = {1e-3: 0.6, 1e-2: 0.4}
    done = {r.digest: by_loss(r.digest, losses[r.tuned or 0]) for r in search}
    assert {Grid(experiment, "mini", done).choice(r.cell).value for r in search} == {1e-2}
    losses = {1e-3: 0.6, 1e-2: None}
    done = {r.digest: by_loss(r.digest, losses[r.tuned or 0]) for r in search}
    assert {Grid(experiment, "mini", done).choice(r.cell).value for r in search} == {1e-3}
    done = {r.digest: by_loss(r.digest, None) for r in search}
    assert (
        Grid(experiment, "mini", done).choice(search[0].cell).value is None
        and Grid(experiment, "mini", done).runs == []
    )
    assert "all of them diverged" in (Grid(experiment, "mini", done).choice(search[0].cell).why or "")
    fell = by_loss("x", 0.5)
    assert (fell.rounds_to(0.6), fell.rounds_to(0.5), fell.rounds_to(0.4)) == (2, 2, None)


def test_one_value_needs_no_search(experiment: Experiment) -> None:
    assert Grid(experiment, "one").searches == []
    assert [r.config.train.lr for r in Grid(experiment, "one").runs] == [1e-2, 1e-2]


def test_a_digest_is_the_configuration_alone(experiment: Experiment) -> None:
    """The same run in another experiment is the same run; its canonical form read back is, too."""
    run = Grid(experiment, "one").runs[0]
    other = experiment.model_copy(update={"name": "other", "title": "Other", "question": "?"})
    assert Grid(other, "one").runs[0].digest == run.digest
    again = parse_config(json.loads(run.config.canonical()))
    assert digest_of(again, contents(again)) == run.digest


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('over = ["method"]', 'over = ["methods"]', "'methods' is not an axis; .* split, method"),
        ('axes = {{ split = ["skewed"] }}', 'axes = {{ split = ["odd"] }}', "split = 'odd'"),
        ('title = "Tiny"', "titel = 3", "titel: Extra inputs"),
        ("[run.model]", "[run.model", "is not TOML"),
        ("seeds = [0, 1]", "seeds = []", "seeds: .*at least 1"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "mini, seeds, names 0 twice"),
        ('split = ["skewed"] }}', 'split = ["skewed", "skewed"] }}', "one, split, names 'skewed' twice"),
        ("tune = [1e-2]", "tune = [1e-2, 0.01]", "one, tune, names 0.01 twice"),
        ("values = [1e-3, 1e-2]", "values = [1e-3, 1e-3]", "values names 0.001 twice"),
        ("seeds = [7]", "seeds = [7, 7]", "seeds names 7 twice"),
        ('over = ["method"]', 'over = ["method", "method"]', "over names 'method' twice"),
        ('rows = "method"', 'rows = "methods"', "'methods' is not an axis"),
        ('rows = "method"', 'rows = ["method"]', "rows: .*string"),
        ("seeds = [7]", "seeds = [1]", "seed 1 is both .*profile mini"),
        ('reference = "FedIT"', 'reference = "fedit"', "reference .*method = 'fedit'"),
        ('at = {{ split = "skewed" }}', 'at = {{ splt = "skewed" }}', "tune.at names splt = 'skewed'"),
        ('paper = "tiny"', 'paper = "tiny"\nskip = [{{ split = "odd" }}]', "skip names split = 'odd'"),
        ('paper = "tiny"', 'paper = "tiny"\nmetric = "test last"', "called 'test last'"),
        ("values = [1e-3, 1e-2]", 'key = "run.seed"\nvalues = [1, 2]', "tune.key = "),
        ("seeds = [0, 1]", 'seeds = [0, 1]\nset = {{ "train.lr" = 0.1 }}', "profile mini sets train.lr.*the search"),
        ("seeds = [0, 1]", "seeds = [0, 1]\nset = {{ run = {{ seed = 3 }} }}", "profile mini sets run.seed"),
        ("[run.run]", "[run.run]\nseed = 5", "profiles.NAME"),
        ("[run.train]", "[run.train]\nlr = 0.1", "sets train.lr"),
        (
            "FedIT = {{",
            "FedIT = {{ clients = {{ alpha = 1.0 }}, ",
            "split = 'skewed' sets clients.alpha = 0.5, .*method = 'FedIT'",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in EXPERIMENT
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace(old, new).format(model="m"))
    with pytest.raises(ConfigError, match=said):
        load_experiment(tmp_path / "e.toml")


TWO = [{"train": {"steps": 4}}, {"train": {"epochs": 4}}, {"train.epochs": 5}]


@pytest.mark.parametrize(("one", "other"), [*permutations(TWO, 2), ({"privacy": {}}, {"privacy.clip": 1.0})])
def test_two_axes_that_set_one_table_are_refused(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    """A table replaces the whole one: whichever axis came first would be lost, under its label's name."""
    tables = f"[axes.split]\nA = {_inline(one)}\n[axes.method]\nB = {_inline(other)}\n"
    with pytest.raises(ConfigError) as refused:
        _of_axes(tmp_path, tables)
    assert all(word in str(refused.value) for word in ("split = 'A'", "method = 'B'", *one, *other))


def test_two_axes_may_set_two_keys_of_a_table_and_a_later_one_may_take_it_away(tmp_path: Path) -> None:
    tables = '[axes.split]\nA = {"train.steps" = 4}\nsame = {"train" = {clip = 4}}\n'
    method = '[axes.method]\nB = {"train.clip" = 4}\nnone = {"train" = {}}\n'
    cells = {
        tuple(run.cell.values()): (run.config.train.steps, run.config.train.clip)
        for run in Grid(_of_axes(tmp_path, tables + method), "mini").runs
    }
    none = {("A", "none"): (10, 1), ("same", "none"): (10, 1)}
    assert cells == {("A", "B"): (4, 4), ("same", "B"): (10, 4), **none}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[run.train]\nsteps = 2\n", ["train.steps", "B"]),
        ('[profiles.mini.set]\n"train.steps" = 2\n', ["train.steps", "B"]),
        ("[profiles.mini.set]\ntrain = {}\n", ["profile mini"]),
        ("", ["no earlier axis", "B"]),
    ],
)
def test_an_empty_table_takes_away_only_what_an_earlier_axis_made(tmp_path: Path, more: str, says: list[str]) -> None:
    """Not what [run] or a profile sets, which all cells share, and not nothing."""
    first = '"train.batch_size" = 2' if more else '"clients.count" = 2'
    with pytest.raises(ConfigError) as refused:
        _of_axes(tmp_path, f"[axes.split]\nA = {{ {first} }}\n[axes.method]\nB = {{ train = {{}} }}\n{more}")
    assert all(word in str(refused.value) for word in says)


def _inline(changes: dict[str, Any]) -> str:
    """Changes as a TOML inline table."""
    return json.dumps(changes).replace(":", " =")


def _of_axes(folder: Path, tables: str) -> Experiment:
    """An experiment with these axes, and perhaps changes of its profile."""
    run = '[run.data]\ntrain = "demo"\n[run.model]\npath = "demo"\n'
    head = 'title = "t"\nquestion = "q"\nrows = "method"\nprofiles.mini.seeds = [0]\n'
    (folder / "e.toml").write_text(head + run + tables)
    return load_experiment(folder / "e.toml")


def test_an_impossible_key_names_the_cell(experiment: Experiment) -> None:
    axes = {**experiment.axes, "method": {"FedIT": {"method.nam": "fedit"}}}
    wrong = experiment.model_copy(update={"axes": axes | {"split": {"skewed": {"clients.alhpa": 1}}}})
    with pytest.raises(ConfigError, match=r"experiment tiny, .*'clients.alhpa'; did you mean 'alpha'"):
        _ = Grid(wrong, "one").runs


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tune": Tune(key="train.lr.x", values=[1, 2])}, "train.lr: must be a number"),
        ({"tune": Tune(key="train.steps.x", values=[1, 2])}, "'train.steps.x' is no key"),
        ({"tune": Tune(key="model.checkpointing", values=[0, 1])}, "model.checkpointing: .* true or false; got 0"),
        ({"tune": Tune(key="train", values=[1, 2])}, "train"),
        ({"tune": Tune(key="train.optimizer", values=[1, 2])}, "train.optimizer"),
        ({"tune": Tune(key="nothing.at_all", values=[1, 2])}, "unknown key 'nothing'"),
    ],
)
def test_a_search_is_over_numbers_that_there_are(experiment: Experiment, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _ = Grid(experiment.model_copy(update=changes), "mini").searches


def test_a_change_below_a_value_is_refused(experiment: Experiment) -> None:
    axes = {**experiment.axes, "method": {"FedIT": {"run.rounds.z": 1}}}
    with pytest.raises(ConfigError, match=r"'run.rounds.z' is no key"):
        _ = Grid(experiment.model_copy(update={"axes": axes}), "one").runs


def test_a_label_that_would_replace_a_whole_table_is_refused(experiment: Experiment) -> None:
    """What the base says and the label does not would be lost; a table that is not there yet is made."""
    axes = {**experiment.axes, "method": {"FedIT": {"train": {"optimizer": "sgd"}}}}
    with pytest.raises(ConfigError, match=r"batch_size, steps.*train\.optimizer"):
        _ = Grid(experiment.model_copy(update={"axes": axes}), "one").runs
    axes["method"] = {"FedIT": {"evaluate": {"every": 2}}}
    assert Grid(experiment.model_copy(update={"axes": axes}), "one").runs[0].config.evaluate.every == 2


def test_a_value_of_the_search_whose_run_fails_is_dropped(experiment: Experiment) -> None:
    """Chosen among the others; where none is left, nothing is, and it is said. 0.9 would have won."""
    search = Grid(experiment, "mini").searches
    done = {r.digest: result(r.digest, 7, 0.9 if r.tuned == 1e-2 else 0.5) for r in search}
    large = [r.digest for r in search if r.tuned == 1e-2]
    left = {digest: found for digest, found in done.items() if digest not in large}
    cell = search[0].cell
    assert Grid(experiment, "mini", done).choice(cell).value == 1e-2
    assert Grid(experiment, "mini", left).choice(cell) == Choice()
    assert Grid(experiment, "mini", left, large).choice(cell).value == 1e-3
    assert len(Grid(experiment, "mini", left, large).runs) == 8
    every = [r.digest for r in search]
    assert Grid(experiment, "mini", {}, every).runs == []
    assert "over train.lr = 0.001, 0.01" in (Grid(experiment, "mini", {}, every).choice(cell).why or "")


@pytest.mark.quick(4)
@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda p: p.stem)
def test_every_experiment_of_the_repository_can_be_planned(path: Path) -> None:
    """All cells of all profiles are configurations."""
    if path.stem == "paper_numbers":
        return
    found = load_experiment(path)
    assert "paper" in found.profiles
    for profile in found.profiles:
        search = Grid(found, profile).searches
        done = {r.digest: result(r.digest, 0, 0.5) for r in search}
        runs = Grid(found, profile, done).runs
        assert len(runs) == len(list(found.cells(profile))) * len(found.profile(profile).seeds)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            '"method.name" = "flexlra"',
            "one, seed 0: .*'flexlra'; did you mean 'flexlora'",
        ),
        ('"clients.ranks" = [2, 4, 8]', "one, seed 0: clients.ranks .* 3 .* 10 clients"),
        ('"method.name" = "glora", "method.rho" = 2', "one, seed 0: .*rho"),
    ],
)
def test_hours_are_told_of_no_run_that_cannot_be(
    change: str, says: str, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """A name, a number of ranks, a setting: what the configuration alone shows, before `--plan` or a training."""
    (tmp_path / "mine.toml").write_text(
        'title = "T"\nquestion = "?"\nrows = "method"\n[run.model]\npath = "demo"\n[run.data]\ntrain = "demo"\n'
        f"[run.clients]\ncount = 10\n[axes.method]\none = {{ {change} }}\n[profiles.mini]\nseeds = [0]\n"
    )
    where = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    for code, more in ((1, ["--plan"]), (2, [])):
        said = main("experiment", "run", str(tmp_path / "mine.toml"), *where, *more)
        assert said.code == code and re.search(says, " ".join(said.err.split())) and not (tmp_path / "work").exists()


# ---- results and statistics ------------------------------------------------------------------------------------------


def test_scores_by_name() -> None:
    """By hand on validation 0.4, 0.9, 0.7."""
    r = result("x", 0, best=0.9, last=0.7)
    assert r.score("test, last") == 0.7 and r.score("test, best") == 0.9
    assert r.score("validation, last") == 0.7 and r.score("validation, best") == 0.9
    assert r.score("unseen, last") == 0.25 and r.score("unseen, best") is None
    assert r.score("clients, last") == pytest.approx(0.4)
    assert r.rounds_to(0.9) == r.score("rounds to 0.9") == 2 and r.score("rounds to 0.95") is None


def test_a_paired_interval_is_students() -> None:
    """By hand: gaps 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.302653, half width 4.302653 / sqrt 3; t = 2 sqrt 3, and
    p = 2 (1 - T_2(t)) = 1 - t / sqrt(t^2 + 2)."""
    d = difference("a", "b", {}, [(1.0, 0.0), (3.0, 1.0), (5.0, 2.0)])
    assert (d.mean, d.pairs) == (2.0, 3)
    assert (d.low, d.high) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-5)
    t = 2 * 3**0.5
    assert d.p == pytest.approx(1 - t / (t * t + 2) ** 0.5, abs=1e-9)
    assert not d.decided
    level = difference("a", "b", {}, [(1.0, 0.5), (2.0, 1.5)])
    assert (level.low, level.mean, level.high) == (0.5, 0.5, 0.5)
    assert level.interval is None and not level.decided, "three gaps alike tell nothing of a fourth"


def test_differences_pair_what_agrees_in_all_other_axes_and_seeds() -> None:
    """By hand: only seeds 0 and 1 are in both; the other split has one common seed, which is no interval."""
    cells = [
        CellScore({"m": "a", "s": "x"}, {0: 1.0, 1: 2.0}, 3, None),
        CellScore({"m": "b", "s": "x"}, {0: 1.5, 1: 2.7, 2: 9.0}, 3, None),
        CellScore({"m": "a", "s": "y"}, {0: 1.0}, 3, None),
        CellScore({"m": "b", "s": "y"}, {0: 1.0}, 3, None),
    ]
    (d,) = paired(cells, "m", "a")
    assert (d.other, d.where, d.pairs) == ("b", {"s": "x"}, 2) and d.mean == pytest.approx(0.6)


# ---- running ---------------------------------------------------------------------------------------------------------


def test_an_experiment_runs_skips_what_is_finished_and_resumes(
    experiment: Experiment, data_root: Path, tmp_path: Path
) -> None:
    """One profile to the end in this process; nothing is left; an interrupted run goes on; results hold no path."""
    places = Places(tmp_path / "results", tmp_path / "work", data_root)
    todo = places.grid(experiment, "one").missing
    assert [r.label for r in todo] == ["skewed, FedIT, 0.01, seed 0", "skewed, GLoRA, 0.01, seed 0"]
    outcomes = list(run_all(todo, places))
    assert [o.error for o in outcomes] == [None, None] and places.grid(experiment, "one").missing == []
    done = places.finished()
    for found in done.values():
        raw = found.model_dump_json(exclude={"config"})
        assert str(tmp_path) not in raw and str(data_root) not in raw
        assert 0 <= found.validation_best <= 1 and found.wall_seconds > 0
    cells = score_cells(Grid(experiment, "one", done))
    assert [c.cell["method"] for c in cells] == ["FedIT", "GLoRA"] and all(c.mean is not None for c in cells)
    digest = todo[0].digest
    for path in places.results.glob("*.jsonl"):
        path.write_text(as_lines({k: v for k, v in read_results_of(path).items() if k != digest}))
    (again,) = places.grid(experiment, "one").missing
    before = done[digest].test
    list(run_all([again], places))  # its folder is still there: no round is run again
    assert places.finished()[digest].test == before


def test_a_failing_run_is_kept_apart_and_the_others_go_on(
    experiment: Experiment, data_root: Path, tmp_path: Path
) -> None:
    places = Places(tmp_path / "results", tmp_path / "work", tmp_path / "nothing here")
    outcomes = list(run_all(places.grid(experiment, "one").missing, places))
    assert all(o.error is not None and "does not exist" in o.error for o in outcomes)
    said = json.loads(places.failure(outcomes[0].run).read_text())
    assert said["label"] == outcomes[0].run.label and "DataError" in said["error"]
    mended = replace(places, data_root=data_root)
    list(run_all(mended.grid(experiment, "one").missing[:1], mended))
    assert not places.failure(outcomes[0].run).exists()


# ---- the command line -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(experiment: Experiment, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with experiments/ and results/."""
    root = tmp_path_factory.mktemp("finished")
    (root / "experiments").mkdir()
    model = experiment.run["model"]["path"]
    (root / "experiments" / "tiny.toml").write_text(EXPERIMENT.format(model=model))
    (root / "experiments" / "paper_numbers.toml").write_text(PAPER)
    places = Places(root / "results", root / "work", data_root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        list(run_all(places.grid(experiment, "one").missing, places))
    return root


def call(root: Path, *args: str) -> Any:
    where = ["--experiments", root / "experiments", "--results", root / "results", "--work", root / "work"]
    return invoke("experiment", *args, *where)


def test_status_table_and_plan_from_the_command_line(finished: Path) -> None:
    assert json.loads(call(finished, "status", "tiny", "--profile", "one", "--json").stdout)["tiny"]["to_do"] == 0
    table = json.loads(call(finished, "table", "tiny", "--profile", "one", "--json").stdout)
    assert [c["cell"]["method"] for c in table["cells"]] == ["FedIT", "GLoRA"]
    assert "FedIT" in call(finished, "table", "tiny", "--profile", "one").stdout
    assert "tiny" in call(finished, "run", "tiny", "--plan").stdout
    assert call(finished, "run", "tiny", "--profile", "one").exit_code == 0, "nothing to do"


@pytest.mark.parametrize(
    ("changes", "clients"),
    [
        ({"data": {"clients": {"a": "a.csv", "b": "b.csv", "c": "c.csv"}}}, 3),
        ({"data": {"train": "x.csv"}, "clients": {"ranks": [2, 4, 4, 8]}}, 4),
        ({"data": {"train": "x.csv"}, "clients": {"count": 7}}, 7),
        ({"data": {"task": "superni", "tasks": 5}}, 5),
    ],
)
def test_a_plan_counts_the_clients_that_there_are(tmp_path: Path, changes: dict[str, Any], clients: int) -> None:
    """By hand: clients x 2 rounds x 3 steps x 4 examples, once."""
    (tmp_path / "mine.toml").write_text(
        'title = "t"\nquestion = "q"\n'
        '[axes.method]\nglora = { "method.name" = "glora" }\n[profiles.mini]\nseeds = [0]\n'
        '[run.model]\npath = "m"\n[run.train]\nsteps = 3\nbatch_size = 4\n[run.run]\nrounds = 2\n'
        + "".join(
            f"[run.{table}]\n" + "".join(f"{key} = {inline(value)}\n" for key, value in keys.items())
            for table, keys in changes.items()
        )
    )
    where = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    said = invoke("experiment", "run", tmp_path / "mine.toml", "--plan", *where, code=1).stdout
    assert f"│ at most {clients * 2 * 3 * 4} " in said and "not counted" in said


def inline(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def test_a_table_in_four_formats(finished: Path) -> None:
    """The same mean in each; CSV parses; --json is --format json."""
    show = ("table", "tiny", "--profile", "one")
    value = json.loads(call(finished, *show, "--json").stdout)
    assert value == json.loads(call(finished, *show, "--format", "json").stdout)
    read = list(csv.DictReader(io.StringIO(call(finished, *show, "--format", "csv").stdout)))
    assert [float(row["mean"]) for row in read] == [c["mean"] for c in value["cells"]]
    assert [row["method"] for row in read] == ["FedIT", "GLoRA"]
    words = f"{value['cells'][0]['mean']:.4f}"
    markdown = call(finished, *show, "--format", "markdown").stdout
    assert f"| FedIT | {words} | 1 | 0.01" in markdown
    table = call(finished, *show).stdout
    assert words in table and "…" not in table


def test_a_plot_is_drawn(finished: Path, tmp_path: Path) -> None:
    call(finished, "plot", "tiny", "--profile", "one", "--out", str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_papers_numbers_beside_experiments_are_no_experiment(finished: Path) -> None:
    assert names_in(finished / "experiments") == ["tiny"]


def test_a_line_that_lies_on_another_says_so() -> None:
    """Two labels of the same scores on every seed: the second hides the first, and the legend says so."""
    history = [{"round": k, "metrics": {"accuracy": 0.1 * k}} for k in (1, 2)]
    other = [{"round": k, "metrics": {"accuracy": 0.2 * k}} for k in (1, 2)]
    lines = {"a": {0: bare("1", history)}, "b": {0: bare("2", other)}, "c": {0: bare("3", history)}}
    assert [handle.get_label() for handle in handles_of(["a", "b", "c"], [lines])] == ["a", "b", "c (lies on a)"]


def test_a_picture_names_the_label_that_has_no_result(experiment: Experiment) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    runs = Grid(experiment, "one").runs
    done = {run.digest: result(run.digest, run.seed, 0.6) for run in runs}
    whole = figures_of(Grid(experiment, "one", done))["curves"]
    del done[runs[0].digest]
    less = figures_of(Grid(experiment, "one", done))["curves"]
    plt.close("all")
    (gone,) = {*less.get_suptitle().splitlines()} - {*whole.get_suptitle().splitlines()}
    assert runs[0].cell["method"] in gone and runs[1].cell["method"] not in gone


def test_bad_names_get_one_line(tmp_path: Path, main: Callable[..., Said]) -> None:
    said = main("experiment", "run", "nothing", "--experiments", tmp_path)
    assert "no experiment" in said.error()
