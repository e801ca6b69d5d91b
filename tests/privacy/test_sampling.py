"""Who takes part. Kinds of evidence: statistical (with its rate of false alarms), mutation (no seed repeats a draw)."""

from __future__ import annotations

import math
import secrets

import pytest

from fedlora.privacy.sampling import poisson_sample

MANY = [f"site-{k:05d}" for k in range(20_000)]


def test_each_client_is_drawn_with_that_probability_and_independently() -> None:
    """Six standard errors of the share, and of the share of neighbours that are both drawn: a false alarm once in 1e8
    runs. Poisson sampling, so that the number of those drawn varies."""
    q = 0.3
    drawn = set(poisson_sample(MANY, q))
    n = len(MANY)
    assert abs(len(drawn) / n - q) < 6 * math.sqrt(q * (1 - q) / n)
    both = sum(MANY[k] in drawn and MANY[k + 1] in drawn for k in range(n - 1)) / n
    assert abs(both - q * q) < 6 * math.sqrt(q * q * (1 - q * q) * 3 / n)


def test_the_coin_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """q = 0.75 is 3/4: of the four secret integers below 4 three draw the client. 0.1 is its float's own fraction."""
    asked: list[int] = []

    def below(limit: int) -> int:
        asked.append(limit)
        return len(asked) - 1

    monkeypatch.setattr(secrets, "randbelow", below)
    assert poisson_sample(["d", "c", "b", "a"], 0.75) == ["a", "b", "c"] and asked == [4, 4, 4, 4]
    asked.clear()
    poisson_sample(["a"], 0.1)
    assert asked == [(0.1).as_integer_ratio()[1]]
