"""The kinds of table that need a plan: verdicts, the gate, the number of seeds, the search's choice."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from fedlora.experiments import decision_words
from fedlora.experiments.claims import Family, setup_axis
from fedlora.experiments.decision_words import UNITS, seeds_in_words
from fedlora.experiments.digits import in_words, shown
from fedlora.experiments.scores import scale
from fedlora.experiments.spec import Experiment
from fedlora.experiments.table_source import Source, Table
from fedlora.experiments.verdicts import per_cent


def decisions(source: Source) -> Table:
    """The verdicts of a family. words: its name."""
    found, alpha = source.family, source.planned.claims.alpha
    columns, rows = decision_words.headings(found.family), decision_words.rows(found)
    if all(answer.test is None for answer in found.answers):  # leave out empty columns
        columns, rows = [*columns[:2], columns[-1]], [[*row[:2], row[-1]] for row in rows]
    return Table(columns, rows, decision_words.caption(found, alpha), found.notes)


def gates(source: Source) -> Table:
    """By how much LoRA beats a head alone, by set-up, and with how many seeds that would pass. words: a family."""
    found, claims = source.family, source.planned.claims
    rows = [
        [gate.setup, label, in_words(gate.ahead[label], gate.spread[label]),
         "not ahead by the margin" if (needed := gate.needed[label]) is None else seeds_in_words(needed),
         "carried by LoRA" if gate.passed else "not known: a run is lost" if gate.lost else "thrown out"]
        for gate in found.gates for label in gate.ahead
    ]  # fmt: skip
    columns = ["set-up", "", "log-loss lower than a head's by, mean ± sd", "seeds that it would take", "set-up is"]
    gate = claims.gates.get(source.grid.experiment.name)
    if gate is None:
        return Table(columns, rows, "", found.gate_notes)
    where = f" (measured in {gate.head_of.experiment}, {gate.head_of.setup})" if gate.head_of else ""
    caption = (
        f"How much lower LoRA's held-out log-loss (nats) is than that of {gate.head}, the control without LoRA{where}: "
        f"mean ± standard deviation over {found.there} paired seeds. LoRA carries a set-up if one of these methods is "
        f"ahead by more than {gate.margin:g} nats (one-sided t test at {claims.alpha / len(gate.lora):g}). *seeds that "
        f"it would take*: to show such a lead in {claims.power:.0%} of cases."
    )
    return Table(columns, rows, caption, found.gate_notes)


def seeds(source: Source) -> Table:
    """The plan's numbers: the largest spread of a gap in the pilot, the seeds that it takes, the planned seeds, and
    what these can show at the largest spread."""
    plan, claims = source.planned.plan, source.planned.claims
    rows, count = [], len(plan.seeds)
    for name, spreads in plan.spreads.items():
        family = claims.families[name]
        question, spread = max(_piloted(source.grid.experiment, family, spreads).items(), key=lambda pair: pair[1])
        gap, equal = claims.shown_by(count, name, spread)
        told = [UNITS[family.metric].size(x) for x in (spread, gap)]
        rows.append([name, f"{told[0]} ({question})", seeds_in_words(plan.needed[name]), str(count), told[1],
                     per_cent(equal)])  # fmt: skip
    families = [claims.families[name] for name in plan.spreads]
    each = [(UNITS[family.metric], family) for family in families]
    units = " or ".join(dict.fromkeys(f"{unit.score} in {unit.name}" for unit, _ in each))
    margins = " or ".join(dict.fromkeys(unit.margin(family) for unit, family in each))
    caps = " or ".join(dict.fromkeys(str(family.cap) for family in families))
    cases, pilot = f"{claims.power:.0%} of cases", len(source.grid.experiment.profile(families[0].pilot).seeds)
    caption = (
        f"*spread*: standard deviation, over the pilot's {pilot} seeds, of the paired gap between two methods "
        f"({units}), with its question. *seeds that it takes*: to find equal methods equivalent, within {margins}, in "
        f"{cases}; the limit was {caps}. The last two columns say what the planned seeds can do at that spread, if "
        f"gaps are normal: the smallest difference that they show in {cases}, and how often they find equal methods "
        f"equivalent."
    )
    columns = ["family", "largest spread of a gap in the pilot", "seeds that it takes", "seeds planned",
               "smallest gap that these show", "chance that equals are found equivalent"]  # fmt: skip
    return Table(columns, rows, caption)


def _piloted(experiment: Experiment, family: Family, spreads: Mapping[str, float]) -> Mapping[str, float]:
    """The spreads that were measured. A set-up without a pilot took the largest of its pair, which is not its own."""
    axis = setup_axis(experiment)
    setups = {cell[axis] for cell in experiment.cells(family.pilot)}
    measured = {question.words for question in family.questions if question.setup in setups}
    return {words: spread for words, spread in spreads.items() if words in measured} or spreads


def rates(source: Source) -> Table:
    """The searched value of each label, with the score on validation that decided it."""
    tune, rates = source.grid.experiment.tune, source.planned.plan.rates
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
    told = " or ".join(map(scale, source.grid.metrics)) or "the score"
    caption = (
        f"The {tune.key} that the search chose for each row, and {told} on validation data at each value tried, the "
        f"mean over seed{'s' if len(tune.seeds) > 1 else ''} {', '.join(map(str, tune.seeds))} of the search."
    )
    return Table(["", "chosen", *(f"validation at {value}" for value in values)], rows, caption)
