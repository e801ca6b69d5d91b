"""GLoRA: averages updates in a consensus subspace, reads out what suits each client (the paper, sections 4.1-4.3).

    span(U_i) = col(B_i A_i), U_i^T U_i = I         gauge fixing: what the factors of client i mean
    U_ref     = TopEig_R( sum_i p_i U_i U_i^T )      consensus basis, R = ceil(rho sum_i r_i), or absolute
    Delta W   = U_ref U_ref^T sum_i p_i B_i A_i      the mean update, projected; exact if R holds every direction
              = U diag(s) V^T                        state: this SVD, and each client's last U_i (its history H_i)
    read out: components 1..floor(gamma r_i), then those best aligned with H_i, up to r_i; sqrt(s) on both factors

Gauge-invariant in the update and in the readouts. Any ranks. Unrelated to PEFT's tuner of the same name ("Generalized
LoRA"). Deviations from the paper, which `glora-paper` follows to the letter: col(B_i A_i) instead of col(B_i), which
B_i alone does not determine; of equal eigenvalues at the cut, the mean's strongest directions; the newest upload as
history, not the one before; R from the clients' nominal ranks; components that may be rounding are not read out.
Cost: O(S^2 (d_out + d_in) + S^3), S = sum r_i; a readout for a client that was not in the last round costs O(r_i R
d_out) for its alignment scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Update
from fedlora.errors import HyperparameterError
from fedlora.linalg import ProjectedSum, Spectrum, Term, projected_sums
from fedlora.methods._shared import balanced, diagnostics_of, spectrum_of


@dataclass(frozen=True, eq=False)
class Trace:
    """What GLoRA remembers of a client: U_i (d_out, k_i) of its newest upload, which moved by `roundoff` in storing.

    alignment: ||U_i^T u_j||^2 (l,) with each component, if that upload is in the current mean; else None.
    """

    basis: Tensor
    roundoff: float
    alignment: Tensor | None


@dataclass(frozen=True, eq=False)
class GLoRAState:
    """spectrum: the projected mean. history: client -> its trace, longest absent first. measured: what R, which is
    `server_rank`, kept of the last mean: the others as in `linalg.ProjectedSum`; {} before any round."""

    spectrum: Spectrum
    history: Mapping[str, Trace] = field(default_factory=dict)
    measured: Mapping[str, float | str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class GLoRA(Method[GLoRAState]):
    """Use it for clients with different ranks and data if the result must not depend on anyone's coordinates.

    Args:
        rho: R as a share of the sum of the round's clients' ranks, in (0, 1]; 1 is always exact.
        rank: R itself instead; overrides rho.
        gamma: the core ratio in [0, 1], the share of a readout that is the same for every client of that rank; 1
            switches the client-aware readout off.
        history: how many clients' subspaces are kept; None: all, 0: none. Clients without one read out by energy. One
            subspace takes 4 d_out r_i bytes for each matrix.
    """

    name: ClassVar[str] = "glora"
    paper: ClassVar[str] = "Beyond Factor Aggregation: Gauge-Aware Low-Rank Server Representations (preprint 2026)"
    State: ClassVar[type] = GLoRAState

    rho: float = 1.0
    rank: int | None = None
    gamma: float = 0.5
    history: int | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise HyperparameterError(f"glora: {name} is {what}; got {getattr(self, name)!r}.")

        require(0 < self.rho <= 1, "rho", "a share of the round's total rank, in (0, 1]")
        require(0 <= self.gamma <= 1, "gamma", "the core ratio, in [0, 1]")
        require(_whole(self.rank, 1), "rank", "a whole rank budget >= 1, or None to use rho")
        require(_whole(self.history, 0), "history", "a number of clients, or None for all")

    @property
    def cuts(self) -> bool:
        """Whether R may leave something out."""
        return self.rank is not None or self.rho < 1

    @property
    def claims(self) -> frozenset[str]:
        # R = ceil(rho sum r_i) counts a client that is split in two twice; an absolute R does not.
        always = {"gauge", "readouts"} | ({"halves"} if self.rank is not None or self.rho == 1 else set())
        return frozenset(always if self.cuts else always | {"exact"})

    @property
    def linear_in(self) -> LinearIn:
        """A cut follows the clients' votes, so the result is then no function of the mean alone."""
        return "clients" if self.cuts else "products"

    def init(self, seed: LoRA) -> GLoRAState:
        return GLoRAState(spectrum_of(seed))

    def aggregate(self, state: GLoRAState, updates: Sequence[Update]) -> GLoRAState:
        return GLoRA.aggregate_all(self, [state], [updates])[0]

    def aggregate_all(self, states: Sequence[GLoRAState], updates: Sequence[Sequence[Update]]) -> list[GLoRAState]:
        ranks = [self.rank or _share(self.rho, sum(u.rank for u in sent)) for sent in updates]
        # Terms of nobody count in the mean, and have no vote.
        sums = [[Term(*u.lora.factors, u.weight, u.roundoff, u.client is not None) for u in sent] for sent in updates]
        means = projected_sums(sums, ranks)
        return [self._after(*one) for one in zip(states, updates, ranks, means, strict=True)]

    def _after(self, state: GLoRAState, updates: Sequence[Update], rank: int, mean: ProjectedSum) -> GLoRAState:
        voters = zip([u for u in updates if u.client is not None], mean.bases, mean.alignments, strict=True)
        # A client whose update is zero keeps its older trace: an empty subspace suits nothing.
        newest = {str(u.client): Trace(U, u.roundoff, a.to(U)) for u, U, a in voters if U.shape[1]}
        older = {c: replace(trace, alignment=None) for c, trace in state.history.items() if c not in newest}
        traces = list((older | newest).items())
        dropped = 0 if self.history is None else max(0, len(traces) - self.history)
        names = ("union_rank", "gap", "tied", "captured", "dropped", "error", "factored")
        measured = {"server_rank": rank, **{name: getattr(mean, name) for name in names}}
        return GLoRAState(mean.spectrum, dict(traces[dropped:]), measured)

    def readout(self, state: GLoRAState, client: str | None, rank: int) -> LoRA:
        return balanced(state.spectrum, self.selected(state, client, rank))

    def selected(self, state: GLoRAState, client: str | None, rank: int) -> Tensor:
        """Indices (k,) of the components that `client` gets, ascending, k <= rank: the core, then the aligned tail.

        Source: paper section 4.3, Algorithm 3 lines 4-10.
        """
        spectrum, trace = state.spectrum, state.history.get(client or "")
        budget = min(rank, spectrum.sound)
        core = min(math.floor(self.gamma * rank + 1e-9), budget)
        if trace is None or core == budget:
            return torch.arange(budget)
        alignment = trace.alignment
        if alignment is None:
            alignment = (trace.basis.mT.to(spectrum.U) @ spectrum.U).double().square().sum(dim=0)
        scores = alignment[core : spectrum.sound].tolist()
        # U_i moved by u in storing, so scores that differ by less than sqrt(u) are equal and go in spectral order. Then
        # the choice depends on subspaces alone, not on anyone's coordinates.
        grid = math.sqrt(trace.roundoff) * max(*scores, 1e-300)
        steps = [-round(score / grid) for score in scores]
        tail = sorted(range(len(steps)), key=steps.__getitem__)[: budget - core]  # a stable sort
        return torch.tensor([*range(core), *(core + j for j in sorted(tail))])

    def effective(self, state: GLoRAState) -> LoRA:
        return balanced(state.spectrum)

    def diagnostics(self, state: GLoRAState) -> Mapping[str, object]:
        return {**diagnostics_of(state.spectrum), **state.measured}


def _share(rho: float, total: int) -> int:
    """R = ceil(rho sum r_i), at least 1. Source: paper section 4.2."""
    return max(1, math.ceil(rho * total - 1e-9))  # 0.56 * 25 is a little more than 14 in floats


def _whole(value: object, least: int) -> bool:
    return value is None or (isinstance(value, int) and value >= least)
