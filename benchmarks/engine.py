"""The engine: what two worker processes gain and take of memory, and what a round does besides training.

    python benchmarks/engine.py [--clients 6] [--repeats 3] [--quick] [--json FILE]

All on the demo's model and data. (a) Rounds of `--clients` clients of four steps, a round of each in turn: by one
worker with one thread, by one with two threads, and by two workers. These are seconds by the clock: the machine must
be idle. (b) The memory of a run of four clients: the proportional share (PSS) of all its processes together, at most,
with one and with two workers. (c) A round's seconds outside forward, backward and optimiser: download, upload,
aggregation, diagnostics, and in local training the swap of adapters, batching and bookkeeping; no evaluation. (d) Peak
memory of a process with 50 clients against one with 3.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch
from transformers.utils import logging

from fedlora.runs.config import load_config
from fedlora.runs.crew import crewed
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from measure import Goal, Ratio, elapsed, median, on_stderr, report

DEMO = Path(str(files("fedlora") / "demo.toml"))
QUICK = ["data.test=0.02", "data.validation=0.02", "server.quorum=1"]


class _Compute:
    """Seconds inside the network's forward, `backward` and the optimiser's step, measured by wrapping the three."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watched(self, network: torch.nn.Module) -> Iterator[None]:
        module, autograd, adam = type(network), torch.autograd, torch.optim.Adam
        saved = module.__call__, autograd.backward, adam.step
        module.__call__, autograd.backward, adam.step = (self._timed(f) for f in saved)  # type: ignore[method-assign]
        try:
            yield
        finally:
            module.__call__, autograd.backward, adam.step = saved  # type: ignore[method-assign]

    def _timed(self, work):  # type: ignore[no-untyped-def]
        def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def overhead(rounds: int) -> dict[str, float]:
    """Shares of the time of `rounds` demo rounds, evaluation left out."""
    prepared = prepare(load_config(DEMO, [*QUICK, f"run.rounds={rounds}"]))
    compute = _Compute()
    network = prepared.trainer._model.network  # type: ignore[attr-defined]
    phases: dict[str, float] = {}
    begun = start(prepared.server, prepared.seed_adapter)
    with compute.watched(network):
        began = time.perf_counter()
        for record in simulate(prepared.server, prepared.clients, prepared.trainer, begun, rounds=rounds):
            for phase, seconds in record.seconds.items():
                phases[phase] = phases.get(phase, 0.0) + seconds
        total = time.perf_counter() - began
    return {
        "total": total,
        "outside forward, backward, optimiser": 1 - compute.seconds / total,
        **{f"share of {phase}": seconds / total for phase, seconds in phases.items()},
    }


def peak_memory(clients: int) -> float:
    """Peak resident MB of a process that runs one round of `clients` clients of three ranks."""
    return float(
        subprocess.run(
            [sys.executable, __file__, "--peak", str(clients)], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
    )


def _one_round_and_peak(clients: int) -> None:
    ranks = [(2, 8, 16)[k % 3] for k in range(clients)]
    sets = [*QUICK, "run.rounds=1", "train.max_steps=1", f"clients.ranks={ranks}", "clients.dirichlet_alpha=100"]
    prepared = prepare(load_config(DEMO, sets))
    for _ in simulate(
        prepared.server, prepared.clients, prepared.trainer, start(prepared.server, prepared.seed_adapter), rounds=1
    ):
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def worker_rounds(clients: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of rounds of the demo's model, `clients` clients of four steps each; without the first of each."""
    sets = [*QUICK, "train.max_steps=4", f"clients.ranks={[(2, 4, 8)[k % 3] for k in range(clients)]}"]
    sets += ["clients.dirichlet_alpha=100", f"run.rounds={repeats + 1}"]
    one = prepare(load_config(DEMO, [*sets, "run.threads=1"]))
    with crewed(prepare(load_config(DEMO, [*sets, "run.threads=0", "run.workers=2"]))) as two:
        crews = {
            "1 worker, 1 thread": (1, one, one.workers),
            "1 worker, 2 threads": (2, one, one.workers),
            "2 workers": (1, two, two.workers),
        }
        playing = {
            name: simulate(run.server, run.clients, workers, start(run.server, run.seed_adapter), rounds=repeats + 1)
            for name, (_, run, workers) in crews.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in crews}
        for _ in range(repeats + 1):
            for name, (threads, *_) in crews.items():
                torch.set_num_threads(threads)
                seconds[name].append(elapsed(lambda name=name: next(playing[name])))  # type: ignore[misc]
    return {name: times[1:] for name, times in seconds.items()}


def worker_memory(workers: int) -> tuple[float, float]:
    """MB of a run's processes together: before its first round, and at most in a round of four clients."""
    said = subprocess.run(
        [sys.executable, __file__, "--memory", str(workers)], capture_output=True, text=True, check=True
    )
    before, peak = said.stdout.split()[-2:]
    return float(before), float(peak)


def _memory(workers: int) -> None:
    import psutil

    def together() -> float:
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        total = 0.0
        for process in family:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss / 1e6
        return total

    sets = [*QUICK, "run.rounds=1", "train.max_steps=4", "clients.ranks=[8,8,8,8]", "clients.dirichlet_alpha=100"]
    prepared = prepare(load_config(DEMO, [*sets, "run.threads=0", f"run.workers={workers}"]))
    before, peak, over = together(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, together())

    watching = threading.Thread(target=watch)
    watching.start()
    with crewed(prepared) as crew:
        state = start(crew.server, crew.seed_adapter)
        list(simulate(crew.server, crew.clients, crew.workers, state, rounds=1))
    over.set()
    watching.join()
    print(before, peak)


def main() -> None:
    began = time.perf_counter()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two clients, one repeat")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        _memory(args.memory)
        return
    if args.peak:
        _one_round_and_peak(args.peak)
        return
    clients, repeats, crowd = (2, 1, 6) if args.quick else (args.clients, args.repeats, 50)
    on_stderr("rounds of one and of two workers")
    rounds = worker_rounds(clients, repeats)
    on_stderr("memory of one and of two workers")
    memory = {workers: worker_memory(workers) for workers in (1, 2)}
    on_stderr("what a round does besides training")
    shares = overhead(1)
    on_stderr("memory of few and of many clients")
    few, many = peak_memory(3), peak_memory(crowd)
    on_stderr("")
    base, two = rounds["1 worker, 1 thread"], rounds["2 workers"]
    gain, took = Ratio.of(base, two), memory[2][1] / memory[1][1]
    outside = shares["outside forward, backward, optimiser"]
    table = [["a round", "seconds", "times as fast"]]
    table += [[name, f"{median(times):.2f}", str(Ratio.of(base, times))] for name, times in rounds.items()]
    held = [["processes", "before the first round, MB", "at most, MB"]]
    held += [[f"{workers} worker{'s' * (workers > 1)}", *(f"{mb:.0f}" for mb in memory[workers])] for workers in memory]
    goals = [
        Goal.of("two workers, times as fast as one", gain, ">= 1.8"),
        Goal("memory of two workers, over one", took, "<= 1.6"),
        Goal("of a round outside forward, backward, optimiser", outside, "<= 0.1", form=".1%"),
        Goal(f"peak memory of {crowd} clients over 3", many / few, "<= 1.1"),
    ]
    tables = {"workers": table, "memory": held}
    peaks = {"3": few, str(crowd): many}
    figures = {"rounds": rounds, "workers' memory": memory, "shares": shares, "peak memory": peaks}
    report(args.json, began, tables=tables, goals=goals, figures=figures)


if __name__ == "__main__":
    main()
