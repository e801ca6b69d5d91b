"""Computes (epsilon, delta) for a sequence of releases, with dp-accounting's privacy loss distributions (PLD).

Neighbours: one client's contribution is present, or zero. Denominators are public and the same for both, so a release
is N(S) against N(S + v) with |v| at most the sensitivity: dp-accounting's `GaussianDpEvent(z)`; if each client is drawn
with probability q, `PoissonSampledDpEvent(q, GaussianDpEvent(z))`; both under ADD_OR_REMOVE_ONE, of whose two
directions it takes the worse. Its estimates are pessimistic: it rounds losses up to its grid, and counts the tails it
cuts off as a certain breach. Substituting one client's data for another's is another relation and costs more (23
becomes 67).

Our noise is the *discrete* Gaussian D of scale s, while the accountant assumes the continuous one. A sum of integers
plus continuous noise, rounded, is the sum plus rounded noise R, so by post-processing PLD's number holds for R; and D
has nearly R's probabilities. For each vector k of d integers, since cosh(x) <= exp(x^2 / 2),

    -d / (24 s^2)  <=  log P[R = k] - log P[D = k]  <=  |k|^2 / (8 s^4)  (+ d 3 exp(-2 pi^2 s^2), which is 0 here)

and |k| <= s (sqrt d + t) + sqrt d / 2 under R except with probability exp(-t^2 / 2). So if T rounds of R are
(epsilon, delta'), T rounds of D are (epsilon + T (lower + upper), delta) for a delta' a millionth smaller than delta.
`Mechanism.check_room` ensures s >= 2^19 sqrt d, which makes T (lower + upper) about 1e-10 T; every number here includes
it. (Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy", 2020, theorem 4, prove that D has
the Gaussian's zCDP, which converted to (epsilon, delta) is looser than PLD: 23.06 would be about 25.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedlora.core.text import quoted
from fedlora.doing import doing
from fedlora.errors import HyperparameterError
from fedlora.privacy.exact import missing
from fedlora.privacy.mechanism import COARSEST_NOISE, LEAST_NOISE, MOST_NOISE

_KEPT_DELTA = 1 - 2.0**-20  # the share of delta for PLD; the rest covers the discrete noise
_CELLS = 500_000  # in a loss distribution: coarser for large epsilon, but still an upper bound
_FINEST = 1e-4  # dp-accounting's own
LEAST_DELTA, LEAST_EPSILON = 1e-10, 1e-2  # smaller values are beyond the resolution of float sums
MOST_EPSILON = 100.0  # when searching for noise; for given noise there is no limit
LEAST_SAMPLING = 1e-6  # below it, dp-accounting's own numbers underflow
SAYS_LITTLE = 20.0  # epsilon: a factor of half a billion in what anybody may conclude
MOST_ROUNDS = 1_000_000  # for the bound in `discrete_noise`


@dataclass(frozen=True)
class Spending:
    """`rounds` releases of one kind: noise multiplier z, each client drawn with probability `sampling` (1: all).

    Raises:
        HyperparameterError: impossible numbers.
    """

    noise_multiplier: float
    rounds: int
    sampling: float = 1.0

    def __post_init__(self) -> None:
        z, q = self.noise_multiplier, self.sampling
        if not LEAST_NOISE <= z <= MOST_NOISE:
            raise HyperparameterError(
                f"privacy: a noise multiplier is z, the noise's standard deviation divided by the clip, from "
                f"{LEAST_NOISE:g} (less has no finite epsilon) to {MOST_NOISE:g}; got {z!r}."
            )
        if not isinstance(self.rounds, int) or isinstance(self.rounds, bool) or not 0 <= self.rounds <= MOST_ROUNDS:
            raise HyperparameterError(
                f"privacy: rounds must be a whole number from 0 to {MOST_ROUNDS:,}; got {quoted(self.rounds)}."
            )
        if not LEAST_SAMPLING <= q <= 1:
            raise HyperparameterError(
                f"privacy: a sampling probability must be {LEAST_SAMPLING:g} to 1 (all clients); got {q!r}."
            )


@doing("computing epsilon")
def epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """Epsilon of all of them composed on the same clients; 0 for none, infinite if dp-accounting finds no number.

    Raises:
        HyperparameterError: delta is outside [1e-10, 1), or dp-accounting is missing.
    """
    check_delta(delta)
    together: dict[tuple[float, float], int] = {}
    for one in spendings:
        if one.rounds:
            kind = (float(one.noise_multiplier), float(one.sampling))
            together[kind] = together.get(kind, 0) + one.rounds
    return _composed(tuple((z, q, rounds) for (z, q), rounds in sorted(together.items())), float(delta))


def epsilon(noise_multiplier: float, rounds: int, delta: float, sampling: float = 1.0) -> float:
    """Epsilon of `rounds` releases at noise multiplier z, each client drawn with probability `sampling`.

    Raises:
        HyperparameterError: impossible numbers, or dp-accounting is missing.

    Example:
        >>> from fedlora.privacy import epsilon
        >>> round(epsilon(1.0, rounds=20, delta=1e-3), 2)
        23.06
        >>> round(epsilon(1.0, rounds=50, delta=1e-5, sampling=0.1), 3)
        5.148
    """
    return epsilon_of([Spending(noise_multiplier, rounds, sampling)], delta)


@doing("searching the noise multiplier")
def noise_multiplier_for(epsilon: float, rounds: int, delta: float, sampling: float = 1.0) -> float:
    """The smallest z whose epsilon is at most the given one, from above: dp-accounting's search, to 1e-6.

    Raises:
        HyperparameterError: impossible numbers, or dp-accounting is missing.

    Example:
        >>> from fedlora.privacy import noise_multiplier_for
        >>> round(noise_multiplier_for(8.0, rounds=20, delta=1e-3), 3)
        2.147
    """
    check_delta(delta)
    if not LEAST_EPSILON <= epsilon <= MOST_EPSILON:
        raise HyperparameterError(
            f"privacy: epsilon must be from {LEAST_EPSILON:g} to {MOST_EPSILON:g}; got {epsilon!r}. "
            f"(Above 20 it says little.)"
        )
    if Spending(1.0, rounds, sampling).rounds == 0:
        raise HyperparameterError("privacy: rounds = 0 releases nothing and needs no noise.")
    library, _ = _libraries()

    class Ours:
        """An accountant, as the search asks it, whose epsilon has the discrete noise in it. Its events are z alone."""

        ledger = library.NoOpDpEvent()

        def compose(self, z: float) -> Ours:
            self.z = z
            return self

        def get_epsilon(self, delta: float) -> float:
            return _composed(((self.z, float(sampling), rounds),), delta)

    log = math.log(1 / delta)
    enough = math.sqrt(rounds / 2) / (math.sqrt(log + epsilon) - math.sqrt(log))  # by zCDP, without sampling
    bracket = library.LowerEndpointAndGuess(0.0, enough)
    return float(library.calibrate_dp_mechanism(Ours, float, float(epsilon), float(delta), bracket))


def epsilon_up(epsilon: float) -> str:
    """Epsilon in thousandths, rounded up, so that it is never below the computed number.

    Example:
        >>> epsilon_up(4.8501)
        '4.851'
    """
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}" if math.isfinite(epsilon) else f"{epsilon}"


def how_strong(epsilon: float) -> str:
    """A remark for people on a large epsilon; "" for others (docs/how-to/privacy.md)."""
    return f" (above {SAYS_LITTLE:g} this guarantee says little: docs/how-to/privacy.md)" * (epsilon > SAYS_LITTLE)


def check_delta(delta: float) -> None:
    """Raise `HyperparameterError` unless delta is in [1e-10, 1)."""
    if not LEAST_DELTA <= delta < 1:
        raise HyperparameterError(
            f"privacy: delta is a probability from {LEAST_DELTA:g} to below 1, far below 1 / clients; got {delta!r}."
        )


@functools.lru_cache(maxsize=4096)
def _composed(kinds: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """kinds: (z, q, rounds)."""
    if not kinds:
        return 0.0
    if any(z < LEAST_NOISE for z, _, _ in kinds) or (every := sum(rounds for _, _, rounds in kinds)) > MOST_ROUNDS:
        return math.inf
    events, pld = _libraries()
    rough = _rough_epsilon(kinds, delta)
    accountant = pld.PLDAccountant(
        events.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=max(_FINEST, rough / _CELLS)
    )
    try:
        for z, q, rounds in kinds:
            event = events.GaussianDpEvent(z)
            accountant.compose(event if q == 1 else events.PoissonSampledDpEvent(q, event), rounds)
        found = float(accountant.get_epsilon(delta * _KEPT_DELTA))
    except (ArithmeticError, ValueError):  # out of its numerical range: no bound is known
        return math.inf
    return found + discrete_noise(found, every, delta) if math.isfinite(found) else math.inf


def discrete_noise(epsilon: float, rounds: int, delta: float) -> float:
    """The most that discreteness of the noise adds to epsilon, by the module docstring, for any d >= 1."""
    # A tail of the noise counts e^epsilon times per round: rounds e^epsilon exp(-t^2 / 2) <= 2^-21 delta.
    t = math.sqrt(2 * (epsilon + 1 + math.log(rounds / delta) + 21 * math.log(2)))
    lower = 1 / (24 * COARSEST_NOISE**2)
    upper = (1 + t + 1 / COARSEST_NOISE) ** 2 / (8 * COARSEST_NOISE**2)
    return rounds * (lower + upper)


def _rough_epsilon(kinds: Sequence[tuple[float, float, int]], delta: float) -> float:
    """Epsilon's order of magnitude, only for the grid: from zCDP, or the central limit theorem for sampled events."""
    rho = 0.0
    for z, q, rounds in kinds:
        whole = rounds / (2 * z * z)
        limit = q * q * rounds * math.expm1(1 / (z * z)) / 2 if z > 0.05 else math.inf
        rho += min(whole, max(limit, 1 / (2 * z * z)) if q < 1 else whole)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def _libraries() -> tuple[Any, Any]:
    """dp_accounting, and its module of privacy loss distributions. Raises `HyperparameterError` without it."""
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise missing("dp-accounting, which computes epsilon", error) from error
    return dp_accounting, pld
