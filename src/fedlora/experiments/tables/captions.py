"""What stands above a filled table: what it shows, of how many seeds, in which unit, and what its columns mean.

A caption is made of what the table is made of. It has to be enough for somebody who reads nothing else on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedlora.experiments.deciding.provenance import edges, mixtures, used, whose_models
from fedlora.experiments.scores.numbers import parse_number
from fedlora.experiments.scores.units import capital, explained, scale
from fedlora.experiments.tables.budgets import SIMULATIONS
from fedlora.experiments.tables.cells import CellScore, measured_by, score_cells, smaller_is_better, without_number
from fedlora.experiments.tables.decision_words import UNITS, margin_in_words
from fedlora.experiments.tables.filled_tables import Source
from fedlora.experiments.tables.prices import prices

_ONE = "Each interval is of one comparison; none is corrected for their number."
_TELLS_EDGES = ("scores", "losses", "mechanism")  # in a column of its own; or about no choice


def caption(kind: str, source: Source) -> str:
    """One paragraph. kind: of `page_tables.KINDS`, with rows to show."""
    return CAPTIONS[kind](source)


def reservations(kind: str, source: Source) -> list[str]:
    """What stands below the table: whose models, mixed commits and machines, edges of grids; of a family its own."""
    family = source.family if kind in ("decisions", "gates") else None
    if family is not None:
        return [*family.notes] if kind == "decisions" else [*family.gate_notes]
    if kind in ("seeds", "rates"):
        return []
    experiment = source.experiment
    of = used(experiment, source.profile, source.results, source.failed, _planned_seeds(source))
    number = {"scores": source.words, "steps": source.words, "differences": source.reference_and_number[1]}.get(
        kind, ""
    )
    of_target = kind not in ("losses", "mechanism") and parse_number(_which(source, number)).of_target
    return [
        *(without_number(_cells_of(source, number)) if kind in ("scores", "steps", "differences") else []),
        *(whose_models(experiment, of) if of_target else []),
        *mixtures(experiment, of),
        *(edges(experiment, source.profile, of) if kind not in _TELLS_EDGES else []),
    ]


def _cells_of(source: Source, number: str) -> list[CellScore]:
    return score_cells(source.experiment, source.profile, source.results, number or None, source.failed)


def _decisions(source: Source) -> str:
    found = source.family
    if found is None or source.claims is None:
        return ""
    family = found.family
    unit, margin = UNITS[family.metric][0].replace(", ", " in "), margin_in_words(family)
    beside = UNITS[family.beside][0].replace(", ", " in ")
    points = " (hundredths)" if "accuracy" in (family.metric, family.beside) else ""
    count = len(family.questions)
    if all(a.test is None for a in found.answers):
        return (
            f"None of the {count} question{'s' if count > 1 else ''} has a verdict, and so no number is shown. Asked "
            f"of {unit}, on held-out test data after the last round, with a margin of {margin} and {found.there} "
            f"paired seeds."
        )
    empty = " Without a verdict this table shows no number." if any(a.test is None for a in found.answers) else ""
    return (
        f"*difference*: by how much the first is better ({unit}, held-out test data, last round), the mean over "
        f"{found.there} paired seeds with its 95 % interval (of one question); less than the margin, {margin}, is too "
        f"little to matter. *ahead*: on how many seeds. *beside*: the same of {beside}{points}, without a verdict. The "
        f"chance that any of the {count} verdict{'s' if count > 1 else ''} is false is at most "
        f"{source.claims.alpha:g}, where gaps are nearly normal.{empty}"
    )


def _gates(source: Source) -> str:
    found, claims = source.family, source.claims
    gate = None if claims is None else claims.gates.get(source.experiment.name)
    if found is None or claims is None or gate is None:
        return ""
    where = f" (measured in {gate.head_of.experiment}, {gate.head_of.setup})" if gate.head_of else ""
    return (
        f"By how much LoRA's held-out log-loss (nats) is lower than that of the control without LoRA, "
        f"{gate.head}{where}: mean ± standard deviation over {found.there} paired seeds. A set-up is carried by LoRA "
        f"where one of the methods named is ahead by more than {gate.margin:g} nats (one-sided t test at "
        f"{claims.alpha / len(gate.lora):g}). *seeds that it would take*: to show such a lead in {claims.power:.0%} of "
        f"cases."
    )


def _scores(source: Source) -> str:
    cells = score_cells(source.experiment, source.profile, source.results, source.words or None)
    tune = source.experiment.tune
    chosen = tune is not None and any(cell.tuned is not None for cell in cells)
    searched = f" *{tune.key}*: the value that the search chose on validation." if tune and chosen else ""
    alone = "; of one seed its number" if any(len(cell.scores) == 1 for cell in cells) else ""
    return f"{capital(_number(source, source.words))}: mean ± standard deviation over seeds{alone}.{searched}"


def _differences(source: Source) -> str:
    reference, which = source.reference_and_number
    return _gap(source, which, f"each row minus that of {reference}")


def _steps(source: Source) -> str:
    return _gap(source, source.words, "each row minus that named under *against*")


def _gap(source: Source, which: str, minus: str) -> str:
    """Of two kinds of paired differences."""
    cells = score_cells(source.experiment, source.profile, source.results, which or None)
    metric, name = measured_by(cells), _which(source, which)
    less = metric is not None and smaller_is_better(name, metric)
    return (
        f"{capital(_number(source, which))}: {minus}, paired by seed (*pairs*: how many), mean and 95 % interval "
        f"(Student's t). {'Negative' if less else 'Positive'} is better. {_ONE}"
    )


def _losses(source: Source) -> str:
    return (
        "The clients' training loss (cross-entropy in nats) in the last round, the mean over clients: from the seed "
        "where it is smallest to the one where it is largest."
    )


def _seeds(source: Source) -> str:
    plan, claims = source.plan, source.claims
    if plan is None or claims is None:
        return ""
    families = [claims.families[name] for name in plan["spreads"]]
    pilot = len(source.experiment.profile(families[0].pilot).seeds)
    units = _alike([UNITS[family.metric][0].replace(", ", " in ") for family in families])
    margins = _alike([margin_in_words(family) for family in families])
    caps = _alike([str(family.cap) for family in families])
    cases = f"{claims.power:.0%} of cases"
    return (
        f"*spread*: the standard deviation over the pilot's {pilot} seeds of the paired gap between two methods "
        f"({units}), and of which question. *seeds that it takes*: to find equal methods equivalent, within {margins}, "
        f"in {cases}; at most {caps} were to be spent. The last two columns say what the planned seeds can do at that "
        f"spread, if gaps are normal: the smallest difference that they show in {cases}, and how often they find equal "
        f"methods equivalent."
    )


def _rates(source: Source) -> str:
    tune, plan = source.experiment.tune, source.plan
    if tune is None or plan is None:
        return ""
    metric = measured_by(score_cells(source.experiment, source.profile, source.results))
    told = "the score" if metric is None else scale(metric)
    return (
        f"The value of {tune.key} that the search chose for each row, and {told} on validation data at each value "
        f"tried, the mean over seed{'s' if len(tune.seeds) > 1 else ''} {', '.join(map(str, tune.seeds))} of the "
        "search."
    )


def _mechanism(source: Source) -> str:
    if source.experiment.merged is not None:
        return (
            "What each merger makes of the same uploads, the mean over seeds. *relative error*: of the merged "
            "update against the exact mean of the clients' products B A (0: it is the mean; 1: as far as no "
            "update). *norm*: Frobenius, over all modules. *rank*: the largest of any module."
        )
    return (
        "Of the last round, the mean over seeds. *factor averages would be off by*: the relative error of averages "
        "of zero-padded factors against the exact mean of the products, on each method's own uploads. *gauge "
        "drift*: how far the method's update moves, relatively, when the same uploads are written in other "
        "coordinates of condition 10."
    )


def _times(source: Source) -> str:
    return (
        "All runs of the profile, each in a process of its own thread. *examples a second*: while clients train, with "
        "what `remember_prefix` computes once a process. *hours of one process*: with data, evaluation and mergers. "
        "What else the machine did at that time is not known: these are no benchmarks."
    )


def _budgets(source: Source) -> str:
    return (
        f"What each cell spent, and {scale('accuracy')} and {scale('loss')} on held-out test data after the last "
        "round: mean ± standard deviation over *seeds*. *epsilon* (rounded up) at *delta*; *z*: noise multiplier; "
        f"*q*: share of the clients that a round asks. {SIMULATIONS}"
    )


def _prices(source: Source) -> str:
    experiment, peace = source.experiment, source.experiment.peace
    found = [p for p in prices(experiment, source.profile, source.results) if p.score == source.words]
    if peace is None or not found:
        return ""
    counts = sorted({price.pairs for price in found})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    name = {"loss": "log-loss"}.get(source.words, source.words)
    intervals = f", with 95 % intervals. {_ONE}" if counts[-1] > 1 else ". One seed has no interval."
    return (
        f"{capital(scale(source.words))} on held-out test data after the last round, the mean over {seeds}. In "
        f"brackets against {experiment.rows[0]} {experiment.reference}: *cost*, by how much {name} is worse where "
        f"{peace.axis} is {peace.label}; *saved*, by how much it is better elsewhere; paired by seed{intervals}"
    )


def _which(source: Source, which: str) -> str:
    return which or source.experiment.profile(source.profile).metric or source.experiment.metric


def _number(source: Source, which: str) -> str:
    cells = score_cells(source.experiment, source.profile, source.results, which or None)
    metrics = dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)
    return " or ".join(dict.fromkeys(explained(_which(source, which), metric) for metric in metrics or [None]))


def _planned_seeds(source: Source) -> Sequence[int] | None:
    plan = source.plan
    return plan["seeds"] if plan is not None and plan["profile"] == source.profile else None


def _alike(words: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(words))


CAPTIONS: Mapping[str, Callable[[Source], str]] = {
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
