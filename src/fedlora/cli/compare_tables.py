"""The tables of `fedlora compare`, the lines under them, and all of it as one value for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlora.cli.compare_found import Found
from fedlora.cli.compare_runs import Failure
from fedlora.cli.formats import Sheet
from fedlora.cli.measures import megabytes
from fedlora.cli.scores import difference_sheet, direction, score_sheet, widen_lines
from fedlora.experiments.comparison import AXIS, PROFILE
from fedlora.experiments.plan import worst_values
from fedlora.experiments.result import Result
from fedlora.experiments.tables import CellScore, Difference, smaller_is_better
from fedlora.runs.attack_words import attacks_of

_PLACES = 5  # so many places have a column of their own on 80 characters


def sheets(found: Found) -> list[Sheet]:
    """Scores, differences, places, costs."""
    return [_scores(found), *_against(found), *_placings(found), _costs(found)]


def _scores(found: Found) -> Sheet:
    by = {found.which: found.cells, **found.beside}
    n = len(found.seeds)
    how = "one seed" if n == 1 else f"mean ± standard deviation over {n} seeds"
    metric = found.metric.replace("_", "-")
    return score_sheet(f"{metric}: {how}; same clients, data and start", by, [AXIS])


def _against(found: Found) -> list[Sheet]:
    if not found.differences:
        return []
    title = f"{found.title}: difference to {found.reference}, paired by seed"
    return [difference_sheet(title, found.differences)]


def _placings(found: Found) -> list[Sheet]:
    if not found.placings or len(found.seeds) == 1:
        return []
    count = len(found.placings)
    own = min(count, _PLACES)
    heads = [f"{k}{('st', 'nd', 'rd')[k - 1] if k < 4 else 'th'}" for k in range(1, own + 1)]
    rows = []
    for p in found.placings:
        rest = [str(sum(p.counts[own:]))] if count > own else []
        rows.append([p.label, *(str(n) for n in p.counts[:own]), *rest, f"{p.mean:.2f}"])
    different, seeds = found.orders
    changes = "the same order on every seed" if different == 1 else f"{different} different orders on {seeds} seeds"
    columns = ["place", *heads, *(["lower"] if count > own else []), "mean place"]
    return [Sheet(f"{found.title}: places by seed; {changes}", columns, rows)]


def _costs(found: Found) -> Sheet:
    """What it took, in the mean over seeds."""
    columns: dict[str, Callable[[Sequence[Result]], str]] = {
        "target": lambda runs: runs[0].target,
        "MB up": lambda runs: _size([r.megabytes_up for r in runs]),
        "MB down": lambda runs: _size([r.megabytes_down for r in runs]),
        "aggregate s": lambda runs: f"{fmean(r.seconds.get('aggregate', 0.0) for r in runs):.2f}",
        "gauge": lambda runs: f"{max(drifts):.1e}" if (drifts := _told([r.drift for r in runs])) else "not told",
    }
    rows = [
        [label, *(column(list(by_seed.values())) for column in columns.values())]
        for label, by_seed in found.runs.items()
    ]
    return Sheet("What a run costs, and its gauge check", [AXIS, *columns], rows, 2)


def _size(each: Sequence[float | None]) -> str:
    told = _told(each)  # private runs do not tell
    return megabytes(1e6 * fmean(told)) if told else "not told"


def _told(each: Sequence[float | None]) -> list[float]:
    return [x for x in each if x is not None]


_VERDICTS = {
    "higher": "Higher: the score is above the reference's; the 95 % interval leaves out zero.",
    "lower": "Lower: the score is below the reference's; the 95 % interval leaves out zero.",
    "undecided": (
        "Undecided: the 95 % interval (Student's t over the paired differences) holds zero; these seeds do not tell "
        "the two methods apart."
    ),
    "equal": "Equal: the same score on every seed, so there is no interval.",
    "no spread": "No spread: the same difference on every seed, so there is no interval.",
}


def remarks(found: Found) -> list[str]:
    configs = [result.settings.model_dump() for by_seed in found.runs.values() for result in by_seed.values()]
    said = [f"UNDER ATTACK, on purpose: {what}. Nothing of these runs is for use." for what in attacks_of(configs)]
    targets = {result.target for by_seed in found.runs.values() for result in by_seed.values()}
    if len(found.seeds) == 1:
        said.append("One seed: no interval and no verdict. Add --seeds 0:8.")
    elif found.reference not in found.runs:
        said.append(f"No differences: the reference {found.reference} has no finished run.")
    elif found.differences:
        k = len(found.differences)
        there = {gap.verdict for gap in found.differences}
        said += [what for verdict, what in _VERDICTS.items() if verdict in there]
        if k > 1:
            said.append(
                f"Each interval is of one comparison. With {k} of them the chance that one or more leave out zero "
                f"where there is no difference is up to {min(100, 5 * k)} %."
            )
    if found.placings and len(found.seeds) > 1 and _shared(found):
        said.append(
            "Places: methods of the same score, to one in a million, share the better place, and it counts for each of "
            "them; the next one is left empty. An order with a shared place is an order of its own."
        )
    said += [f"{cell.cell[AXIS]}: {why}" for cell in found.cells if (why := _without(found, cell)) is not None]
    said += direction(found.which, found.cells)
    if len(targets) > 1:
        said.append("Some rows measure the server's model and some the clients' own (target): do not compare these.")
    said += _search_remarks(found)
    return said


def _shared(found: Found) -> bool:
    """Whether on any seed two share a place: each place is then not taken once on each seed."""
    seeds = sum(found.placings[0].counts)
    return any(sum(taken) != seeds for taken in zip(*(p.counts for p in found.placings), strict=True))


def _without(found: Found, cell: CellScore) -> str | None:
    """Which finished runs lack the compared number."""
    lack = [str(seed) for seed in found.runs[cell.cell[AXIS]] if seed not in cell.scores]
    if not lack:
        return None
    seeds = f"seed{'s' if len(lack) > 1 else ''} {', '.join(lack)}"
    return (
        f"no number {found.which!r} on {seeds}: the run diverged, or never got there. So there is no mean, and no "
        f"difference from another."
    )


def _search_remarks(found: Found) -> list[str]:
    tune = found.experiment.tune
    if tune is None or len(set(tune.values)) < 2:
        return []
    seeds = ", ".join(map(str, tune.seeds))
    said = [f"tuned: {tune.key}, for each method the best on validation, on seed {seeds}, which is not compared."]
    said += worst_values(found.experiment, PROFILE, found.results, {})
    return said + widen_lines(found.experiment, PROFILE, found.cells)


def value(
    found: Found, failures: Sequence[Failure], summary: Callable[[str, int], Mapping[str, Any]]
) -> dict[str, Any]:
    """For JSON: everything. summary: what a run's folder says of a label and seed."""
    methods = {
        str(cell.cell[AXIS]): {
            "scores": dict(cell.scores), "n": len(cell.scores), "mean": cell.mean, "sd": cell.spread,
            "tuned": cell.tuned,
            "runs": {seed: summary(cell.cell[AXIS], seed) for seed in found.runs[cell.cell[AXIS]]},
        }
        for cell in found.cells
    }  # fmt: skip
    return {
        "metric": found.which, "score": found.metric,
        "smaller_is_better": smaller_is_better(found.which, found.metric),
        "seeds": list(found.seeds), "reference": found.reference, "methods": methods,
        "differences": [_difference(d) for d in found.differences],
        "places": {p.label: list(p.counts) for p in found.placings},
        "refused": {f.label: f.why for f in failures if not f.seeds},
        "failed": [
            {"method": f.label, "seeds": list(f.seeds), "why": f.why}
            for f in failures if f.seeds and (f.dropped is None or f.by_machine)
        ],
        "dropped": [f.words() for f in failures if f.dropped is not None and not f.by_machine],
    }  # fmt: skip


def _difference(d: Difference) -> dict[str, Any]:
    """As JSON has it. Gaps that are all alike have no interval."""
    low, high = d.interval or (None, None)
    return {**vars(d), "low": low, "high": high, "decided": d.decided}
