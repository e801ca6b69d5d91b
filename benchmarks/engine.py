"""The engine: what share of a round is not training, and does memory grow with the number of clients?

    python benchmarks/engine.py [--rounds 2] [--json FILE]

(a) A demo round's seconds outside forward, backward and optimiser: download, upload, aggregation, diagnostics, and in
local training the swap of adapters, batching and bookkeeping; no evaluation. (b) Peak memory of a process with 50
clients against one with 3, of the same model and data.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch
from transformers.utils import logging

from fedlora.runs.config import load_config
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from measure import as_json, machine

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
    sets = [*QUICK, "run.rounds=1", "train.steps=2", f"clients.ranks={ranks}", "clients.partition=iid"]
    prepared = prepare(load_config(DEMO, sets))
    for _ in simulate(
        prepared.server, prepared.clients, prepared.trainer, start(prepared.server, prepared.seed_adapter), rounds=1
    ):
        pass
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
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
    if args.json:
        args.json.write_text(as_json({"machine": machine(), "shares": shares, "memory": {"3": few, "50": many}}))


if __name__ == "__main__":
    main()
