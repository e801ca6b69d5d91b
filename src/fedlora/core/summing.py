"""What more a method may offer: its next state from *sums* over a round's updates, not from their list.

A server that has more uploads than memory adds them up as they come and forgets them. A method that can go on from what
is left inherits one of these, and its state is then the one that `aggregate` makes of the list, up to rounding:

* `FromSums`: of a matrix the mean update itself is left and, where the method asks for it, the clients' votes.
* `FromMeans`: the mean factors are left. For methods that average factors; there is nothing more to write.
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
    """What a method needs of a round.

    votes: K = sum_i p_i U_i U_i^T. bases: of how many clients it keeps U_i, the last ones by name; 0: nobody's.
    canonical: whose columns span U_i, as `linalg.gauge_split` says. rank_tol: the tolerance of a client's rank; None:
    by its stored dtype.
    """

    votes: bool = False
    bases: int = 0
    canonical: Canonical = "product"
    rank_tol: float | None = None

    def tolerance(self, stored: torch.dtype) -> float:
        """The relative size of rounding in factors that arrived in `stored`."""
        return rank_tolerance(stored) if self.rank_tol is None else self.rank_tol


@dataclass(frozen=True, eq=False)
class Sums:
    """A round's updates of one matrix, added up. Handed to one method, once: it may use the tensors up.

    mean (d_out, d_in), votes (d_out, d_out) or None: float64, of weights p_i. doubts (d_out, d_out) or None: what
    rounding of the stored factors can be of the votes, sum_i (p_i t_i)^2 U_i U_i^T with t_i the tolerance of the
    client's rank. dtype: the compute dtype, of the state. nominal: sum r_i. ranks: client -> rank of its update. bases:
    client -> (U_i (d_out, k_i) in the compute dtype, the roundoff of the dtype in which it came). roundoff: of the
    clients' dtypes, by weight. floor: how large rounding of the stored factors can be in one direction of the mean.
    terms: the sizes of what
    was added up; larger where so many were that float64's own rounding adds up.
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
    """A method that can do without the list of updates."""

    @abstractmethod
    def summing(self) -> Summing:
        """What it needs.

        Raises:
            HyperparameterError: its options need all uploads at once.
        """

    @abstractmethod
    def from_sums(self, state: S, sums: Sums) -> S:
        """The next state."""


class FromMeans:
    """A method that sees of its clients nothing but weighted means of the factors that travelled, zero-padded or not.

    So `aggregate` of a round is `aggregate` of one update for each rank, the mean of those who have it with the sum of
    their weights.
    """

    def require_means(self) -> None:
        """Nothing where its options keep to that.

        Raises:
            HyperparameterError: an option needs the clients apart.
        """
