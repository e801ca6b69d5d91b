"""What results say, as frames and values: runs, means of cells, paired differences, places, prices, budgets.

`results` is a folder as a pandas frame; a new column of it is a line in `COLUMNS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fedlora.errors import ConfigError
from fedlora.experiments.digits import ALIKE, alike, in_words, places
from fedlora.experiments.plan import chosen_value, mains
from fedlora.experiments.result import Result, Spent
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Cell, Experiment
from fedlora.experiments.store import read_results_of
from fedlora.training.metrics import METRICS

if TYPE_CHECKING:
    from pandas import DataFrame

SCORES = ("loss", "accuracy")  # held-out log-loss, the less the better, and accuracy
SIMULATIONS = "Private runs of an experiment are simulations: each is a population of its own, and epsilon is its own."
# Of each run, in `results`.
COLUMNS: Mapping[str, Callable[[Result], object]] = {
    "digest": lambda r: r.digest,
    "method": lambda r: r.method,
    "seed": lambda r: r.settings.run.seed,
    "metric": lambda r: r.metric,
    "target": lambda r: r.target,
    "rounds": lambda r: r.rounds,
    "best_round": lambda r: r.best_round,
    "test, best": lambda r: r.score("test, best"),
    "test, last": lambda r: r.score("test, last"),
    "validation, best": lambda r: r.score("validation, best"),
    "MB up": lambda r: r.megabytes_up,
    "MB down": lambda r: r.megabytes_down,
    "seconds": lambda r: r.wall_seconds,
    "seconds of training": lambda r: r.seconds.get("train"),
    "epsilon": lambda r: r.privacy.epsilon_planned if r.privacy else None,
    "commit": lambda r: " and ".join(r.commits(12)),
    "machine": lambda r: r.machine.words,
}


def results(path: str | Path, *, by_round: bool = False) -> DataFrame:
    """Stored runs as a pandas frame.

    Args:
        path: a folder of results (`results`, the `--out` of `fedlora compare`), or one of its files.
        by_round: a row for each run, round and score (on validation; "training loss" of each client), in place of one
            for each run.

    Returns:
        By run: where it is stored, `COLUMNS`, every setting in which the runs differ ("train.lr"), and every score on
        the test set after the last round ("test loss"). By round: digest, method, seed, round, metric, client, value.

    Raises:
        CheckpointError: a file there that holds no results. FileNotFoundError: nothing is there.

    Example:
        >>> runs = results("results")
        >>> runs.groupby("method")["seed"].count().to_dict()
        {'glora': 1}
    """
    from pandas import DataFrame

    place = Path(path)
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise FileNotFoundError(f"{place} has no results (NAME.jsonl).")
    found = [(file.stem, result) for file in files for result in read_results_of(file).values()]
    if by_round:
        return DataFrame([row for _, result in found for row in rounds_of(result)])
    settings = [_flat(result.settings.model_dump(mode="json")) for _, result in found]
    differing = {key for one in settings for key in one if any(one[key] != other.get(key) for other in settings)}
    return DataFrame(
        [
            {"file": file, **{name: column(result) for name, column in COLUMNS.items()},
             **{key: value for key, value in told.items() if key in differing - {"run.seed", "method.name"}},
             **{f"test {name}": value for name, value in result.test.last.items()}}
            for (file, result), told in zip(found, settings, strict=True)
        ]
    )  # fmt: skip


def rounds_of(result: Result) -> Iterator[dict[str, object]]:
    """Each score on validation and each client's training loss, by round; NaN where it diverged."""
    of = {"digest": result.digest, "method": result.method, "seed": result.settings.run.seed}
    for score in result.history.metrics:
        for t, value in result.history.curve(score).items():
            yield {**of, "round": t, "metric": score, "client": None, "value": value}
    for t in range(1, result.rounds + 1):
        for client, loss in result.history.losses_of(t).items():
            value = math.nan if loss is None else loss
            yield {**of, "round": t, "metric": "training loss", "client": client, "value": value}


def long_records(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[dict[str, object]]:
    """A record for each run, round and score on validation, with the labels of its cell: for curves of one's own."""
    found = []
    for run in mains(experiment, profile, results, failed):
        if (result := run.result(results)) is not None:
            for row in rounds_of(result):
                if row["client"] is None:
                    of = {**run.cell, "seed": run.seed, "round": row["round"]}
                    found.append({**of, "metric": row["metric"], "value": row["value"]})
    return found


def _flat(table: Mapping[str, object], where: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in table.items():
        found |= _flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return found


@dataclass(frozen=True)
class CellScore:
    """One cell. scores: seed -> value, of the seeds that were run. planned: how many were meant. tuned: the value that
    the search chose. metric: what the scores are of, as "accuracy"; None where nothing was run. none: seeds whose run
    has no number: it diverged, failed by itself, or never got there (a censored number of rounds). less: whether less
    is better."""

    cell: Cell
    scores: Mapping[int, float]
    planned: int
    tuned: float | None
    metric: str | None = None
    none: tuple[int, ...] = ()
    less: bool = False

    @property
    def mean(self) -> float | None:
        """None where a run has no number: the mean of the others would favour what fails."""
        return fmean(self.scores.values()) if self.scores and not self.none else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, where there is a mean."""
        return stdev(self.scores.values()) if len(self.scores) > 1 and not self.none else None

    @property
    def median(self) -> float | None:
        """A run without a number is worse than all others; None where it falls on one of these."""
        count = len(self.scores) + len(self.none)
        best_first = sorted(self.scores.values(), reverse=not self.less)
        if count // 2 >= len(best_first):
            return None
        return best_first[count // 2] if count % 2 else fmean(best_first[count // 2 - 1 : count // 2 + 1])

    def ranked(self) -> dict[int, float]:
        """Seed -> value for an order, in which no number is the last place."""
        return {**self.scores, **dict.fromkeys(self.none, math.inf if self.less else -math.inf)}

    def words(self, form: Callable[[float, float | None], str] = in_words) -> str:
        """The mean with its spread; without a mean the median, if there is one, and how many have a number."""
        if self.mean is not None:
            return form(self.mean, self.spread)
        if not self.none:
            return "none"
        told = f"{len(self.scores)} of {len(self.scores) + len(self.none)} have a number"
        return told if self.median is None else f"median {form(self.median, None)}; {told}"


@dataclass(frozen=True)
class Difference:
    """other - reference over the seeds that both have: mean, 95 % confidence interval and two-sided p (paired t)."""

    reference: str
    other: str
    where: Mapping[str, str]
    pairs: int
    mean: float
    low: float
    high: float
    p: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero. Gaps that are all alike have no interval, and decide nothing."""
        return self.low != self.high and (self.low > 0 or self.high < 0)

    @property
    def interval(self) -> tuple[float, float] | None:
        """None where all gaps are alike."""
        return None if self.low == self.high else (self.low, self.high)

    @property
    def verdict(self) -> str:
        """ "higher" or "lower" than the reference, "undecided" where the interval holds zero; where all gaps are alike
        there is none, and where they are all zero the scores are "equal"."""
        if self.low == self.high:
            return "no spread" if self.mean else "equal"
        return ("higher" if self.low > 0 else "lower") if self.decided else "undecided"


@dataclass(frozen=True)
class Placing:
    """Which places a label took among the others. counts: of the first place, the second, ..., over the seeds that all
    have. Labels whose scores are alike (`digits.alike`) share the better place."""

    label: str
    counts: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(place * count for place, count in enumerate(self.counts, start=1)) / sum(self.counts)


def score_cells(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    which: str | None = None,
    failed: Collection[str] = (),
) -> list[CellScore]:
    """Every cell of the profile with what has been run of it. which: a name as `Result.score` takes it. failed: as
    `plan.chosen_value` takes it."""
    which = which or experiment.profile(profile).metric or experiment.metric
    done: dict[tuple[str, ...], dict[int, float]] = {}
    none: dict[tuple[str, ...], list[int]] = {}
    metrics: dict[tuple[str, ...], str] = {}
    for run in mains(experiment, profile, results, failed):
        key, result, value = tuple(run.cell.values()), run.result(results), None
        if result is not None:
            metrics[key], value = result.metric, result.score(which)
        if value is not None:
            done.setdefault(key, {})[run.seed] = value
        elif result is not None or run.digest in failed:
            none.setdefault(key, []).append(run.seed)
    planned, found = len(experiment.profile(profile).seeds), []
    for cell in experiment.cells(profile):
        key = tuple(cell.values())
        tuned, metric = chosen_value(experiment, profile, cell, results, failed), metrics.get(key)
        less = metric is not None and smaller_is_better(which, metric)
        found.append(CellScore(cell, done.get(key, {}), planned, tuned, metric, tuple(none.get(key, ())), less))
    return found


def without_number(cells: Sequence[CellScore]) -> list[str]:
    """A line for each cell that has numbers on some of its runs only; "0 of 5" says it of none."""
    return [
        f"{', '.join(cell.cell.values())}: no number on seed{'s' if len(cell.none) > 1 else ''} "
        f"{', '.join(map(str, cell.none))}: the run diverged, failed or never got there. So there is no mean, and no "
        f"difference from another."
        for cell in cells
        if cell.none and cell.scores
    ]


def measured_by(cells: Sequence[CellScore]) -> str | None:
    """The metric of the cells' scores, or all of them; None where nothing was run."""
    return " and ".join(dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)) or None


def score_categories(
    experiment: Experiment, profile: str, results: Mapping[str, Result], which: str, failed: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """Label of the first row axis -> category -> mean over its tasks and over seeds, for data that come in tasks.

    which: "test, last" (tasks that clients train on), "unseen, last" and so on.
    """
    axis = experiment.rows[0]
    found: dict[str, dict[str, list[float]]] = {}
    for run in mains(experiment, profile, results, failed):
        result = run.result(results)
        for task, score in (result.by_group(which) if result else {}).items():
            category = result.categories.get(task, task) if result else task
            found.setdefault(run.cell[axis], {}).setdefault(category, []).append(score)
    return {label: {c: fmean(x) for c, x in sorted(by.items())} for label, by in found.items()}


def placings(cells: Sequence[CellScore], axis: str, *, smaller_is_better: bool = False) -> list[Placing]:
    """The places of the axis's labels, seed by seed; cells differ in that axis only. None where no seed is in all."""
    ranked = [cell.ranked() for cell in cells]
    seeds = set.intersection(*map(set, ranked)) if cells else set()
    if not seeds or not any(cell.scores for cell in cells):
        return []
    counts = [[0] * len(cells) for _ in cells]
    for seed in seeds:
        for k, place in enumerate(places([each[seed] for each in ranked], smaller_is_better=smaller_is_better)):
            counts[k][place] += 1
    return [Placing(cell.cell[axis], tuple(count)) for cell, count in zip(cells, counts, strict=True)]


def orders(cells: Sequence[CellScore], *, smaller_is_better: bool = False) -> tuple[int, int]:
    """How many different orders of the cells there are over the seeds that all have, and how many seeds these are.
    An order in which two share a place is another one than those in which one of them is ahead."""
    ranked = [cell.ranked() for cell in cells]
    seeds = set.intersection(*map(set, ranked)) if cells else set()
    found = {places([each[seed] for each in ranked], smaller_is_better=smaller_is_better) for seed in seeds}
    return len(found), len(seeds)


def smaller_is_better(which: str, metric: str) -> bool:
    """Whether of a number, as `Result.score` takes its name, less is better."""
    return parse_number(which).smaller_is_better(metric)


def paired(cells: Sequence[CellScore], axis: str, reference: str) -> list[Difference]:
    """Each other label of the axis against the reference, where all other axes agree, over the seeds that both have.
    None of a pair in which a run has no number (`without_number`): the gaps of the others would favour what fails."""
    differences = []
    for theirs in cells:
        if theirs.cell[axis] == reference:
            continue
        where = {name: label for name, label in theirs.cell.items() if name != axis}
        for ours in cells:
            if ours.cell[axis] == reference and all(ours.cell[name] == label for name, label in where.items()):
                seeds = sorted(set(ours.scores) & set(theirs.scores))
                if len(seeds) > 1 and not ours.none and not theirs.none:
                    pairs = [(theirs.scores[seed], ours.scores[seed]) for seed in seeds]
                    differences.append(difference(reference, theirs.cell[axis], where, pairs))
    return differences


def difference(
    reference: str, other: str, where: Mapping[str, str], pairs: Sequence[tuple[float, float]]
) -> Difference:
    """The paired t interval of (other, reference) pairs. What differs by rounding alone (`digits.alike`) is no gap."""
    from scipy import stats

    gaps = [0.0 if alike(a, b) else a - b for a, b in pairs]
    rounding = ALIKE * max(abs(score) for pair in pairs for score in pair)
    if max(gaps) - min(gaps) <= rounding:  # no spread: the interval is the number itself
        mean = fmean(gaps)
        return Difference(reference, other, where, len(gaps), mean, mean, mean, math.nan)
    test = stats.ttest_1samp(gaps, 0.0)
    interval = test.confidence_interval(0.95)
    return Difference(
        reference, other, where, len(gaps), fmean(gaps), float(interval.low), float(interval.high), float(test.pvalue)
    )


# ---- what a row costs in peace, and saves elsewhere ------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """One row against the reference in one place. where: the labels of the other axes. peaceful: nobody attacks there.
    mean: of the row itself. better: how much better than the reference it is, negative where it is worse, the mean over
    the seeds that both have; low, high: its 95 % interval (paired t), None with one seed. Where a run has no number
    mean or better is NaN."""

    row: str
    where: Mapping[str, str]
    peaceful: bool
    score: str
    pairs: int
    mean: float
    better: float
    low: float | None
    high: float | None


def prices(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    scores: Sequence[str] = SCORES,
    failed: Collection[str] = (),
) -> list[Price]:
    """Every row in every place where row and reference share a seed, on the test set after the last round; empty for an
    experiment without `peace`."""
    peace, axis, reference = experiment.peace, experiment.rows[0], experiment.reference
    if peace is None or reference is None:
        return []
    found: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[int, float]] = {}
    for run in mains(experiment, profile, results, failed):
        result = run.result(results)
        where = tuple((name, label) for name, label in run.cell.items() if name != axis)
        for score in scores:
            if result is not None:  # NaN: it diverged
                value = result.tested(score)
                number = math.nan if value is None else value
                found.setdefault((score, run.cell[axis], where), {})[run.seed] = number
    known = {key[0] for key, by_seed in found.items() if not all(map(math.isnan, by_seed.values()))}
    made = []
    for (score, row, where), ours in found.items():
        theirs = found.get((score, reference, where), {})
        seeds = sorted({*ours} & {*theirs})
        if not seeds or score not in known:
            continue
        up = 1.0 if METRICS[score].larger_is_better else -1.0
        pairs = [(up * ours[seed], up * theirs[seed]) for seed in seeds]
        whole = not any(math.isnan(one) for pair in pairs for one in pair)
        gap = difference(reference, row, dict(where), pairs) if len(seeds) > 1 and whole else None
        alone = pairs[0][0] - pairs[0][1] if whole else math.nan
        better, low, high = (gap.mean, gap.low, gap.high) if gap else (alone, None, None)
        peaceful = dict(where).get(peace.axis) == peace.label
        mean = fmean(ours[seed] for seed in seeds)
        made.append(Price(row, dict(where), peaceful, score, len(seeds), mean, better, low, high))
    return made


def price_rows(found: Sequence[Price], score: str) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) of one score's table in words: a row a label, peace first, "value (how much better)" in each."""
    of = [price for price in found if price.score == score]
    places = list(dict.fromkeys(_place(price) for price in sorted(of, key=lambda p: not p.peaceful)))
    labels = list(dict.fromkeys(price.row for price in of))
    at = {(price.row, _place(price)): price for price in of}
    rows = [[label, *(_cell(at.get((label, place))) for place in places)] for label in labels]
    peaceful = {_place(price) for price in of if price.peaceful}
    return ["", *(f"{place}: cost" if place in peaceful else f"{place}: saved" for place in places)], rows


def _place(price: Price) -> str:
    return ", ".join(price.where.values())


def _cell(price: Price | None) -> str:
    """The score, and behind it what it cost (peace) or saved, with its interval."""
    if price is None:
        return ""
    if math.isnan(price.better):
        return "none: a run has no number"
    amount = (-price.better if price.peaceful else price.better) + 0.0  # no minus before a zero
    if price.low is None or price.high is None or price.low == price.high:
        return f"{price.mean:.3f} ({amount:+.3f})"
    low, high = (-price.high, -price.low) if price.peaceful else (price.low, price.high)
    return f"{price.mean:.3f} ({amount:+.3f}, {low:+.3f} to {high:+.3f})"


# ---- what privacy costs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """One cell over its seeds. line, label: of the two axes. scores: score -> seed -> value, on the test set after the
    last round; none of a score that a run lacks, because it diverged. spent: by each of its runs, read from the results
    and not from the plan; None where the cell has no [privacy]."""

    line: str
    label: str
    seeds: int
    scores: Mapping[str, Mapping[int, float]]
    spent: Spent | None = None

    @property
    def epsilon(self) -> float | None:
        return None if self.spent is None else self.spent.epsilon_planned

    def mean(self, score: str) -> float:
        return fmean(self.scores[score].values())

    def spread(self, score: str) -> tuple[float, float]:
        """(least, largest) over the seeds."""
        return min(self.scores[score].values()), max(self.scores[score].values())


def spendings(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[Budget]:
    """Every cell that has a result, in the order of the file; empty for an experiment without `budgets`.

    Raises:
        ConfigError: runs of one cell that did not spend the same, or that have [privacy] where the file says none.
    """
    axes = experiment.budgets
    if axes is None:
        return []
    found: dict[tuple[str, str], dict[int, Result]] = {}
    for run in mains(experiment, profile, results, failed):
        if run.digest in results:
            found.setdefault((run.cell[axes.lines], run.cell[axes.axis]), {})[run.seed] = results[run.digest]
    return [_spent(line, label, label != axes.none, by_seed) for (line, label), by_seed in found.items()]


def _spent(line: str, label: str, private: bool, by_seed: Mapping[int, Result]) -> Budget:
    scores: dict[str, dict[int, float]] = {}
    for seed, result in by_seed.items():
        for score in SCORES:
            if (value := result.tested(score)) is not None:
                scores.setdefault(score, {})[seed] = value
    scores = {score: by for score, by in scores.items() if len(by) == len(by_seed)}
    told: list[Spent] = [result.privacy for result in by_seed.values() if result.privacy is not None]
    if len(told) != (len(by_seed) if private else 0):
        raise ConfigError(
            f"{line}, {label}: {len(told)} of its {len(by_seed)} runs have [privacy], and by budgets.none "
            f"{'all have it' if private else 'none has'}."
        )
    if not private:
        return Budget(line, label, len(by_seed), scores)
    if any(one != told[0] for one in told):
        raise ConfigError(f"{line}, {label}: its runs have not spent the same.")
    return Budget(line, label, len(by_seed), scores, told[0])


def budget_rows(found: Sequence[Budget], lines: str) -> tuple[list[str], list[list[str]]]:
    """(columns, rows) in words: what each cell spent, and mean ± standard deviation over its seeds. lines: the axis."""
    columns = [lines, "epsilon", "delta", "z", "q", "rounds", "accuracy", "log-loss", "seeds"]
    rows = []
    for cell in found:
        spent, told = cell.spent, ["none", "", "", "", ""]
        if spent is not None:
            told = [_epsilon(cell), f"{spent.delta:g}", f"{spent.noise_multiplier:.4g}", f"{spent.sampling:g}",
                    str(spent.rounds_planned)]  # fmt: skip
        rows.append([cell.line, *told, _score(cell, "accuracy"), _score(cell, "loss"), str(cell.seeds)])
    return columns, rows


def _epsilon(cell: Budget) -> str:
    """Rounded up; of a run that is clipped and hardly noised no promise at all."""
    e = cell.epsilon or 0.0
    return f"{math.ceil(e * 100) / 100:.2f}" if e < 1000 else f"none ({cell.label})"


def _score(cell: Budget, score: str) -> str:
    values = list(cell.scores.get(score, {}).values())
    if not values:
        return "none: a run has no number"
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
