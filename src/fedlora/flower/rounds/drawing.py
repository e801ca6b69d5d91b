"""Who is asked in a round, and what becomes of everyone else in the policy. A pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedlora.flower.rounds.events import Fate
from fedlora.flower.terms.policy import Policy
from fedlora.server.sampling import sample_clients


@dataclass(frozen=True)
class Drawn:
    """asked: in the policy's order. not_asked: everyone else of the policy -> (fate, why)."""

    asked: tuple[str, ...]
    not_asked: Mapping[str, tuple[Fate, str]]


def draw(
    policy: Policy,
    refusals: Mapping[str, int],
    online: Collection[str],
    *,
    participation: float,
    seed: int,
    round: int,
) -> Drawn:
    """The clients of a round: a share of those who are not in quarantine, of which those that are online are asked.

    Where some are in quarantine as many are drawn as before, of those that are left.
    """
    free = [name for name in policy.clients if not is_quarantined(policy, refusals, name)]
    share = participation
    if 0 < len(free) < len(policy.clients):
        share = min(1.0, share * len(policy.clients) / len(free))
    chosen = sample_clients(free, share, seed=seed, round=round) if free else []
    fates: dict[str, tuple[Fate, str]] = {}
    for name in policy.clients:
        if name not in free:
            fates[name] = ("quarantined", f"it is in quarantine after {refusals[name]} refused uploads")
        elif name not in chosen:
            fates[name] = ("not drawn", "")
        elif name not in online:
            fates[name] = ("offline", "it is not online")
    return Drawn(tuple(name for name in policy.clients if name not in fates), fates)


def is_quarantined(policy: Policy, refusals: Mapping[str, int], name: str) -> bool:
    """Whether a client had so many uploads refused that it is not asked any more."""
    return bool(policy.quarantine) and refusals.get(name, 0) >= policy.quarantine


__all__ = ["Drawn", "draw", "is_quarantined"]
