"""`fedlora experiment run --plan`: which runs are missing, and a count of what each one costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedlora.cli.screen import Table, console
from fedlora.errors import counted
from fedlora.experiments.costs import Workload, Workloads, trained_on
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun, mains, searches, waiting
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Experiment
from fedlora.runs.config import RunConfig
from fedlora.runs.inputs import named
from fedlora.training.metrics import generates

_Counted = tuple[PlannedRun, Workload]


def show_plan(chosen: Sequence[Experiment], profile: str, places: Places, rate: float | None) -> None:
    """Show a row for each experiment. rate: examples a second, instead of the pace of finished runs."""
    done, given_up, count = places.finished(unclean=True), places.given_up(), Workloads(places.data_root)
    paces = _paces(done)
    numbers = ("search runs", "runs", "finished", "examples to train", "texts to score", "hours", "MB that travel")
    table = Table("experiment", *numbers)
    lacking: dict[str, str] = {}
    for experiment in chosen:
        search = searches(experiment, profile)
        planned = [*mains(experiment, profile, done, given_up), *waiting(experiment, profile, done, given_up)]
        runs = {run.digest: run for run in planned}
        todo = [run for run in search if run.digest not in done and run.digest not in given_up]
        todo += [run for digest, run in runs.items() if digest not in done]
        work = [(run, count.of(run.config)) for run in todo]
        trained = _sum([each.trained for _, each in work])
        most = "at most " if any(each.most for _, each in work) else ""
        lacking |= {each.why: experiment.name for _, each in work if each.why}
        told = "not counted: no data" if trained is None else f"{most}{trained:,}"
        hours = _hours(work, (lambda _: 1 / rate) if rate else lambda config: paces.get(_kind(config)))
        finished = sum(digest in done for digest in runs)
        table.add_row(
            experiment.name, str(len(search)), str(len(runs)), str(finished), told, _scored(work), hours,
            _travel(experiment, todo, list(runs.values()), done),
        )  # fmt: skip
    console.print(table)
    for why, name in lacking.items():
        console.print(f"{name}: its data were not read: {why}")
    if lacking:
        console.print("at most: without data, each client counts with whole batches")
    said = "the time of finished runs of the same model and max_length, all included, on any machine"
    by = f"--rate, {rate:g} examples a second: training only, without scoring" if rate else said
    console.print(f"hours of one process by {by}")


def _sum(each: Sequence[int | None]) -> int | None:
    """The sum; None if one term is unknown."""
    return None if None in each else sum(n for n in each if n is not None)


def _scored(work: Sequence[_Counted]) -> str:
    """The number of held-out texts, and of those whose answer is generated token by token."""
    if (total := _sum([each.scored for _, each in work])) is None:
        return "not counted: no data"
    made = sum(each.scored or 0 for run, each in work if generates(run.config.evaluate.metric))
    return f"{total:,}" + (f", {made:,} by generating" if 0 < made < total else " by generating" if made else "")


def _hours(work: Sequence[_Counted], pace: Callable[[RunConfig], float | None]) -> str:
    """The hours from each run's own pace in seconds per example; no number if one run has no pace."""
    spent, strange = 0.0, 0
    for run, each in work:
        seconds = pace(run.config)
        if each.trained is None:
            return "not counted: no data"
        if seconds is None:
            strange += 1
        else:
            spent += seconds * each.trained / 3600
    return f"unknown: no run like {counted(strange, 'run')} is finished" if strange else f"{spent:.1f}"


def _kind(config: RunConfig) -> tuple[str, int]:
    """The key for how long an example takes: the model's name, and the longest text."""
    return named(config).model.path, config.data.max_length


def _paces(done: Mapping[str, Result]) -> dict[tuple[str, int], float]:
    """Kind of run -> seconds of the whole process per trained example, from finished runs."""
    sums: dict[tuple[str, int], tuple[float, int]] = {}
    for result in done.values():
        config, trained = result.settings, trained_on(result)
        if trained:
            kind = config.model.path, config.data.max_length
            spent, examples = sums.get(kind, (0.0, 0))
            sums[kind] = spent + result.wall_seconds, examples + trained
    return {kind: spent / examples for kind, (spent, examples) in sums.items()}


def _travel(
    experiment: Experiment, todo: Sequence[PlannedRun], runs: Sequence[PlannedRun], done: Mapping[str, Result]
) -> str:
    """The traffic in MB, from finished runs of each run's own cell; unknown if a cell has none."""

    def cell(run: PlannedRun) -> tuple[tuple[str, str], ...]:
        return tuple(pair for pair in run.cell.items() if pair[0] != experiment.merged)

    sizes: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for run in runs:
        if run.digest in done and (size := done[run.digest].bytes):
            sizes.setdefault(cell(run), []).append(size["total"] / 1e6)
    if any(cell(run) not in sizes for run in todo):
        return "unknown"
    return f"{sum(sum(sizes[cell(run)]) / len(sizes[cell(run)]) for run in todo):.0f}"
