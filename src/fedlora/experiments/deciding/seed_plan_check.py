"""A plan's numbers are recomputed from the pilot and the search that it was made of: it is not just believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlora.errors import ConfigError
from fedlora.experiments.deciding.claims import Claims
from fedlora.experiments.deciding.decisions import read_scores
from fedlora.experiments.deciding.seed_plan import Plan, needed_seeds, rates, spreads_of, wanted_seeds
from fedlora.experiments.grid.spec import Experiment
from fedlora.experiments.stored.results import Result


def check_content(
    plan: Plan, claims: Claims, experiment: Experiment, results: Mapping[str, Result], failed: Mapping[str, str]
) -> list[str]:
    """What of the plan could not be recomputed, for its pilot or its search is not among the results; empty where all
    of it was.

    Raises:
        ConfigError: profile, spreads, seeds or rates of the plan are others than claims, pilot and search give.
    """
    families = claims.of(experiment.name)
    first = next(iter(families.values()))
    pilot = first.pilot
    if plan["profile"] != first.profile:
        _refuse(experiment, "profile", plan["profile"], first.profile)
    scores = read_scores(experiment, pilot, results, failed)
    try:
        spreads = {name: spreads_of(name, family, experiment, scores) for name, family in families.items()}
    except ConfigError:
        unchecked = [f"The plan of {experiment.name} is not checked: its pilot is not among these results."]
    else:
        unchecked = []
        _hold(experiment, "spreads", plan["spreads"], spreads)
        needed = needed_seeds(claims, families, spreads)
        for name, number in needed.items():  # by one: a library may round the power at the boundary otherwise
            if abs(plan["needed"].get(name, -9) - number) > 1:
                _refuse(experiment, f"needed.{name}", plan["needed"].get(name), number)
    wanted = wanted_seeds(families, plan["needed"])
    seeds = experiment.profile(plan["profile"]).seeds[:wanted]
    if plan["seeds"] != seeds:
        _refuse(experiment, "seeds", plan["seeds"], seeds)
    return [*unchecked, *_rates(plan, experiment, results, failed)]


def _rates(plan: Plan, experiment: Experiment, results: Mapping[str, Result], failed: Mapping[str, str]) -> list[str]:
    now = {rate["of"]: rate for rate in rates(experiment, plan["profile"], results, failed)}
    gone = [label for label in now if not any(rate["of"] == label for rate in plan["rates"])]
    for rate in plan["rates"]:
        found: Mapping[str, Any] = now.get(rate["of"], {})
        told = _numbers(found.get("validation", {}))
        if any(value is not None and told.get(key) is None for key, value in _numbers(rate["validation"]).items()):
            return [
                f"The rates in the plan of {experiment.name} are not checked: the search is not among these results."
            ]
        _hold(experiment, f"rates of {rate['of']}", rate, found)
    if gone and not plan["rates"]:
        _refuse(experiment, "rates", [], list(now.values()))
    return []


def _hold(experiment: Experiment, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    theirs, ours = _numbers(there), _numbers(here)
    for key in dict.fromkeys((*theirs, *ours)):
        if not _alike(theirs.get(key), ours.get(key)):
            _refuse(experiment, f"{what}, {key}", theirs.get(key), ours.get(key))


def _numbers(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested tables as one."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _numbers(value, f"{where}{key}: ") if isinstance(value, Mapping) else {f"{where}{key}": value}
    return found


def _alike(a: object, b: object) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    return a == b


def _refuse(experiment: Experiment, what: str, there: object, here: object) -> None:
    raise ConfigError(
        f"the plan of {experiment.name} says {what} = {there!r:.80}, and its pilot, its search and its families give "
        f"{here!r:.80}: the plan or they were changed. Restore them (git), or plan again (fedlora experiment "
        f"plan {experiment.name} --again), which the plan will show."
    )
