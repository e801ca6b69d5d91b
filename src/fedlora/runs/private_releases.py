"""What a private run keeps and what it shows: its noised sums on disk, written and charged before anything leaves and
read again after a kill; and of its other files the parts that `fedlora.privacy.releases` allows.

RUN/private/    for the server only (mode 700): none of it may be handed out
    run.json        the run's id in the ledger, and a secret for its files' identity
    journal/        the noised sums

Held-out examples are public in a private run: `checks` refuses others.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlora.core import files
from fedlora.errors import CheckpointError, HyperparameterError
from fedlora.privacy.events import Budget, Event
from fedlora.privacy.journal import Journal
from fedlora.privacy.ledger import Ledger
from fedlora.privacy.mechanism import Mechanism
from fedlora.privacy.releases import filtered
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.server.private import Releases

WITHHELD = "withheld"


class Planned(Releases):
    """For a server that is only planned or checked: nothing was released, and nothing can be."""

    def stored(self, round: int, context: str) -> Tensor | None:
        return None

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism, sampling: float) -> Tensor:
        raise HyperparameterError("this server is only a plan: it cannot keep or charge releases.")


@dataclass(frozen=True)
class OnDisk(Releases):
    """For a run in its folder. rounds, delta: its plan's. budget: the population's."""

    folder: Path
    run: str
    ledger: Ledger
    budget: Budget | None
    rounds: int
    delta: float

    @property
    def journal(self) -> Journal:
        return Journal(self.folder / "journal", self.ledger, self.budget)

    def stored(self, round: int, context: str) -> Tensor | None:
        return self.journal.stored(round, context)

    def settle(self, round: int, context: str, noised: Tensor, mechanism: Mechanism, sampling: float) -> Tensor:
        _secret(self.folder)
        return self.journal.store(noised, self.event(round, mechanism, len(noised), sampling), context)

    def event(self, round: int, mechanism: Mechanism, size: int, sampling: float) -> Event:
        """The ledger's charge for one round."""
        return Event.of(
            mechanism, size, run=self.run, round=round, sampling=sampling, rounds=self.rounds, delta=self.delta
        )

    def check_budget(self, mechanism: Mechanism, size: int, sampling: float) -> None:
        """Raise `BudgetSpent` if all rounds of a fresh run would exceed the budget."""
        self.ledger.check(self.event(1, mechanism, size, sampling), self.budget, self.rounds)

    def why_spent(self, done: int) -> str:
        """Why the budget cannot pay another round after `done` of this run: from the ledger alone, which is public."""
        more = sum(event.run == self.run for event in self.ledger.read().events) - done
        mine = f"the ledger has {more} more charges of this run than this folder has rounds: it is a copy or old backup"
        why = mine if more > 0 else "others have charged its ledger meanwhile"
        return f"the budget of privacy.population cannot pay another round: {why}"

    def check_charged(self, done: int) -> None:
        """Raise `CheckpointError` unless the ledger holds every finished round."""
        charged = {event.round for event in self.ledger.read().events if event.run == self.run}
        if lacks := sorted(set(range(1, done + 1)) - charged):
            raise CheckpointError(
                f"{len(lacks)} released rounds of this run (such as round {lacks[0]}) are missing from the ledger "
                f"that privacy.ledger names. Name the one that they were charged to."
            )


def private_folder(folder: RunFolder) -> Path:
    """RUN/private, which like RUN/checkpoints is readable by this user only."""
    path = folder.path / "private"
    for secret in (path, folder.checkpoints):  # both reveal who took part
        _secret(secret)
    return path


def _secret(folder: Path) -> None:
    """Create the folder, for this user only."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def begin(folder: RunFolder) -> None:
    """Store a new private run's id, before the folder has a manifest."""
    home = private_folder(folder)
    if not (home / "run.json").is_file():  # exists after a kill, or if somebody removed the manifest
        files.write(home / "run.json", json.dumps({"run": secrets.token_hex(8), "secret": secrets.token_hex(16)}))


def read_private(folder: RunFolder) -> tuple[str, str]:
    """The run's id, and its secret. Raises `CheckpointError`."""
    path = folder.path / "private" / "run.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return str(found["run"]), str(found["secret"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), and a private run cannot continue without it. Choose another --out: the "
            f"ledger keeps what this one has spent."
        ) from error


# ---- what others get -------------------------------------------------------------------------------------------------


def shown_config(config: RunConfig) -> RunConfig:
    """The public part of a configuration: all of it; for a private run, without the names of clients' files, which may
    identify people or reveal content. The run's folder, card and trackers get this version, and its digest."""
    if config.privacy is None:
        return config
    data = config.data
    train = data.train if data.train in (None, "demo") else WITHHELD
    withheld = {"train": train, "clients": dict.fromkeys(data.clients, WITHHELD)}
    return config.model_copy(update={"data": data.model_copy(update=withheld)})


def public_manifest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without facts about clients' data: counts, classes, digests, how much was cut or copied."""
    public = filtered("manifest.json", facts)
    nothing: dict[str, Any] = {"train": {}, "own_test": {}, "categories": {}, "label_counts": None}
    return {**public, "data": {**nothing, **public["data"]}}
