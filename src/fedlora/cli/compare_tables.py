"""The tables of `fedlora compare`, the lines under them, and all of it as one value for JSON. A column is a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlora.cli.formats import Sheet
from fedlora.cli.measures import megabytes
from fedlora.cli.scores import difference_sheet, direction, score_sheet, widen_lines
from fedlora.experiments.comparison import AXIS, PROFILE, ComparedRuns
from fedlora.experiments.grid import Grid
from fedlora.experiments.plan import worst_values
from fedlora.experiments.result import Result
from fedlora.experiments.scores import titled
from fedlora.experiments.tables import (
    CellScore,
    Difference,
    Placing,
    measured_by,
    orders,
    placings,
    score_cells,
    without_number,
)
from fedlora.runs.attack_words import attacks_of

_PLACES = 5  # so many places have a column of their own on 80 characters
_BESIDE = ("validation, best", "test, best", "test, last")


def sheets(grid: Grid, cells: Sequence[CellScore], differences: Sequence[Difference]) -> list[Sheet]:
    """Scores, differences, places, costs. cells: of the compared number."""
    metric, seeds = measured_by(cells), _seeds(grid)
    title = titled(grid.which(), metric)
    how = "one seed" if len(seeds) == 1 else f"mean ± standard deviation over {len(seeds)} seeds"
    beside = {name: score_cells(grid, name) for name in _BESIDE if name != grid.which()}
    scores = {grid.which(): cells, **{name: of for name, of in beside.items() if any(cell.scores for cell in of)}}
    made = [score_sheet(f"{(metric or '').replace('_', '-')}: {how}; same clients, data and start", scores, [AXIS])]
    if differences:
        told = f"{title}: difference to {grid.experiment.reference}, paired by seed"
        made.append(difference_sheet(told, differences))
    return [*made, *_places_sheet(title, cells, len(seeds)), _costs(grid)]


def _seeds(grid: Grid) -> Sequence[int]:
    return grid.experiment.profile(PROFILE).seeds


def _placings(cells: Sequence[CellScore]) -> list[Placing]:
    """None of one method alone."""
    scored = [cell for cell in cells if cell.scores]
    return placings(scored, AXIS, smaller_is_better=scored[0].less) if len(scored) > 1 else []


def _places_sheet(title: str, cells: Sequence[CellScore], seeds: int) -> list[Sheet]:
    found = _placings(cells)
    if not found or seeds == 1:
        return []
    own = min(len(found), _PLACES)
    heads = [f"{k}{('st', 'nd', 'rd')[k - 1] if k < 4 else 'th'}" for k in range(1, own + 1)]
    rows = []
    for p in found:
        rest = [str(sum(p.counts[own:]))] if len(found) > own else []
        rows.append([p.label, *(str(n) for n in p.counts[:own]), *rest, f"{p.mean:.2f}"])
    scored = [cell for cell in cells if cell.scores]
    different, on = orders(scored, smaller_is_better=scored[0].less)
    changes = "the same order on every seed" if different == 1 else f"{different} different orders on {on} seeds"
    columns = ["place", *heads, *(["lower"] if len(found) > own else []), "mean place"]
    return [Sheet(f"{title}: places by seed; {changes}", columns, rows)]


# What a run took, in the mean over seeds. No number of private runs travels.
_COSTS: Mapping[str, Callable[[Sequence[Result]], str]] = {
    "target": lambda runs: runs[0].target,
    "MB up": lambda runs: _mean([r.megabytes_up for r in runs]),
    "MB down": lambda runs: _mean([r.megabytes_down for r in runs]),
    "aggregate s": lambda runs: f"{fmean(r.seconds.get('aggregate', 0.0) for r in runs):.2f}",
    "gauge": lambda runs: f"{max(drifts):.1e}" if (drifts := _told([r.drift for r in runs])) else "not told",
}


def _costs(grid: Grid) -> Sheet:
    by: dict[str, list[Result]] = {}
    for run, result in grid.used:
        by.setdefault(run.cell[AXIS], []).append(result)
    rows = [[label, *(column(of) for column in _COSTS.values())] for label, of in by.items()]
    return Sheet("What a run costs, and its gauge check", [AXIS, *_COSTS], rows, 2)


def _mean(each: Sequence[float | None]) -> str:
    told = _told(each)
    return megabytes(1e6 * fmean(told)) if told else "not told"


def _told(each: Sequence[float | None]) -> list[float]:
    return [x for x in each if x is not None]


_VERDICTS = {
    "higher": "Higher: the score is above the reference's; the 95 % interval excludes zero.",
    "lower": "Lower: the score is below the reference's; the 95 % interval excludes zero.",
    "undecided": (
        "Undecided: the 95 % interval (Student's t over the paired differences) contains zero; these seeds cannot "
        "tell the two methods apart."
    ),
    "equal": "Equal: the same score on every seed, so there is no interval.",
    "no spread": "No spread: the same difference on every seed, so there is no interval.",
}


def remarks(grid: Grid, cells: Sequence[CellScore], differences: Sequence[Difference]) -> list[str]:
    """What a reader of the tables has to know."""
    attacks = attacks_of([result.settings.model_dump() for _, result in grid.used])
    said = [f"UNDER ATTACK, on purpose: {what}. Do not use these results." for what in attacks]
    if len(_seeds(grid)) == 1:
        said.append("One seed: no interval and no verdict. Add --seeds 0:8.")
    elif grid.experiment.reference not in grid.experiment.axes[AXIS]:
        said.append(f"No differences: the reference {grid.experiment.reference} has no finished run.")
    elif differences:
        k = len(differences)
        said += [what for verdict, what in _VERDICTS.items() if verdict in {gap.verdict for gap in differences}]
        if k > 1:
            said.append(
                f"Each interval is of one comparison. With {k} of them the chance that at least one excludes zero "
                f"without a real difference is up to {min(100, 5 * k)} %."
            )
    if len(_seeds(grid)) > 1 and _shared(_placings(cells)):
        said.append(
            "Places: methods of the same score, to one in a million, share the better place, which counts for each "
            "of them; the next place stays empty. An order with a shared place counts as another order."
        )
    said += [*without_number(cells), *direction(grid.which(), cells)]
    if len({result.target for _, result in grid.used}) > 1:
        said.append("Some rows measure the server's model, others the clients' own (target): do not compare these.")
    tune = grid.experiment.tune
    if tune is not None and len(set(tune.values)) > 1:
        seeds = ", ".join(map(str, tune.seeds))
        said.append(
            f"tuned: {tune.key}, for each method the best on validation, on seed {seeds}, which is not compared."
        )
        said += worst_values(grid.experiment, PROFILE, grid.results, {})
        said += widen_lines(grid.experiment, PROFILE, cells)
    return said


def _shared(found: Sequence[Placing]) -> bool:
    """Whether on any seed two share a place: each place is then not taken once on each seed."""
    return any(sum(taken) != sum(found[0].counts) for taken in zip(*(p.counts for p in found), strict=True))


def value(
    grid: Grid, cells: Sequence[CellScore], differences: Sequence[Difference], kept: ComparedRuns
) -> dict[str, Any]:
    """For JSON: the score of every seed, and every run's summary."""

    def runs(label: str) -> dict[int, dict[str, Any]]:
        mine = [run for run, _ in grid.used if run.cell[AXIS] == label]
        told = {run.seed: kept.folder(run).read_json("summary.json") for run in mine}
        return {seed: {key: x for key, x in one.items() if key != "diagnostics"} for seed, one in told.items()}

    methods = {
        cell.cell[AXIS]: {
            "scores": dict(cell.scores), "n": len(cell.scores), "mean": cell.mean, "sd": cell.spread,
            "tuned": cell.tuned, "runs": runs(cell.cell[AXIS]),
        }
        for cell in cells
    }  # fmt: skip
    return {
        "metric": grid.which(), "score": measured_by(cells), "smaller_is_better": any(cell.less for cell in cells),
        "seeds": list(_seeds(grid)), "reference": grid.experiment.reference, "methods": methods,
        "differences": [_difference(d) for d in differences],
        "places": {p.label: list(p.counts) for p in _placings(cells)},
    }  # fmt: skip


def _difference(d: Difference) -> dict[str, Any]:
    """As JSON has it. Gaps that are all alike have no interval."""
    low, high = d.interval or (None, None)
    return {**vars(d), "low": low, "high": high, "decided": d.decided}
