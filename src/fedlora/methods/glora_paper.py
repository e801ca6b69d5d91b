"""GLoRA as the paper prints it: Algorithms 1 to 3 of its appendix, line by line. For reproducing; use `glora` to train.

    Alg. 1, l. 7-8     B_i = U_i T_i, Ahat_i = T_i A_i, by QR; with rank(B_i) columns if B_i is deficient (footnote 1)
    Alg. 2, l. 1-2     M = [sqrt(p_i) U_i],  U_ref = TopEig_R(M M^T)
    Alg. 2, l. 3-6     Z_g = sum_i p_i U_ref^T U_i Ahat_i
    Alg. 3, l. 1-2     Z_g = O Sigma V^T,  U_s = U_ref O
    Alg. 3, l. 4-11    the core, the tail by alignment with H_i, sqrt(sigma) on both factors

It keeps what `glora` mends: U_i spans col(B_i) even where A_i never uses it; R counts rank(B_i); of equal eigenvalues
at the cut it takes what the solver returns, so that there even the update depends on the gauge; a readout after round t
aligns with the client's upload before round t, because line 13 stores U_i for t + 1.

Readings, where the text leaves a choice: R = ceil(rho sum_i rank(B_i)), at least 1; components with sigma_j = 0 are
none; equal scores go in spectral order; slots that stay empty start as in LoRA. `tests/test_executable_paper.py` holds
it against the same algorithms in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Update
from fedlora.errors import HyperparameterError
from fedlora.linalg import unit_roundoff

_RANK = 1e-10  # footnote 1: rank(B_i) counts singular values above this, or the roundoff of storing, times the largest
_REAL = 1e-12  # Alg. 3: sigma_j is zero below this, or the roundoff of storing, times sigma_1
_TIE = 12  # Alg. 3, l. 7: scores, in [0, 1], are equal if they agree in so many decimals


@dataclass(frozen=True, eq=False)
class PaperState:
    """Omega = (U_ref (d_out, R), Z_g (R, d_in)). before: client -> H_i (d_out, rank(B_i)), of uploads before the last
    round. latest: the same with the last round's."""

    omega: LoRA
    before: Mapping[str, Tensor] = field(default_factory=dict)
    latest: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class GLoRAPaper(Method[PaperState]):
    """Use it to compare with the paper's text.

    Args:
        rho: R as a share of sum_i rank(B_i), in (0, 1].
        gamma: the core ratio, in [0, 1].
    """

    name: ClassVar[str] = "glora-paper"
    paper: ClassVar[str] = "Beyond Factor Aggregation: Gauge-Aware Low-Rank Server Representations, Algorithms 1-3"
    State: ClassVar[type] = PaperState

    rho: float = 1.0
    gamma: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise HyperparameterError(f"glora-paper: rho is a share of the total rank, in (0, 1]; got {self.rho!r}.")
        if not 0 <= self.gamma <= 1:
            raise HyperparameterError(f"glora-paper: gamma is the core ratio, in [0, 1]; got {self.gamma!r}.")

    @property
    def claims(self) -> frozenset[str]:
        """A cut may go through equal eigenvalues, where the solver's choice depends on the gauge."""
        return frozenset({"exact", "gauge", "readouts", "halves"} if self.rho == 1 else ())

    def init(self, seed: LoRA) -> PaperState:
        # Alg. 1, l. 1. A fresh start has B = 0, so U_ref has no column.
        U, Ahat = _gauge_fix(seed, unit_roundoff(seed.factors[0].dtype))
        return PaperState(LoRA(U, Ahat).map(lambda t: _stored(t, seed.factors[0])))

    def aggregate(self, state: PaperState, updates: Sequence[Update]) -> PaperState:
        like = updates[0].lora.factors[0]
        # Alg. 1, l. 7-9. Clients send (B_i, A_i); the server's QR gives the same U_i and Ahat_i as theirs would.
        fixed = {str(u.client): (u.weight, *_gauge_fix(u.lora, u.roundoff)) for u in updates}
        R = max(1, math.ceil(self.rho * sum(U.shape[1] for _, U, _ in fixed.values()) - 1e-9))
        # Alg. 2, l. 1: M (d_out, sum_i rank(B_i))
        M = torch.cat([math.sqrt(p) * U for p, U, _ in fixed.values()], dim=1)
        # Alg. 2, l. 2. The left singular vectors of M are the eigenvectors of M M^T, which is never formed.
        U_ref = torch.linalg.svd(M, full_matrices=False)[0][:, :R]
        # Alg. 2, l. 3-6: Z_i = U_ref^T U_i Ahat_i (R, d_in), Z_g = sum_i p_i Z_i
        Z_g = torch.stack([p * (U_ref.mT @ U @ Ahat) for p, U, Ahat in fixed.values()]).sum(dim=0)
        # Alg. 1, l. 13: H_i <- U_i for the next round; this round's readouts (l. 12) still use the one before.
        latest = {**state.latest, **{client: _stored(U, like) for client, (_, U, _) in fixed.items()}}
        return PaperState(LoRA(_stored(U_ref, like), _stored(Z_g, like)), state.latest, latest)

    def readout(self, state: PaperState, client: str | None, rank: int) -> LoRA:
        U_ref, Z_g = state.omega.map(Tensor.double).factors
        # Alg. 3, l. 1-2: Z_g = O Sigma V^T, U_s = U_ref O
        O, sigma, Vt = torch.linalg.svd(Z_g, full_matrices=False)
        zero = max(_REAL, unit_roundoff(state.omega.factors[0].dtype))
        real = int((sigma > zero * sigma[:1]).sum())
        U_s = U_ref @ O[:, :real]
        chosen = self.selected(U_s, state.before.get(client or ""), rank).to(sigma.device)
        # Alg. 3, l. 11: balanced factors
        root = sigma[chosen].sqrt()
        return LoRA(U_s[:, chosen] * root, root[:, None] * Vt[chosen]).map(lambda t: t.to(state.omega.factors[0]))

    def selected(self, U_s: Tensor, H: Tensor | None, rank: int) -> Tensor:
        """Indices (k,) of the real components that a client gets, ascending; H: its history, or None."""
        budget = min(rank, U_s.shape[1])
        if H is None:  # Alg. 3, l. 9
            return torch.arange(budget)
        # Alg. 3, l. 4: the core {1, ..., floor(gamma r_i)}
        core = min(math.floor(self.gamma * rank + 1e-9), budget)
        # Alg. 3, l. 6-7: a_ij = ||H_i^T u_j||^2, the best r_i - |core| of them
        scores = (H.double().mT @ U_s[:, core:]).square().sum(dim=0).cpu()
        best = torch.argsort(torch.round(scores, decimals=_TIE), descending=True, stable=True)[: budget - core]
        return torch.cat([torch.arange(core), core + best.sort().values])

    def effective(self, state: PaperState) -> LoRA:
        return state.omega

    def diagnostics(self, state: PaperState) -> Mapping[str, object]:
        return {"rank": state.omega.rank, "server_rank": state.omega.rank}


def _stored(t: Tensor, like: Tensor) -> Tensor:
    """Row by row, as a checkpoint gives it back: the bits of products depend on the order in memory."""
    return t.to(like).contiguous()


def _gauge_fix(lora: LoRA, roundoff: float) -> tuple[Tensor, Tensor]:
    """(U (d_out, rank(B)), Ahat (rank(B), d_in)), float64: B A = U Ahat, U^T U = I. Alg. 1, l. 7-8 and footnote 1."""
    B, A = lora.map(Tensor.double).factors
    left, s, _ = torch.linalg.svd(B, full_matrices=False)
    rank = int((s > max(_RANK, roundoff) * s[:1]).sum())
    if rank == B.shape[1]:
        U, T = torch.linalg.qr(B)
        return U, T @ A
    U = left[:, :rank]
    return U, U.mT @ B @ A
