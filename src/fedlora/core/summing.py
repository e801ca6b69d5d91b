"""What a method may add to save memory: computing its next state from *sums* over a round's updates, not their list.

A server with more uploads than memory adds them up as they arrive and discards them. A method that can work from the
sums inherits one of these classes; up to rounding, its state equals what `aggregate` makes of the list:

* `FromSums`: receives, per matrix, the mean update and, if it asks for them, the clients' votes.
* `FromMeans`: receives the mean factors. For methods that average factors; they have nothing more to write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedlora.linalg import Canonical, rank_tolerance

S = TypeVar("S")


@dataclass(frozen=True)
class Summing:
    """What a method needs from a round.

    votes: K = sum_i p_i U_i U_i^T. bases: the number of clients whose U_i to keep, the last by name; 0: none.
    canonical: whose columns span U_i, as in `linalg.gauge_fix`. rank_tol: the tolerance for a client's rank; None:
    set by its stored dtype.
    """

    votes: bool = False
    bases: int = 0
    canonical: Canonical = "product"
    rank_tol: float | None = None

    def tolerance(self, stored: torch.dtype) -> float:
        """The relative rounding error of factors that arrived as `stored`."""
        return rank_tolerance(stored) if self.rank_tol is None else self.rank_tol


@dataclass(frozen=True, eq=False)
class Sums:
    """A round's updates of one matrix, added up. Passed to one method, once: it may overwrite the tensors.

    mean (d_out, d_in), votes (d_out, d_out) or None: float64, weighted by p_i. doubts (d_out, d_out) or None: bounds
    the votes' error from rounding of the stored factors, sum_i (p_i t_i)^2 U_i U_i^T with t_i the tolerance of the
    client's rank. dtype: the state's compute dtype. nominal: sum r_i. ranks: client -> rank of its update. bases:
    client -> (U_i (d_out, k_i) in the compute dtype, the roundoff of its stored dtype). roundoff: the clients' dtypes'
    roundoff, averaged by weight. floor: the largest error that rounding of the stored factors can cause in one
    direction of the mean. terms: the sizes of the summands; larger if there were so many that float64's own rounding
    adds up.
    """

    mean: Tensor
    votes: Tensor | None
    doubts: Tensor | None
    dtype: torch.dtype
    nominal: int
    ranks: Mapping[str, int]
    bases: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    roundoff: float = 0.0
    floor: float = 0.0
    terms: float = 0.0


class FromSums(ABC, Generic[S]):
    """A method that does not need the list of updates."""

    @abstractmethod
    def summing(self) -> Summing:
        """What the method needs from a round.

        Raises:
            HyperparameterError: its options need all uploads at once.
        """

    @abstractmethod
    def from_sums(self, state: S, sums: Sums) -> S:
        """The next state."""


class FromMeans:
    """A method that uses only weighted means of the clients' travelled factors, zero-padded or not.

    `aggregate` of a round then equals `aggregate` of one update per rank: the mean over the clients of that rank, with
    the sum of their weights.
    """

    def require_means(self) -> None:
        """Check that its options keep to that.

        Raises:
            HyperparameterError: an option needs individual clients' updates.
        """
