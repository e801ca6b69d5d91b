"""GLoRA for very many clients: two exchanges a round, constant memory at the server, messages that are plain sums.

    plan    = SketchPlan(d_out, d_in, rank=64, seed=round)         everybody derives the same test matrix Omega
    first   = range_message(lora, examples, plan)         client:  n_i U_i (U_i^T Omega),  n_i k_i,  n_i
    basis   = range_basis(sum of the first, plan)         server:  Q = orth(sum), sent to all
    second  = core_message(lora, examples, basis, plan)   client:  n_i Q^T B_i A_i,  n_i (Q^T U_i)(Q^T U_i)^T,  sizes
    result  = sketched(sum of the second, basis, plan)    server:  (U_ref, Z_g) within span(Q), and how much it caught

Messages add up with +, so secure aggregation can compute them, and the server need not see one client's. A client's
cost and the server's memory do not depend on how many there are. The result approximates the consensus subspace of K =
sum p_i U_i U_i^T (paper section 4.2): well where clients share a subspace, badly where K's spectrum is flat, for which
no cheap method works. `captured` and `error_bound` say which it is; below `least_captured` the result is refused.

Differs from `GLoRA`: no history, so readouts are by spectrum alone. One module; a federation has one plan for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, fresh_rows
from fedlora.errors import HyperparameterError, RankMismatch, ShapeError
from fedlora.linalg import Spectrum, gauge_splits, rank_tolerance, unit_roundoff, with_canonical_signs
from fedlora.linalg.spectrum import cut_by_rounding


@dataclass(frozen=True)
class SketchPlan:
    """What all sides of a round agree on. rank: R. oversample: columns of Omega beyond R. seed: of Omega."""

    d_out: int
    d_in: int
    rank: int
    seed: int
    oversample: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.d_out or self.oversample < 0 or self.d_in < 1:
            raise HyperparameterError(
                f"a sketch has a rank from 1 to d_out = {self.d_out} and oversample >= 0; got {self.rank} and "
                f"{self.oversample}."
            )

    @property
    def width(self) -> int:
        """Columns of Omega."""
        return min(self.rank + self.oversample, self.d_out)

    def omega(self) -> Tensor:
        """The test matrix (d_out, width), float32: the same wherever it is drawn."""
        return fresh_rows(self.width, self.d_out, "sketch", self.seed, like=torch.empty(0, dtype=torch.float32)).mT


@dataclass(frozen=True, eq=False)
class _Summed:
    """Messages add up, and nothing else is ever done with one. They travel in float32; a sum of them is float64."""

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self):
            return NotImplemented
        return type(self)(*(getattr(self, f.name).double() + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, eq=False)
class RangeMessage(_Summed):
    """Y (d_out, width): n_i U_i (U_i^T Omega). trace: n_i k_i, k_i the update's rank. examples: n_i."""

    Y: Tensor
    trace: Tensor
    examples: Tensor


@dataclass(frozen=True, eq=False)
class CoreMessage(_Summed):
    """Z (width, d_in): n_i Q^T B_i A_i. C (width, width): n_i (Q^T U_i)(Q^T U_i)^T. trace, examples: as before.

    missed: n_i times the squared size of what of B_i A_i lies outside span(Q). size: n_i ||B_i A_i||. floor: n_i^2
    times the squared size that rounding of the stored factors can have in one direction.
    """

    Z: Tensor
    C: Tensor
    trace: Tensor
    missed: Tensor
    examples: Tensor
    size: Tensor
    floor: Tensor


@dataclass(frozen=True, eq=False)
class Sketched:
    """spectrum: of the mean update, projected. captured: the share of tr K in span(U_ref).

    error_bound: an upper bound of ||result - mean|| / ||mean||: exactly what lies in span(Q) outside U_ref, which R
    left out, and `missed`. missed: an upper bound of what the sketch itself lost, relative to the mean: outside span(Q)
    the clients' root mean square (Jensen), and the rounding of the messages. rounding: as in `linalg.ConsensusMean`.
    lost, cut: the norms of what the sketch lost and of what R left out. size: what ||mean|| is at least.
    """

    spectrum: Spectrum
    captured: float
    error_bound: float
    missed: float
    rounding: float = 0.0
    lost: float = 0.0
    cut: float = 0.0
    size: float = 0.0


def range_message(lora: LoRA, examples: float, plan: SketchPlan) -> RangeMessage:
    """A client's first message.

    Raises:
        ShapeError: the update is of another matrix than the plan's.
    """
    U = _basis(lora, plan)
    n = torch.tensor(float(examples), dtype=torch.float64)
    Y = U @ (U.mT @ plan.omega().to(U.device))
    return RangeMessage(Y * float(examples), n * U.shape[1], n)


def range_basis(total: RangeMessage, plan: SketchPlan) -> Tensor:
    """Q (d_out, width), orthonormal, float32, from the sum of the first messages."""
    if not float(total.examples) > 0:
        raise RankMismatch("nobody took part in this round: the examples add up to 0.")
    Q: Tensor = torch.linalg.qr((total.Y / total.examples).double())[0]
    return Q.float()


def core_message(lora: LoRA, examples: float, basis: Tensor, plan: SketchPlan) -> CoreMessage:
    """A client's second message: its update and its subspace within span(Q)."""
    U = _basis(lora, plan)
    B, A = (t.detach().double() for t in lora.factors)
    tolerance = max(rank_tolerance(t.dtype) for t in lora.factors)
    Q = basis.double()
    inside, QB = Q.mT @ U.double(), Q.mT @ B
    R = torch.linalg.qr(A.mT, mode="r").R.mT  # ||X A|| = ||X R||, which a trace of Gram matrices loses in bad gauges
    sizes = torch.linalg.vector_norm(B, dim=0) * torch.linalg.vector_norm(A, dim=1)
    rounding = 64 * unit_roundoff(torch.float64) * float(sizes.sum())
    missed = (float(torch.linalg.matrix_norm((B - Q @ QB) @ R)) + rounding) ** 2
    size = float(torch.linalg.matrix_norm(B @ R)) + rounding
    slots = sizes.square().sum()
    n = torch.tensor(float(examples), dtype=torch.float64)
    return CoreMessage(
        Z=((QB @ A) * float(examples)).float(), C=(inside @ inside.mT) * n, trace=n * U.shape[1],
        missed=n * missed, examples=n, size=n * size, floor=(n * tolerance).square() * slots.cpu(),
    )  # fmt: skip


def sketched(
    total: CoreMessage, basis: Tensor, plan: SketchPlan, *, least_captured: float = 0.5, most_error: float = 0.8
) -> Sketched:
    """The round's result: the strongest R directions of K within span(Q), and the mean update in them.

    Raises:
        RankMismatch: they hold less than `least_captured` of tr K: the clients do not share a subspace, and what would
            be lost is most of what they sent; or the error may exceed `most_error`: most share a subspace, and what
            others send outside it is large. A larger rank, or `GLoRA`, which is exact.
    """
    n = float(total.examples)
    # Q is orthonormal to float32 only: span(Q) by an exact basis Q L^-T, in which the sums are L^-1 Z and L^-1 C L^-T.
    Q = basis.double()
    overlap = Q.mT @ Q
    L = torch.linalg.cholesky(overlap)
    slack = float(torch.linalg.matrix_norm(overlap - torch.eye(len(overlap)).to(overlap), ord=2))
    mean = torch.linalg.solve_triangular(L, total.Z.double() / n, upper=False)
    C = torch.linalg.solve_triangular(L, total.C / n, upper=False)
    eigenvalues, V = torch.linalg.eigh(torch.linalg.solve_triangular(L, C.mT, upper=False))
    V, rest = V.flip(1)[:, : plan.rank], V.flip(1)[:, plan.rank :]
    trace = float(total.trace) / n
    captured = min(float(eigenvalues.flip(0)[: plan.rank].sum()) / trace, 1.0) if trace else 1.0
    if captured < least_captured:
        raise RankMismatch(
            f"rank {plan.rank} holds {captured:.0%} of the clients' subspaces, less than {least_captured:.0%}: they do "
            f"not share a subspace (a flat spectrum), and a sketch cannot stand for them. Take a larger rank, or glora."
        )
    O, s, Vh = torch.linalg.svd(V.mT @ mean, full_matrices=False)
    sizes = float(total.size) / n
    keep, noise, doubtful = cut_by_rounding(
        s.tolist(),
        terms=sizes,
        stored=math.sqrt(float(total.floor)) / n,
        worked_in=torch.float64,
        stored_in=torch.float32,
    )
    left = torch.linalg.solve_triangular(L.mT, V @ O[:, :keep], upper=True)
    spectrum = with_canonical_signs((Q @ left).float(), s[:keep].float(), Vh[:keep].float(), noise, doubtful)
    # Outside span(Q), and of rounding: of the messages, of the result, and of Q.
    outside, rounding = math.sqrt(float(total.missed) / n), (slack + 8 * unit_roundoff(torch.float32)) * sizes
    left_out = math.hypot(float(torch.linalg.vector_norm(rest.mT @ mean)), outside) + rounding
    size = math.hypot(max(float(torch.linalg.vector_norm(s)) - rounding, 0.0), left_out)  # of the mean
    error, missed = (left_out / size, (outside + rounding) / size) if size else (0.0, 0.0)
    if error > most_error:
        raise RankMismatch(
            f"the sketched mean may be off by {error:.0%}, more than {most_error:.0%}, although it holds "
            f"{captured:.0%} of the clients' subspaces: updates outside of what most clients share are large. Take a "
            f"larger rank, or glora; and look at those clients, for one far larger than the others is often a fault."
        )
    cut = max(left_out - outside - rounding, 0.0)
    return Sketched(spectrum, captured, error, missed, doubtful, outside + rounding, cut, size)


def _basis(lora: LoRA, plan: SketchPlan) -> Tensor:
    """U_i (d_out, k_i), float32: of the column space of B_i."""
    B, A = (t.detach() for t in lora.factors)
    if (B.shape[0], A.shape[1]) != (plan.d_out, plan.d_in):
        raise ShapeError(
            f"the plan is of a matrix ({plan.d_out}, {plan.d_in}), the update of ({B.shape[0]}, {A.shape[1]})."
        )
    tolerance = max(rank_tolerance(B.dtype), rank_tolerance(A.dtype))
    (split,) = gauge_splits([(B, A)], tolerances=[tolerance], dtype=torch.float32)
    return split.U
