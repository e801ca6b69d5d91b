"""What a federation's server needs: peak memory of its ServerApp and of its SuperLink, and how its files grow.

    python benchmarks/flower_memory.py [--rank 256] [--rounds 3] [--json FILE]

Three sites over TLS on this machine, processes as they are deployed; each site measures after each round. The demo's
model with adapters on all its linear layers: rank 256 makes 43 MB of it. Baseline: the same federation with rank 1,
which is what Python, torch and Flower take. Peak: VmHWM of the process, which its kernel counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from fedlora.adapters.io import read_adapter
from fedlora.flower.places import FederationFolder
from fedlora.flower.serving import database
from fedlora.flower.serving.trial import Trial
from fedlora.flower.setup.init_steps import trial as write_trial
from fedlora.flower.site.node_process import free_port
from fedlora.runs.config import load_config
from measure import as_json, machine

DEMO = Path(__file__).parent.parent / "src" / "fedlora" / "demo.toml"
KINDS = {"ServerApp": "serverapp", "SuperLink": "superlink"}


def config_of(rank: int, rounds: int) -> Any:
    sets = ["clients.count=3", f"clients.ranks={rank}", "train.steps=1", "run.threads=1", "server.quorum=2"]
    sets += ["lora.targets=all-linear", "evaluate.every=1", "evaluate.clients_at_end=false"]
    sets += [f"run.rounds={rounds}", "data.validation=0.01", "data.test=0.01"]
    return load_config(DEMO, sets)


def own_processes() -> dict[int, str]:
    """Process -> its command line, of all that this one started, and they."""
    parents, lines = {}, {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parents[int(place.name)] = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
                lines[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError):
                continue
    mine, found = {os.getpid()}, dict[int, str]()
    while more := {process for process, parent in parents.items() if parent in mine} - mine:
        mine |= more
    for process in mine - {os.getpid()}:
        found[process] = lines[process]
    return found


def peaks(over: threading.Event, every: float = 0.1) -> dict[str, int]:
    """Kind of process -> the largest VmHWM seen, in bytes, until `over` is set."""
    found = dict.fromkeys(KINDS, 0)
    while not over.wait(every):
        for process, line in own_processes().items():
            for kind, word in KINDS.items():
                if word not in line.split(" --", 1)[0]:
                    continue
                try:
                    status = Path(f"/proc/{process}/status").read_text()
                except OSError:
                    continue
                high = next((row for row in status.splitlines() if row.startswith("VmHWM")), None)
                if high is not None:
                    found[kind] = max(found[kind], int(high.split()[1]) * 1024)
    return found


def played(folder: Path, rank: int, rounds: int) -> dict[str, Any]:
    write_trial(folder, config_of(rank, rounds), free_port())
    home, over, found = FederationFolder(folder), threading.Event(), dict[str, Any]()
    watching = threading.Thread(target=lambda: found.update(peaks(over)))
    watching.start()
    sizes, done = list[dict[str, int]](), threading.Event()

    def grow() -> None:
        while not done.wait(0.2):
            rows = home.rounds.read_text().count("\n") if home.rounds.is_file() else 0
            files = sum(path.stat().st_size for path in home.checkpoints.glob("*") if path.is_file())
            now = {"round": rows, "database": database.size(home.database), "checkpoints": files}
            if not sizes or sizes[-1] != now:
                sizes.append(now)

    growing = threading.Thread(target=grow)
    growing.start()
    began = time.perf_counter()
    try:
        Trial(folder).play()
    finally:
        done.set()
        over.set()
        growing.join()
        watching.join()
    adapter, _ = read_adapter(home.path / "server" / "adapter")
    size = sum(t.numel() * t.element_size() for lora in adapter.modules.values() for t in lora.tensors().values())
    largest = {key: max(one[key] for one in sizes) for key in ("database", "checkpoints")}
    return {"rank": rank, "adapter": size, "seconds": time.perf_counter() - began, "peak": found, "largest": largest,
            "growth": sizes}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [played(Path(scratch) / str(rank), rank, options.rounds) for rank in (1, options.rank)]
    base, full = rows
    print(f"adapter: {full['adapter'] / 1e6:.1f} MB; three sites, {options.rounds} rounds, {full['seconds']:.0f} s")
    for kind in KINDS:
        small, large = base["peak"][kind], full["peak"][kind]
        times = (large - small) / full["adapter"]
        print(f"{kind:12} {large / 1e6:8.0f} MB, {small / 1e6:.0f} MB of it with rank 1: + {times:.1f} x the adapter")
    for key, value in full["largest"].items():
        print(f"{key:12} {value / 1e6:8.0f} MB at most, {value / full['adapter']:.1f} x the adapter")
    if options.json:
        options.json.write_text(as_json({"machine": machine(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
