"""What is spent. Kinds of evidence: reference figures (of the design, checked with dp-accounting by others), oracle
(the analytic Gaussian in closed form; discrete probabilities summed term by term), property.
"""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest

from fedlora.errors import HyperparameterError
from fedlora.privacy import Mechanism, Spending, accounting, epsilon, epsilon_of, noise_multiplier_for
from fedlora.privacy.accounting import discrete_noise
from fedlora.privacy.mechanism import COARSEST_NOISE

PLD = pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is None, reason="dp-accounting is not installed")


def upper_tail(x: float) -> float:
    return math.erfc(x / math.sqrt(2)) / 2


def gaussian_delta(epsilon: float, z: float, rounds: int) -> float:
    """delta of T Gaussian releases, exactly: one release of z / sqrt(T) (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(rounds) / z
    return upper_tail(epsilon / mu - mu / 2) - math.exp(epsilon) * upper_tail(epsilon / mu + mu / 2)


@PLD
@pytest.mark.quick(2)
@pytest.mark.usefixtures("fine_losses")
@pytest.mark.parametrize(
    ("z", "rounds", "delta", "sampling", "expected"),
    [(1.0, 50, 1e-5, 0.1, 5.148), (1.0, 50, 1e-5, 1.0, 54.4), (1.0, 20, 1e-3, 1.0, 23.06), (2.147, 20, 1e-3, 1.0, 8.0)],
)
def test_reference_figures(z: float, rounds: int, delta: float, sampling: float, expected: float) -> None:
    """To three digits, from the design notes (trust.md, section 2, item 6)."""
    found = epsilon(z, rounds, delta, sampling)
    digits = 3 - 1 - math.floor(math.log10(expected))
    assert round(found, digits) == round(expected, digits)


@PLD
def test_the_noise_for_an_epsilon() -> None:
    """epsilon 8 of 20 rounds at delta 1e-3 needs z = 2.147 (design notes); the inverse of `epsilon`, from above."""
    assert noise_multiplier_for(8.0, 20, 1e-3) == pytest.approx(2.147, abs=5e-4)
    for eps in (1e9, 101.0, math.nan, math.inf, -1.0, 0, 1e-4):
        with pytest.raises(HyperparameterError, match=r"from 0\.01 to 100"):
            noise_multiplier_for(eps, 20, 1e-3)
    with pytest.raises(HyperparameterError, match="releases nothing"):
        noise_multiplier_for(8.0, 0, 1e-3)
    for eps, rounds, delta, sampling in ((1.0, 5, 1e-5, 0.5), (30.0, 1, 1e-3, 1.0)):
        z = noise_multiplier_for(eps, rounds, delta, sampling)
        assert epsilon(z, rounds, delta, sampling) <= eps < epsilon(z * (1 - 3e-4), rounds, delta, sampling)


@PLD
@pytest.mark.parametrize(("z", "rounds", "delta"), [(0.5, 1, 1e-5), (1.0, 20, 1e-3), (4.0, 100, 1e-6), (50.0, 1, 1e-5)])
def test_never_below_the_exact_gaussian_and_close_to_it(z: float, rounds: int, delta: float) -> None:
    """Oracle: the closed form. Pessimistic means: at the epsilon that is told, the exact delta is at most the asked."""
    found = epsilon(z, rounds, delta)
    assert gaussian_delta(found, z, rounds) <= delta
    assert gaussian_delta(found * 0.999, z, rounds) > delta


@PLD
def test_events_compose_in_any_order_and_cost_more_together() -> None:
    one, other = Spending(1.0, 5), Spending(2.0, 7, 0.5)
    together = epsilon_of([one, other], 1e-5)
    assert together == epsilon_of([other, Spending(1.0, 2), Spending(1.0, 3)], 1e-5)
    assert max(epsilon_of([one], 1e-5), epsilon_of([other], 1e-5)) < together
    assert epsilon_of([], 1e-5) == 0.0 == epsilon_of([Spending(1.0, 0)], 1e-5)
    assert math.isinf(epsilon_of([one, Spending(1e-3, 10**6)], 1e-5))  # beyond the bound for rounds


def test_what_the_discrete_noise_adds_is_small_and_counted() -> None:
    """Expected: below 1e-9 a round at the coarsest grid that `check_room` admits; growing with rounds."""
    assert 0 < discrete_noise(10.0, 1, 1e-5) < 1e-9
    assert discrete_noise(10.0, 1000, 1e-5) > 500 * discrete_noise(10.0, 1, 1e-5)
    for eps, rounds, delta in ((0.1, 1, 1e-3), (10.0, 1000, 1e-5), (90.0, 7, 1e-10)):  # by the docstring, d = 1
        s = COARSEST_NOISE
        t = math.sqrt(2 * math.log(rounds * math.exp(eps) * 2**21 / delta))  # rounds e^eps exp(-t^2 / 2) = 2^-21 delta
        bound = rounds * (1 / (24 * s**2) + (s * (1 + t) + 1 / 2) ** 2 / (8 * s**4))
        assert bound <= discrete_noise(eps, rounds, delta) <= 1.2 * bound
    size = 10
    with pytest.raises(HyperparameterError, match="too coarse"):
        Mechanism(1.0, 1.0, 2.0**-20).check_room(size, clients=1)


@PLD
def test_epsilon_has_the_discrete_noise_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = accounting._composed.__wrapped__(((2.0, 1.0, 3),), 1e-4)
    monkeypatch.setattr(accounting, "discrete_noise", lambda found, rounds, delta: 5.0)
    assert accounting._composed.__wrapped__(((2.0, 1.0, 3),), 1e-4) == pytest.approx(plain + 5.0, abs=1e-6)


@PLD
def test_an_outsider_with_dp_accounting_gets_the_same() -> None:
    """Oracle: dp-accounting alone, as its manual has it, to six digits."""
    events, pld = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant(events.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(events.GaussianDpEvent(1.3), 7)
    accountant.compose(events.PoissonSampledDpEvent(0.2, events.GaussianDpEvent(0.9)), 11)
    found = epsilon_of([Spending(1.3, 7), Spending(0.9, 11, 0.2)], 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert found >= accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, math.nan, 1e-12])
def test_impossible_deltas(delta: float) -> None:
    with pytest.raises(HyperparameterError, match="delta"):
        epsilon(1.0, 1, delta)


@pytest.mark.parametrize(
    ("z", "rounds", "sampling"),
    [(9e-4, 1, 1.0), (math.nan, 1, 1.0), (1.0, -1, 1.0), (1.0, 2.5, 1.0), (1.0, 10**30, 1.0), (1.0, 1, 0.0),
     (1.0, 1, 1.1)],
)  # fmt: skip
def test_impossible_spendings(z: float, rounds: int, sampling: float) -> None:
    with pytest.raises(HyperparameterError, match="privacy"):
        epsilon(z, rounds, 1e-5, sampling)


def test_without_dp_accounting_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    accounting._composed.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(HyperparameterError, match=r"dp-accounting.*fedlora\[privacy\]"):
        epsilon(1.0, 1, 1e-5)
