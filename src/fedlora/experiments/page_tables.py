"""The kinds of table that a page is filled with: each is its columns, its rows, and a caption above them.

A caption is enough for somebody who reads nothing else on the page: what is shown, of how many seeds, in which unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean

from fedlora.errors import ConfigError
from fedlora.experiments import decision_words
from fedlora.experiments.claims import Claims, Family, setup_axis
from fedlora.experiments.costs import times_of
from fedlora.experiments.decision_words import UNITS, margin_in_words, seeds_in_words
from fedlora.experiments.decisions import Answers
from fedlora.experiments.digits import difference_in_words, in_words, shown
from fedlora.experiments.footnotes import edges, mixtures, used, whose_models
from fedlora.experiments.plan import PlannedRun, at_the_edge
from fedlora.experiments.result import Result
from fedlora.experiments.scores import capital, explained, parse_number, scale
from fedlora.experiments.seed_plan import SeedPlan
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import (
    SCORES,
    SIMULATIONS,
    CellScore,
    Difference,
    budget_rows,
    measured_by,
    paired,
    price_rows,
    prices,
    score_cells,
    smaller_is_better,
    spendings,
    without_number,
)
from fedlora.experiments.verdicts import per_cent

_ONE = "Each interval is of one comparison; none is corrected for their number."


@dataclass(frozen=True)
class Table:
    """caption: one paragraph. below: what it rests on, a paragraph each."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Source:
    """What a block's table is made of. plan, answers, claims: of the experiment; None and empty where it has no plan.
    words: what stands behind the kind in the block. failed: digest -> why, of runs that failed by themselves."""

    experiment: Experiment
    profile: str
    results: Mapping[str, Result]
    words: str = ""
    plan: SeedPlan | None = None
    answers: Sequence[Answers] = field(default_factory=tuple)
    claims: Claims | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> Answers:
        """The one that the block's words name. Raises `ConfigError` for a name that is none."""
        known = {one.name: one for one in self.answers}
        if self.words not in known:
            raise ConfigError(f"{self.experiment.name} is asked by {', '.join(known)}; got {self.words!r}.")
        return known[self.words]

    @cached_property
    def used(self) -> list[tuple[PlannedRun, Result]]:
        """The profile's runs that have a result; where there is a plan of it, of the planned seeds."""
        seeds = self.plan.seeds if self.plan is not None and self.plan.profile == self.profile else None
        return used(self.experiment, self.profile, self.results, self.failed, seeds)

    @cached_property
    def axes(self) -> list[str]:
        """Those of which the profile has more than one label; the first at least."""
        cells = list(self.experiment.cells(self.profile))
        told = [axis for axis in self.experiment.axes if len({cell[axis] for cell in cells}) > 1]
        return told or [self.experiment.rows[0]]

    def which(self, number: str) -> str:
        return number or self.experiment.profile(self.profile).metric or self.experiment.metric

    def cells(self, number: str = "") -> list[CellScore]:
        return score_cells(self.experiment, self.profile, self.results, self.which(number), self.failed)

    def told(self, number: str, cells: Sequence[CellScore]) -> str:
        """The number in words, with its unit, as a sentence begins."""
        metrics = dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)
        return capital(" or ".join(dict.fromkeys(explained(self.which(number), m) for m in metrics or [None])))

    def notes(self, *, number: str | None = None, cells: Sequence[CellScore] = (), edges_too: bool = True) -> list[str]:
        """What the numbers rest on. number: of which, where it is a score; its model is whose."""
        of_target = number is not None and parse_number(self.which(number)).of_target
        return [
            *without_number(cells),
            *(whose_models(self.experiment, self.used) if of_target else []),
            *mixtures(self.experiment, self.used),
            *(edges(self.experiment, self.profile, self.used) if edges_too else []),
        ]


def table_of(kind: str, source: Source) -> Table:
    """Raises `ConfigError` for words that the kind does not take."""
    return KINDS[kind](source)


def _budgets(source: Source) -> Table:
    experiment = source.experiment
    lines = experiment.budgets.lines if experiment.budgets else ""
    columns, rows = budget_rows(spendings(experiment, source.profile, source.results, source.failed), lines)
    caption = (
        f"What each cell spent, and {scale('accuracy')} and {scale('loss')} on held-out test data after the last "
        "round: mean ± standard deviation over *seeds*. *epsilon* (rounded up) at *delta*; *z*: noise multiplier; "
        f"*q*: share of the clients that a round asks. {SIMULATIONS}"
    )
    return Table(columns, rows, caption, source.notes(number=""))


def _prices(source: Source) -> Table:
    """What each row costs without an attacker, and saves with one. words: the score."""
    if source.words not in SCORES:
        raise ConfigError(f"'prices' takes one of {', '.join(SCORES)}; got {source.words!r}.")
    experiment, peace = source.experiment, source.experiment.peace
    every = prices(experiment, source.profile, source.results, failed=source.failed)
    found = [price for price in every if price.score == source.words]
    columns, rows = price_rows(found, source.words)
    counts = sorted({price.pairs for price in found}) or [0]
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    name = {"loss": "log-loss"}.get(source.words, source.words)
    intervals = f", with 95 % intervals. {_ONE}" if counts[-1] > 1 else ". One seed has no interval."
    caption = "" if peace is None else (
        f"{capital(scale(source.words))} on held-out test data after the last round, the mean over {seeds}. In "
        f"brackets against {experiment.rows[0]} {experiment.reference}: *cost*, by how much {name} is worse where "
        f"{peace.axis} is {peace.label}; *saved*, by how much it is better elsewhere; paired by seed{intervals}"
    )  # fmt: skip
    told = [[cell or "not run" for cell in row] for row in rows]
    return Table([experiment.rows[0], *columns[1:]], told, caption, source.notes(number=""))


def _scores(source: Source) -> Table:
    """A row a cell that has any. words: a number's name; none: the experiment's."""
    tune, cells = source.experiment.tune, source.cells(source.words)
    columns: dict[str, Callable[[CellScore], str]] = {
        "mean ± sd": lambda cell: cell.words(),
        "seeds": lambda cell: str(len(cell.scores)),
    }
    searched = ""
    if tune is not None and any(cell.tuned is not None for cell in cells):
        columns[tune.key] = lambda cell: _value(source, cell)
        searched = f" *{tune.key}*: the value that the search chose on validation."
    rows = [
        [*(cell.cell[axis] for axis in source.axes), *(column(cell) for column in columns.values())]
        for cell in cells
        if cell.scores or cell.none
    ]
    alone = "; of one seed its number" if any(len(cell.scores) == 1 for cell in cells) else ""
    caption = f"{source.told(source.words, cells)}: mean ± standard deviation over seeds{alone}.{searched}"
    below = source.notes(number=source.words, cells=cells, edges_too=False)
    return Table([*source.axes, *columns], rows, caption, below)


def _differences(source: Source) -> Table:
    """Paired by seed. words: `LABEL` of the first row axis that all others are compared with, then a colon and a
    number's name, each of which may be left out."""
    label, _, number = (part.strip() for part in source.words.partition(":"))
    experiment, axis = source.experiment, source.experiment.rows[0]
    reference = label or experiment.reference or ""
    if reference not in experiment.axes[axis]:
        raise ConfigError(f"{experiment.name} has no {axis} {reference!r}: {', '.join(experiment.axes[axis])}.")
    cells, others = source.cells(number), [a for a in source.axes if a != axis]
    rows = [[d.other, *(d.where[a] for a in others), *_gap(d)] for d in paired(cells, axis, reference)]
    caption = _of_gaps(source, number, cells, f"each row minus that of {reference}")
    return Table([axis, *others, f"against {reference}", "95 %", "pairs"], rows, caption,
                 source.notes(number=number, cells=cells))  # fmt: skip


def _steps(source: Source) -> Table:
    """Each label of the first row axis against the one before it. words: a number's name, or nothing."""
    axis, cells = source.experiment.rows[0], source.cells(source.words)
    others = [a for a in source.axes if a != axis]
    rows = [
        [label, before, *(d.where[a] for a in others), *_gap(d)]
        for before, label in pairwise(dict.fromkeys(cell.cell[axis] for cell in cells))
        for d in paired([cell for cell in cells if cell.cell[axis] in (before, label)], axis, before)
    ]
    caption = _of_gaps(source, source.words, cells, "each row minus that named under *against*")
    return Table([axis, "against", *others, "difference", "95 %", "pairs"], rows, caption,
                 source.notes(number=source.words, cells=cells))  # fmt: skip


def _gap(d: Difference) -> list[str]:
    return [*difference_in_words(d.mean, d.low, d.high, " to "), str(d.pairs)]


def _of_gaps(source: Source, number: str, cells: Sequence[CellScore], minus: str) -> str:
    metric = measured_by(cells)
    less = metric is not None and smaller_is_better(source.which(number), metric)
    return (
        f"{source.told(number, cells)}: {minus}, paired by seed (*pairs*: how many), mean and 95 % interval "
        f"(Student's t). {'Negative' if less else 'Positive'} is better. {_ONE}"
    )


def _losses(source: Source) -> Table:
    """The clients' training losses in the last round: the mean over clients, from the smallest seed to the largest."""
    found: dict[tuple[str, ...], list[float]] = {}
    for run, result in source.used:
        if last := result.history.losses_of(result.rounds):
            mean = math.nan if None in last.values() else fmean(x for x in last.values() if x is not None)
            found.setdefault(tuple(run.cell[axis] for axis in source.axes), []).append(mean)
    rows = []
    for key, of in found.items():
        told = [loss for loss in of if not math.isnan(loss)]
        words = f"{min(told):.2f} to {max(told):.2f}" if told else "none"
        rows.append([*key, words, str(len(of)) if len(told) == len(of) else
                     f"{len(told)} of {len(of)}, others diverged"])  # fmt: skip
    caption = (
        "The clients' training loss (cross-entropy in nats) in the last round, the mean over clients: from the seed "
        "where it is smallest to the one where it is largest."
    )
    return Table([*source.axes, "training loss", "seeds"], rows, caption, source.notes(edges_too=False))


def _decisions(source: Source) -> Table:
    """words: a family."""
    found, alpha = source.family, source.claims.alpha if source.claims else 0.0
    columns, rows = decision_words.headings(found.family), decision_words.rows(found)
    if all(answer.test is None for answer in found.answers):  # columns of nothing say nothing
        columns, rows = [*columns[:2], columns[-1]], [[*row[:2], row[-1]] for row in rows]
    return Table(columns, rows, decision_words.caption(found, alpha), found.notes)


def _gates(source: Source) -> Table:
    """By how much LoRA beats a head alone, by set-up, and with how many seeds that would pass. words: a family."""
    found, claims = source.family, source.claims
    rows = [
        [gate.setup, label, in_words(gate.ahead[label], gate.spread[label]),
         "not ahead by the margin" if (needed := gate.needed[label]) is None else seeds_in_words(needed),
         "carried by LoRA" if gate.passed else "not known: a run is lost" if gate.lost else "thrown out"]
        for gate in found.gates for label in gate.ahead
    ]  # fmt: skip
    columns = ["set-up", "", "log-loss lower than a head's by, mean ± sd", "seeds that it would take", "set-up is"]
    gate = None if claims is None else claims.gates.get(source.experiment.name)
    if claims is None or gate is None:
        return Table(columns, rows, "", found.gate_notes)
    where = f" (measured in {gate.head_of.experiment}, {gate.head_of.setup})" if gate.head_of else ""
    caption = (
        f"By how much LoRA's held-out log-loss (nats) is lower than that of the control without LoRA, "
        f"{gate.head}{where}: mean ± standard deviation over {found.there} paired seeds. A set-up is carried by LoRA "
        f"where one of the methods named is ahead by more than {gate.margin:g} nats (one-sided t test at "
        f"{claims.alpha / len(gate.lora):g}). *seeds that it would take*: to show such a lead in {claims.power:.0%} of "
        f"cases."
    )
    return Table(columns, rows, caption, found.gate_notes)


def _seeds(source: Source) -> Table:
    """What the plan says: the largest spread of a gap in the pilot, how many seeds it takes, how many there are, and
    what these can show where the spread is largest."""
    plan, claims = source.plan, source.claims
    if plan is None or claims is None:
        return Table(["family"], [], "")
    rows, count = [], len(plan.seeds)
    for name, spreads in plan.spreads.items():
        family = claims.families[name]
        question, spread = max(_piloted(source.experiment, family, spreads).items(), key=lambda pair: pair[1])
        found = claims.powers(name, {question: spread}, count)[question]
        _, factor, digits = UNITS[family.metric]
        told = [f"{factor * x:.{digits}f}" for x in (spread, found.gap)]
        rows.append([name, f"{told[0]} ({question})", seeds_in_words(plan.needed[name]), str(count), told[1],
                     per_cent(found.equal)])  # fmt: skip
    families = [claims.families[name] for name in plan.spreads]
    units, margins, caps = (
        " or ".join(dict.fromkeys(words(family) for family in families))
        for words in (lambda f: UNITS[f.metric][0].replace(", ", " in "), margin_in_words, lambda f: str(f.cap))
    )
    cases, pilot = f"{claims.power:.0%} of cases", len(source.experiment.profile(families[0].pilot).seeds)
    caption = (
        f"*spread*: the standard deviation over the pilot's {pilot} seeds of the paired gap between two methods "
        f"({units}), and of which question. *seeds that it takes*: to find equal methods equivalent, within {margins}, "
        f"in {cases}; at most {caps} were to be spent. The last two columns say what the planned seeds can do at that "
        f"spread, if gaps are normal: the smallest difference that they show in {cases}, and how often they find equal "
        f"methods equivalent."
    )
    columns = ["family", "largest spread of a gap in the pilot", "seeds that it takes", "seeds planned",
               "smallest gap that these show", "chance that equals are found equivalent"]  # fmt: skip
    return Table(columns, rows, caption)


def _piloted(experiment: Experiment, family: Family, spreads: Mapping[str, float]) -> Mapping[str, float]:
    """The spreads that were measured. A set-up without a pilot took the largest of its pair, and is not where it is
    from."""
    axis = setup_axis(experiment)
    setups = {cell[axis] for cell in experiment.cells(family.pilot)}
    measured = {question.words for question in family.questions if question.setup in setups}
    return {words: spread for words, spread in spreads.items() if words in measured} or spreads


def _rates(source: Source) -> Table:
    """The value of the search that each label got, with what it was chosen by: the score on validation."""
    tune, rates = source.experiment.tune, source.plan.rates if source.plan else []
    if tune is None:
        return Table(["of"], [], "")
    values = list(dict.fromkeys(value for rate in rates for value in rate.validation))
    rows = []
    for rate in rates:
        each = [list(rate.validation.get(value, {}).values()) for value in values]
        means = ["diverged" if None in scores else in_words(fmean(x for x in scores if x is not None)) if scores else ""
                 for scores in each]  # fmt: skip
        chosen = "none" if rate.value is None else shown(rate.value)
        rows.append([rate.of, chosen + (f" ({rate.at_the_edge} tried)" if rate.at_the_edge else ""), *means])
    metric = measured_by(source.cells())
    told = "the score" if metric is None else scale(metric)
    caption = (
        f"The value of {tune.key} that the search chose for each row, and {told} on validation data at each value "
        f"tried, the mean over seed{'s' if len(tune.seeds) > 1 else ''} {', '.join(map(str, tune.seeds))} of the "
        "search."
    )
    return Table(["", "chosen", *(f"validation at {value}" for value in values)], rows, caption)


# Of mergers and of runs: column -> its number.
_OF_MERGERS: Mapping[str, Callable[[Result], float | None]] = {
    "relative error": lambda r: r.of.error if r.of else None,
    "norm": lambda r: r.of.norm if r.of else None,
    "rank": lambda r: r.of.rank if r.of else None,
}
_OF_RUNS: Mapping[str, Callable[[Result], float | None]] = {
    "factor averages would be off by": lambda r: r.score("server, error of factor averages"),
    "gauge drift": lambda r: r.score("server, gauge drift"),
}


def _mechanism(source: Source) -> Table:
    """What happens to the update in the last round, in the mean over seeds."""
    merged = source.experiment.merged is not None
    columns = _OF_MERGERS if merged else _OF_RUNS
    found: dict[tuple[str, ...], list[list[float]]] = {}
    for run, result in source.used:
        numbers = [x for column in columns.values() if (x := column(result)) is not None]
        if len(numbers) == len(columns):
            found.setdefault(tuple(run.cell[axis] for axis in source.axes), []).append(numbers)
    rows = [[*key, *(_fact(fmean(column)) for column in zip(*lists, strict=True)), str(len(lists))]
            for key, lists in found.items()]  # fmt: skip
    caption = (
        "What each merger makes of the same uploads, the mean over seeds. *relative error*: of the merged update "
        "against the exact mean of the clients' products B A (0: it is the mean; 1: as far as no update). *norm*: "
        "Frobenius, over all modules. *rank*: the largest of any module."
        if merged else
        "Of the last round, the mean over seeds. *factor averages would be off by*: the relative error of averages "
        "of zero-padded factors against the exact mean of the products, on each method's own uploads. *gauge "
        "drift*: how far the method's update moves, relatively, when the same uploads are written in other "
        "coordinates of condition 10."
    )  # fmt: skip
    return Table([*source.axes, *columns, "seeds"], rows, caption, source.notes(edges_too=False))


def _times(source: Source) -> Table:
    """One row of all trainings of the profile, each counted once, whatever was merged from it."""
    times = times_of({run.digest: result for run, result in source.used}.values())
    known = times.examples is not None and times.training
    rate = f"{(times.examples or 0) / times.training:.0f}" if known else "not known"
    trained = "not known" if times.examples is None else f"{times.examples:,}"
    columns = ["runs", "examples trained on", "examples a second", "hours of one process"]
    caption = (
        "All runs of the profile, each in a process of its own thread. *examples a second*: while clients train, with "
        "what `remember_prefix` computes once a process. *hours of one process*: with data, evaluation and mergers. "
        "What else the machine did at that time is not known: these are no benchmarks."
    )
    row = [str(times.runs), trained, rate, f"{times.wall / 3600:.1f}"]
    return Table(columns, [row], caption, source.notes(number=""))


def _value(source: Source, cell: CellScore) -> str:
    """What the search chose, and whether nothing beyond it was tried."""
    edge = at_the_edge(source.experiment, source.profile, cell.tuned)
    return "" if cell.tuned is None else shown(cell.tuned) + (f" ({edge} tried)" if edge else "")


def _fact(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


KINDS: Mapping[str, Callable[[Source], Table]] = {
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
