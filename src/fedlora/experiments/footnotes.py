"""Facts that scores depend on but do not show: whose model was measured, by which code, on which machine, and choices
at the edge of their grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from fedlora.experiments.claims import Family, Gate, setup_axis
from fedlora.experiments.digits import shown
from fedlora.experiments.grid import Grid
from fedlora.experiments.merger_settings import ALONE
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.result import Result
from fedlora.experiments.scores import parse_number
from fedlora.experiments.tables import CellScore, of_two_units, without_number

Used = Sequence[tuple[PlannedRun, Result]]
_FIRST_GRID = (1e-3, 10.0)  # the grid of C in results that do not record it


def notes(
    grid: Grid, number: str | None = None, *, cells: Sequence[CellScore] = (), of: Used | None = None,
    searched: bool = True,
) -> list[str]:  # fmt: skip
    """One line for each thing that a reader of these runs' numbers must know.

    Args:
        number: its name, if it is a score, "" for the compared one; for a score a line says whose model has it.
        cells: those with the number, for seeds that lack it. of: the runs, if these are not all.
        searched: whether to mention values at the edge of their grid.
    """
    of = grid.used if of is None else of
    which = "" if number is None else grid.which(number)
    return [
        *without_number(cells),
        *of_two_units(cells, grid.rows),
        *(whose_models(grid.rows, of, which) if which and parse_number(which).of_target else []),
        *mixtures(grid.rows, of),
        *(edges(grid, of) if searched else []),
    ]


def family_notes(family: Family, grid: Grid) -> list[str]:
    """Notes on only the runs that a family compares."""
    setups, labels = setup_axis(grid.experiment), {label for pair in family.pairs for label in pair}
    of = [o for o in grid.used if o[0].cell[grid.rows] in labels and o[0].cell[setups] in family.setups]
    return notes(grid, "test, last", of=of)


def gate_notes(gate: Gate, setups: Collection[str], grid: Grid) -> list[str]:
    """A line if the head alone chose its strength at the edge of its grid. grid, setups: where it was measured."""
    axis = setup_axis(grid.experiment)
    heads = [result.of for run, result in grid.used if run.cell[grid.rows] == gate.head and run.cell[axis] in setups]
    counts: Counter[tuple[str, float]] = Counter()
    for head in heads:
        if head is not None and head.strength is not None:
            low, high = head.strengths_tried or _FIRST_GRID
            if head.strength in (low, high):
                counts["largest" if head.strength == high else "smallest", head.strength] += 1
    return [
        f"The strength C of {gate.head} is the {end} tried, {shown(value)}, in {count} of {len(heads)} runs: a better "
        f"head may lie beyond, and LoRA's lead over it would be smaller."
        for (end, value), count in counts.items()
    ]


def whose_models(axis: str, of: Used, which: str) -> list[str]:
    """A line if scores are from clients' own models, because they appear beside those of a server's model."""
    labels: dict[str, dict[str, None]] = {}
    for run, result in of:
        labels.setdefault(_whose(result, which), {})[run.cell[axis]] = None
    if {*labels} <= {_OF_SERVER}:
        return []
    if len(labels) == 1:
        return [f"Every number is {next(iter(labels))}, not {_OF_SERVER}."]
    each = [f"{', '.join(mine)}: {score}." for score, mine in labels.items() if score != _OF_SERVER]
    return [" ".join([*each, *([f"The others: {_OF_SERVER}."] if _OF_SERVER in labels else [])])]


_OF_SERVER = "the score of the server's model"


def _whose(result: Result, which: str) -> str:
    alone = result.of is not None and result.of.merger.get("control") == ALONE
    if result.target != "clients" and not alone:
        return _OF_SERVER
    data = ", each on its client's own data" if result.on_own_data(which) else " on the same data"
    return f"the mean score of the clients' own models{data}"


def mixtures(axis: str, of: Used) -> list[str]:
    """A line if runs are from several commits, machines or versions of libraries, and how often a comparison mixes
    them: the axis's labels on one seed, with all else equal."""
    found = [_mixture(axis, of, what, told) for what, told in _ORIGINS.items()]
    return [line for line in found if line]


def _mixture(axis: str, of: Used, what: str, told: Callable[[Result], str]) -> str:
    """A merger's commit may differ from that of the training that it merges, and from the other mergers'."""
    each_of = [(run, told(result)) for run, result in of]
    counts = Counter(origin for _, origin in dict.fromkeys((run.digest, origin) for run, origin in each_of))
    if len(counts) < 2:
        return ""
    places: dict[tuple[object, ...], set[str]] = {}
    for run, origin in each_of:
        where = tuple(label for name, label in run.cell.items() if name != axis)
        places.setdefault((run.seed, where), set()).add(origin)
    met = sum(len(each) > 1 for each in places.values())
    each = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    meet = f"Different ones are compared in {met} of {len(places)} cases (a seed in a set-up)"
    why = ", which may explain part of a gap" if met else ""
    return f"The {len({run.digest for run, _ in of})} runs come from {len(counts)} {what}: {each}. {meet}{why}."


def _machines(result: Result) -> str:
    """The machines of all its parts, each once."""
    return " and ".join(dict.fromkeys(part.machine.words for part in result.made))


_ORIGINS: Mapping[str, Callable[[Result], str]] = {
    "commits of the code": lambda result: " and ".join(result.commits(7)),
    "machines": _machines,
    "versions of libraries": lambda result: ", ".join(f"{k} {v}" for k, v in sorted(result.versions.items())),
}


def edges(grid: Grid, of: Used) -> list[str]:
    """A line for each searched value that ties with others, or is the largest or smallest tried."""
    tune = grid.experiment.tune
    if tune is None:
        return []
    over = [axis for axis in tune.over if len({run.cell[axis] for run, _ in of}) > 1]
    found: dict[tuple[str, str], list[str]] = {}
    for where, run in {tuple(run.cell[axis] for axis in tune.over): run for run, _ in of}.items():
        made = grid.choice(run.cell)
        label = ", ".join(name for axis, name in zip(tune.over, where, strict=True) if axis in over) or "all"
        if made.level:
            what = f"{', '.join(map(shown, made.level))} tie on validation, and the smallest was taken"
            found.setdefault((what, "the search does not tell them apart"), []).append(label)
        elif made.edge is not None and run.tuned is not None:
            what = f"{shown(run.tuned)}, the {made.edge} tried, was chosen"
            found.setdefault((what, "the best may lie beyond: widen the grid"), []).append(label)
    return [f"{tune.key} = {what} for {'; '.join(labels)}: {so}." for (what, so), labels in found.items()]
