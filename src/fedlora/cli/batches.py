"""Many runs behind one progress bar: how many are done, which are running, how much time is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedlora.cli.screen import notes
from fedlora.errors import ConfigError
from fedlora.experiments.plan import PlannedRun
from fedlora.experiments.runner import Keeper, Outcome, run_all
from fedlora.runs.quiet import quiet_libraries


def run_batch(
    title: str,
    todo: Sequence[PlannedRun],
    places: Keeper,
    workers: int,
    wanted: Callable[[PlannedRun], bool],
    heard: Callable[[Outcome], None],
) -> None:
    """Run them; each outcome is heard as it comes. An interrupt ends them at once."""
    if not todo:
        return
    quiet_libraries()
    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("runs"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[now]}", markup=False),
    )  # fmt: skip
    shares: dict[str, tuple[str, float]] = {}  # digest -> label and share of its rounds, of what is running
    finished = 0
    with Progress(*columns, console=notes) as progress:
        task = progress.add_task(title, total=len(todo), now="")

        def draw() -> None:
            done = finished + sum(share for _, share in shares.values())
            progress.update(task, completed=done, now="; ".join(label for label, _ in shares.values()))

        def tick(run: PlannedRun, round: int) -> None:
            rounds = run.config.run.rounds
            shares[run.digest] = f"{run.label}: round {round} of {rounds}", min(1.0, round / rounds)
            draw()

        with closing(run_all(todo, places, workers=workers, tick=tick, wanted=wanted)) as outcomes:
            for outcome in outcomes:
                finished += 1
                shares.pop(outcome.run.digest, None)
                draw()
                heard(outcome)


def worker_count(text: str, runs: int) -> int:
    """`--workers` as a number: N, or "auto", which is one for each core that this process may use.

    Raises:
        ConfigError: neither.
    """
    if text == "auto":
        return max(1, min(runs, cores()))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--workers is a whole number of at least 1, or auto; got {text!r}.")
    return int(text)


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


WorkersHelp = typer.Option(metavar="N|auto", help="processes, one run each at a time; auto: one a core")
