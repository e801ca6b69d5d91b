"""Draws who takes part in a private round: each client by its own secret coin.

Amplification by sampling protects against those who cannot see who was drawn. So the coins come from the system
(`secrets`), not from a seed: a seed is in the configuration, and torch's CPU generator keeps only 32 bits of it. The
draw is secret: no file that leaves the server has it, and an empty draw is released as pure noise.

A private round draws its own clients and accepts uploads only from them (`server.private`). The draw is kept in a
secret folder until the round is over (`runs.private_releases`), so that a killed round is played again with the same
clients. On a network, traffic reveals who takes part: there all clients do, and the ledger uses q = 1.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from fractions import Fraction

from fedlora.errors import HyperparameterError


def poisson_sample(clients: Sequence[str], probability: float) -> list[str]:
    """Each client with that probability, independently; sorted, and often empty. A secret.

    The coin is exact: a secret integer below the denominator of the float `probability`.

    Raises:
        HyperparameterError: a probability outside (0, 1], or a repeated client.

    Example:
        >>> poisson_sample(["b", "a"], 1.0)
        ['a', 'b']
    """
    if not (isinstance(probability, int | float) and math.isfinite(probability) and 0 < probability <= 1):
        raise HyperparameterError(f"privacy: a sampling probability must be in (0, 1]; got {probability!r}.")
    if len(set(clients)) < len(clients):
        raise HyperparameterError(f"privacy: {len(clients) - len(set(clients))} clients are named twice.")
    exact = Fraction(probability)
    return [client for client in sorted(clients) if secrets.randbelow(exact.denominator) < exact.numerator]
