"""A comparison as an experiment: its plan, the places of its methods, where its runs lie. Kind: oracle (by hand)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedlora.errors import ConfigError
from fedlora.experiments.comparison import PROFILE, ComparedRuns, comparison
from fedlora.experiments.grid import Choice, Grid
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Experiment, Tune
from fedlora.experiments.tables import CellScore, difference, orders, placings
from fedlora.runs.config import RunConfig, parse_config
from fedlora.runs.folder import RunFolder
from fedlora.runs.sections import MethodSection
from support.made_results import bare

BASE = parse_config(
    {
        "model": {"path": "m"},
        "data": {"clients": {"b": "b.jsonl", "a": "a.jsonl"}},
        "method": {"name": "glora", "rho": 0.75},
        "train": {"lr": 0.01},
        "run": {"threads": 2},
    }
)
METHODS = {
    "glora": MethodSection(name="glora"),
    "svd energy=0.9": MethodSection.model_validate({"name": "svd", "energy": 0.9}),
}


def compared(base: RunConfig = BASE, seeds: tuple[int, ...] = (0, 3), tune: Tune | None = None) -> Experiment:
    return comparison(base, METHODS, seeds, name="c", metric="test, last", tune=tune)


def test_the_runs_are_the_configuration_with_method_seed_and_one_thread() -> None:
    """The digests of configurations changed by hand: the bare name of its method is the configuration's own,
    rho and all; the order of the clients, which says who has which rank, stays."""
    planned = Grid(compared(), PROFILE).runs
    assert [(run.cell["method"], run.seed) for run in planned] == [(m, s) for m in METHODS for s in (0, 3)]
    for run in planned:
        section = METHODS[run.cell["method"]] if run.cell["method"] != "glora" else BASE.method
        changes = {"method": section, "run": BASE.run.model_copy(update={"seed": run.seed, "threads": 1})}
        assert run.digest == BASE.model_copy(update=changes).digest()
        assert list(run.config.data.clients) == ["b", "a"]


def test_a_search_asks_no_label_that_says_a_value_itself() -> None:
    """Else the row "svd energy=0.9" would be of the value that was found. The configuration's own value is only where
    the search begins."""
    with pytest.raises(ConfigError, match=r"svd energy=0.9.* sets method\.energy"):
        compared(tune=Tune(key="method.energy", values=[0.5, 0.7]))
    glora = {"glora": METHODS["glora"]}
    tune = Tune(key="method.rho", values=[0.5, 1.0])
    found = Grid(comparison(BASE, glora, (0,), name="c", metric="test, last", tune=tune), PROFILE).searches
    assert {run.config.method.model_dump()["rho"] for run in found} == {0.5, 1.0}


def test_runs_are_named_for_people_and_found_by_digest(tmp_path: Path) -> None:
    kept = ComparedRuns.at(tmp_path, tuned_key="train.lr")
    tune = Tune(values=[0.001, 0.02], seeds=[1000])
    names = [str(kept.folder(run).path.relative_to(tmp_path)) for run in Grid(compared(tune=tune), PROFILE).searches]
    assert names == [f"{m}/search/train.lr={v}/seed-1000" for m in ("glora", "svd_energy=0.9") for v in (0.001, 0.02)]
    one = Grid(compared(tune=Tune(values=[0.02])), PROFILE).runs[1]
    assert kept.folder(one).path == tmp_path / "glora" / "train.lr=0.02" / "seed-3"
    elsewhere = tmp_path / "glora" / "renamed"
    elsewhere.mkdir(parents=True)
    RunFolder(elsewhere).write_json("manifest.json", {"config_digest": one.digest, "data": {}})
    assert kept.folder(one).path == elsewhere and kept.finished() == {}


def test_a_search_on_compared_seeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed 3 is both"):
        compared(tune=Tune(values=[0.1, 0.2], seeds=[3]))


def test_the_edge_of_the_grid() -> None:
    """By hand: each of three values is best in turn. No edge of one value, nor where two tie."""
    e, ends = compared(tune=Tune(values=[0.1, 0.01, 1.0])), {0.01: "smallest", 0.1: None, 1.0: "largest"}
    cell = next(e.cells(PROFILE))

    def found(*best: float) -> Choice:
        done = {run.digest: bare(run.digest, [{"round": 1, "metrics": {"accuracy": 0.9 if run.tuned in best else 0.5}}],
                                 best_round=1) for run in Grid(e, PROFILE).searches}  # fmt: skip
        return Grid(e, PROFILE, done).choice(cell)

    assert [(found(v).value, found(v).edge) for v in ends] == [*ends.items()]
    assert found(0.1, 1.0) == Choice(0.1, level=(0.1, 1.0))
    assert Grid(compared(tune=Tune(values=[0.1])), PROFILE).choice(cell) == Choice(0.1), "one value is no search"


CELLS = [
    CellScore({"method": "a"}, {0: 0.5, 1: 0.7, 2: 0.5}, 3, None),
    CellScore({"method": "b"}, {0: 0.6, 1: 0.6, 2: 0.5, 3: 0.9}, 4, None),
    CellScore({"method": "c"}, {0: 0.4, 1: 0.7, 2: 0.4}, 3, None),
]


def test_places_by_seed() -> None:
    """By hand: seed 0 b a c; seed 1 a and c share the first place, b is third; seed 2 a and b first, c third; seed 3 is
    not in all. Means (2+1+1)/3, (1+3+1)/3, (3+1+3)/3. Where less is better: c a b; b first, a and c second; c first, a
    and b second."""
    found = placings(CELLS, "method")
    assert [(p.label, p.counts) for p in found] == [("a", (2, 1, 0)), ("b", (2, 0, 1)), ("c", (1, 0, 2))]
    assert [p.mean for p in found] == pytest.approx([4 / 3, 5 / 3, 7 / 3])
    assert orders(CELLS) == (3, 3) and orders(CELLS[:1]) == (1, 3)
    less = placings([replace(cell, less=True) for cell in CELLS], "method")
    assert [p.counts for p in less] == [(0, 3, 0), (1, 1, 1), (2, 1, 0)]
    assert placings([CELLS[0], CellScore({"method": "d"}, {9: 1.0}, 1, None)], "method") == []


def test_of_which_numbers_less_is_better() -> None:
    more = ["test, last", "test, best", "unseen, last"]
    assert not any(parse_number(which).smaller_is_better("accuracy") for which in more)
    assert parse_number("rounds to 0.9").smaller_is_better("accuracy")
    assert parse_number("test, last").smaller_is_better("perplexity")


def test_a_verdict_is_of_the_interval() -> None:
    """By hand with t(0.975, 2) = 4.3027: gaps 1, 2, 3 are 2 +- 2.48; gaps 5, 6, 7 are 6 +- 2.48; alike: none."""
    assert difference("a", "b", {}, [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]).verdict == "undecided"
    assert difference("a", "b", {}, [(5.0, 0.0), (6.0, 0.0), (7.0, 0.0)]).verdict == "higher"
    assert difference("a", "b", {}, [(0.0, 5.0), (0.0, 6.0), (0.0, 7.0)]).verdict == "lower"
    alike = difference("a", "b", {}, [(1.0, 0.0)] * 3)
    assert (alike.verdict, alike.interval, alike.decided) == ("no spread", None, False)


def test_a_number_that_none_of_the_runs_has_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"'clients, last': .*evaluate.clients_at_end"):
        comparison(BASE, METHODS, (0,), name="c", metric="clients, last")
