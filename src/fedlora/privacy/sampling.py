"""Who takes part in a private round: each client by a secret coin of its own.

Amplification by sampling holds against those who cannot see who was drawn. So the coins are the system's (`secrets`),
not a seed's: a seed is in the configuration, and torch's CPU generator keeps 32 bits of one. Who was drawn is a secret:
it is in no file that leaves the server, and an empty draw is released as pure noise.

A private round draws for itself and takes nobody's upload but theirs (`server.private_round`). The draw is kept in a
secret folder until the round is over (`runs.private_releases`): a round that was killed is played with the same
clients. On a network who takes part is seen by its traffic: there all take part, and the ledger uses q = 1.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from fractions import Fraction

from fedlora.errors import HyperparameterError


def poisson_sample(clients: Sequence[str], probability: float) -> list[str]:
    """Each client with that probability, independently; sorted, and often empty. A secret.

    The coin is exact: a secret integer below the denominator of the float that `probability` is.

    Raises:
        HyperparameterError: a probability outside (0, 1], or a client twice.

    Example:
        >>> poisson_sample(["b", "a"], 1.0)
        ['a', 'b']
    """
    if not (isinstance(probability, int | float) and math.isfinite(probability) and 0 < probability <= 1):
        raise HyperparameterError(f"privacy: a sampling probability is in (0, 1]; got {probability!r}.")
    if len(set(clients)) < len(clients):
        raise HyperparameterError(f"privacy: {len(clients) - len(set(clients))} clients are named twice.")
    exact = Fraction(probability)
    return [client for client in sorted(clients) if secrets.randbelow(exact.denominator) < exact.numerator]
