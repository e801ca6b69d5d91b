"""Draws who takes part in a private round: each client by its own secret coin.

Amplification by sampling protects against those who cannot see who was drawn. So the coins come from the system
(`secrets`), not from a seed: a seed is in the configuration, and torch's CPU generator keeps only 32 bits of it. The
draw is secret: no file that leaves the server has it, and an empty draw is released as pure noise.

A private round draws its own clients and accepts uploads only from them (`server.private`). A round that is killed
before its sum is stored draws anew. On a network, traffic reveals who takes part: there all clients do, and the ledger
uses q = 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from fractions import Fraction


def poisson_sample(clients: Sequence[str], probability: float) -> list[str]:
    """Each client with that probability, independently; sorted, and often empty. A secret.

    The coin is exact: a secret integer below the denominator of the float `probability`.

    Example:
        >>> poisson_sample(["b", "a"], 1.0)
        ['a', 'b']
    """
    exact = Fraction(probability)
    return [client for client in sorted(clients) if secrets.randbelow(exact.denominator) < exact.numerator]
