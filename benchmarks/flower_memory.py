"""Bytes and memory on Flower: fedlora's strategy beside a bare Flower app that averages the same arrays, in one run.

    python benchmarks/flower_memory.py [--mb 100] [--rounds 3] [--only bare,fedlora] [--method fedit]
                                       [--quick] [--json FILE]

A SuperLink and three SuperNodes on this machine, without TLS; no model and no training, so that all of a round is what
its messages take. Each site sends back an adapter of `--mb` megabytes, float32.

bare: Flower's FedAvg on PyTorch state dicts, as in its own examples, under its own flower-superlink.
fedlora: `FedLoRA` with `--method` (fedit averages factors: the same arithmetic), `Node` at the sites, fedlora's
SuperLink, and the allocator as `serve` sets it. glibc: the same with glibc's own defaults.

Peak: VmHWM of a process, which its kernel counts; `before` is that of the imports alone. Processor seconds are of all
processes of a contestant and a round, from the first round's end on. At least 2 rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

SITES = 3
PROJECT = """[project]
name = "wire"
version = "1.0.0"
description = "benchmark"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "fedlora"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "wire.app:server_app"
clientapp = "wire.app:client_app"
"""
KINDS = {"serverapp": "ServerApp", "superlink": "SuperLink", "clientapp": "ClientApps", "supernode": "SuperNodes"}

# ---------------------------------------------------------------------------- the apps, in processes that Flower starts
server_app, client_app = ServerApp(), ClientApp()


def plan() -> dict[str, Any]:
    return dict(json.loads(os.environ["WIRE_PLAN"]))


def seed_factors() -> dict[str, torch.Tensor]:
    """The adapter of so many megabytes: rank 64 on square matrices of 1024."""
    d, r = 1024, 64
    count = max(1, round(plan()["mb"] * 1e6 / (4 * 2 * d * r)))
    made = torch.Generator().manual_seed(0)
    return {f"m{k}.{f}": torch.randn((d, r) if f == "B" else (r, d), generator=made)
            for k in range(count) for f in "BA"}  # fmt: skip


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """What training makes of it here."""
    return tensor + torch.rand(()) * 1e-3


def own_peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    import fedlora.flower.strategy  # noqa: F401 - in both, so that `before` is of the same imports

    facts: dict[str, Any] = {"before": own_peak(), "rounds": []}
    home = Path(plan()["home"])

    def note(*_: Any) -> None:  # None stops nothing
        facts["rounds"].append({"at": time.time(), "peak": own_peak(), "database": (home / "state.db").stat().st_size})
        (home / "facts.json").write_text(json.dumps(facts))

    while len(list(grid.get_node_ids())) < SITES:
        time.sleep(0.5)
    (play_bare if plan()["kind"] == "bare" else play_fedlora)(grid, note)


def play_bare(grid: Grid, note: Any) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES)
    strategy.start(
        grid, ArrayRecord(seed_factors()), num_rounds=plan()["rounds"], timeout=3600.0,
        evaluate_fn=lambda round, arrays: note() if round else None,
    )  # fmt: skip


def play_fedlora(grid: Grid, note: Any) -> None:
    from fedlora import Adapter, Kept, LoRA, Server, build
    from fedlora.flower import FedLoRA

    t, home = seed_factors(), Path(plan()["home"])
    seed = Adapter({name: LoRA(t[f"{name}.B"], t[f"{name}.A"]) for name in dict.fromkeys(n[:-2] for n in t)})
    server = Server(build(plan()["method"]), round=Kept(quorum=SITES))
    strategy = FedLoRA(server, SITES, adapter=seed, folder=home)
    del t, seed
    strategy.start(grid, num_rounds=plan()["rounds"], should_stop=note)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    if plan()["kind"] == "bare":
        arrays = ArrayRecord({k: moved(t) for k, t in message.content["arrays"].to_torch_state_dict().items()})  # type: ignore[union-attr]
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})}), reply_to=message
        )  # fmt: skip
    from fedlora.core.trainer import Trained
    from fedlora.flower.records import record_parcel
    from fedlora.flower.site.node import Node

    class Moves:
        def train(self, download: Any, adapter: Any, position: int) -> Trained:
            modules = {name: lora.map(moved) for name, lora in adapter.modules.items()}
            return Trained(replace(adapter, modules=modules), 10, 0.5, position + 1)

    name = record_parcel(message.content)[0].client.id
    return Message(Node(name, Moves(), Path(plan()["home"]) / name).work(message.content), reply_to=message)


# ---------------------------------------------------------------------------------------------- who starts and watches


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Watch(threading.Thread):
    """Every process that has this contestant's plan in its environment: its peak, and its processor seconds by time."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.mark, self.over, self.peaks = mark.encode(), threading.Event(), dict.fromkeys(KINDS.values(), 0)
        self.first: dict[str, int] = {}
        self.spent: dict[int, list[tuple[float, float]]] = {}

    def run(self) -> None:
        known: dict[int, str | None] = {}
        while not self.over.wait(0.3):
            for process in [int(place.name) for place in Path("/proc").iterdir() if place.name.isdigit()]:
                with contextlib.suppress(OSError, IndexError, ValueError):
                    if process not in known:
                        known[process] = self._kind(process)
                    if (kind := known[process]) is not None:
                        self._note(process, kind)

    def _kind(self, process: int) -> str | None:
        if self.mark not in Path(f"/proc/{process}/environ").read_bytes():
            return None
        line = Path(f"/proc/{process}/cmdline").read_bytes().decode()
        found = [name for word, name in KINDS.items() if word in line.split("--")[0].replace("-", "")]
        return found[0] if found else "others"

    def _note(self, process: int, kind: str) -> None:
        status = Path(f"/proc/{process}/status").read_text()
        if kind in self.peaks:
            high = int(status.partition("VmHWM:")[2].split()[0]) * 1024
            self.peaks[kind] = max(self.peaks[kind], high)
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.spent.setdefault(process, []).append((time.time(), ticks))

    def seconds_since(self, begin: float) -> float:
        """Processor seconds of all these processes after `begin`."""
        total = 0.0
        for seen in self.spent.values():
            before = max((ticks for at, ticks in seen if at <= begin), default=0.0)
            total += seen[-1][1] - before
        return total


def played(home: Path, kind: str, mb: float, rounds: int, method: str) -> dict[str, Any]:
    from fedlora.flower.processes import GIVES_BACK, SUPERLINK, end_all_of, environment

    (home / "app" / "wire").mkdir(parents=True)
    (home / "flwr").mkdir()
    (home / "app" / "pyproject.toml").write_text(PROJECT)
    (home / "app" / "LICENSE").write_text("none\n")
    (home / "app" / "wire" / "__init__.py").write_text("")
    (home / "app" / "wire" / "app.py").write_text(
        "from flower_memory import client_app, server_app\n__all__ = ['client_app', 'server_app']\n"
    )  # fmt: skip
    port, here = free_port(), Path(__file__).parent
    (home / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    said = json.dumps({"home": str(home), "kind": kind, "mb": mb, "rounds": rounds, "method": method})
    env = environment(home / "flwr") | {"WIRE_PLAN": said, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{here.parent / 'src'}:{here}"
    served = env | GIVES_BACK if kind == "fedlora" else env
    own = ["flower-superlink"] if kind == "bare" else [sys.executable, "-m", SUPERLINK]
    watch, processes = Watch(said), list[subprocess.Popen[bytes]]()
    watch.start()

    def started(name: str, *command: str, env: dict[str, str] = env) -> None:
        with (home / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                              start_new_session=True))  # fmt: skip

    try:
        started("superlink", *own, "--insecure", "--host", "127.0.0.1", "--port", str(port), "--database",
                str(home / "state.db"), "--disable-runtime-dependency-installation", env=served)  # fmt: skip
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.3)
        for k in range(SITES):
            started(f"node-{k}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port",
                    str(free_port()))  # fmt: skip
        idle = 0
        started("run", "flwr", "run", str(home / "app"), "here", "--stream")
        facts: dict[str, Any] = {"rounds": []}
        while len(facts["rounds"]) < rounds:
            time.sleep(0.5)
            if not facts["rounds"] and not watch.peaks["ServerApp"]:
                idle = watch.peaks["SuperLink"]
            with contextlib.suppress(OSError, ValueError):
                facts = json.loads((home / "facts.json").read_text())
            for name, process in (("superlink", processes[0]), ("run", processes[-1])):
                if len(facts["rounds"]) < rounds and process.poll() is not None:
                    raise RuntimeError((home / f"{name}.log").read_text()[-2000:])
        times = [row["at"] for row in facts["rounds"]]
        seconds = [after - before for before, after in pairwise(times)]
        cpu = watch.seconds_since(times[0]) / max(1, rounds - 1)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            time.sleep(2)
        end_all_of(home / "flwr")
        watch.over.set()
        watch.join()
    return {
        "kind": kind, "method": method if kind != "bare" else "FedAvg", "mb": mb, "seconds": seconds, "processor": cpu,
        "before": {"ServerApp": facts["before"], "SuperLink": idle}, "peak": watch.peaks,
        "peaks": [row["peak"] for row in facts["rounds"]], "database": [row["database"] for row in facts["rounds"]],
        "checkpoints": sum(p.stat().st_size for p in home.glob("checkpoints/*") if p.is_file()),
    }  # fmt: skip


def shown(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The page's table: peaks and what is above the imports, in MB."""
    head = ["", "a round, s", "processor, s", "ServerApp, MB", "above imports", "SuperLink, MB", "above idle",
            "database, MB"]  # fmt: skip
    found = [head]
    for row in rows:
        memory = []
        for name in ("ServerApp", "SuperLink"):
            peak, before = row["peak"][name] / 1e6, row["before"][name] / 1e6
            memory += [f"{peak:.0f}", f"{(peak - before) / row['mb']:.1f} x"]
        found.append([f"{row['kind']} ({row['method']}), {SITES} x {row['mb']:g} MB", f"{median(row['seconds']):.1f}",
                      f"{row['processor']:.1f}", *memory, f"{max(row['database']) / 1e6:.0f}"])  # fmt: skip
    return found


def goals(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    from measure import Goal

    by = {row["kind"]: row for row in rows}
    if "fedlora" not in by:
        return []
    own, mb = by["fedlora"], by["fedlora"]["mb"] * 1e6
    app = (own["peak"]["ServerApp"] - 0.4e9) / mb
    link = (own["peak"]["SuperLink"] - own["before"]["SuperLink"]) / mb
    found = [Goal("Flower: ServerApp's peak less 0.4 GB, in adapters", app, "<= 6", form=".1f"),
             Goal("Flower: SuperLink's peak above an idle one, in adapters", link, "<= 4", form=".1f")]  # fmt: skip
    if "bare" in by:
        ratio = own["processor"] / by["bare"]["processor"]
        found.append(Goal("Flower: a round's processor time over a bare app", ratio, "<= 1.5"))
    return found


def main() -> None:
    from measure import report

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="bare,fedlora")
    parser.add_argument("--method", default="fedit")
    parser.add_argument("--quick", action="store_true", help="an adapter of 2 MB, 2 rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mb, rounds = (2.0, 2) if options.quick else (options.mb, options.rounds)
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    for kind in options.only.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(played(Path(scratch), kind, mb, rounds, options.method))
    report(options.json, began, tables={"apps": shown(rows)}, goals=goals(rows), figures=rows)


if __name__ == "__main__":
    main()
