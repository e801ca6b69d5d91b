"""`fedlora experiment run --plan`: which runs are missing, and a count of what each one costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedlora.cli.screen import Table, console, notes
from fedlora.errors import counted
from fedlora.experiments.checks import problems
from fedlora.experiments.costs import Workload, Workloads, trained_on
from fedlora.experiments.measured import Paces
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun, mains, searches, waiting
from fedlora.experiments.result import Result
from fedlora.experiments.spec import Experiment
from fedlora.runs.config import RunConfig
from fedlora.runs.inputs import named
from fedlora.runs.quiet import quiet_libraries

_Counted = tuple[PlannedRun, Workload]
_NUMBERS = ("search runs", "runs", "finished", "examples to train", "tokens to train", "texts to score",
            "answers to generate", "MB that travel", "GB of memory", "hours")  # fmt: skip


def show_plan(
    chosen: Sequence[Experiment], profile: str, places: Places, *, workers: int, measure: bool, price: float | None
) -> None:
    """Show a row for each experiment, and what is wrong with it.

    measure: take the pace from a few steps here, instead of from finished runs. price: of an hour of one process.
    """
    quiet_libraries()
    done, given_up, count = places.finished(unclean=True), places.given_up(), Workloads(places.data_root)
    table = Table("experiment", *_NUMBERS, *([] if price is None else ["price"]))
    lacking: dict[str, str] = {}
    wrong: dict[str, None] = {}
    unread = False
    finished_pace = _paces(done)
    measured = Paces(places.data_root) if measure else None
    for experiment in chosen:
        search = searches(experiment, profile)
        planned = [*mains(experiment, profile, done, given_up), *waiting(experiment, profile, done, given_up)]
        runs = {run.digest: run for run in planned}
        todo = [run for run in search if run.digest not in done and run.digest not in given_up]
        todo += [run for digest, run in runs.items() if digest not in done]
        work = [(run, count.of(run.config)) for run in todo]
        unread = unread or any(each.scored is None for _, each in work)
        lacking |= {why: experiment.name for _, each in work for why in each.whys}
        wrong |= dict.fromkeys(problems(todo, places, workers, count))
        hours = _hours(work, measured.seconds if measured else finished_pace)
        cost = [] if price is None else [hours if isinstance(hours, str) else f"{hours * price:,.2f}"]
        finished = sum(digest in done for digest in runs)
        table.add_row(
            experiment.name, str(len(search)), str(len(runs)), str(finished), *_work(work),
            hours if isinstance(hours, str) else f"{hours:.{2 if hours >= 1 else 3}f}", *cost,
        )  # fmt: skip
    console.print(table)
    for why, name in lacking.items():
        console.print(f"{name}: not all is counted: {why}")
    if unread:
        console.print("at most: without data, each client counts with whole batches")
    said = "the time of finished runs of the same model and max_length, all included, on any machine"
    by = "a few steps, texts and messages of each kind of run, timed on this device now" if measure else said
    console.print(
        f"hours of one process by {by}. GB of the process's device at the peak, estimated within a factor of 2, in the "
        f"largest run."
    )
    notes.warn(*(one for one in wrong if one not in lacking))


def _work(work: Sequence[_Counted]) -> list[str]:
    """The cells from examples to memory."""
    each = [workload for _, workload in work]
    most = "at most " if any(one.most for one in each) else ""
    sizes = [one.bytes for one in each]
    travel = _sum([None if size is None else size.total for size in sizes])
    bounded = "at most " if most or any(size is not None and size.most for size in sizes) else ""
    evaluated = (run.config.run.rounds > run.config.evaluate.every for run, _ in work)
    texts = "at most " if most or any(evaluated) else ""  # the best state may be the last, which is scored once
    memory = [one.memory.total if one.memory is not None else None for one in each]
    largest = None if None in memory else max((n for n in memory if n is not None), default=0)
    return [
        _shown(_sum([one.trained for one in each]), most),
        _shown(_sum([one.tokens for one in each]), most),
        _shown(_sum([one.scored for one in each]), texts),
        _shown(answers := _sum([one.answers for one in each]), texts if answers else ""),
        _shown(None if travel is None else travel / 1e6, bounded, ".1f"),
        _shown(None if largest is None else largest / 1e9, "", ".2f"),
    ]


def _shown(number: float | None, most: str = "", form: str = "") -> str:
    return "not counted" if number is None else f"{most}{number:,{form}}"


def _sum(each: Sequence[int | None]) -> int | None:
    """The sum; None if one term is unknown."""
    return None if None in each else sum(n for n in each if n is not None)


def _hours(work: Sequence[_Counted], pace: Callable[[RunConfig, Workload], float | None]) -> float | str:
    """The hours from each run's own seconds; words if one run's are unknown."""
    each = [pace(run.config, workload) for run, workload in work]
    strange = sum(seconds is None for seconds in each)
    if any(workload.trained is None for _, workload in work):
        return "not counted"
    if strange:
        return f"unknown: no run like {counted(strange, 'run')} is finished (--measure)"
    return sum(seconds for seconds in each if seconds is not None) / 3600


def _kind(config: RunConfig) -> tuple[str, int]:
    """The key for how long an example takes: the model's name, and the longest text."""
    return named(config).model.path, config.data.max_length


def _paces(done: Mapping[str, Result]) -> Callable[[RunConfig, Workload], float | None]:
    """The seconds of a run's whole process, by those of finished runs of its kind for each trained example."""
    sums: dict[tuple[str, int], tuple[float, int]] = {}
    for result in done.values():
        config, trained = result.settings, trained_on(result)
        if trained:
            kind = config.model.path, config.data.max_length
            spent, examples = sums.get(kind, (0.0, 0))
            sums[kind] = spent + result.wall_seconds, examples + trained

    def seconds(config: RunConfig, work: Workload) -> float | None:
        spent, examples = sums.get(_kind(config), (0.0, 0))
        return None if not examples or work.trained is None else spent / examples * work.trained

    return seconds
