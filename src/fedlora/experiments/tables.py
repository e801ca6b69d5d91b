"""Tables of an experiment, as frames with notes under them: scores, differences paired by seed, costs, clients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import pandas as pd

from fedlora.experiments import stats
from fedlora.experiments.grid import Planned
from fedlora.experiments.results import megabytes
from fedlora.experiments.scores import SCALES, Line, Number
from fedlora.experiments.spec import Cell
from fedlora.experiments.tune import Progress
from fedlora.runs.attack_words import attacks_of
from fedlora.training.metrics import by_guessing

ALIKE = 1e-5  # relative: scores that differ by less are the same up to rounding
Runs = Sequence[tuple[Planned, Line]]


class Table(NamedTuple):
    """frame: the first `names` columns are names, the others numbers or short words. notes: the first says what the
    table shows."""

    frame: pd.DataFrame
    names: int
    notes: Sequence[str]


def tables_of(progress: Progress, which: str | None = None, margin: float | None = None) -> list[Table]:
    """All tables with a row. which: the number to compare, by default the experiment's. margin: a difference that does
    not matter, by default the experiment's, which is in the unit of its own number."""
    number = progress.grid.number(which)
    each = [scores(progress, number), differences(progress, number, margin), costs(progress), clients(progress)]
    each += [categories(progress, number)]
    return [table for table in each if len(table.frame)]


def by_cell(progress: Progress) -> Iterator[tuple[Cell, Runs]]:
    """Each cell with its runs that have a line."""
    found: dict[tuple[str, ...], list[tuple[Planned, Line]]] = {tuple(c.values()): [] for c in progress.grid.cells}
    for run, line in progress.used:
        found[tuple(run.cell.values())].append((run, line))
    yield from zip(progress.grid.cells, found.values(), strict=True)


def mean_of(number: Number, runs: Runs) -> float:
    """The `middle` over seeds."""
    return middle(number, [number.of(line) for _, line in runs])


def middle(number: Number, each: Collection[float]) -> float:
    """The mean; NaN if a run has no number, because the mean of the others would favour what fails. Of rounds to a
    target the median, in which a run that never gets there is the worst: infinite if it is such a run."""
    if number.of_rounds and each:
        return float(median(math.inf if math.isnan(x) else x for x in each))
    return fmean(each) if each else math.nan


def scores(progress: Progress, number: Number) -> Table:
    """Mean and standard deviation of each cell over its seeds; n: runs with the number, of the `planned` ones."""
    grid, rows, lacking = progress.grid, [], False
    for cell, runs in by_cell(progress):
        have = [x for _, line in runs if not math.isnan(x := number.of(line))]
        row: dict[str, Any] = {axis: cell[axis] for axis in grid.axes}
        if grid.experiment.tune is not None:
            choice = progress.choices.get(grid.key(cell))
            row[grid.experiment.tune.key] = math.nan if choice is None else choice.value
        row["median" if number.of_rounds else "mean"] = mean_of(number, runs)
        if not number.of_rounds:
            row["sd"] = stdev(have) if len(have) == len(runs) > 1 else math.nan
            lacking = lacking or len(have) < len(runs)
        rows += [{**row, "n": len(have), "planned": len(grid.seeds)}] if runs else []
    over = "median over seeds; n: runs that reach it" if number.of_rounds else "mean over seeds"
    notes = [f"{in_its_unit(progress, number)}, {over}.", *_whose(progress, number), *_mixtures(progress)]
    notes += (
        ["A run without the number failed, diverged or did not measure it: then there is no mean."] if lacking else []
    )
    return Table(pd.DataFrame(rows), len(grid.axes), notes)


def differences(progress: Progress, number: Number, margin: float | None = None) -> Table:
    """Each label of the compared axis less the reference, over the seeds that both have, all other labels equal. With a
    margin: a verdict, and the seeds that "equivalent" would take, from three seeds on."""
    grid, up = progress.grid, number.larger_is_better(_metric(progress))
    if margin is None and number == grid.number():
        margin = grid.experiment.margin
    gaps, lacking = _gaps(progress, number, margin)
    frame = pd.DataFrame([
        {**dict(zip(grid.axes, place, strict=True)), "difference": gap.mean, "low": gap.low, "high": gap.high,
         "n": gap.n, "p": gap.p}
        for place, gap in gaps.items()
    ])  # fmt: skip
    reference = grid.experiment.reference
    notes = [f"{in_its_unit(progress, number)}, less that of {reference}: paired by seed, with a 95 % t interval."]
    if gaps:
        frame["p (Holm)"] = stats.holm(list(frame["p"]))
        notes.append(f"{'Positive' if up else 'Negative'} is better. Holm's p is over {len(gaps)} comparisons.")
    if gaps and margin is not None:
        words = stats.verdicts(gaps, larger_is_better=up)
        needed = [
            stats.seeds_needed(gap.sd, margin, len(gaps)) if gap.n > 2 and gap.sd else None for gap in gaps.values()
        ]
        frame["verdict"] = [words[place] for place in gaps]
        frame["seeds needed"] = pd.array(needed, dtype="Int64")
        notes.append(
            f"equivalent: a difference below {margin:g} either way. All verdicts together err in 5 %. seeds needed: to "
            f"find two equal ones equivalent with a power of 80 % ({stats.MOST}: that or more)."
        )
        classes = next(line["classes"] for _, line in progress.used if "failed" not in line)
        if not number.of_rounds and (guess := by_guessing(_metric(progress), classes)) is not None:
            notes.append(f"Guessing scores {guess:.3g}: models that learned nothing are equivalent, too.")
    return Table(frame, len(grid.axes), [*notes, *lacking])


def _gaps(
    progress: Progress, number: Number, margin: float | None
) -> tuple[dict[tuple[str, ...], stats.Gap], list[str]]:
    """Labels -> the gap to the reference; and a note for each kind of pair that is left out."""
    grid, reference = progress.grid, progress.grid.experiment.reference
    theirs = {tuple(cell.values()): {run.seed: line for run, line in runs} for cell, runs in by_cell(progress)}
    gaps: dict[tuple[str, ...], stats.Gap] = {}
    apart, without = [], []
    for cell, runs in by_cell(progress) if reference is not None else ():
        if cell[grid.rows] == reference:
            continue
        other = theirs.get(tuple({**cell, grid.rows: reference or ""}.values()), {})
        pairs = [(line, other[run.seed]) for run, line in runs if run.seed in other]
        each = [(number.of(ours), number.of(base)) for ours, base in pairs]
        place = tuple(cell[axis] for axis in grid.axes)
        if any(number.on_own_data(ours) != number.on_own_data(base) for ours, base in pairs):
            apart.append(", ".join(place))
        elif any(math.isnan(x) for pair in each for x in pair):
            without.append(", ".join(place))
        elif each:
            gaps[place] = stats.paired([0.0 if math.isclose(a, b, rel_tol=ALIKE) else a - b for a, b in each], margin)
    notes = []
    if without:
        notes.append(f"No difference where a run has no number, which would favour what fails: {'; '.join(without)}.")
    if apart:
        notes.append(
            f"Not compared, because one is of clients' own models on their own data: {'; '.join(apart)}. Measure the "
            f"clients' own models of all (evaluate.target = 'clients'), or compare 'clients, last'."
        )
    return gaps, notes


def costs(progress: Progress) -> Table:
    """What a run sends and takes, the mean over seeds; and how far its model moves with coordinates, on the worst."""

    def of(line: Line) -> dict[str, float]:
        up, down = megabytes(line)
        seconds = line["seconds"] or {"aggregate": math.nan}  # a private run does not tell them
        return {"MB up": up, "MB down": down, "s": sum(seconds.values()), "aggregate s": seconds.get("aggregate", 0.0)}

    rows = []
    for cell, runs in by_cell(progress):
        each = [of(line) for _, line in runs if "failed" not in line]
        drifts = [line["gauge_drift"].get(line["method"]) for _, line in runs if "failed" not in line]
        if each:
            means = {name: fmean(one[name] for one in each) for name in each[0]}
            worst = max((x for x in drifts if x is not None), default=math.nan)
            rows.append({**{axis: cell[axis] for axis in progress.grid.axes}, **means, "gauge": worst})
    note = (
        "Costs of a run, the mean over seeds. gauge: how far the model moves, relative to itself, if the last uploads "
        "are written in other coordinates."
    )
    return Table(pd.DataFrame(rows), len(progress.grid.axes), [note])


def clients(progress: Progress) -> Table:
    """Each client's own readout after the last round, a column for each cell."""

    def of(line: Line) -> dict[str, float | None]:
        each = line["clients_at_end"].items()
        return {f"{name} ({line['ranks'].get(name)})": scores.get(line["metric"]) for name, scores in each}

    note = f"Each client's (its rank's) own readout after the last round, the mean over seeds: {_unit(progress)}."
    return _columns(progress, "client (rank)", of, note)


def categories(progress: Progress, number: Number) -> Table:
    """Means by category, for data in tasks."""
    note = f"{number.name}, by category of its tasks: the mean over tasks and seeds."
    return _columns(progress, "category", lambda line: by_category(number, line), note)


def by_category(number: Number, line: Line) -> dict[str, float | None]:
    """Category -> the mean over its tasks, for data that come in tasks."""
    found: dict[str, list[float]] = {}
    for name, score in number.scores(line).items() if not number.of_rounds and number.where != "clients" else ():
        if name.startswith("group/") and score is not None:
            task = name.removeprefix("group/")
            found.setdefault(line["categories"].get(task, task), []).append(score)
    return {category: fmean(each) for category, each in found.items()}


def _columns(progress: Progress, head: str, of: Callable[[Line], Mapping[str, float | None]], note: str) -> Table:
    """A row for each name that `of` gives, a column for each cell with one; the means over seeds."""
    columns: dict[str, dict[str, float]] = {}
    for cell, runs in by_cell(progress):
        found: dict[str, list[float]] = {}
        for _, line in runs:
            for name, value in (of(line) if "failed" not in line else {}).items():
                found.setdefault(name, []).append(math.nan if value is None else value)
        if found:
            columns[", ".join(cell[axis] for axis in progress.grid.axes)] = {k: fmean(x) for k, x in found.items()}
    names = sorted({name for column in columns.values() for name in column})
    rows = [{head: name, **{c: means.get(name, math.nan) for c, means in columns.items()}} for name in names]
    return Table(pd.DataFrame(rows), 1, [note])


def in_its_unit(progress: Progress, number: Number) -> str:
    """A number in words, with its unit."""
    if number.of_rounds:
        metric = _metric(progress).replace("_", " ")
        return f"The first evaluated round whose validation {metric} reaches {number.target:g}"
    return f"{number.name}: {_unit(progress)}"


def _unit(progress: Progress) -> str:
    metric = _metric(progress)
    return SCALES.get(metric, metric)


def warnings(progress: Progress) -> list[str]:
    """What nobody may overlook: attacks on purpose, and that privacy is simulated."""
    lines = [line for _, line in progress.used if "failed" not in line]
    found = [f"UNDER ATTACK, on purpose: {what}. Do not use these results." for what in attacks(progress)]
    if any(line["privacy"] for line in lines):
        found.append(
            "Private runs of an experiment are simulations, each with a population and an epsilon of its own. None of "
            "this is an account of anybody's data."
        )
    return found


def attacks(progress: Progress) -> list[str]:
    """The attacks on the used runs, each once, in words."""
    return attacks_of([line["config"] for _, line in progress.used if "failed" not in line])


def _whose(progress: Progress, number: Number) -> list[str]:
    """A note if scores are of clients' own models, because they stand beside those of a server's model."""
    if number.where == "clients":
        return []
    labels: dict[str, None] = {}
    for run, line in progress.used:
        if line.get("target") == "clients":
            own = ", each on its own data" if number.on_own_data(line) else ", on the common data"
            labels[f"{run.cell[progress.grid.rows]}: the mean of the clients' own models{own}."] = None
    return list(labels)


def _mixtures(progress: Progress) -> list[str]:
    """A note for each way in which the runs are not of one kind: commits, or the content of a model or of data."""
    lines = [line for _, line in progress.used if "failed" not in line]
    commits = sorted({line["commit"] for line in lines})
    found = [f"Runs of {len(commits)} commits: {', '.join(commits)}."] if len(commits) > 1 else []
    read: dict[str, set[str]] = defaultdict(set)  # what must be alike -> its digests
    for line in lines:
        dealt = [line["seed"], *(line["config"].get(table) for table in ("data", "clients", "attack"))]
        read[f"model {line['config']['model']['name']!r}"].add(line["read"]["model"])
        read[f"data of seed {dealt}"] |= {line["read"]["data"]} - {None}  # a private run does not tell
    odd = {name.partition(" ")[0] for name, digests in read.items() if len(digests) > 1}
    return found + [f"Not all runs read the same {what}: its content changed between them." for what in sorted(odd)]


def _metric(progress: Progress) -> str:
    each = [line["metric"] for _, line in progress.used if "failed" not in line]
    return str(each[0]) if each else "loss"
