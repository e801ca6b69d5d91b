"""A canary audit: what somebody who sees releases can tell about one client, beside what the ledger says.

Kind of evidence: statistical. The attacker knows everything but whether one client, whose whole vector lies along one
direction, took part; it thresholds the release along that direction. From its counts follows a lower bound of epsilon
with confidence 99.99 % (Clopper and Pearson, each rate 99.995 %): log((true positives - delta) / false positives). A
correct mechanism fails one of the three tests once in 3,000 runs at most (in truth far more rarely: the bound is not
tight). With the noise off the same audit must find far more than the ledger says, or it could see nothing at all.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import beta

from fedlora.privacy import Mechanism, epsilon

LIBRARIES = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("opendp", "dp_accounting")), reason="fedlora[privacy]"
)
DELTA, SIZE, OTHERS, TRIALS = 1e-3, 4, 3, 2000


def at_least(successes: int, trials: int, error: float) -> float:
    """Clopper and Pearson: the smallest rate at which so many successes or more have probability `error`."""
    return float(beta.ppf(error, successes, trials - successes + 1)) if successes else 0.0


def audited(release: Callable[[torch.Tensor], torch.Tensor], with_it: torch.Tensor, without: torch.Tensor) -> float:
    """The lower bound of epsilon. The threshold is chosen on one half of the trials, and judged on the other."""
    direction = (with_it - without).double()
    direction /= direction.norm()
    scores = {}
    for name, total in (("in", with_it), ("out", without)):
        releases = torch.stack([release(total) for _ in range(TRIALS)]).double()
        scores[name] = releases @ direction
    half, best = TRIALS // 2, 0.0
    candidates = torch.quantile(
        torch.cat([scores["in"][:half], scores["out"][:half]]), torch.linspace(0.01, 0.99, 99).double()
    )

    def bound(threshold: float, part: slice) -> float:
        hits, false = (int((scores[name][part] > threshold).sum()) for name in ("in", "out"))
        lower, upper = at_least(hits, half, 5e-5) - DELTA, 1 - at_least(half - false, half, 5e-5)
        return math.log(lower / upper) if lower > 0 else 0.0

    middle = float((scores["in"][:half].mean() + scores["out"][:half].mean()) / 2)
    chosen = max([*map(float, candidates[::7]), middle], key=lambda t: bound(t, slice(0, half)))
    return max(best, bound(chosen, slice(half, None)))


def neighbours(mechanism: Mechanism) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum with the canary and with zero in its place; the canary sends far more than the clip."""
    generator = torch.Generator().manual_seed(0)
    others = [mechanism.contribution(torch.randn(SIZE, generator=generator) * 10) for _ in range(OTHERS)]
    without = torch.stack(others).sum(dim=0)
    return without + mechanism.contribution(torch.tensor([1e6, 0.0, 0.0, 0.0])), without


@LIBRARIES
@pytest.mark.quick(1)
@pytest.mark.parametrize("z", [0.6, 1.0, 3.0])
def test_an_attacker_finds_less_than_the_ledger_says(z: float) -> None:
    """And not nothing: at z = 0.6 and 1 the audit finds a part of epsilon (a quarter, mostly)."""
    mechanism = Mechanism.of(1.0, z, SIZE)
    found, told = audited(mechanism.noised, *neighbours(mechanism)), epsilon(z, 1, DELTA)
    assert found <= told
    assert z > 1 or found > 0.15 * told


@LIBRARIES
def test_with_the_noise_off_it_finds_more() -> None:
    """Every trial is a hit: log(0.98 / 0.0099) is 4.6, above the ledger's 3.1 of z = 1 and 1.0 of z = 3."""
    mechanism = Mechanism.of(1.0, 1.0, SIZE)
    silent = Mechanism(mechanism.clip, 0.0, mechanism.grid)
    found = audited(silent.noised, *neighbours(mechanism))
    assert found > 1.3 * epsilon(1.0, 1, DELTA) > epsilon(3.0, 1, DELTA)
