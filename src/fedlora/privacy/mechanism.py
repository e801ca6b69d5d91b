"""Stub: see the docstrings. The real one replaces it with the same signatures."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Contribution:
    """One client's vector as it is summed. Secret: none of it may leave the server.

    integers: int64 (d,), in units of the grid. norm: of the vector with its weight, before the clip; NaN where it was
    not finite. factor: by which it was clipped, 1 where it was not. usable: False for one that counts as zero.
    """

    integers: Tensor
    norm: float
    factor: float
    usable: bool


@dataclass(frozen=True)
class Mechanism:
    """The public constants of a run: clip C, noise_multiplier z, grid gamma (a power of two)."""

    clip: float
    noise_multiplier: float
    grid: float

    @classmethod
    def of(cls, clip: float, noise_multiplier: float, size: int, grid: float | None = None) -> Mechanism:
        """With the default grid for vectors of `size` entries."""
        raise NotImplementedError

    def sensitivity(self, size: int) -> float:
        """What the ledger uses, grid included: most that one client moves the sum, in the vector's own units."""
        raise NotImplementedError

    def check_room(self, size: int, clients: int) -> None:
        """Raises `HyperparameterError` where sums of so many clients could leave int64, or the grid is too coarse."""
        raise NotImplementedError

    def clipped(self, vector: Tensor, weight: float = 1.0) -> Contribution:
        """The vector (d,) with its weight, clipped to C and rounded to the grid, with (secret) facts about it."""
        raise NotImplementedError

    def contribution(self, vector: Tensor, weight: float = 1.0) -> Tensor:
        """`clipped(...).integers`: int64 (d,). Values that are not finite give zeros, and a warning."""
        raise NotImplementedError

    def noised(self, total: Tensor) -> Tensor:
        """int64 (d,): the sum of contributions plus exact discrete Gaussian noise. Needs the extra `privacy`."""
        raise NotImplementedError

    def mean(self, released: Tensor, denominator: float) -> Tensor:
        """float64 (d,): the released integers times the grid, over a public denominator (q n, or q n times n_max's)."""
        raise NotImplementedError


def share_of(num_examples: float, most: float) -> float:
    """w_i = min(n_i, n_max) / n_max in [0, 1]; 0 for what is no number."""
    raise NotImplementedError
