"""`fedlora experiment plan | decide`: the number of seeds before, the verdicts after, and every look in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.experiment_files import (
    CLAIMS,
    EXPERIMENTS,
    RESULTS,
    WORK,
    Claimed,
    Directory,
    Names,
    Results,
    Work,
    load_named,
    tell,
    tell_left_out,
)  # fmt: skip
from fedlora.cli.formats import Format, FormatOption, JsonAlias, Printed, Sheet, chosen, show
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, Family, check_asked, load_claims
from fedlora.experiments.decision_words import (
    UNITS,
    headings,
    margin_in_words,
    plain_answers,
    records,
    remarks,
    rows,
    seeds_in_words,
    title,
)
from fedlora.experiments.decisions import Answers, answers_from, read_scores
from fedlora.experiments.digits import shown
from fedlora.experiments.plan import mains
from fedlora.experiments.result import unclean_lines
from fedlora.experiments.runner import Places
from fedlora.experiments.seed_plan import SeedPlan, check_plan, make_plan, path_of, read_plan, runs_of, write_plan
from fedlora.experiments.spec import Experiment, load_all
from fedlora.experiments.store import exists
from fedlora.experiments.verdicts import per_cent
from fedlora.runs.manifest import commit_of_code


def plan_seeds(
    names: Names,
    again: Annotated[bool, typer.Option("--again", help="write another plan; the old one is kept inside")] = False,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """Fix the number of seeds, from the pilot's spread, before the runs that count."""
    asked, places = load_claims(claims), Places(results, work, None)
    done, failed = places.finished(), places.given_up()
    for name in names:
        experiment = load_named(name, experiments)
        known = {e.name: e for e in [*load_all(experiments), experiment]}
        check_asked(asked, known)
        families = asked.of(experiment.name)
        pilot = next((family.pilot for family in families.values()), "pilot")
        tell_left_out(places, [(experiment, pilot)] if pilot in experiment.profiles else [])
        scores = read_scores(experiment, pilot, done, failed) if families else {}
        plan = make_plan(
            asked, experiment, known, scores, done, commit_of_code(), failed, places.finished(unclean=True)
        )
        path = path_of(results, experiment.name)
        _show_plan(asked, experiment, write_plan(path, plan, again=again), path, name)


def _show_plan(asked: Claims, experiment: Experiment, plan: SeedPlan, path: Path, name: str) -> None:
    """Seeds, what they can show, rates; what is too few; and the next command. name: as the experiment was typed."""
    if plan.results.there:
        tell([f"{plan.results.there} of the {plan.results.of} planned runs are there already. Verdicts will say so: a "
              f"plan that is written after its runs were seen plans nothing."])  # fmt: skip
    families, seeds = asked.of(experiment.name), len(plan.seeds)
    sheet = Sheet(
        f"{experiment.name}: {seeds} seeds ({plan.seeds[0]} to {plan.seeds[-1]}), in {path}",
        ["family", "largest spread", "margin", "seeds needed", "cap"],
        [
            [family, _in_unit(of, max(plan.spreads[family].values())), margin_in_words(of),
             seeds_in_words(plan.needed[family]), str(of.cap)]
            for family, of in families.items()
        ],
    )  # fmt: skip
    can = {family: asked.powers(family, plan.spreads[family], seeds) for family in families}
    cases = f"{asked.power:.0%}"
    power = Sheet(
        f"what {seeds} seeds can show, at the pilot's spread, if gaps are normal",
        ["question", "spread", f"smallest gap shown in {cases}", "chance that equals are found equivalent"],
        [
            [question, *(_in_unit(families[family], size) for size in (one.spread, one.gap)), per_cent(one.equal)]
            for family, each in can.items()
            for question, one in each.items()
        ],
    )
    rates = Sheet(
        "the search", ["for", "key", "chosen", "at the edge"],
        [[r.of, r.key, "" if r.value is None else shown(r.value), r.at_the_edge or ""] for r in plan.rates],
    )  # fmt: skip
    show(Printed([sheet, power, *([rates] if plan.rates else [])], [], plan.model_dump(mode="json")), Format.table)
    tell([
        f"{family}: {seeds_in_words(plan.needed[family])} seeds would find equal methods equivalent in {cases} of "
        f"cases; {seeds} do in {per_cent(min(one.equal for one in can[family].values()))}, and show a difference of "
        f"{_in_unit(families[family], max(one.gap for one in can[family].values()))} or more in {cases} (of the "
        f"question with the largest spread). What lies between stays undecided."
        for family, n in plan.needed.items() if n > seeds
    ])  # fmt: skip
    profile = experiment.profile(plan.profile)
    if seeds == len(profile.seeds) and any(n > seeds < families[of].cap for of, n in plan.needed.items()):
        tell([f"profile {plan.profile} has {seeds} seeds, fewer than a family needs and its cap allows."])
    which = f"0:{seeds}" if plan.seeds == list(range(seeds)) else ",".join(map(str, plan.seeds))
    tell([f"next: fedlora experiment run {name} --profile {plan.profile} --seeds {which}"])


def decide(
    names: Names,
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
) -> None:
    """Better, worse, equivalent or undecided: for each question, once all planned seeds are there."""
    asked, places, loaded = load_claims(claims), Places(results, work, None), load_all(experiments)
    found: list[Answers] = []
    past: list[str] = []
    for name in names:
        experiment = load_named(name, experiments)
        if not asked.of(experiment.name):
            raise ConfigError(f"no family of {claims} asks the experiment {experiment.name}.")
        tell_left_out(places, [(experiment, family.profile) for family in list(asked.of(experiment.name).values())[:1]])
        plan = read_plan(path_of(places.results, experiment.name))
        past += plan.history
        found += answers_of(asked, experiment, loaded, places)
        done, failed = places.finished(), places.given_up()
        past += unclean_lines(result for run in mains(experiment, plan.profile, done, failed)
                              if run.seed in plan.seeds and (result := run.result(done)) is not None)  # fmt: skip
    sheets = [Sheet(title(one), headings(one.family), rows(one), names=2) for one in found]
    value = {"alpha": asked.alpha, "history": past, "families": [plain_answers(one) for one in found]}
    lines = [
        {"family": one.name, "seeds": one.there, "planned": one.wanted, **r} for one in found for r in records(one)
    ]
    show(Printed(sheets, lines, value, [*past, *_notes(asked, found)]), chosen(format, json))


def _in_unit(family: Family, value: float) -> str:
    """A gap in the family's unit: "0.0123 nats", "1.23 points"."""
    words, factor, digits = UNITS[family.metric]
    return f"{factor * value:.{digits}f} {words.partition(', ')[2]}"


def read_answers(
    claims: Claims, loaded: Sequence[Experiment], places: Places
) -> tuple[tuple[Claims, list[Answers]], dict[str, list[str]]]:
    """Every family of every experiment that has a plan, for the page; and experiment -> how its verdicts came about."""
    found: list[Answers] = []
    past: dict[str, list[str]] = {}
    for experiment in loaded:
        if claims.of(experiment.name) and exists(path_of(places.results, experiment.name)):
            plan = read_plan(path_of(places.results, experiment.name))
            past[experiment.name] = plan.history
            found += answers_of(claims, experiment, loaded, places)
    return (claims, found), past


def answers_of(claims: Claims, experiment: Experiment, loaded: Sequence[Experiment], places: Places) -> list[Answers]:
    """The families of one experiment. Raises `ConfigError` where there is no plan."""
    known = {e.name: e for e in [*loaded, experiment]}
    check_asked(claims, known)
    plan = read_plan(path_of(places.results, experiment.name))
    done, failed = places.finished(), places.given_up()
    runs = runs_of(claims, experiment, known, plan.profile, plan.seeds, done, failed)
    check_plan(plan, claims, experiment.name, runs)
    return answers_from(claims, experiment, known, plan.profile, plan.seeds, done, failed)


def _notes(claims: Claims, found: Sequence[Answers]) -> list[str]:
    waiting = sorted({one.family.experiment for one in found if not one.complete})
    return [
        f"Of each family the chance that it says anything false is at most {claims.alpha:g} (Holm's step-down, "
        f"Shaffer's count, over tests of difference and of equivalence), where gaps are nearly normal: with few seeds "
        f"skewed or two-valued gaps make it several times that. Intervals are of one question each.",
        *remarks(found),
        *(f"{name}: no number before all planned seeds are there." for name in waiting),
    ]
