"""The one thing more that a method may offer: its next state from a *pair* whose product is the mean update.

A server that keeps no uploads has no list of updates to hand to `Method.aggregate`. Whether it folded them into bounded
memory or sketched them by sums, it has two factors M (d_out, c) and N (c, d_in) with M N = sum_i n_i B_i A_i, as far as
it knows, and measures of what is missing. A method that can go on from there inherits `FromPair`. Neither side knows
the other: who makes pairs does not know what a method does with them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from fedlora.linalg import Canonical, Spectrum, rank_tolerance

S = TypeVar("S")


@dataclass(frozen=True)
class Pairing:
    """How a method wants clients' updates put into a pair.

    canonical: whose columns span U_i, as `linalg.gauge_split` says. weighting: n_i, or 1 for everybody. rank_tol: the
    tolerance of a client's rank; None: by its stored dtype. choice: the options, as "rho=0.5", by which the method
    would choose what to keep, where they are not the defaults: a pair of a rank of its own overrides them.
    """

    canonical: Canonical = "product"
    weighting: Literal["examples", "uniform"] = "examples"
    rank_tol: float | None = None
    choice: tuple[str, ...] = ()

    def tolerance(self, stored: torch.dtype) -> float:
        """The relative size of rounding in factors that arrived in `stored`."""
        return rank_tolerance(stored) if self.rank_tol is None else self.rank_tol


@dataclass(frozen=True, eq=False)
class Pair:
    """A round's updates of one matrix, as two factors.

    M (d_out, c), N (c, d_in): M N is sum_i n_i B_i A_i and M M^T is sum_i n_i U_i U_i^T, less what was left out; one
    dtype, the compute dtype. total: what the mean divides by, sum_i n_i. spectrum: where the pair came as its own SVD,
    divided by total, strongest first: it is the result then, of rank R, and M and N are made of it.
    nominal, revealed: the clients' ranks added up, None where nobody knows. rank: R, None: the method's to choose.
    approximation: None where M N is all of it, or the name of what stood in for the uploads. kept: the share of the
    clients' subspaces in it. lost: an upper bound of the norm of what M N lacks, and of what storing it cost, in units
    of the sum; cut: the norm of what a choice of R already left out; least: what the norm of the whole sum is at least.
    roundoff: of the clients' dtypes, by weight. noise, floor: how large rounding of the stored factors can be in one
    direction, of the votes' root and of the mean.
    """

    M: Tensor
    N: Tensor
    total: float
    spectrum: Spectrum | None = None
    nominal: int | None = None
    revealed: int | None = None
    rank: int | None = None
    approximation: str | None = None
    kept: float = 1.0
    lost: float = 0.0
    cut: float = 0.0
    least: float = 0.0
    roundoff: float = 0.0
    noise: float = 0.0
    floor: float = 0.0


class FromPair(ABC, Generic[S]):
    """A method that can do without the list of updates."""

    @abstractmethod
    def pairing(self) -> Pairing:
        """How it wants the pair made.

        Raises:
            HyperparameterError: its options need all uploads at once.
        """

    @abstractmethod
    def from_pair(self, state: S, pair: Pair) -> S:
        """The next state. Who took part leaves no trace in it: no single upload is known.

        Its diagnostics say "dropped", the share of the mean's energy that may be missing, with `Pair.lost` in it.
        """
