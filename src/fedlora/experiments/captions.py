"""What stands above a filled table: what it shows, of how many seeds, in which unit, and what its columns mean.

A caption is made of what the table is made of. It has to be enough for somebody who reads nothing else on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedlora.experiments.budgets import SIMULATIONS
from fedlora.experiments.decision_words import UNITS, margin_in_words
from fedlora.experiments.page_tables import Source
from fedlora.experiments.provenance import notes, used
from fedlora.experiments.tables import measured_by, score_cells, smaller_is_better
from fedlora.experiments.units import explained, scale

_ONE = "Each interval is of one comparison, with no correction for their number: this is no verdict."


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
    of = used(source.experiment, source.profile, source.results, seeds=_planned_seeds(source))
    return notes(source.experiment, source.profile, of)


def _decisions(source: Source) -> str:
    found = source.family
    if found is None or source.claims is None:
        return ""
    family = found.family
    unit, margin = UNITS[family.metric][0].replace(", ", " in "), margin_in_words(family)
    beside = UNITS[family.beside][0].replace(", ", " in ")
    points = " (hundredths)" if "accuracy" in (family.metric, family.beside) else ""
    empty = " Where there is no verdict, there is no number." if any(a.test is None for a in found.answers) else ""
    questions = len(family.questions)
    return (
        f"*difference*: by how much the first is better on held-out test data after the last round, {unit}, the mean "
        f"over {found.there} seeds, paired by seed, with its 95 % interval; negative: the second is better. Less than "
        f"{margin} (the margin) is too little to matter. *ahead*: on how many seeds the first is better. *beside*: the "
        f"same for {beside}{points}, without a verdict. *verdict*: of {questions} "
        f"question{'s' if questions > 1 else ''} with one error rate, at most {source.claims.alpha:g} that any is "
        f"false.{empty}"
    )


def _gates(source: Source) -> str:
    found, claims = source.family, source.claims
    gate = None if claims is None else claims.gates.get(source.experiment.name)
    if found is None or claims is None or gate is None:
        return ""
    where = f" (of {gate.head_of.experiment}, {gate.head_of.setup})" if gate.head_of else ""
    return (
        f"By how much the held-out log-loss (nats) of a LoRA adapter is lower than that of {gate.head}{where}, which is "
        f"trained without LoRA on all clients' data; mean ± standard deviation over {found.there} seeds, paired by seed. A "
        f"set-up is carried by LoRA where one of its adapters is ahead by more than {gate.margin:g} nats (one-sided t "
        f"test, level {claims.alpha / len(gate.lora):g} for each adapter). *seeds that it would take*: to show such a "
        f"lead with power {claims.power:g}."
    )


def _scores(source: Source) -> str:
    what = _number(source, source.words)
    tune = source.experiment.tune
    searched = f" *{tune.key}*: the value that the search chose on validation." if tune and _searched(source) else ""
    return f"{_capital(what)}: mean ± standard deviation over seeds; of one seed its number alone.{searched}"


def _differences(source: Source) -> str:
    reference, which = source.reference_and_number
    return _gap(source, which, f"each row minus {reference}")


def _steps(source: Source) -> str:
    return _gap(source, source.words, "each row minus the one named under *against*")


def _gap(source: Source, which: str, minus: str) -> str:
    """Of two kinds of paired differences."""
    cells = score_cells(source.experiment, source.profile, source.results, which or None)
    metric, name = measured_by(cells), _which(source, which)
    less = metric is not None and smaller_is_better(name, metric)
    return (
        f"{_capital(_number(source, which))}: {minus}, the mean over *pairs* seeds, paired by seed, with its 95 % interval "
        f"(Student's t); {'negative' if less else 'positive'} is better. {_ONE}"
    )


def _losses(source: Source) -> str:
    return (
        "The clients' training loss (cross-entropy in nats) in the last round, the mean over clients: from the seed where "
        "it is smallest to the one where it is largest."
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
    return (
        f"The pilot's {pilot} seeds give the spread: the standard deviation over seeds of the paired gap between two "
        f"methods ({units}), in brackets of which question. *seeds that it takes*: to find equal methods equivalent, "
        f"within {margins}, with power {claims.power:g}; planned are at most {caps}, the same for all families. *smallest "
        f"gap that these show*: with power {claims.power:g}, as a difference; *chance*: to find equivalent what is equal. "
        f"Both at that spread, for normal gaps, before a single seed was run."
    )


def _rates(source: Source) -> str:
    tune, plan = source.experiment.tune, source.plan
    if tune is None or plan is None:
        return ""
    metric = measured_by(score_cells(source.experiment, source.profile, source.results))
    told = "the score" if metric is None else scale(metric)
    return (
        f"The value of {tune.key} that the search chose for each row, and {told} on validation data at each value tried, "
        f"the mean over seed{'s' if len(tune.seeds) > 1 else ''} {', '.join(map(str, tune.seeds))} of the search."
    )


def _mechanism(source: Source) -> str:
    if source.experiment.merged is not None:
        return (
            "What each merger makes of the same uploads, the mean over seeds. *relative error*: of the merged update "
            "against the exact mean of the clients' products B A (0: it is the mean; 1: as far as no update). *norm*: "
            "Frobenius, over all modules. *rank*: the largest of any module."
        )
    return (
        "Of the last round, the mean over seeds. *factor averages would be off by*: the relative error of averages of "
        "zero-padded factors against the exact mean of the products, on each method's own uploads. *gauge drift*: how far "
        "the method's update moves, relatively, when the same uploads are written in other coordinates of condition 10."
    )


def _budgets(source: Source) -> str:
    return (
        f"What each cell spent, and {scale('accuracy')} and {scale('loss')} on held-out test data after the last round: "
        f"mean ± standard deviation over *seeds*. *epsilon* (rounded up) at *delta*; *z*: noise multiplier; *q*: share of "
        f"the clients that a round asks. {SIMULATIONS}"
    )


def _prices(source: Source) -> str:
    experiment, peace = source.experiment, source.experiment.peace
    name = {"loss": "log-loss"}.get(source.words, source.words)
    kept = f"{experiment.rows[0]} {experiment.reference}" if experiment.reference else "the reference"
    seeds = len(experiment.profile(source.profile).seeds)
    one = " One seed has no interval." if seeds == 1 else f" {_ONE}"
    return (
        f"{_capital(scale(source.words))} on held-out test data after the last round, the mean over "
        f"{seeds} seed{'s' if seeds > 1 else ''} or as many as were run. In brackets, paired by seed against {kept}, with "
        f"95 % intervals: *cost*, by how much a row's {name} is worse where {peace.axis if peace else 'nothing'} is "
        f"{peace.label if peace else 'wrong'}; *saved*, by how much it is better elsewhere.{one}"
    )


def _which(source: Source, which: str) -> str:
    return which or source.experiment.profile(source.profile).metric or source.experiment.metric


def _number(source: Source, which: str) -> str:
    cells = score_cells(source.experiment, source.profile, source.results, which or None)
    metrics = dict.fromkeys(cell.metric for cell in cells if cell.metric is not None)
    return " or ".join(dict.fromkeys(explained(_which(source, which), metric) for metric in metrics or [None]))


def _searched(source: Source) -> bool:
    cells = score_cells(source.experiment, source.profile, source.results)
    return any(cell.tuned is not None for cell in cells)


def _planned_seeds(source: Source) -> Sequence[int] | None:
    plan = source.plan
    return plan["seeds"] if plan is not None and plan["profile"] == source.profile else None


def _alike(words: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(words))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


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
}
