"""A federation's folder without a model, and a SuperLink that does what a test says: for the supervisor's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from fedlora.flower.places import FederationFolder
from fedlora.flower.server.journal import Journal
from fedlora.flower.server.superlink import NodeFacts, RunFacts
from fedlora.flower.terms.settings import FederationSettings

CLIENTS = {"acme": 8, "berlin": 4, "cork": 2}
Turn = Callable[["FakeLink"], RunFacts | None]  # one look at the run; None: it goes on as it is


def federation_folder(home: Path, rounds: int = 3, quorum: int = 2) -> Path:
    """federation.toml, policy.toml and a key file for each client."""
    (home / "keys").mkdir(parents=True)
    (home / "federation.toml").write_text(
        'id = "fed-1"\n[data]\nlabel_names = ["no", "yes"]\n[lora]\ntarget_modules = ["query"]\n'
        f"[run]\nrounds = {rounds}\n[server]\nquorum = {quorum}\n"
    )
    (home / "policy.toml").write_text("[clients]\n" + "".join(f"{n} = {r}\n" for n, r in CLIENTS.items()))
    for name in CLIENTS:
        (home / "keys" / f"{name}.pub").write_text(f"key of {name}")
    return home


def play_round(home: Path, number: int, fates: Mapping[str, str] | None = None) -> None:
    """What a ServerApp writes of a round."""
    fates = {**dict.fromkeys(CLIENTS, "trained"), **(fates or {})}
    losses = {name: 1 / number + k / 10 for k, name in enumerate(fates) if fates[name] == "trained"}
    line = {
        "round": number, "seconds": 2.5, "loss": sum(losses.values()) / len(losses) if losses else None,
        "losses": losses, "weights": dict.fromkeys(losses, 1 / max(len(losses), 1)),
        "fates": {name: {"fate": fate, "why": "" if fate == "trained" else "so"} for name, fate in fates.items()},
    }  # fmt: skip
    scores = {name: {"accuracy": 0.75, "examples": 8} for name in losses}
    told = Journal(home / "server")
    told.asked(number, "train", list(fates))
    told.played(json.dumps(line))
    told.scored(number, {"site_metrics": scores, "site_mean": {"accuracy": 0.75, "examples": 24}})
    (home / "state" / "logs").mkdir(parents=True, exist_ok=True)
    with (home / "state" / "logs" / "serverapp.log").open("a") as file:
        file.write(f"2026-01-31 12:00:00,000 round {number} is played\n")


def end_rounds(home: Path, number: int) -> None:
    """What a ServerApp writes when it ends well."""
    Journal(home / "server").ended("complete", "")
    settings = FederationSettings.load(home / "federation.toml").agreed()
    summary = {"rounds": number, "stopped_early": None, "settings": settings}
    (home / "server" / "summary.json").write_text(json.dumps(summary))


class FakeLink:
    """A SuperLink whose runs are a script: runs -> the turns of each, one for a look.

    done: what was asked of it, in order. online: who is there; `comes` is called at each look at the nodes.
    """

    address = "127.0.0.1:1"

    def __init__(self, home: Path, *scripts: list[Turn]) -> None:
        self.folder, self.log, self.scripts = FederationFolder(home), home / "superlink.log", list(scripts)
        self.done: list[str] = []
        self.keys = set[str]()
        self.online = list(CLIENTS)
        self.comes: Callable[[], None] = lambda: None
        self.code: int | None = None
        self.listed = list[RunFacts]()
        self._turns: list[Turn] = []

    def start(self) -> None:
        self.done.append("start")
        self.code = None

    def stop(self) -> None:
        self.done.append("stop")
        self.code = None

    def ended(self) -> int | None:
        return self.code

    def nodes(self) -> list[NodeFacts]:
        self.comes()
        return [NodeFacts(n, k, "online" if n in self.online else "offline", b"") for k, n in enumerate(CLIENTS)]

    def runs(self) -> list[RunFacts]:
        return self.listed

    def look(self, run: int) -> RunFacts:
        found = self._turns.pop(0)(self) if self._turns else None
        return found or RunFacts(run, "running")

    def keep_keys(self, keys: Mapping[str, Path]) -> list[str]:
        new = sorted(keys.keys() - self.keys)
        if new or keys.keys() != self.keys:
            self.done.append("keys " + ",".join(keys))
        self.keys = set(keys)
        return [f"{name}: its key is admitted" for name in new if len(self.done) > 2]

    def run(self) -> int:
        assert self.scripts, "no more runs were expected"
        self.done.append("run")
        self._turns = self.scripts.pop(0)
        return 7

    def stop_run(self, run: int) -> None:
        self.done.append(f"stop run {run}")


def rounds(*numbers: int, **fates: str) -> Turn:
    """A turn in which these rounds are played."""

    def turn(link: FakeLink) -> RunFacts | None:
        for number in numbers:
            play_round(link.folder.path, number, fates)
        return None

    return turn


def completes(number: int) -> Turn:
    def turn(link: FakeLink) -> RunFacts:
        end_rounds(link.folder.path, number)
        return RunFacts(7, "finished:completed")

    return turn


def fails(details: str, *, ended: str = "") -> Turn:
    """The run fails. ended: why, in now.json."""

    def turn(link: FakeLink) -> RunFacts:
        if ended:
            Journal(link.folder.path / "server").ended(ended, details)
        return RunFacts(7, "finished:failed", details)

    return turn


def dies(code: int = -9) -> Turn:
    """The SuperLink ends."""

    def turn(link: FakeLink) -> RunFacts | None:
        link.code = code
        return None

    return turn
