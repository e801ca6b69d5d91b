"""Private rounds in processes that are killed. Run as a program of its own, since it forks:

    python privacy_rounds.py kills FOLDER         one round, killed before each of its steps and then resumed: JSON
    python privacy_rounds.py torn FOLDER          likewise, and the step that dies writes half of its bytes first
    python privacy_rounds.py charge FOLDER RUN N  N charges to one ledger that others charge too
    python privacy_rounds.py spend FOLDER RUN EPSILON   charges until the budget is spent: prints how many

Noise here is any secret integers: what is drawn twice differs. What leaves is written to FOLDER/left/, one file each
time that it leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedlora.errors import BudgetSpent
from fedlora.privacy import Budget, Event, Journal, Ledger, Mechanism
from fedlora.privacy.journal import _read
from support.killed_writers import killed

SIZE = 40
MECHANISM = Mechanism.of(clip=1.0, noise_multiplier=1.0, size=SIZE)
STEPS = ("mkdir", "open", "rename", "replace", "rmdir", "unlink", "fchmod", "fsync", "pwrite", "ftruncate", "write")


def event(run: str, round: int, released: str = "") -> Event:
    found = Event.of(MECHANISM, SIZE, run=run, round=round, sampling=1.0, rounds=20, delta=1e-3)
    return Event(**{**asdict(found), "released": released})


def some_digest() -> str:
    return hashlib.sha256(secrets.token_bytes(16)).hexdigest()


def noised() -> torch.Tensor:
    return torch.tensor([secrets.randbelow(2**50) - 2**49 for _ in range(SIZE)])


def digest(total: torch.Tensor) -> str:
    return hashlib.sha256(str(total.tolist()).encode()).hexdigest()[:12]


def play(home: Path, round: int = 1) -> None:
    """One round of a run, played or taken from the journal; what leaves is left behind."""
    journal = Journal(home / "journal", Ledger(home / "ledger.jsonl", "some clients"))
    total = journal.stored(round)
    if total is None:
        total = journal.store(noised(), event("one", round))
    left = home / "left"
    left.mkdir(exist_ok=True)
    (left / f"{round}-{secrets.token_hex(4)}").write_text(digest(total))


def look(home: Path) -> str:
    """What is in the journal, in the ledger, and what has left, as JSON."""
    journal = Journal(home / "journal", Ledger(home / "ledger.jsonl", "some clients"))
    held = {}
    for path in journal.folder.glob("*.noised"):
        event, _, released = _read(path, round := int(path.name.split("-")[1]))
        held[round] = [digest(released), event.released]
    charged = [[c.round, c.released] for c in journal.ledger.read().events]
    left = (
        sorted(p.name.split("-")[0] + " " + p.read_text() for p in (home / "left").glob("*")) if home.exists() else []
    )
    return json.dumps({"held": held, "charged": charged, "left": left})


def kills(home: Path, *, torn: bool) -> list[dict[str, Any]]:
    if torn:
        exit_ = os._exit
        whole = os.pwrite

        def half(descriptor: int, raw: bytes, at: int) -> int:
            """Dies in the middle of its `HALF`-th write."""
            counted.append(at)
            if len(counted) == which[0]:
                whole(descriptor, raw[: len(raw) // 2], at)
                exit_(9)
            return whole(descriptor, raw, at)

        found = []
        for number in range(1, 5):
            which, counted = [number], []
            os.pwrite = half
            found += killed(lambda: None, lambda: play(home), lambda: look(home), _whole_again(home, whole), home, ())[
                :1
            ]
            os.pwrite = whole
        return found
    return killed(lambda: None, lambda: play(home), lambda: look(home), lambda: play(home), home, STEPS)


def _whole_again(home: Path, whole: Any) -> Any:
    def after() -> None:
        os.pwrite = whole
        play(home)

    return after


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what in ("kills", "torn"):
        os.fsync = lambda descriptor: None
        print(json.dumps(kills(folder / "home", torn=what == "torn")))
    elif what == "charge":
        for number in range(1, int(sys.argv[4]) + 1):
            Ledger(folder / "ledger.jsonl", "some clients").charge(event(sys.argv[3], number, some_digest()))
    elif what == "spend":
        spent = 0
        try:
            while True:
                charge = event(sys.argv[3], spent + 1, some_digest())
                Ledger(folder / "ledger.jsonl", "some clients").charge(charge, Budget(float(sys.argv[4]), 1e-3))
                spent += 1
        except BudgetSpent as error:
            print(json.dumps({"spent": spent, "said": str(error)}))
