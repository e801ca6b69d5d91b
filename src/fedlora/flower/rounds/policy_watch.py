"""policy.toml read anew at each round's begin: who is added, removed or of another rank takes effect there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import FedLoRAError
from fedlora.flower.rounds.events import PolicyChanged
from fedlora.flower.terms.policy import Policy


@dataclass(frozen=True)
class PolicyWatch:
    """A policy's file. check: raises `FedLoRAError` for a policy that this federation cannot play."""

    path: Path
    check: Callable[[Policy], None]

    def read(self, now: Policy, round: int) -> tuple[Policy, PolicyChanged | None]:
        """(the policy from now on, what changed about its clients). A file that cannot be used changes nothing, and
        `why` says what is wrong with it."""
        try:
            found = Policy.read(self.path)
            self.check(found)
        except FedLoRAError as error:
            return now, PolicyChanged(round, why=f"{error} The policy before it stays.")
        if found == now:
            return now, None
        old, new = dict(now.clients), dict(found.clients)
        return found, PolicyChanged(
            round,
            {name: rank for name, rank in new.items() if name not in old},
            tuple(name for name in old if name not in new),
            {name: (old[name], rank) for name, rank in new.items() if name in old and old[name] != rank},
        )


__all__ = ["PolicyWatch"]
