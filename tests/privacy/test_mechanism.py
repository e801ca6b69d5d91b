"""The mechanism: what one client can move a sum by, and what noise is added.

Kinds of evidence: property (integers, in exact arithmetic, on hard families), statistical (with its rate of false
alarms), mutation (generators that must not be used).
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedlora.errors import HyperparameterError
from fedlora.privacy import exact
from fedlora.privacy import mechanism as mechanism_module
from fedlora.privacy.exact import LARGEST, held, squared_norm
from fedlora.privacy.mechanism import Mechanism

NOISE = pytest.mark.skipif(importlib.util.find_spec("opendp") is None, reason="opendp is not installed")


def exact_norm_squared(integers: torch.Tensor) -> int:
    """Python's own integers, entry by entry."""
    return sum(x * x for x in integers.tolist())


def test_the_bound_is_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clip in float64 keeps it without the exact check, and the exact check keeps it where a norm came out too
    small (as a sum of floats may: here by far more than one could)."""
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mechanism = Mechanism.of(1.0, 1.0, len(vector))
    limit = mechanism.bound(len(vector)) ** 2
    whole = torch.linalg.vector_norm
    with monkeypatch.context() as patched:
        patched.setattr(mechanism_module, "held", lambda integers, bound: integers)
        assert 0.999 * limit < exact_norm_squared(mechanism.contribution(vector)) <= limit
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda x: 0.9 * whole(x))
    assert 0.999 * limit < exact_norm_squared(mechanism.contribution(vector)) <= limit


def test_the_clip_keeps_direction_and_length() -> None:
    """Expected: v C / |v|, in rationals of the float64 input; a vector below the clip only meets the grid."""
    mechanism = Mechanism.of(2.0, 1.0, size=3)
    clipped = mechanism.contribution(torch.tensor([3.0, 0.0, 4.0]), weight=0.5)
    assert torch.allclose(clipped.double() * mechanism.grid, torch.tensor([1.2, 0.0, 1.6], dtype=torch.float64))
    untouched = mechanism.contribution(torch.tensor([0.25, -0.5, 1.0]))
    assert (untouched.double() * mechanism.grid).tolist() == [0.25, -0.5, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_count_as_zero(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    mechanism = Mechanism.of(1.0, 1.0, size=5)
    vector = torch.ones(5, dtype=torch.float64)
    vector[2] = bad
    found = mechanism.contribution(vector)
    assert found.dtype == torch.int64 and not found.any()
    assert "counts as zero" in caplog.text


@pytest.mark.parametrize("value", [1e38, 1e150, 1e154, 1.7e308, 5e-324, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_size_of_values_breaks_the_bound(value: float, dtype: torch.dtype) -> None:
    """Expected: every entry C / sqrt(d), or its own value below that; zero if the squares overflow float64."""
    mechanism = Mechanism.of(1.0, 1.0, size=16)
    vector = torch.full((16,), value, dtype=torch.float64).to(dtype)
    stored = float(vector[0])
    wanted = min(1.0, 4 * stored) / 4 if math.isfinite(16 * stored * stored) else 0.0
    assert mechanism.contribution(vector).tolist() == [round(wanted / mechanism.grid)] * 16


def test_exact_squares_and_the_shrinking_of_what_is_above() -> None:
    """Expected: Python's integers. The shrunk vector is within the bound, and within one step of its direction."""
    generator = random.Random(0)
    entries = [generator.randint(-LARGEST, LARGEST) for _ in range(300)] + [LARGEST, -LARGEST, 0, 1]
    vector = torch.tensor(entries)
    assert squared_norm(vector) == sum(x * x for x in entries)
    bound = math.isqrt(squared_norm(vector)) // 3
    shrunk = held(vector, bound)
    assert exact_norm_squared(shrunk) <= bound**2
    assert exact_norm_squared(shrunk) >= (bound - 2 * math.sqrt(len(entries))) ** 2
    assert held(torch.tensor([3, 4]), 5).tolist() == [3, 4]  # on the bound: not above it
    for beyond in (LARGEST + 1, -(2**63)):
        with pytest.raises(OverflowError):
            squared_norm(torch.tensor([beyond]))


def test_the_grid_is_a_power_of_two_and_costs_a_millionth() -> None:
    """Expected: from its definition, gamma sqrt(d) <= 2^-20 C min(1, z)."""
    for clip, z, size in ((1.0, 1.0, 1), (0.3, 2.0, 10), (7.0, 0.01, 12345), (1e-6, 1.0, 10**7), (1e6, 50.0, 10**7)):
        mechanism = Mechanism.of(clip, z, size)
        assert math.frexp(mechanism.grid)[0] == 0.5
        ratio = mechanism.grid * math.sqrt(size) / clip / min(1, z)
        assert 2.0**-22 < ratio <= 2.0**-20
        mechanism.check_room(size, clients=10_000)
        assert clip + mechanism.grid * math.sqrt(size) <= mechanism.sensitivity(size) <= clip * (1 + 4e-6)
        assert Fraction(mechanism.scale(size)) >= Fraction(z) * mechanism.bound(size)
        assert mechanism.scale(size) <= z * mechanism.bound(size) * (1 + 1e-15)


def test_sums_that_could_leave_64_bits_are_refused_in_advance() -> None:
    with pytest.raises(HyperparameterError, match="64-bit"):
        Mechanism(1.0, 1.0, 2.0**-41).check_room(size=100, clients=10**7)
    with pytest.raises(HyperparameterError, match="64-bit"):
        Mechanism(1.0, 1e6, 2.0**-41).check_room(size=10**6, clients=1)
    with pytest.raises(HyperparameterError, match="64-bit"):
        Mechanism(1.0, 0.0, 2.0**-45).check_room(size=100, clients=1)  # exact squares hold 2^42
    with pytest.raises(OverflowError):
        Mechanism(1.0, 1.0, 2.0**-60).contribution(torch.ones(100))
    with pytest.raises(HyperparameterError, match="too coarse"):
        Mechanism(1.0, 1.0, 2.0**-10).check_room(size=100, clients=10)


@pytest.mark.parametrize(
    ("clip", "z", "grid"),
    [(0, 1, 0.5), (-1, 1, 0.5), (math.nan, 1, 0.5), (math.inf, 1, 0.5), (1, -1, 0.5),
     (1, math.nan, 0.5), (1, 1, 0.3), (1, 1, 0.0), (1, 1, math.inf), (1e-101, 1, 0.5), (1e101, 1, 0.5), (1, 1e-4, 0.5),
     (1, 1e7, 0.5)],
)  # fmt: skip
def test_impossible_constants_are_refused(clip: float, z: float, grid: float) -> None:
    with pytest.raises(HyperparameterError, match="privacy"):
        Mechanism(clip, z, grid)


# ---- noise -----------------------------------------------------------------------------------------------------------


@NOISE
@pytest.mark.parametrize("z", [0.1, 1.0, 20.0])
def test_the_moments_of_the_noise(z: float) -> None:
    """Expected: mean 0, variance s^2, fourth moment 3 s^4 of a discrete Gaussian of large s (Canonne, Kamath and
    Steinke, fact 19: below 1e-100 of the Gaussian's). n = 20,000 draws; six standard errors of each: z-scores beyond 6
    have probability 2e-9, so all nine checks raise a false alarm once in 5e7 runs."""
    n = 20_000
    mechanism = Mechanism.of(1.0, z, n)
    s = mechanism.scale(n)
    assert s == pytest.approx(z * mechanism.sensitivity(n) / mechanism.grid)
    x = mechanism.noised(torch.zeros(n, dtype=torch.int64)).double() / s
    assert abs(float(x.mean())) < 6 / math.sqrt(n)
    assert abs(float(x.square().mean()) - 1) < 6 * math.sqrt(2 / n)
    assert abs(float(x.pow(4).mean()) - 3) < 6 * math.sqrt(96 / n)


@NOISE
def test_no_seed_repeats_noise_and_no_seeded_generator_is_touched() -> None:
    """The same seeds give other noise, and torch's, Python's and numpy's generators stand where they stood."""
    mechanism, total = Mechanism.of(1.0, 1.0, 50), torch.zeros(50, dtype=torch.int64)
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
        draws.append(mechanism.noised(total))
        assert torch.equal(before[0], torch.get_rng_state())
        assert (before[1], before[2]) == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    assert not torch.equal(*draws)


def test_without_opendp_noise_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    exact._measurement.cache_clear()
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(HyperparameterError, match=r"opendp.*Nothing replaces.*fedlora\[privacy\]"):
        Mechanism.of(1.0, 1.0, 2).noised(torch.zeros(2, dtype=torch.int64))
    silent = Mechanism.of(1.0, 0.0, 2)  # without noise nothing is needed: audits
    assert silent.noised(torch.tensor([5, -5])).tolist() == [5, -5]


@NOISE
def test_opendp_says_the_same_of_its_measurement() -> None:
    """Oracle: opendp's own privacy map (zCDP of the discrete Gaussian; Canonne, Kamath and Steinke 2020, theorem 4):
    rho = K^2 / (2 s^2), at most 1 / (2 z^2)."""
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    for z in (0.37, 1.0, 2.147):
        mechanism = Mechanism.of(0.3, z, 100)
        space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
        rho = dp.m.make_gaussian(*space, scale=mechanism.scale(100)).map(float(mechanism.bound(100)))
        assert rho == pytest.approx(1 / (2 * z * z), rel=1e-12)
        assert rho <= 1 / (2 * z * z) * (1 + 1e-15)
