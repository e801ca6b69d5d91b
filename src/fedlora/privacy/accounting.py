"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spending:
    """`rounds` releases of one kind: noise multiplier z and sampling probability q."""

    noise_multiplier: float
    rounds: int
    sampling: float = 1.0


def epsilon_of(spendings: Sequence[Spending], delta: float) -> float:
    """Of all of them together, one after the other on the same clients."""
    raise NotImplementedError


def epsilon(noise_multiplier: float, rounds: int, delta: float, sampling: float = 1.0) -> float:
    """Of `rounds` releases. Needs the extra `privacy`."""
    raise NotImplementedError


def noise_multiplier_for(epsilon: float, rounds: int, delta: float, sampling: float = 1.0) -> float:
    """The smallest z (to 1e-4 of itself, from above) whose `epsilon` is at most the given one."""
    raise NotImplementedError
