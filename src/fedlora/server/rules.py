"""Robust rules: from the inner products of the clients' changes, the coefficients of the robust change.

    G_ij = <X_i, X_j>,  X_i = B_i A_i - R_i, what client i moved        c = rule.coefficients(G, p)
    robust change = sum_i c_i X_i,  c_i >= 0                           distances: ||X_i - X_j||^2 = G_ii + G_jj - 2 G_ij

A rule sees no coordinates and no ranks: only the n x n Gram matrix G (float64, `changes`) and the clients' weights p,
which sum to 1. So it costs little beside G, and it can be computed by hand. Indices are in the order of client ids.

Bounds: S is any set of n - f clients, the honest ones, X_S the mean of their changes and V_S = mean_{i in S}
||X_i - X_S||^2. With equal weights a rule's result is at most sqrt(kappa V_S) from X_S, whatever the other f send
(Allouah et al., "Fixing by Mixing", AISTATS 2023, table 1; no rule has kappa < f / (n - 2 f)).
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError

log = logging.getLogger("fedlora.server")

Count = int | float  # how many clients: a number, or a share of a round's below one half, rounded up

_EQUAL = 1e-6  # scores and slopes that differ by less are equal: a gauge of condition 1e6 moves them by 1e-7
_APART = 1e-13  # squared distances below this, relative to the squared norms, are float64 rounding
_SETTLED = 1e-10  # the median's iteration ends when no coefficient, times its relative distance, changes by more
_ITERATIONS = 1000


class Rule(ABC):
    """A robust rule: a frozen dataclass. name: as in [robust].

    Example:
        >>> str(NNM(Krum(f=0.2), f=0.2)), Krum(f=0.2).least(10)
        ('krum (f = 0.2) after mixing', 7)
    """

    name: ClassVar[str]

    @abstractmethod
    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        """c (n,) >= 0. gram (n, n): <X_i, X_j>, float64. p (n,): the clients' weights, float64."""

    def least(self, n: int) -> int:
        """The fewest clients that it can do with in a round of n."""
        return 1

    def __str__(self) -> str:
        keys = ", ".join(f"{key} = {value}" for key, value in vars(self).items() if value)
        return f"{self.name} ({keys})" if keys else self.name


class Tolerant(Rule):
    """A rule that tolerates f, how many clients of a round may be Byzantine."""

    f: Count

    def least(self, n: int) -> int:
        return 2 * self.byzantine(n) + 1

    def byzantine(self, n: int) -> int:
        """f in a round of n clients, of which it may be a share."""
        return self.f if isinstance(self.f, int) else math.ceil(self.f * n - 1e-9)

    def __post_init__(self) -> None:
        whole = isinstance(self.f, int) and not isinstance(self.f, bool) and self.f >= 0
        if not whole and not (isinstance(self.f, float) and 0 <= self.f < 0.5):
            what = "a number of clients (2), or a share of a round's below one half (0.2)"
            raise HyperparameterError(f"{self.name}: f, how many may be Byzantine, is {what}; got {self.f!r}.")


@dataclass(frozen=True)
class NormClipping(Rule):
    """Each change cut to a norm: c_i = p_i min(1, threshold / ||X_i||). threshold None: the round's median norm.

    Source: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?" (arXiv 1911.07963), section 5.
    Deviation: the median. Bound: client i moves the result by at most p_i threshold.
    """

    name: ClassVar[str] = "norm-clipping"

    threshold: float | None = None

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        norms = norms_of(gram)
        return p * _cut(norms, self.threshold, norms)


@dataclass(frozen=True)
class CenteredClipping(Rule):
    """v <- v + sum_i p_i (X_i - v) min(1, tau / ||X_i - v||), from v = 0. tau None: the round's median norm.

    Source: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization" (ICML 2021).
    Deviation: their v starts at the last round's result; here at no change, so that a round cannot affect the next one.
    Bound: in each iteration client i moves v by at most p_i tau.
    """

    name: ClassVar[str] = "centered-clipping"

    tau: float | None = None
    iterations: int = 3

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        norms, c = norms_of(gram), torch.zeros_like(p)
        for _ in range(self.iterations):
            kept = p * _cut(distances_from(c, gram), self.tau, norms)
            c = c + kept - kept.sum() * c
        return c


@dataclass(frozen=True)
class Krum(Tolerant):
    """The one change with the smallest score: the sum of squared distances to its n - f nearest, itself included.

    Source: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries" (NeurIPS 2017).
    Deviation: they leave out one more neighbour; n - f as in Farhadkhani et al., "Byzantine Machine Learning Made Easy"
    (ICML 2022). Weights do not count. Bound: kappa = 6 (n - f) / (n - 2 f); it needs n >= 2 f + 3.
    """

    name: ClassVar[str] = "krum"

    f: Count

    def least(self, n: int) -> int:
        return 2 * self.byzantine(n) + 3

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        return _mean_of(_by_score(gram, self.byzantine(len(p)))[:1], p)


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The weighted mean of the n - f changes with the smallest scores of `Krum`.

    Source, deviation: as `Krum`; they leave open how many are kept. Bound: the squared distance from X_S is at most
    2 (n - f) / (n - 2 f) (2 V_S + max_{i in S} ||X_i - X_S||^2); it needs n >= 2 f + 3.
    """

    name: ClassVar[str] = "multi-krum"

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        f = self.byzantine(len(p))
        return _mean_of(_by_score(gram, f)[: len(p) - f], p)


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """argmin_z sum_i p_i ||X_i - z||.

    Source: Weiszfeld's iteration, as Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning" (IEEE TSP
    2022). Deviation: nothing is smoothed. Whether changes are themselves medians, where the iteration would stall, is
    decided first, by the test of Vardi and Zhang (PNAS 2000); all others then get exactly 0.
    Bound: kappa = 4 ((n - f) / (n - 2 f))^2. It counts weights, so clients that hold half of them decide.
    """

    name: ClassVar[str] = "geometric-median"

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        squares = _squared_distances(gram)
        medians = [k for k in range(len(p)) if _is_median(k, gram, squares, p)]
        if medians:  # of several, every point between them is one, too
            return _mean_of((squares[medians] == 0).any(dim=0).nonzero()[:, 0].tolist(), p)
        # A far change moves the result by its coefficient times its distance: its coefficient must settle by so much.
        far = squares.sqrt().median(dim=1).values
        far = (far / far[far > 0].median()).clamp(min=1.0)
        c, step = p, 0.0
        for _ in range(_ITERATIONS):
            apart = distances_from(c, gram)
            # A change that the iteration meets by chance is no median: the clamp lets it go on from there.
            pulls = p / apart.clamp(min=1e-8 * float(apart[apart > 0].median()))
            before, c = c, pulls / pulls.sum()
            step = float(((c - before).abs() * far).max())
            if step <= _SETTLED:
                return c
        log.warning("%s: after %d iterations coefficients still change by %.1e.", self.name, _ITERATIONS, step)
        return c


@dataclass(frozen=True)
class NNM(Tolerant):
    """Nearest-neighbor mixing: each change becomes the weighted mean of its n - f nearest, then `rule` decides.

    Source: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, "Fixing by Mixing" (AISTATS 2023). Deviation: means
    are weighted. Bound: 8 f / (n - f) (kappa + 1) instead of the rule's kappa; it needs n >= 2 f + 1.
    """

    name: ClassVar[str] = "nnm"

    rule: Rule
    f: Count

    def least(self, n: int) -> int:
        return max(super().least(n), self.rule.least(n))

    def coefficients(self, gram: Tensor, p: Tensor) -> Tensor:
        n = len(p)
        near = [_in_order(row)[: n - self.byzantine(n)] for row in _squared_distances(gram).tolist()]
        W = torch.stack([_mean_of(one, p) for one in near])
        return W.mT @ self.rule.coefficients(W @ gram @ W.mT, p)

    def __str__(self) -> str:
        return f"{self.rule} after mixing"


def _cut(sizes: Tensor, most: float | None, norms: Tensor) -> Tensor:
    """min(1, most / size); 1 for a size of 0. Of an even number torch takes the lower median: half cannot raise it."""
    most = float(norms.median()) if most is None else most
    return (most / sizes).nan_to_num(nan=1.0).clamp(max=1.0)


def _is_median(k: int, gram: Tensor, squares: Tensor, p: Tensor) -> bool:
    """Whether X_k is a geometric median: the others pull with no more than the weight that lies at X_k.

    || sum_j p_j (X_j - X_k) / ||X_j - X_k|| || <= p_k, over all j that are apart from it.
    """
    here = squares[k] == 0
    pulls = torch.where(here, 0.0, p / torch.where(here, 1.0, squares[k].sqrt()))
    pulls[k] -= pulls.sum()
    # By G: a far change pulls with its small coefficient times a large product, and squared distances would blur that.
    return float(pulls @ gram @ pulls) <= (1 + _EQUAL) * float(p[here].sum()) ** 2


def _by_score(gram: Tensor, f: int) -> list[int]:
    """The clients by Krum's score, best first."""
    others = _squared_distances(gram).fill_diagonal_(math.inf).sort(dim=1).values[:, : max(0, len(gram) - f - 1)]
    return _in_order(others.sum(dim=1).tolist())


def _in_order(values: list[float]) -> list[int]:
    """Indices, smallest first; equal values in the order of client ids, whatever gauge the clients chose."""
    ascending = sorted(range(len(values)), key=values.__getitem__)
    least = values[ascending[0]]
    level: dict[int, float] = {}  # index -> the least of the values that are equal to its own
    for k in ascending:
        if values[k] > least + _EQUAL * abs(least):
            least = values[k]
        level[k] = least
    return sorted(ascending, key=lambda k: (level[k], k))


def _mean_of(chosen: list[int], p: Tensor) -> Tensor:
    c = torch.zeros_like(p)
    c[chosen] = p[chosen] / p[chosen].sum()
    return c


def norms_of(gram: Tensor) -> Tensor:
    return gram.diagonal().clamp(min=0).sqrt()


def _squared_distances(gram: Tensor) -> Tensor:
    """(n, n): ||X_i - X_j||^2, exactly 0 where float64 cannot tell two changes apart."""
    own = gram.diagonal()
    squares = own[:, None] + own - 2 * gram
    return torch.where(squares > _APART * (own[:, None] + own), squares, 0.0)


def distances_from(c: Tensor, gram: Tensor) -> Tensor:
    """(n,): ||X_i - sum_j c_j X_j||."""
    along = gram @ c
    return (gram.diagonal() - 2 * along + c @ along).clamp(min=0).sqrt()
