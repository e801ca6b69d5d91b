"""The kinds of table that a page is filled with: each is a function of an experiment, its results and its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from fedlora.errors import ConfigError
from fedlora.experiments.deciding.claims import Claims, Family, setup_axis
from fedlora.experiments.deciding.decisions import Answers
from fedlora.experiments.deciding.power import per_cent, powers
from fedlora.experiments.deciding.seed_plan import Plan
from fedlora.experiments.grid.plan import at_the_edge, mains
from fedlora.experiments.grid.run_times import times_of
from fedlora.experiments.grid.spec import Experiment
from fedlora.experiments.scores.digits import difference_in_words, in_words, shown
from fedlora.experiments.stored.results import Result
from fedlora.experiments.tables import decision_words
from fedlora.experiments.tables.budgets import budget_rows, spendings
from fedlora.experiments.tables.cells import CellScore, paired, score_cells
from fedlora.experiments.tables.prices import SCORES, price_rows, prices

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Source:
    """What a block's table is made of. plan, answers, claims: of the experiment; None and empty where it has no plan.
    words: what stands behind the kind in the block. failed: digest -> why, of runs that failed by themselves."""

    experiment: Experiment
    profile: str
    results: Mapping[str, Result]
    words: str = ""
    plan: Plan | None = None
    answers: Sequence[Answers] = field(default_factory=tuple)
    claims: Claims | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> Answers | None:
        """The one that the block's words name; None without a plan. Raises `ConfigError` for a name that is none."""
        if self.plan is None:
            return None
        known = {one.name: one for one in self.answers}
        if self.words not in known:
            raise ConfigError(f"{self.experiment.name} is asked by {', '.join(known)}; got {self.words!r}.")
        return known[self.words]

    @property
    def reference_and_number(self) -> tuple[str, str]:
        """Of `differences`: the label that all others are compared with, and a number's name or nothing."""
        label, _, which = self.words.partition(":")
        return label.strip() or self.experiment.reference or "", which.strip()


def table_of(kind: str, source: Source) -> Rows:
    """Columns and rows. Raises `ConfigError` for words that the kind does not take."""
    return KINDS[kind](source)


def _budgets(source: Source) -> Rows:
    experiment = source.experiment
    lines = experiment.budgets.lines if experiment.budgets else ""
    return budget_rows(spendings(experiment, source.profile, source.results, source.failed), lines)


def _prices(source: Source) -> Rows:
    if source.words not in SCORES:
        raise ConfigError(f"'prices' takes one of {', '.join(SCORES)}; got {source.words!r}.")
    columns, rows = price_rows(
        prices(source.experiment, source.profile, source.results, failed=source.failed), source.words
    )
    return [source.experiment.rows[0], *columns[1:]], [[cell or "not run" for cell in row] for row in rows]


def _scores(source: Source) -> Rows:
    """A row a cell that has any. words: a number's name, as `Result.score` takes it; none: the experiment's."""
    axes = _told_axes(source.experiment, source.profile)
    rows = [[*(cell.cell[axis] for axis in axes), cell.words(), str(len(cell.scores)),
             _value(source, cell)]
            for cell in _cells(source, source.words) if cell.scores or cell.none]  # fmt: skip
    if not any(row[-1] for row in rows):
        return [*axes, "mean ± sd", "seeds"], [row[:-1] for row in rows]
    return [*axes, "mean ± sd", "seeds", source.experiment.tune.key if source.experiment.tune else ""], rows


def _differences(source: Source) -> Rows:
    """Paired differences. words: `LABEL` of the first row axis that all others are compared with, then a colon and a
    number's name, each of which may be left out."""
    reference, which = source.reference_and_number
    experiment, axis = source.experiment, source.experiment.rows[0]
    if reference not in experiment.axes[axis]:
        raise ConfigError(f"{experiment.name} has no {axis} {reference!r}: {', '.join(experiment.axes[axis])}.")
    others = [a for a in _told_axes(experiment, source.profile) if a != axis]
    rows = []
    for d in paired(_cells(source, which), axis, reference):
        mean, interval = difference_in_words(d.mean, d.low, d.high, " to ")
        rows.append([d.other, *(d.where[a] for a in others), mean, interval, str(d.pairs)])
    return [axis, *others, f"against {reference}", "95 %", "pairs"], rows


def _steps(source: Source) -> Rows:
    """Each label of the first row axis against the one before it. words: a number's name, or nothing."""
    experiment, axis = source.experiment, source.experiment.rows[0]
    others = [a for a in _told_axes(experiment, source.profile) if a != axis]
    cells = _cells(source, source.words)
    labels = list(dict.fromkeys(cell.cell[axis] for cell in cells))
    rows = []
    for before, label in pairwise(labels):
        for d in paired([cell for cell in cells if cell.cell[axis] in (before, label)], axis, before):
            mean, interval = difference_in_words(d.mean, d.low, d.high, " to ")
            rows.append([label, before, *(d.where[a] for a in others), mean, interval, str(d.pairs)])
    return [axis, "against", *others, "difference", "95 %", "pairs"], rows


def _losses(source: Source) -> Rows:
    """The clients' training losses in the last round: the mean over clients, from the smallest seed to the largest."""
    axes = _told_axes(source.experiment, source.profile)
    found: dict[tuple[str, ...], list[float]] = {}
    for run in mains(source.experiment, source.profile, source.results, source.failed):
        result = run.result(source.results)
        last = result.raw["history"][-1]["losses"] if result is not None and result.raw["history"] else {}
        if last:
            each = [float(loss) if isinstance(loss, int | float) else math.nan for loss in last.values()]
            found.setdefault(tuple(run.cell[axis] for axis in axes), []).append(fmean(each))
    rows = []
    for key, of in found.items():
        told = [loss for loss in of if not math.isnan(loss)]
        words = f"{min(told):.2f} to {max(told):.2f}" if told else "none"
        seeds = str(len(of)) if len(told) == len(of) else f"{len(told)} of {len(of)}, others diverged"
        rows.append([*key, words, seeds])
    return [*axes, "training loss", "seeds"], rows


def _decisions(source: Source) -> Rows:
    """words: a family."""
    found = source.family
    if found is None:
        return [""], []
    columns, rows = decision_words.headings(found.family), decision_words.rows(found)
    if any(answer.test is not None for answer in found.answers):
        return columns, rows
    return [*columns[:2], columns[-1]], [[*row[:2], row[-1]] for row in rows]  # columns of nothing say nothing


def _gates(source: Source) -> Rows:
    """By how much LoRA beats a head alone, by set-up, and with how many seeds that would pass. words: a family."""
    found = source.family
    rows = [
        [gate.setup, label, in_words(gate.ahead[label], gate.spread[label]),
         "not ahead by the margin" if (needed := gate.needed[label]) is None else decision_words.seeds_in_words(needed),
         "carried by LoRA" if gate.passed else "not known: a run is lost" if gate.lost else "thrown out"]
        for gate in (found.gates if found is not None else ()) for label in gate.ahead
    ]  # fmt: skip
    return ["set-up", "", "log-loss lower than a head's by, mean ± sd", "seeds that it would take", "set-up is"], rows


def _seeds(source: Source) -> Rows:
    """What the plan says: the largest spread of a gap in the pilot, how many seeds it takes, how many there are, and
    what these can show where the spread is largest."""
    plan, claims = source.plan, source.claims
    if plan is None or claims is None:
        return ["family"], []
    rows, count = [], len(plan["seeds"])
    for name, spreads in plan["spreads"].items():
        of = _piloted(source.experiment, claims.families[name], spreads)
        question, spread = max(of.items(), key=lambda pair: pair[1])
        found = powers(claims, claims.families[name], {question: spread}, count)[question]
        _, factor, digits = decision_words.UNITS[claims.families[name].metric]
        told = [f"{factor * x:.{digits}f}" for x in (spread, found.gap)]
        rows.append(
            [name, f"{told[0]} ({question})", decision_words.seeds_in_words(plan["needed"][name]), str(count), told[1],
             per_cent(found.equal)]
        )  # fmt: skip
    return ["family", "largest spread of a gap in the pilot", "seeds that it takes", "seeds planned",
            "smallest gap that these show", "chance that equals are found equivalent"], rows  # fmt: skip


def _piloted(experiment: Experiment, family: Family, spreads: Mapping[str, float]) -> Mapping[str, float]:
    """The spreads that were measured. A set-up without a pilot took the largest of its pair, and is not where it is
    from."""
    axis = setup_axis(experiment)
    setups = {cell[axis] for cell in experiment.cells(family.pilot)}
    measured = {question.words for question in family.questions if question.setup in setups}
    return {words: spread for words, spread in spreads.items() if words in measured} or spreads


def _rates(source: Source) -> Rows:
    """The value of the search that each label got, with what it was chosen by: the score on validation."""
    if source.plan is None:
        return ["of"], []
    values = list(dict.fromkeys(value for rate in source.plan["rates"] for value in rate["validation"]))
    rows = []
    for rate in source.plan["rates"]:
        each = [list(rate["validation"].get(value, {}).values()) for value in values]
        cells = ["diverged" if None in scores else in_words(fmean(scores)) if scores else "" for scores in each]
        rows.append(
            [
                rate["of"],
                ("none" if rate["value"] is None else shown(rate["value"]))
                + (f" ({rate['at_the_edge']} tried)" if rate["at_the_edge"] else ""),
                *cells,
            ]
        )
    return ["", "chosen", *(f"validation at {value}" for value in values)], rows


def _mechanism(source: Source) -> Rows:
    """What happens to the update in the last round, in the mean over seeds. Of mergers: the relative error against the
    exact mean, the norm, the rank. Of runs: how far zero-padded factor averages of the same uploads would have been
    off, and how far the update moves when uploads are written in other coordinates (gauge drift)."""
    experiment = source.experiment
    axes = _told_axes(experiment, source.profile)
    found: dict[tuple[str, ...], list[list[float]]] = {}
    for run in mains(experiment, source.profile, source.results, source.failed):
        result = run.result(source.results)
        if result is None:
            continue
        if experiment.merged is not None:
            facts = result.raw["of"]
            numbers = [facts.get(name) for name in ("error", "norm", "rank")]
        else:
            numbers = [result.score("server, error of factor averages"), result.score("server, gauge drift")]
        if (told := [number for number in numbers if number is not None]) and len(told) == len(numbers):
            found.setdefault(tuple(run.cell[axis] for axis in axes), []).append(told)
    of_mergers, of_runs = ["relative error", "norm", "rank"], ["factor averages would be off by", "gauge drift"]
    columns = of_mergers if experiment.merged else of_runs
    rows = [[*key, *(_fact(fmean(column)) for column in zip(*lists, strict=True)), str(len(lists))]
            for key, lists in found.items()]  # fmt: skip
    return [*axes, *columns, "seeds"], rows


def _value(source: Source, cell: CellScore) -> str:
    """What the search chose, and whether nothing beyond it was tried."""
    edge = at_the_edge(source.experiment, source.profile, cell.tuned)
    return "" if cell.tuned is None else shown(cell.tuned) + (f" ({edge} tried)" if edge else "")


def _times(source: Source) -> Rows:
    """One row of all trainings of the profile, each counted once, whatever was merged from it."""
    found = {run.digest: result for run in mains(source.experiment, source.profile, source.results, source.failed)
             if (result := run.result(source.results)) is not None}  # fmt: skip
    if not found:
        return ["runs"], []
    times = times_of(found.values())
    known = times.examples is not None and times.training
    rate = f"{(times.examples or 0) / times.training:.0f}" if known else "not known"
    trained = "not known" if times.examples is None else f"{times.examples:,}"
    columns = ["runs", "examples trained on", "examples a second", "hours of one process"]
    return columns, [[str(times.runs), trained, rate, f"{times.wall / 3600:.1f}"]]


def _fact(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def _told_axes(experiment: Experiment, profile: str) -> list[str]:
    """Those of which the profile has more than one label; the first at least."""
    cells = list(experiment.cells(profile))
    told = [axis for axis in experiment.axes if len({cell[axis] for cell in cells}) > 1]
    return told or [experiment.rows[0]]


def _cells(source: Source, which: str) -> list[CellScore]:
    return score_cells(source.experiment, source.profile, source.results, which or None, source.failed)


KINDS: Mapping[str, Callable[[Source], Rows]] = {
    "budgets": _budgets,
    "prices": _prices,
    "scores": _scores,
    "differences": _differences,
    "steps": _steps,
    "losses": _losses,
    "decisions": _decisions,
    "gates": _gates,
    "seeds": _seeds,
    "rates": _rates,
    "mechanism": _mechanism,
    "times": _times,
}
PLANNED = ("decisions", "gates", "seeds", "rates")  # those that need a plan
