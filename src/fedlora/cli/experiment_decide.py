"""`fedlora experiment plan | decide`: the number of seeds before the runs, and the verdicts after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedlora.cli.experiment_project import Project
from fedlora.cli.formats import Format, Printed, show
from fedlora.cli.screen import notes
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, check_asked
from fedlora.experiments.decided import Decided, decided
from fedlora.experiments.decision_words import (
    UNITS,
    headings,
    plain_answers,
    records,
    remarks,
    rows,
    seeds_in_words,
    title,
)
from fedlora.experiments.decisions import Answers, read_scores
from fedlora.experiments.grid import Grid
from fedlora.experiments.page_tables import table_of
from fedlora.experiments.result import unclean_lines
from fedlora.experiments.seed_plan import SeedPlan, make_plan, path_of, write_plan
from fedlora.experiments.spec import Experiment
from fedlora.experiments.table_source import Source, Table
from fedlora.experiments.verdicts import per_cent
from fedlora.runs.manifest import commit_of_code


def plan_seeds(project: Project, names: Sequence[str], *, again: bool) -> None:
    """Write and show a plan for each experiment."""
    claims = _claims(project)
    for name in names:
        experiment = project.named(name)
        check_asked(claims, project.known(experiment))
        family = next(iter(claims.of(experiment.name).values()), None)
        if family is None:
            raise ConfigError(f"no family asks about the experiment {experiment.name}: there is nothing to plan.")
        project.tell_left_out([(experiment, family.pilot)])
        pilot = read_scores(project.places.grid(experiment, family.pilot))
        grid = project.places.grid(experiment, family.profile)
        plan = make_plan(claims, grid, pilot, commit_of_code(), project.places.finished(unclean=True))
        path = path_of(project.results, experiment.name)
        _show_plan(claims, grid, write_plan(path, plan, again=again), path, name)


def _claims(project: Project) -> Claims:
    if project.asked is None:
        beside = project.experiments / project.claims.name
        raise ConfigError(
            f"neither {beside} nor {project.claims} exists; one must state the questions. Name it by --claims."
        )
    return project.asked


def _show_plan(asked: Claims, grid: Grid, plan: SeedPlan, path: Path, name: str) -> None:
    """Show the plan as pages do, what it lacks, and the next command. name: the experiment as typed."""
    experiment = grid.experiment
    if plan.results.there:
        notes.warn(
            f"{plan.results.there} of the {plan.results.of} planned runs exist already. Verdicts will say so: "
            f"a plan made after seeing its runs plans nothing."
        )
    families, seeds = asked.of(experiment.name), len(plan.seeds)
    source = Source(grid, decided=Decided(asked, plan, grid))
    made = [table for kind in ("seeds", "rates") if (table := table_of(kind, source)).rows]
    where = f"{experiment.name}: {seeds} seeds ({plan.seeds[0]} to {plan.seeds[-1]}), in {path}"
    show(Printed(made, [], plan.model_dump(mode="json"), [where]), Format.table)
    cases = f"{asked.power:.0%}"
    for family, n in plan.needed.items():
        if n > seeds:
            gap, equal = asked.shown_by(seeds, family, max(plan.spreads[family].values()))
            unit = UNITS[families[family].metric]
            notes.warn(
                f"{family}: {seeds_in_words(n)} seeds would find equal methods equivalent in {cases} of cases; {seeds} "
                f"do in {per_cent(equal)}, and show a difference of {unit.size(gap)} {unit.name} or more in {cases} "
                f"(of the question with the largest spread). What lies between stays undecided."
            )
    profile = experiment.profile(plan.profile)
    if seeds == len(profile.seeds) and any(n > seeds < families[of].cap for of, n in plan.needed.items()):
        notes.warn(f"profile {plan.profile} has {seeds} seeds, fewer than a family needs and its cap allows.")
    which = f"0:{seeds}" if plan.seeds == list(range(seeds)) else ",".join(map(str, plan.seeds))
    notes.warn(f"next: fedlora experiment run {name} --profile {plan.profile} --seeds {which}")


def show_answers(project: Project, names: Sequence[str], form: Format) -> None:
    """Show the verdicts of each family that asks about these experiments."""
    claims, found, past = _claims(project), list[Answers](), list[str]()
    for name in names:
        experiment = project.named(name)
        if not (families := claims.of(experiment.name)):
            raise ConfigError(f"no family of {project.claims} asks about the experiment {experiment.name}.")
        project.tell_left_out([(experiment, next(iter(families.values())).profile)])
        one = decided_of(project, claims, experiment)
        found += one.answers
        past += [*one.plan.history, *unclean_lines(result for _, result in one.grid.used)]
    tables = [Table(headings(one.family), rows(one), title(one), names=2) for one in found]
    value = {"alpha": claims.alpha, "history": past, "families": [plain_answers(one) for one in found]}
    lines = [
        {"family": one.name, "seeds": one.there, "planned": one.wanted, **r} for one in found for r in records(one)
    ]
    show(Printed(tables, lines, value, [*past, *_notes(claims, found)]), form)


def decided_of(project: Project, claims: Claims, experiment: Experiment) -> Decided:
    """The answers of one experiment's families. Raises `ConfigError` if there is no plan."""
    known = project.known(experiment)
    check_asked(claims, known)
    profile = next(iter(claims.of(experiment.name).values())).profile
    return decided(claims, project.results, project.places.grid(experiment, profile), known.__getitem__)


def _notes(claims: Claims, found: Sequence[Answers]) -> list[str]:
    waiting = sorted({one.family.experiment for one in found if not one.complete})
    return [
        f"Each family says anything false with a probability of at most {claims.alpha:g} (Holm's step-down, "
        f"Shaffer's count, over tests of difference and of equivalence), if gaps are nearly normal. With few seeds, "
        f"skewed or two-valued gaps make it several times as large. Each interval is for one question.",
        *remarks(found),
        *(f"{name}: no result until all planned seeds are there." for name in waiting),
    ]
