"""Many runs behind one progress bar: how many are done, which are running, how much time is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from rich.progress import TaskID

from fedlora.cli.screen import bar, notes, say
from fedlora.doing import doing
from fedlora.errors import ConfigError
from fedlora.experiments.gpus import begin, dealt, visible
from fedlora.experiments.grid import Grid
from fedlora.experiments.places import Places
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.pool import Process, Slot
from fedlora.experiments.runner import Outcome, run_all
from fedlora.runs.quiet import quiet_libraries
from fedlora.workers.processes import available

Cluster = Callable[[Sequence[PlannedRun]], Sequence[Slot]]  # runs to do -> where they go on


def run_batch(
    title: str,
    todo: Sequence[PlannedRun],
    places: Places,
    slots: Sequence[Slot],
    wanted: Callable[[PlannedRun], bool],
) -> list[Outcome]:
    """Run them, and return the failures. An interrupt ends them at once. If the output is a pipe or file, so that
    nobody sees a bar, a line reports each run's start and end."""
    quiet_libraries()
    rows: dict[str, TaskID] = {}  # digest -> the line of a run that is running
    waited: list[bool] = []
    failed: list[Outcome] = []
    finished = 0
    with bar("{task.fields[unit]}") as progress, doing(title, len(todo)) as step:
        whole = progress.add_task(title, total=len(todo), unit="runs")

        def tick(run: PlannedRun, round: int) -> None:
            rounds = run.config.run.rounds
            if run.digest not in rows:
                if not notes.is_terminal:
                    say(f"{title}: {run.label} begins")
                rows[run.digest] = progress.add_task(run.label, total=rounds, unit="rounds")
            progress.update(rows[run.digest], completed=round)
            running = [f"{t.description} round {t.completed:.0f} of {t.total:.0f}" for t in progress.tasks[1:5]]
            step.what = f"{title} ({'; '.join(running)})"
            shares = (task.percentage / 100 for task in progress.tasks if task.id != whole)
            progress.update(whole, completed=finished + sum(shares))

        def waits() -> None:
            step.what = f"{title}: waiting for other processes, which have all runs that are left"
            if not waited:
                waited.append(True)
                say(f"{step.what}; a run whose process was killed is free after a minute")

        runs = run_all(todo, places, slots=slots, tick=tick, wanted=wanted, waits=waits)
        with closing(runs) as outcomes:
            for outcome in outcomes:
                finished += 1
                if not notes.is_terminal:
                    say(f"{title}: {finished} of {len(todo)}: {_end(outcome)}")
                if outcome.run.digest in rows:
                    progress.remove_task(rows.pop(outcome.run.digest))
                progress.update(whole, completed=finished)
                step.done = finished
                failed += [outcome] if outcome.error is not None else []
    return failed


def _end(outcome: Outcome) -> str:
    if outcome.seconds is None:
        return f"{outcome.run.label} done by another process"
    end = "done" if outcome.error is None else f"failed: {outcome.error.rstrip('.')}"
    return f"{outcome.run.label} {end}, {outcome.seconds:.0f} s"


def _processes(workers: int, todo: Sequence[PlannedRun]) -> Sequence[Slot]:
    """Processes of this machine; none if all goes on in this one."""
    if workers == 1:
        return ()
    gpus = dealt(workers, todo) or [""] * workers
    return [Process(partial(begin, gpus[k])) for k in range(min(workers, len(todo)))]


def run_stages(
    grid: Grid,
    places: Places,
    workers: str,
    *,
    again: Callable[[Grid, Sequence[Outcome]], Grid],
    wanted: Callable[[PlannedRun], bool],
    cluster: Cluster | None = None,
) -> list[Outcome]:
    """The search, then the runs that it decides, each at most once. Returns the failures.

    Args:
        again: the grid with its present results, from the failures so far.
        wanted: called before a run is started; False leaves the run out.
        cluster: where runs go on instead of `workers` processes of this machine.
    """
    failed: list[Outcome] = []
    tried: set[str] = set()
    for _ in range(2):
        grid = again(grid, failed)
        todo = [run for run in grid.missing if run.digest not in tried and wanted(run)]
        todo.sort(key=lambda run: (not run.searching, run.seed))  # seed by seed: an interrupt leaves whole pairs
        tried |= {run.digest for run in todo}
        if todo:
            slots = _processes(worker_count(workers, todo), todo) if cluster is None else cluster(todo)
            failed += run_batch(grid.experiment.name, todo, places, slots, wanted)
    return failed


def worker_count(text: str, todo: Sequence[PlannedRun]) -> int:
    """The number of workers from `--workers`: N, or "auto", which is one for each core that this process may use, or
    for each GPU.

    Raises:
        ConfigError: the text is neither.
    """
    if text == "auto":
        devices = {run.config.model.device for run in todo}
        places = len(visible()) if devices != {"cpu"} else 0
        return max(1, min(len(todo), places or available()))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--workers must be a whole number of at least 1, or auto; got {text!r}.")
    return int(text)
