"""Many runs behind one progress bar: how many are done, the rounds of those that run, how much time is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fedlora.cli.screen import bar, notes, say
from fedlora.doing import doing
from fedlora.experiments.drive import Watch
from fedlora.experiments.grid import Planned
from fedlora.experiments.work import Work

_LOOK = 2.0  # seconds between two looks into the run folders


@contextmanager
def watched(title: str, work: Work) -> Iterator[Watch]:
    """What `drive` tells, on the screen; in a log a line for each run that ends. A batch system's end (SIGTERM) is like
    Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with bar() as progress, doing(title) as step:
            task = progress.add_task(title, total=None)
            ended: set[str] = set()
            looked = 0.0

            def watch(todo: Sequence[Planned], one: tuple[Planned, str | None] | None) -> None:
                nonlocal looked
                if one is not None:
                    ended.add(one[0].digest)
                step.of, step.done = len(todo), sum(run.digest in ended for run in todo)
                if one is not None and (one[1] is not None or not notes.is_terminal):
                    end = "done" if one[1] is None else f"failed: {one[1]}"
                    say(f"{title}: {step.done} of {step.of}: {one[0].label} {end}")
                if one is not None or time.monotonic() - looked > _LOOK:
                    running = [
                        (run, count) for run in todo if run.digest not in ended and (count := _rounds(work, run))
                    ]
                    shares = sum(count / run.config.run.rounds for run, count in running)
                    words = "; ".join(f"{run.label} round {n} of {run.config.run.rounds}" for run, n in running[:3])
                    step.what = f"{title} ({words})" if words else title
                    progress.update(task, total=step.of, completed=step.done + shares, description=step.what)
                    looked = time.monotonic()

            yield watch
    finally:
        signal.signal(signal.SIGTERM, before)


def _rounds(work: Work, run: Planned) -> int:
    """The rounds that a run has made."""
    with suppress(OSError):
        return (work.run_folder(run).path / "metrics.jsonl").read_bytes().count(b"\n")
    return 0
