"""What scores rest on and numbers do not show: whose model was measured, by which code, on which machine, and what was
chosen at the edge of its grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from fedlora.experiments.claims import Claims, Family, setup_axis
from fedlora.experiments.digits import shown
from fedlora.experiments.merger_settings import ALONE
from fedlora.experiments.plan import PlannedRun, at_the_edge, mains
from fedlora.experiments.result import Result
from fedlora.experiments.scores import parse_number
from fedlora.experiments.spec import Experiment

Used = Sequence[tuple[PlannedRun, Result]]
_FIRST_GRID = (1e-3, 10.0)  # of C, in results that do not say what was tried


def used(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = (),
    seeds: Collection[int] | None = None,
) -> list[tuple[PlannedRun, Result]]:  # fmt: skip
    """The profile's runs that have a result, of these seeds."""
    return [
        (run, result)
        for run in mains(experiment, profile, results, failed)
        if (seeds is None or run.seed in seeds) and (result := run.result(results)) is not None
    ]


def notes(experiment: Experiment, profile: str, which: str, of: Used) -> list[str]:
    """A line for each thing that a reader of a number of these runs has to know. which: its name. of: as `used` gives
    them."""
    whose = whose_models(experiment, of) if parse_number(which).of_target else []
    return [*whose, *mixtures(experiment, of), *edges(experiment, profile, of)]


def family_notes(
    family: Family, experiment: Experiment, profile: str, seeds: Collection[int], results: Mapping[str, Result],
    failed: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Of the runs that a family compares, and of no others."""
    axis, setups = experiment.rows[0], setup_axis(experiment)
    labels = {label for pair in family.pairs for label in pair}
    of = used(experiment, profile, results, failed, seeds)
    return notes(
        experiment,
        profile,
        "test, last",
        [o for o in of if o[0].cell[axis] in labels and o[0].cell[setups] in family.setups],
    )


def gate_notes(
    claims: Claims, family: Family, experiments: Mapping[str, Experiment], profile: str, seeds: Collection[int],
    results: Mapping[str, Result], failed: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Where the head alone, which the gate of a family's experiment asks in any set-up, chose its strength at the edge
    of what was tried."""
    gate = claims.gates.get(family.experiment)
    if gate is None:
        return []
    elsewhere = gate.head_of
    asked = experiments[elsewhere.experiment if elsewhere else family.experiment]
    setups = (
        [elsewhere.setup] if elsewhere else [s for one in claims.of(family.experiment).values() for s in one.setups]
    )
    heads = [
        (run, result)
        for run, result in used(asked, profile, results, failed, seeds)
        if run.cell[asked.rows[0]] == gate.head and run.cell[setup_axis(asked)] in setups
    ]
    counts: Counter[tuple[str, float]] = Counter()
    for _, result in heads:
        strength = None if result.of is None else result.of.strength
        if result.of is None or strength is None:
            continue
        low, high = result.of.strengths_tried or _FIRST_GRID
        if strength in (low, high):
            counts["largest" if strength == high else "smallest", strength] += 1
    return [
        f"The strength C of {gate.head} is the {end} tried, {shown(value)}, in {count} of {len(heads)} runs: a better "
        f"head may lie beyond, and LoRA's lead over it would be smaller."
        for (end, value), count in counts.items()
    ]


def whose_models(experiment: Experiment, of: Used) -> list[str]:
    """Where scores are of clients' own models: a line, for they stand beside those of a server's."""
    axis = experiment.rows[0]
    own = list(dict.fromkeys(run.cell[axis] for run, result in of if _of_clients(result)))
    others = {run.cell[axis] for run, result in of if not _of_clients(result)}
    if not own:
        return []
    score = "the mean score of the clients' own models on the same data"
    if not others:
        return [f"Every number is {score}, not the score of a server's model."]
    return [f"{', '.join(own)}: {score}. The others: the score of the server's model."]


def _of_clients(result: Result) -> bool:
    alone = result.of is not None and result.of.merger.get("control") == ALONE
    return result.target == "clients" or alone


def mixtures(experiment: Experiment, of: Used) -> list[str]:
    """A line where runs are of several commits, machines or versions of libraries, and how often these meet in what is
    compared: the labels of the first row axis on one seed, all else alike."""
    found = [_mixture(experiment, of, what, told) for what, told in _ORIGINS.items()]
    return [line for line in found if line]


def _mixture(experiment: Experiment, of: Used, what: str, told: Callable[[Result], str]) -> str:
    """A merger may be of another commit than the training that it merges, and than the mergers beside it."""
    each_of = [(run, told(result)) for run, result in of]
    counts = Counter(origin for _, origin in dict.fromkeys((run.digest, origin) for run, origin in each_of))
    if len(counts) < 2:
        return ""
    places: dict[tuple[object, ...], set[str]] = {}
    for run, origin in each_of:
        where = tuple(label for axis, label in run.cell.items() if axis != experiment.rows[0])
        places.setdefault((run.seed, where), set()).add(origin)
    met = sum(len(each) > 1 for each in places.values())
    each = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
    meet = (
        f"Runs of different ones are compared in {met} of {len(places)} cases (a seed in a set-up): part of such a gap "
        f"may come of that."
        if met
        else "All runs of a seed in a set-up are of one: no gap comes of that."
    )
    return f"The {len({run.digest for run, _ in of})} runs are of {len(counts)} {what}: {each}. {meet}"


def _machines(result: Result) -> str:
    """Of all its parts, each once; of a part that noted none, the one of the result."""
    return " and ".join(dict.fromkeys((part.machine or result.machine).words for part in result.made))


_ORIGINS: Mapping[str, Callable[[Result], str]] = {
    "commits of the code": lambda result: " and ".join(result.commits(7)),
    "machines": _machines,
    "versions of libraries": lambda result: ", ".join(f"{k} {v}" for k, v in sorted(result.versions.items())),
}


def edges(experiment: Experiment, profile: str, of: Used) -> list[str]:
    """A line for each searched value that is the largest or the smallest of those tried."""
    tune = experiment.tune
    if tune is None:
        return []
    over = [axis for axis in tune.over if len({run.cell[axis] for run, _ in of}) > 1]
    found: dict[tuple[str, float], list[str]] = {}
    for run, _ in of:
        edge = at_the_edge(experiment, profile, run.tuned)
        if edge is not None and run.tuned is not None:
            labels = found.setdefault((edge, run.tuned), [])
            where = ", ".join(run.cell[axis] for axis in over) or "all"
            labels += [where] if where not in labels else []
    return [
        f"{tune.key} = {shown(value)}, the {edge} tried, was chosen for {'; '.join(labels)}: the best may lie beyond."
        for (edge, value), labels in found.items()
    ]
