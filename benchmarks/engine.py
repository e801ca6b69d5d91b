"""The engine: what share of a round is not training, and does memory grow with the number of clients?

    python benchmarks/engine.py [--rounds 2] [--clients 3,12] [--repeats 3] [--flower] [--json FILE]

(a) A demo round's seconds outside forward, backward and optimiser: download, upload, aggregation, diagnostics, and in
local training the swap of adapters, batching and bookkeeping; no evaluation. (b) Peak memory of a process with 50
clients against one with 3, of the same model and data. (c) Rounds of 3 and of 12 clients by one worker with one thread
and with two, and by two workers, a round of each in turn; with --flower, of Flower's simulation (Ray) after them. (d)
What two workers take of memory beside one: the proportional share (PSS) of all processes together.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median

import torch
from transformers.utils import logging

from fedlora.runs.config import load_config
from fedlora.runs.crew import crewed
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from measure import as_json, elapsed, machine

DEMO = Path(str(files("fedlora") / "demo.toml"))
QUICK = ["data.test=0.02", "data.validation=0.02", "server.quorum=1"]


class _Compute:
    """Seconds inside the network's forward, `backward` and the optimiser's step, measured by wrapping the three."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watched(self, network: torch.nn.Module) -> Iterator[None]:
        module, tensor, adam = type(network), torch.Tensor, torch.optim.Adam
        saved = module.__call__, tensor.backward, adam.step
        module.__call__, tensor.backward, adam.step = (self._timed(f) for f in saved)  # type: ignore[method-assign]
        try:
            yield
        finally:
            module.__call__, tensor.backward, adam.step = saved  # type: ignore[method-assign]

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
    with compute.watched(network):
        began = time.perf_counter()
        for record in simulate(
            prepared.server,
            prepared.clients,
            prepared.trainer,
            start(prepared.server, prepared.seed_adapter),
            rounds=rounds,
        ):
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
    sets = [*QUICK, "run.rounds=1", "train.steps=2", f"clients.ranks={ranks}", "clients.alpha=100"]
    prepared = prepare(load_config(DEMO, sets))
    for _ in simulate(
        prepared.server, prepared.clients, prepared.trainer, start(prepared.server, prepared.seed_adapter), rounds=1
    ):
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def worker_rounds(clients: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of rounds of the demo's model, `clients` clients of four steps each; without the first of each."""
    sets = [*QUICK, "train.steps=4", f"clients.ranks={[(2, 4, 8)[k % 3] for k in range(clients)]}"]
    sets += ["clients.alpha=100", f"run.rounds={repeats + 1}"]
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


def flower_rounds(clients: int, repeats: int) -> list[float]:
    """The same rounds in Flower's simulation, two of its processes at work; without the first."""
    from fedlora.flower.setup.init_steps import trial as write_trial
    from fedlora.flower.site.node_process import free_port
    from flower_simulation import simulate_federation

    sets = [*QUICK, "train.steps=4", f"clients.ranks={[(2, 4, 8)[k % 3] for k in range(clients)]}"]
    sets += ["clients.alpha=100", f"run.rounds={repeats + 1}", "run.threads=1", "data.validation=0.01"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "f"
        write_trial(folder, load_config(DEMO, sets), free_port())
        with contextlib.redirect_stdout(io.StringIO()):
            simulate_federation(folder)
        lines = (folder / "server" / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines][1:]


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

    sets = [*QUICK, "run.rounds=1", "train.steps=4", "clients.ranks=[8,8,8,8]", "clients.alpha=100"]
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
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--clients", default="3,12")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--flower", action="store_true", help="needs Ray: pip install 'flwr[simulation]'")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        _memory(args.memory)
        return
    if args.peak:
        _one_round_and_peak(args.peak)
        return
    shares = overhead(args.rounds)
    few, many = peak_memory(3), peak_memory(50)
    print("| | measured | goal |\n|---|---:|---|")
    outside = shares["outside forward, backward, optimiser"]
    print(f"| a demo round outside forward, backward and optimiser | {outside:.1%} | <= 10 % |")
    for name, share in shares.items():
        if name.startswith("share"):
            print(f"| {name} | {share:.2%} | |")
    print(f"| peak memory, 50 clients / 3 clients | {many / few:.3f} ({many:.0f} / {few:.0f} MB) | <= 1.1 |")
    rounds: dict[int, dict[str, list[float]]] = {}
    print("\n| clients | worker | a round, s (median) | against 1 worker, 1 thread | goal |\n|---:|---|---:|---:|---|")
    for clients in map(int, args.clients.split(",")):
        rounds[clients] = worker_rounds(clients, args.repeats)
        if args.flower:
            rounds[clients]["Flower's simulation"] = flower_rounds(clients, args.repeats)
        base = median(rounds[clients]["1 worker, 1 thread"])
        for name, times in rounds[clients].items():
            goal = {"2 workers": ">= 1.7, and ahead of Flower"}.get(name, "")
            print(f"| {clients} | {name} | {median(times):.2f} | {base / median(times):.2f} | {goal} |", flush=True)
    memory = {workers: worker_memory(workers) for workers in (1, 2)}
    before, peak = memory[1]
    print("\n| | MB | of one worker | goal |\n|---|---:|---:|---|")
    allowed = 1.3 + (peak - before) / peak
    print(f"| 1 worker, at most | {peak:.0f}, of which activations and the like {peak - before:.0f} | 1 | |")
    print(f"| 2 workers, at most | {memory[2][1]:.0f} | {memory[2][1] / peak:.2f} | <= {allowed:.2f} |")
    if args.json:
        found = {"machine": machine(), "shares": shares, "memory": {"3": few, "50": many}}
        args.json.write_text(as_json({**found, "rounds": rounds, "workers' memory": memory}))


if __name__ == "__main__":
    main()
