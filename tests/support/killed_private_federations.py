"""A private federation on Flower of two rounds, killed in each stage of the second, and gone on with:

    python killed_private_federations.py FOLDER STAGE ...

prints a JSON table with one entry for each of these stages. A kill is `os._exit`: nothing of Python's own end runs. The
sites are toys; journal, ledger, checkpoints and lines are the real ones. What was spent is not computed, so it
is fast.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opendp.prelude  # noqa: F401  before the forks
import torch

from fedlora.core.trainer import Trained
from fedlora.flower.server.journal import Journal as Told
from fedlora.flower.strategy import FedLoRA
from fedlora.privacy import Journal, Ledger
from fedlora.runs.private_run import PrivateRun
from fedlora.server.state import RunState
from support.flower_grid import Toy, play
from support.killed_private_runs import digest, forked, sums
from support.private_flower import private_federation

ROUNDS = 2


class Logging(Toy):
    """Writes down whom it trained."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def train(self, download: Any, adapter: Any, position: int) -> Trained:
        with self._log.open("a") as file:
            file.write(json.dumps([download.round + 1, download.client.id]) + "\n")
        return super().train(download, adapter, position)


def played(home: Path, log: Path) -> RunState:
    """The federation, from wherever it is."""
    strategy, grid = private_federation(home, trainer=Logging(log))
    play(strategy, grid, ROUNDS)
    return strategy.state


def trained(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


STAGES: dict[str, tuple[Any, str, Callable[..., int]]] = {
    "before the sum is written": (Journal, "store", lambda self, released, event, *_: event.round),
    "before the charge": (Ledger, "charge", lambda self, event, *_: event.round),
    "before its checkpoint": (FedLoRA, "_store", lambda self, after: after.state.round),
    "before its line": (Told, "played", lambda self, line: json.loads(line)["round"]),
    "after its line": (FedLoRA, "_measure", lambda self, *_: self.round),
}


def die_at(owner: Any, name: str, round_of: Callable[..., int]) -> None:
    """From now on the process dies where that is called for the last round."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if round_of(*args) == ROUNDS:
            os._exit(9)
        return real(*args, **kwargs)

    setattr(owner, name, call)


def main(folder: Path, stages: list[str]) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None
    spent = {"epsilon": 1.0, "epsilon_planned": 2.0, "delta": 1e-3}
    PrivateRun.spent = lambda self, round: spent  # type: ignore[method-assign]
    found = {}
    for stage in stages:
        where = STAGES[stage]
        home, log = folder / stage.replace(" ", "-"), folder / "log"
        home.mkdir()
        log.unlink(missing_ok=True)

        def once(where: Any = where, home: Path = home, log: Path = log) -> int:
            die_at(*where)
            played(home, log)
            return 0

        if forked(once) != 9:
            raise RuntimeError(f"{stage}: it was not killed")
        entry: dict[str, Any] = {"journal": sums(home / "private"), "charged before": len(charged(home))}
        log.unlink(missing_ok=True)

        def again(home: Path = home, log: Path = log) -> None:
            (home / "digest").write_text(digest(played(home, log)))

        if forked(again):
            raise RuntimeError(f"{stage}: it could not go on")
        lines = (home / "server" / "rounds.jsonl").read_text().splitlines()
        entry |= {
            "trained": trained(log),
            "after": sums(home / "private"),
            "lines": [json.loads(x)["round"] for x in lines],
        }
        entry |= {"charged": charged(home), "digest": (home / "digest").read_text()}
        if stage == "before its line":
            shutil.rmtree(home / "server")  # from the journal alone, with nobody trained
            log.unlink(missing_ok=True)
            if forked(again) or trained(log):
                raise RuntimeError(f"{stage}: the journal alone does not give the rounds again")
            entry["from the journal"] = (home / "digest").read_text()
        found[stage] = entry
    print(json.dumps(found))


def charged(home: Path) -> list[list[Any]]:
    return [[c.round, c.released] for c in Ledger(home / "ledger.jsonl", "toys").read().events]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that were forked from need not end
