"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from collections.abc import Sequence


def poisson_sample(clients: Sequence[str], probability: float) -> list[str]:
    """Each client with that probability, independently, by the system's secret generator; sorted. May be empty. A
    secret: who was drawn must not be written anywhere that leaves the server."""
    raise NotImplementedError
