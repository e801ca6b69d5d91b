"""A private run of two rounds that is killed before each of its steps on the disk, and resumed. A program of its own:

    python killed_private_runs.py FOLDER STRIDE

prints a JSON list with one entry for each kill: before every STRIDE-th of some hundred steps. A kill is `os._exit`, as
in `killed_writers`. The engine trains toys; journal, ledger and checkpoints are the real ones. No
budget: nothing is accounted, so it is fast. Steps that wait for the disk count, and do not wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import opendp.prelude  # noqa: F401  before the forks
import torch

from fedlora import Adapter, Client, Server, build
from fedlora.core import checkpoint
from fedlora.core.trainer import Trained
from fedlora.privacy import Ledger
from fedlora.runs.folder import RunFolder
from fedlora.runs.private_releases import OnDisk, begin, private_folder, read_private
from fedlora.server.private import Private, Releases
from fedlora.server.state import RunState
from fedlora.simulation import simulate, start
from fedlora.testing.federations import EXAMPLES, pushed, seed_adapter
from support.federations import EQUAL
from support.killed_writers import STEPS, die_at

ROUNDS, SHARE = 2, 0.5
WRITES = (*STEPS, "pwrite", "ftruncate")


class Toy:
    """Pushes an adapter, and writes down whom it trained: past `os`'s counted steps."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        with self._log.open("a") as file:
            file.write(f"{download.round + 1} {download.client.id}\n")
        return Trained(pushed(adapter, download.client.id, download.round), EXAMPLES[download.client.id], 0.5, position)


def server(releases: Releases) -> Server:
    privacy = Private(1.0, 1.0, tuple(EQUAL), 4, releases, dims=4, sampling=SHARE)
    return Server(build("glora"), round=privacy)


def on_disk(home: Path) -> OnDisk:
    folder = RunFolder(home / "run")
    run, _ = read_private(folder)
    return OnDisk(private_folder(folder), run, Ledger(home / "ledger", "toys"), None, ROUNDS, 1e-3)


def play(home: Path, log: Path) -> RunState:
    """The run, from wherever it is."""
    folder = RunFolder(home / "run")
    if not (folder.path / "private" / "run.json").exists():
        begin(folder)
    playing = server(on_disk(home))
    loaded = checkpoint.load_newest(folder.checkpoints, RunState, playing.method.State)
    state = loaded[1] if loaded else start(playing, seed_adapter(4))
    clients = [Client(name, rank) for name, rank in EQUAL.items()]
    for record in simulate(playing, clients, Toy(log), state, rounds=ROUNDS):
        state = record.state
        checkpoint.save(folder.checkpoints, state.round, state, keep=2)
    return state


def digest(state: RunState) -> str:
    found = hashlib.sha256()
    updates = [build("glora").effective(s) for s in state.server.modules.values()]
    for tensor in [*(t for lora in updates for t in lora.tensors().values()), *state.server.heads.values()]:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def sums(private: Path) -> dict[str, str]:
    """Of the journal below: noised sum's file -> its digest."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((private / "journal").glob("*.noised"))}


def trained(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def forked(work: Any) -> int:
    """The exit code of a child that does this."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work() or 0)
        except BaseException as error:
            print(f"it failed by itself: {error!r}", file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, stride: int) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None
    found = []
    for step in range(1, 10_000, stride):
        home, log = folder / "home", folder / "log"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        log.unlink(missing_ok=True)

        def once(step: int = step, home: Path = home, log: Path = log) -> int:
            seen = die_at(step, WRITES)
            play(home, log)
            return 0 if len(seen) < step else 2

        code = forked(once)
        if code not in (0, 9):
            raise RuntimeError(f"step {step}: code {code}")
        entry: dict[str, Any] = {"step": step, "journal": sums(home / "run" / "private")}
        log.unlink(missing_ok=True)

        def again(home: Path = home, log: Path = log) -> None:
            (home / "digest").write_text(digest(play(home, log)))

        if forked(again):
            raise RuntimeError(f"step {step}: the resumed run failed")
        entry |= {"trained": trained(log), "after": sums(home / "run" / "private")}
        entry["charged"] = [[c.round, c.released] for c in Ledger(home / "ledger", "toys").read().events]
        shutil.rmtree(home / "run" / "checkpoints")  # from the journal alone, with nobody trained
        log.unlink(missing_ok=True)
        entry["digest"] = (home / "digest").read_text()
        if forked(again):
            raise RuntimeError(f"step {step}: the run from the journal alone failed")
        entry |= {"digest from the journal": (home / "digest").read_text(), "trained from the journal": trained(log)}
        entry["charged from the journal"] = len(Ledger(home / "ledger", "toys").read().events)
        found.append(entry)
        if code == 0:
            break
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
