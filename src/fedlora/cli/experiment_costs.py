"""`fedlora experiment run --plan`: which runs are missing, and a count of what each one costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import typer

from fedlora.cli.screen import NOT_WHOLE, Table, complain, console, notes
from fedlora.errors import counted
from fedlora.experiments.costs import Workload, Workloads, trained_on
from fedlora.experiments.grid import Grid
from fedlora.experiments.measured import Paces
from fedlora.experiments.plan import PlannedRun, told_once
from fedlora.experiments.result import Result
from fedlora.runs.config import RunConfig
from fedlora.runs.inputs import named

_Counted = tuple[PlannedRun, Workload]
_NUMBERS = ("search runs", "runs", "finished", "examples to train", "tokens to train", "texts to score",
            "answers to generate", "MB that travel", "hours")  # fmt: skip


def show_plan(
    grids: Sequence[Grid], count: Workloads, wrong: Sequence[str], *, measure: bool, price: float | None
) -> None:
    """Show a row for each experiment, what it does not count, and what is wrong with it: `wrong`.

    measure: take the pace from a few steps here, instead of from finished runs. price: of an hour of one process.
    """
    table = Table("experiment", *_NUMBERS, *([] if price is None else ["price"]))
    lacking: dict[str, list[str]] = {}
    unread = False
    pace = Paces(count.root).seconds if measure else _paces(grids[0].results)
    for grid in grids:
        search, done = grid.searches, grid.results
        runs = {run.digest: run for run in [*grid.runs, *grid.waiting]}
        todo = [run for run in search if run.digest not in done and run.digest not in grid.failed]
        todo += [run for digest, run in runs.items() if digest not in done]
        work = [(run, count.of(run.config)) for run in todo]
        unread = unread or any(each.scored is None for _, each in work)
        for run, each in work:
            for why in (why for why in each.whys if not any(why in line for line in wrong)):
                lacking.setdefault(why, []).append(run.label)
        finished = sum(digest in done for digest in runs)
        hours = _hours(work, pace, price)
        table.add_row(grid.experiment.name, str(len(search)), str(len(runs)), str(finished), *_work(work), *hours)
    console.print(table)
    for line in told_once({f"not all is counted: {why}": labels for why, labels in lacking.items()}):
        console.print(line)
    if unread:
        console.print("at most: without data, each client counts with whole batches")
    said = "the time of finished runs of the same model and max_length, all included, on any machine"
    by = "a few steps, texts and messages of each kind of run, timed on this device now" if measure else said
    console.print(f"hours of one process by {by}.")
    notes.warn(*wrong)
    if wrong:
        complain(f"{counted(len(wrong), 'thing')} wrong, each in a line above: without --plan, no run would start.")
        raise typer.Exit(NOT_WHOLE)


def _work(work: Sequence[_Counted]) -> list[str]:
    """The cells from examples to bytes."""
    each = [workload for _, workload in work]
    most = "at most " if any(one.most for one in each) else ""
    sizes = [one.bytes for one in each]
    bounded = "at most " if most or any(size is not None and size.most for size in sizes) else ""
    evaluated = (run.config.run.rounds > run.config.evaluate.every for run, _ in work)
    texts = "at most " if most or any(evaluated) else ""  # the best state may be the last, which is scored once
    answers = [one.answers for one in each]
    return [
        _shown([one.trained for one in each], most),
        _shown([one.tokens for one in each], most),
        _shown([one.scored for one in each], texts),
        _shown(answers, texts if any(answers) else ""),
        _shown([None if size is None else size.total / 1e6 for size in sizes], bounded, ".1f"),
    ]


def _shown(each: Sequence[float | None], most: str = "", form: str = "") -> str:
    """The sum over the runs that are counted, and how many these are if not all."""
    known = [number for number in each if number is not None]
    if each and not known:
        return "not counted"
    return f"{most}{sum(known):,{form}}" + _of_all(known, each)


def _of_all(known: Sequence[float], each: Sequence[float | None]) -> str:
    return "" if len(known) == len(each) else f" ({len(known)} of {counted(len(each), 'run')})"


def _hours(
    work: Sequence[_Counted], pace: Callable[[RunConfig, Workload], float | None], price: float | None
) -> list[str]:
    """The hours from each run's own seconds, and their price, over the runs that are counted; words if there is no
    pace for one of these."""
    there = [(run.config, workload) for run, workload in work if workload.trained is not None]
    if work and not there:
        return ["not counted"] * (1 if price is None else 2)
    each = [pace(config, workload) for config, workload in there]
    known = [seconds for seconds in each if seconds is not None]
    if len(known) < len(each):
        words = f"unknown: no run like {counted(len(each) - len(known), 'run')} is finished (--measure)"
        return [words] * (1 if price is None else 2)
    hours, part = sum(known) / 3600, _of_all(known, [None] * len(work))
    return [f"{hours:.{2 if hours >= 1 else 3}f}{part}", *([] if price is None else [f"{hours * price:,.2f}{part}"])]


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
