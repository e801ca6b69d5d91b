"""The mechanism: clip, round to a grid, sum as integers, add an exact discrete Gaussian.

    x_i = round(clip(w_i v_i, C) / gamma)      integers; |x_i|_2 <= K, checked in exact arithmetic
    S   = sum over those present of x_i        int64, far from overflow (`check_room`)
    S'  = S + N_Z(0, s^2)^d                    s >= z K; this is released
    mean = gamma S' / (public denominator)

One client's contribution is present or becomes zero, so S moves by at most K = ceil(C / gamma) + ceil(sqrt d): rounding
to the nearest moves each entry by at most gamma / 2, and the norm by at most gamma sqrt(d) / 2. K gamma is the
sensitivity recorded in the ledger, and z = s / K its noise multiplier. gamma is a power of two, so that dividing by it
rounds nothing. By default gamma sqrt(d) is at most 2^-20 of C and of z C: the grid costs a millionth of the noise, and
is fine enough for the accountant's continuous Gaussian to represent the discrete one (`accounting`).

For the noise itself, see `exact`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError
from fedlora.privacy.exact import LARGEST, held, with_noise

log = logging.getLogger(__name__)

FINEST = 2.0**-20  # gamma sqrt(d) relative to the clip and to the noise
COARSEST_NOISE = 2.0**19  # least s / sqrt(d), which `accounting` requires of the grid
LEAST_NOISE, MOST_NOISE = 1e-3, 1e6  # z: less costs an epsilon of a million per release; more overflows dp-accounting
_CLIPS = 1e-100, 1e100  # squares of such numbers, and their grids, stay inside float64
_ROOM = 2**62  # for sums with their noise
_DEVIATIONS = 40  # of noise that must fit: larger noise has probability 1e-348


@dataclass(frozen=True)
class Mechanism:
    """A run's public constants.

    Args:
        clip: C, the largest norm of one client's whole vector (all modules and heads), 1e-100 to 1e100.
        noise_multiplier: z, the noise's standard deviation in units of the sensitivity, 0.001 to 1e6. 0 adds no noise:
            only for tests and audits, never from a configuration.
        grid: gamma, a power of two. `Mechanism.of` chooses it.

    Raises:
        HyperparameterError: a constant is outside its range, or the grid is not a power of two.

    Example:
        >>> from fedlora.privacy import Mechanism
        >>> import torch
        >>> mechanism = Mechanism.of(clip=1.0, noise_multiplier=0.0, size=4)
        >>> total = mechanism.contribution(torch.tensor([3.0, 4.0, 0.0, 0.0]))
        >>> mechanism.mean(mechanism.noised(total), denominator=1)
        tensor([0.6000, 0.8000, 0.0000, 0.0000], dtype=torch.float64)
    """

    clip: float
    noise_multiplier: float
    grid: float

    def __post_init__(self) -> None:
        clip, z = self.clip, self.noise_multiplier
        if not _CLIPS[0] <= clip <= _CLIPS[1]:  # nor NaN
            raise HyperparameterError(
                f"privacy: clipping_norm must be a number from {_CLIPS[0]:g} to {_CLIPS[1]:g}; got {clip!r}."
            )
        if not (z == 0 or LEAST_NOISE <= z <= MOST_NOISE):
            raise HyperparameterError(
                f"privacy: noise_multiplier must be a number from {LEAST_NOISE:g} to {MOST_NOISE:g}; got {z!r}."
            )
        if math.frexp(self.grid)[0] != 0.5:
            raise HyperparameterError(
                f"privacy: the grid must be a power of two, so that dividing by it rounds nothing; got {self.grid!r}. "
                f"`Mechanism.of` chooses one."
            )

    @classmethod
    def of(cls, clip: float, noise_multiplier: float, size: int) -> Mechanism:
        """A mechanism with the default grid for vectors of `size` entries: the largest power of two with
        gamma sqrt(d) <= 2^-20 C min(1, z)."""
        finest = clip * min(1.0, noise_multiplier or 1.0) * FINEST / math.sqrt(size)
        return cls(clip, noise_multiplier, math.ldexp(1.0, math.frexp(finest)[1] - 1))

    def bound(self, size: int) -> int:
        """K = ceil(C / gamma) + ceil(sqrt d): the exact upper bound on a contribution's integer norm."""
        return math.ceil(Fraction(self.clip) / Fraction(self.grid)) + math.isqrt(size - 1) + 1

    def sensitivity(self, size: int) -> float:
        """K gamma, for the ledger: the most that one client moves the sum of vectors of `size` entries, grid included,
        in the vector's own units."""
        return self.bound(size) * self.grid

    def scale(self, size: int) -> float:
        """s >= z K, the noise's standard deviation in grid units: rounded up, never below; 0 if z is 0."""
        wanted = Fraction(self.noise_multiplier) * self.bound(size)
        s = float(wanted)
        return s if Fraction(s) >= wanted else math.nextafter(s, math.inf)

    def check_room(self, size: int, clients: int) -> None:
        """Check that sums over this many clients, with noise, stay far inside int64, and that the grid is fine enough
        for the ledger's epsilon to hold. Call it before the first round.

        Raises:
            HyperparameterError: one of the two fails.
        """
        bound, s = self.bound(size), self.scale(size)
        if bound > LARGEST or clients * bound + _DEVIATIONS * s > _ROOM:
            raise HyperparameterError(
                f"privacy: sums of {clients} clients' vectors of norm {bound:.1e} steps, with noise of {s:.1e}, could "
                f"leave 64-bit integers. The grid {self.grid:g} is too fine for the clip {self.clip:g}; "
                f"`Mechanism.of` chooses a coarser one."
            )
        if s and s < COARSEST_NOISE * math.sqrt(size):
            raise HyperparameterError(
                f"privacy: the grid {self.grid:g} is too coarse: the noise is {s:.1e} steps, but epsilon is computed "
                f"for at least {COARSEST_NOISE * math.sqrt(size):.1e} with {size} entries. `Mechanism.of` chooses one."
            )

    def contribution(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """int64 (d,): the weighted vector, clipped to C, in grid units.

        Args:
            vector: (d,) floating point. If its norm is no finite float64 (NaN, Inf, entries beyond 1e154), the client
                counts as zero, with a warning.
            weight: w_i, in [0, 1]. It is applied before the clip, so no weight breaks the bound.
        """
        y = vector.detach().to(device="cpu", dtype=torch.float64) * weight
        norm = float(torch.linalg.vector_norm(y))
        if not math.isfinite(norm):
            log.warning("a client's vector is not finite (NaN or Inf) and counts as zero in the private sum")
            return torch.zeros(y.shape, dtype=torch.int64)
        if norm > self.clip:
            y = y * (self.clip / norm)
        # float64 may have rounded the norm down; `held` does not.
        return held(torch.round(y / self.grid).to(torch.int64), self.bound(len(y)))

    def noised(self, total: Tensor) -> Tensor:
        """int64 (d,): the sum of contributions, plus an independent N_Z(0, s^2) in each entry.

        Never call it twice for one sum, except as two charged releases, and never reuse the noise for another sum: the
        difference would reveal a client. `Journal` ensures both.

        Raises:
            HyperparameterError: opendp is missing.
        """
        s = self.scale(len(total))
        return with_noise(total, s) if s else total.clone()

    def mean(self, released: Tensor, denominator: float) -> Tensor:
        """float64 (d,): gamma released / denominator. denominator: public (q n), never the number of those present."""
        return released.to(torch.float64) * self.grid / denominator
