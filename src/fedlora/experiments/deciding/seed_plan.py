"""The plan of an experiment, in a file: how many seeds, why, at which rates, and every look at the results since.

    results/plans/NAME.json    written once by `fedlora experiment plan`, after the search and the pilot

Nothing is decided without it, and nothing before its number of seeds is there. A plan that is written again keeps the
one before, and every look is noted: what was seen when can be read off the file and its history.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.deciding.claims import Claims, Family, Question
from fedlora.experiments.deciding.decisions import Scores, gaps_of
from fedlora.experiments.deciding.verdicts import seeds_needed, weigh
from fedlora.experiments.grid.plan import PlannedRun, at_the_edge, chosen_value, mains, searches
from fedlora.experiments.grid.spec import Experiment
from fedlora.experiments.stored.results import Result
from fedlora.experiments.stored.stored_seed_plan import read_stored_plan

Plan = dict[str, Any]


def path_of(results: Path, experiment: str) -> Path:
    """Beside the results."""
    return results.parent / "plans" / f"{experiment}.json"


def asked(claims: Claims, experiment: str) -> str:
    """A digest of what decides verdicts: pairs, set-ups, margins, scores, error rates and the gate; not the words."""
    families = {
        name: family.model_dump(mode="json", exclude={"question", "claims"})
        for name, family in claims.of(experiment).items()
    }
    gate = claims.gates.get(experiment)
    told = [families, claims.alpha, claims.power, gate.model_dump(mode="json") if gate else None]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def runs_of(
    claims: Claims,
    experiment: Experiment,
    experiments: Mapping[str, Experiment],
    profile: str,
    seeds: Sequence[int],
    results: Mapping[str, Result],
    failed: Collection[str] = (),
) -> dict[str, str]:
    """Experiment -> a digest of its planned runs: cells, seeds, configurations, mergers; also of the experiment from
    which the gate takes its head. It changes where a label stands for something else than it did."""
    gate = claims.gates.get(experiment.name)
    known = {experiment.name: experiment}
    if gate is not None and gate.head_of is not None:
        known[gate.head_of.experiment] = experiments[gate.head_of.experiment]
    found = {}
    for name, each in known.items():
        runs = [run for run in mains(each, profile, results, failed) if run.seed in seeds]
        told = [[run.seed, sorted(run.cell.items()), run.digest, run.mergers] for run in runs]
        found[name] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return found


def make_plan(
    claims: Claims,
    experiment: Experiment,
    experiments: Mapping[str, Experiment],
    pilot: Scores,
    results: Mapping[str, Result],
    commit: Mapping[str, Any] | None,
    failed: Mapping[str, str] | None = None,
    seen: Mapping[str, Result] | None = None,
) -> Plan:
    """The plan: seeds from the pilot's spreads, the rates with what they were chosen by, which runs these are, and how
    many of them are there already.

    experiments: by name, those that a gate names. seen: all results that there are, those of a changed checkout too.

    A question whose set-up has no pilot takes the largest spread of its pair.

    Raises:
        ConfigError: nobody asks the experiment, or a family has a pair without a pilot.
    """
    families = claims.of(experiment.name)
    if not families:
        raise ConfigError(f"no family asks the experiment {experiment.name}: there is nothing to plan.")
    spreads = {name: spreads_of(name, family, experiment, pilot) for name, family in families.items()}
    needed = needed_seeds(claims, families, spreads)
    wanted = wanted_seeds(families, needed)
    profile = next(iter(families.values())).profile
    seeds = experiment.profile(profile).seeds
    seen = results if seen is None else seen
    planned = [run for run in mains(experiment, profile, results, failed or {}) if run.seed in seeds[:wanted]]
    cells = sum(1 for _ in experiment.cells(profile))
    if len(planned) < cells * len(seeds[:wanted]):
        done = len(planned) // len(seeds[:wanted])
        raise ConfigError(
            f"the search of {experiment.name}, profile {profile}, is not done: {done} of {cells} cells have a value. A "
            f"plan says which runs answer, so run the search first: fedlora experiment run {experiment.called} "
            f"--profile {profile} --seeds {seeds[0]}"
        )
    there = {
        "there": sum(run.result(seen) is not None for run in planned),
        "of": cells * len(seeds[:wanted]),
    }
    return {
        "experiment": experiment.name, "asked": asked(claims, experiment.name), "written": _now(), "commit": commit,
        "profile": profile, "seeds": seeds[:wanted], "needed": needed, "spreads": spreads,
        "rates": rates(experiment, profile, results, failed or {}), "looks": [], "before": [],
        "runs": runs_of(claims, experiment, experiments, profile, seeds[:wanted], results, failed or {}),
        "results": there,
    }  # fmt: skip


def needed_seeds(
    claims: Claims, families: Mapping[str, Family], spreads: Mapping[str, Mapping[str, float]]
) -> dict[str, int]:
    """Family -> seeds with which equal methods are found equivalent, by its largest spread."""
    return {
        name: max(
            seeds_needed(spread, family.margin, len(family.questions), alpha=claims.alpha, power=claims.power)
            for spread in spreads[name].values()
        )
        for name, family in families.items()
    }


def wanted_seeds(families: Mapping[str, Family], needed: Mapping[str, int]) -> int:
    """How many are planned: what the family that needs most may have, and four at least."""
    return max(max(4, min(families[name].cap, n)) for name, n in needed.items() if name in families)


def spreads_of(name: str, family: Family, experiment: Experiment, pilot: Scores) -> dict[str, float]:
    """Question -> the standard deviation of its gaps in the pilot."""
    seeds = experiment.profile(family.pilot).seeds
    there: dict[Question, float] = {}
    for question in family.questions:
        try:
            there[question] = weigh(gaps_of(pilot, question, family.metric, seeds), family.margin).spread
        except KeyError:
            continue
    found = {}
    for question in family.questions:
        alike = [s for q, s in there.items() if (q.first, q.second) == (question.first, question.second)]
        if not alike:
            raise ConfigError(
                f"the pilot of {experiment.name} is not done: the family {name} asks {question.words}, and on none of "
                f"its set-ups are all seeds {', '.join(map(str, seeds))} of both there. Run it first: fedlora "
                f"experiment run {experiment.called} --profile {family.pilot}"
            )
        found[question.words] = there.get(question, max(alike))
    return found


def rates(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """For each label of the searched axes: the value chosen, and the score on validation of each value and seed; where
    cells share one value, of each of them, by its label and the seed ("glora, 7")."""
    if experiment.tune is None:
        return []
    over, axis = experiment.tune.over, experiment.merged or experiment.rows[0]
    scored: list[tuple[dict[str, str], PlannedRun, float]] = []  # (labels of the axes, run of the search, score)
    for run in searches(experiment, profile):
        labels: Mapping[str, Mapping[str, Any]] = run.mergers or {run.cell.get(axis, ""): {}}
        found = results.get(run.digest)
        for label, merger in labels.items():
            result = found.merged(label, merger) if found is not None and run.mergers else found
            scored.append(({**run.cell, axis: label}, run, math.nan if result is None else result.validation_best))
    shared = [a for a in experiment.axes if a not in over and len({at[a] for at, _, _ in scored}) > 1]
    evidence: dict[tuple[str, ...], dict[str, dict[str, float | None]]] = {}
    for at, run, score in scored:
        by_run = evidence.setdefault(tuple(at[a] for a in over), {}).setdefault(f"{run.tuned:g}", {})
        by_run[", ".join([*(at[a] for a in shared), str(run.seed)])] = None if math.isnan(score) else round(score, 6)
    chosen: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in experiment.cells(profile):
        value = chosen_value(experiment, profile, cell, results, failed)
        key = tuple(cell[axis] for axis in over)
        if key not in chosen:
            edge = at_the_edge(experiment, profile, value)
            chosen[key] = {
                "of": ", ".join(key) or "all", "key": experiment.tune.key, "value": value, "at_the_edge": edge,
                "validation": evidence.get(key, {}),
            }  # fmt: skip
    return list(chosen.values())


def write_plan(path: Path, plan: Plan, *, again: bool) -> None:
    """Raises `ConfigError` where there is one already, unless `again`; then the old one is kept inside the new."""
    if is_planned(path):
        old = read_plan(path)
        if not again:
            raise ConfigError(
                f"{path} is there already, of {old['written']}: {len(old['seeds'])} seeds. A plan is written once, "
                f"before its runs. --again writes another one and keeps this one in it, for all to see."
            )
        plan = {**plan, "before": [*old["before"], {**old, "before": []}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(plan, indent=1, sort_keys=True) + "\n")


def read_plan(path: Path) -> Plan:
    """Raises `ConfigError` for none, or a damaged one (`stored_plans`)."""
    return read_stored_plan(path)


def is_planned(path: Path) -> bool:
    """Whether there is a plan, be it damaged: what cannot be read is not taken for none."""
    return os.path.lexists(path)


def answered(plan: Plan) -> str | None:
    """When all its planned seeds were first looked at; None where they were not yet."""
    return next((look["at"] for look in plan["looks"] if _whole(look)), None)


def check_plan(plan: Plan, claims: Claims, experiment: str, runs: Mapping[str, str]) -> None:
    """Raises `ConfigError` where the questions or the runs are others than those that were planned. runs: as `runs_of`
    gives them now. Plans before version 0.1.0 was released have none, and are not asked."""
    if plan["asked"] != asked(claims, experiment):
        raise ConfigError(
            f"the questions of {experiment} are not those of its plan of {plan['written']}: pairs, set-ups, margins, "
            f"error rates or the gate have changed since. Put them back, or plan again (fedlora experiment plan "
            f"{experiment} --again), which the plan will show."
        )
    changed = [name for name, digest in plan.get("runs", runs).items() if runs.get(name) != digest]
    if changed:
        raise ConfigError(
            f"the runs of {changed[0]} are not those of the plan of {experiment}, of {plan['written']}: a label, a "
            f"set-up, a seed, a rate or the base of its file stands for something else now. Put it back, or plan again "
            f"(fedlora experiment plan {experiment} --again), which the plan will show."
        )


def history(plan: Plan) -> list[str]:
    """What a reader of verdicts has to know of how they came about: earlier plans, those that were answered, and looks
    before all seeds were there. Empty for one plan and one look."""
    said = []
    for k, old in enumerate(plan["before"], start=1):
        seen = answered(old)
        words = f"Plan {k} of {len(plan['before']) + 1}, of {old['written']}, had {len(old['seeds'])} seeds"
        shared = sorted(set(old["seeds"]) & set(plan["seeds"]))
        before = [look for look in old["looks"] if not _whole(look)]
        if seen is None and before:
            most = max(max(look["there"]) for look in before)
            said.append(
                f"{words} and was not answered, but looked at {_times(len(before))} before all of them were there, "
                f"on {most} of them at the most."
            )
        elif seen is None:
            said.append(f"{words} and was not answered.")
        elif shared:
            said.append(
                f"{words} and was answered on {seen}, on {len(shared)} of the seeds used now. What is said now was "
                f"planned after these were seen: its error rate does not hold."
            )
        else:
            said.append(f"{words} and was answered on {seen}, on other seeds.")
    there = plan.get("results", {"there": 0, "of": 0})
    if there["there"]:
        said.append(
            f"{there['there']} of the {there['of']} planned runs were there when the plan was written: it may "
            f"have been written after they were seen, and then no error rate holds."
        )
    early = sum(not _whole(look) for look in plan["looks"])
    if early:
        said.append(f"{early} look{'s' if early > 1 else ''} at these runs before all planned seeds were there.")
    return said


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def not_noted(plan: Plan) -> list[str]:
    """What an older version did not write into the plan."""
    if "results" in plan:
        return []
    return [f"How many runs of {plan['experiment']} were there when its plan was written is not noted in it."]


def _whole(look: Mapping[str, Any]) -> bool:
    return all(there >= look["of"] for there in look["there"])


def note_look(path: Path, plan: Plan, there: Sequence[int], *, by: str = "decide") -> Plan:
    """The plan with this look at the results, stored where it saw other seeds than the last one. there: seeds with all
    runs, for each family. by: the command."""
    seen = {"by": by, "there": list(there), "of": len(plan["seeds"])}
    if plan["looks"] and {key: plan["looks"][-1].get(key) for key in seen} == seen:
        return plan
    plan = {**plan, "looks": [*plan["looks"], {"at": _now(), **seen}]}
    files.write(path, json.dumps(plan, indent=1, sort_keys=True) + "\n")
    return plan


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
