"""GLoRA: average the updates in a consensus subspace, read out what suits each client (the paper, sections 4.1-4.3).

    B_i A_i = U_i Ahat_i,  U_i^T U_i = I             gauge fixing: span(U_i) and Ahat_i are what B_i, A_i mean
    U_ref   = TopEig_R( sum_i p_i U_i U_i^T )        consensus basis, R = ceil(rho sum_i r_i) or absolute
    Z_g     = U_ref^T sum_i p_i B_i A_i              U_ref Z_g is the mean update, projected; exact if R >= union rank
    U_ref Z_g = U diag(s) V^T                        state: the spectrum, and each client's last U_i (its history H_i)
    read out: components 1..floor(gamma r_i), then those best aligned with H_i, r_i in all; sqrt(s) on both factors

Gauge-invariant in the update and in the state. Any ranks. Not PEFT's unrelated tuner of the same name ("Generalized
LoRA"). Deviations from the paper, each an option and each named in the diagnostics (`preset="paper"` pins the paper's
choice): ties at the cut are broken by energy; col(B_i A_i) instead of col(B_i); the freshest history; R from nominal
ranks. Always: components that are rounding noise are no components, and slots that none fills start as LoRA starts.
Cost: O(S^2 (d_out + d_in) + S^3), S = sum r_i; the readout of a client whose upload is not of the last round O(r_i R
d_out) for its alignment scores. All terms: docs/scale.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedlora.errors import HyperparameterError, RankMismatch
from fedlora.fastpath import consensus_spectrum, gauge_fix_all
from fedlora.folding import Folded, fold
from fedlora.linalg import (
    Canonical,
    ConsensusSpectrum,
    Spectrum,
    Tie,
    energy_spectrum,
    rank_tolerance,
    tie_tolerance,
    unit_roundoff,
)
from fedlora.lora import LoRA
from fedlora.method import Readout, Roles, Update
from fedlora.methods.rank_partition import partitioned
from fedlora.methods.spectral import FactorSplit, instantiate, start_spectrum, whole
from fedlora.parallel import Each, one_by_one
from fedlora.sketch import Sketched
from fedlora.whole_mean import Uncut, whole_means

log = logging.getLogger(__name__)

Basis = Literal["projector", "energy"]
Budget = Literal["nominal", "revealed"]
Score = Literal["alignment", "energy"]
Weighting = Literal["examples", "uniform", "rank-partition"]


@dataclass(frozen=True, eq=False)
class Trace:
    """One client's history: the basis U_i (d_out, k_i) of its upload in the aggregation that made state `round`."""

    round: int
    basis: Tensor


@dataclass(frozen=True)
class Cut:
    """What the last aggregation kept. union_rank, gap, tied, captured as in `linalg.ConsensusSpectrum`.

    approximation: None, or the name of what stood in for all clients' subspaces together: "incremental" (`folding`) or
    "two-pass sketch" (`sketch`). kept: the share of tr K that it kept. error: an upper bound of what it left out of the
    mean update, relative to the result. client_ranks: empty where uploads were not kept.
    """

    server_rank: int
    total_rank: int
    union_rank: int | None
    gap: float
    tied: bool
    captured: float
    client_ranks: Mapping[str, int]
    approximation: str | None = None
    kept: float = 1.0
    error: float = 0.0


@dataclass(frozen=True, eq=False)
class GLoRAState:
    """(U_ref, Z_g) as the SVD of its product, each client's newest traces, and how the last cut went.

    start: the rows of A that a fresh start shares; None later. alignment: client -> ||U_i^T u_j||^2 (l,) of its upload
    in the last aggregation with each component; absent where it did not come with the rest at no cost.
    """

    key: int
    round: int
    spectrum: Spectrum
    start: Tensor | None
    history: Mapping[str, tuple[Trace, ...]]
    cut: Cut | None
    alignment: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FoldedUpdates:
    """What a part of a round's uploads was folded into: `folding.Folded` with weights n_i (None: nothing yet), the sums
    of these weights, of nominal and of revealed ranks, and the narrowest dtype that factors came in.
    """

    pair: Folded | None
    weight: float
    nominal: int
    revealed: int
    stored: torch.dtype

    @property
    def nbytes(self) -> int:
        return 0 if self.pair is None else self.pair.nbytes


@dataclass(frozen=True, eq=False)
class _Aggregate:
    """One aggregation: its result, and of each client in order its basis U_i and, where known, its alignment."""

    spectrum: ConsensusSpectrum
    bases: tuple[Tensor, ...]
    alignments: tuple[Tensor | None, ...] | None


@dataclass(frozen=True)
class GLoRA:
    """Use it for clients of different ranks and data, where the result must not depend on anyone's coordinates.

    Args:
        rho: rank budget R as a share of the participants' total rank, in (0, 1]; 1 is always exact.
        rank: absolute R instead; overrides rho.
        gamma: core ratio in [0, 1]: the share of a readout that every client of that rank gets alike.
        tie: at equal eigenvalues, "energy" (unique), "paper" (whatever the solver returns) or "error".
        basis: "projector" (the paper: each client's subspace counts by p_i alone, so one large client has bounded
            influence) or "energy" (top-R of the mean update itself: least error, unbounded influence).
        canonical: subspace of the product B_i A_i, or of B_i alone as the paper writes.
        budget: R from "nominal" ranks r_i or from the "revealed" rank(B_i) of the paper's footnote.
        history_lag: 0 reads out by the latest upload; 1 by the newest one older than the state, as Algorithm 1.
        score: tail components by "alignment" ||H_i^T u_j||^2, or by "energy" s_j^2 ||H_i^T u_j||^2.
        factor_split: "balanced" (sqrt(s) on both) or "left" (s on B).
        rank_tol: overrides `linalg.rank_tolerance`.
        history_limit: clients whose history is kept, None: all of them, 0: nobody's. Whose is not reads out by energy.
            One takes 4 d_out r_i bytes for each matrix.
        weighting: "examples" uses the p_i that the server hands in, "uniform" 1/n instead; "rank-partition" gives the
            components that only high-rank clients hold the weight among these (raFLoRA's cure for rank collapse).
    """

    name: ClassVar[str] = "glora"
    paper: ClassVar[str] = "Beyond Factor Aggregation: Gauge-Aware Low-Rank Server Representations (preprint 2026)"
    State: ClassVar[type] = GLoRAState
    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "paper": {
            "tie": "paper",
            "basis": "projector",
            "canonical": "B",
            "budget": "revealed",
            "history_lag": 1,
            "score": "alignment",
            "factor_split": "balanced",
        },
        "car-off": {"gamma": 1.0},
    }

    rho: float = 1.0
    rank: int | None = None
    gamma: float = 0.5
    tie: Tie = "energy"
    basis: Basis = "projector"
    canonical: Canonical = "product"
    budget: Budget = "nominal"
    history_lag: Literal[0, 1] = 0
    score: Score = "alignment"
    factor_split: FactorSplit = "balanced"
    rank_tol: float | None = None
    weighting: Weighting = "examples"
    history_limit: int | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise HyperparameterError(f"glora: {name} is {what}; got {getattr(self, name)!r}.")

        require(0 < self.rho <= 1, "rho", "a share of the participants' total rank, in (0, 1]")
        whole = self.rank is None or isinstance(self.rank, int)
        require(whole and (self.rank is None or self.rank >= 1), "rank", "a whole rank budget >= 1, or None to use rho")
        require(0 <= self.gamma <= 1, "gamma", "the core ratio, in [0, 1]")
        require(self.history_lag in (0, 1), "history_lag", "0 (latest upload) or 1 (Algorithm 1 to the letter)")
        limit = self.history_limit
        require(
            limit is None or (isinstance(limit, int) and limit >= 0), "history_limit", "a number of clients, or None"
        )
        require(self.rank_tol is None or 0 < self.rank_tol < 1, "rank_tol", "a relative tolerance in (0, 1), or None")
        for name, options in {
            "tie": Tie, "basis": Basis, "canonical": Canonical, "budget": Budget,
            "score": Score, "factor_split": FactorSplit, "weighting": Weighting,
        }.items():  # fmt: skip
            require(getattr(self, name) in get_args(options), name, f"one of {get_args(options)}")

    def init(self, seed: LoRA, key: int) -> GLoRAState:
        spectrum, start = start_spectrum(seed)
        return GLoRAState(key, 0, spectrum, start, {}, None, {})

    def roles(self, round: int) -> Roles:
        return Roles()

    def aggregate(self, state: GLoRAState, updates: Sequence[Update]) -> GLoRAState:
        return self.aggregate_all([state], [updates])[0]

    def aggregate_all(
        self, states: Sequence[GLoRAState], updates: Sequence[Sequence[Update]], each: Each = one_by_one
    ) -> list[GLoRAState]:
        """`aggregate` of several matrices, faster than one by one where they are small and of one shape."""
        if self.weighting == "rank-partition":
            updates = [partitioned(us) for us in updates]
        uncut: dict[int, Uncut] = {}
        for k, us in enumerate(updates):
            ranks = [u.B.shape[1] for u in us]
            if self._budget(us, ranks) >= sum(ranks):
                tolerance = max(self._tolerance(u.stored) for u in us)
                uncut[k] = Uncut([(u.B, u.A) for u in us], self._weights(us), tolerance)
        made: dict[int, _Aggregate] = {}
        for k, mean in zip(uncut, whole_means(list(uncut.values()), each), strict=True):
            if mean is not None:
                nothing_cut = ConsensusSpectrum(mean.spectrum, mean.spectrum.rank, math.inf, False, 1.0)
                made[k] = _Aggregate(nothing_cut, mean.bases, mean.alignments)
        others = [k for k in range(len(states)) if k not in made]
        made |= dict(zip(others, each(lambda k: self._projected(updates[k]), others), strict=True))
        return [self._after(states[k], updates[k], made[k]) for k in range(len(states))]

    def _after(self, state: GLoRAState, updates: Sequence[Update], made: _Aggregate) -> GLoRAState:
        """The next state, from one aggregation."""
        revealed = {u.client: U.shape[1] for u, U in zip(updates, made.bases, strict=True)}
        c, spectrum, total_rank = made.spectrum, made.spectrum.spectrum, sum(u.rank for u in updates)
        cut = Cut(
            self._budget(updates, revealed.values()), total_rank, c.union_rank, c.gap, c.tied, c.captured, revealed
        )

        round = state.round + 1
        traces = {u.client: Trace(round, U) for u, U in zip(updates, made.bases, strict=True) if U.shape[1]}
        kept = {c: state.history.get(c, ())[-1:] if self.history_lag else () for c in traces}
        history = {**state.history, **{c: (*kept[c], trace) for c, trace in traces.items()}}
        if self.history_limit is not None:  # the longest absent go first
            newest = sorted(history, key=lambda c: (history[c][-1].round, c), reverse=True)[: self.history_limit]
            history = {c: history[c] for c in sorted(newest)}
        alignment = {}
        if made.alignments is not None:
            known = zip(revealed, made.alignments, strict=True)
            alignment = {c: a.to(spectrum.s) for c, a in known if a is not None and c in history}
        return GLoRAState(state.key, round, spectrum, None, history, cut, alignment)

    def _weights(self, updates: Sequence[Update]) -> list[float]:
        return [1 / len(updates) if self.weighting == "uniform" else u.weight for u in updates]

    def _projected(self, updates: Sequence[Update]) -> _Aggregate:
        """The aggregate as the paper writes it: gauge fixing, the consensus subspace, the mean update in it."""
        weights = self._weights(updates)
        dtype = updates[0].B.dtype
        fixed = gauge_fix_all(
            [(u.B, u.A) for u in updates],
            tolerances=[self._tolerance(u.stored) for u in updates],
            canonical=self.canonical,
            dtype=dtype,
        )
        bases, ranks = tuple(U for U, _ in fixed), [U.shape[1] for U, _ in fixed]
        M, N = _side_by_side(fixed, weights)
        stored = max((u.stored for u in updates), key=unit_roundoff)
        c = self._consensus(M, N, self._budget(updates, ranks), stored)
        if c.alignment is None:
            return _Aggregate(c, bases, None)
        blocks = torch.split(c.alignment, ranks)
        parts = zip(blocks, weights, strict=True)  # of a weight near zero nothing is left to divide
        return _Aggregate(c, bases, tuple(b.sum(dim=0) / p if p > 1e-12 else None for b, p in parts))

    def _consensus(self, M: Tensor, N: Tensor, R: int, stored: torch.dtype, noise: float = 1.0) -> ConsensusSpectrum:
        """noise: how much more of it there is than in factors stored as `stored`."""
        tolerances = {"tolerance": noise * self._tolerance(stored), "tie_tolerance": tie_tolerance(stored)}
        if self.basis == "projector":
            return consensus_spectrum(M, N, R, tie=self.tie, **tolerances)
        return energy_spectrum(M, N, R, **tolerances)

    def require_folding(self) -> None:
        """Raises `HyperparameterError` where these options need all uploads at once."""
        if self.weighting == "rank-partition":
            raise HyperparameterError("glora: rank-partition weighting needs all uploads at once; set no memory limit.")

    def require_sketching(self) -> None:
        """Raises `HyperparameterError` for options that a sketched round could not keep."""
        kept = GLoRA(gamma=self.gamma, factor_split=self.factor_split, history_lag=self.history_lag, score=self.score,
                     tie=self.tie, history_limit=self.history_limit)  # fmt: skip
        other = [f.name for f in fields(GLoRA) if getattr(self, f.name) != getattr(kept, f.name)]
        if other:
            raise HyperparameterError(
                f"glora: a sketched round has a rank of its own, the projector basis, and weights by the server's "
                f"choice; leave out {', '.join(other)}."
            )

    def fold(self, folded: FoldedUpdates | None, updates: Sequence[Update], columns: int) -> FoldedUpdates:
        """For `streaming`: some updates, with weights n_i, on top of those that were folded before."""
        counts = [1.0 if self.weighting == "uniform" else u.weight for u in updates]
        fixed = gauge_fix_all(
            [(u.B, u.A) for u in updates],
            tolerances=[self._tolerance(u.stored) for u in updates],
            canonical=self.canonical,
            dtype=updates[0].B.dtype,
        )
        before = folded or FoldedUpdates(None, 0.0, 0, 0, updates[0].stored)
        return FoldedUpdates(
            fold(before.pair, *_side_by_side(fixed, counts), columns),
            before.weight + math.fsum(counts),
            before.nominal + sum(u.rank for u in updates),
            before.revealed + sum(U.shape[1] for U, _ in fixed),
            max((before.stored, *(u.stored for u in updates)), key=unit_roundoff),
        )

    def aggregate_folded(self, state: GLoRAState, folded: FoldedUpdates, total: float) -> GLoRAState:
        """For `streaming`: the next state. Who took part in this round leaves no trace in the history.

        Raises:
            RankMismatch: less than half of the clients' subspaces could be kept.
        """
        pair = folded.pair
        assert pair is not None
        if pair.kept < 0.5:
            raise RankMismatch(
                f"only {pair.kept:.0%} of the clients' subspaces could be kept in {pair.M.shape[1]} columns: they "
                f"share too little (a flat spectrum), and what is left would stand for few of them. Give the server "
                f"more memory; all of this round needs {folded.revealed} columns."
            )
        if pair.kept < 0.9:
            log.warning("%.0f %% of the clients' subspaces kept in memory; the rest of them is lost", 100 * pair.kept)
        root = (folded.weight if self.weighting == "uniform" else total) ** 0.5
        rank = folded.nominal if self.budget == "nominal" else folded.revealed
        R = self.rank or max(1, math.ceil(self.rho * rank - 1e-9))
        c = self._consensus(pair.M / root, pair.N / root, R, folded.stored, pair.noise)
        size = float(torch.linalg.vector_norm(c.spectrum.s, dtype=torch.float64))
        error = pair.lost / root**2 / size if size else 0.0
        cut = Cut(
            R, folded.nominal, c.union_rank, c.gap, c.tied, c.captured, {},
            "incremental" if pair.left_out else None, pair.kept, error,
        )  # fmt: skip
        return GLoRAState(state.key, state.round + 1, c.spectrum, None, state.history, cut, {})

    def aggregate_sketched(self, state: GLoRAState, sketched: Sketched, rank: int) -> GLoRAState:
        """For `sketch_round`: the next state. No single upload is known, so nobody's history changes."""
        s = sketched.spectrum
        cut = Cut(
            rank, 0, None, math.inf, False, 1.0, {}, "two-pass sketch", sketched.captured, sketched.error_bound
        )  # fmt: skip
        return GLoRAState(state.key, state.round + 1, s, None, state.history, cut, {})

    def _budget(self, updates: Sequence[Update], revealed: Iterable[int]) -> int:
        """R. Source: paper section 4.2, R = ceil(rho sum r_i)."""
        total = sum(u.rank for u in updates) if self.budget == "nominal" else sum(revealed)
        return self.rank or max(1, math.ceil(self.rho * total - 1e-9))

    def readout(self, state: GLoRAState, client: str | None, rank: int) -> Readout:
        chosen = self.select(state, client, rank)
        seed = (state.key, state.round, client or "")
        lora = instantiate(state.spectrum, chosen, rank, split=self.factor_split, start=state.start, seed=seed)
        return Readout(lora, fresh=True)

    def select(self, state: GLoRAState, client: str | None, rank: int) -> Tensor:
        """Indices of the components that `client` gets at `rank`, ascending: the core, then the best aligned tail.

        At most `rank` and at most as many as there are. Alignment scores equal within round-off go in spectral order,
        so that the set is a function of the subspaces alone. Source: paper section 4.3, Algorithm 3 lines 4-10.
        """
        spectrum = state.spectrum
        budget = min(rank, spectrum.rank)
        core = min(math.floor(self.gamma * rank + 1e-9), budget)
        trace = self._trace(state, client)
        if trace is None or core == budget:
            return torch.arange(budget)
        known = state.alignment.get(client or "") if trace.round == state.round else None
        if known is not None:
            score = known[core:].double()
        else:
            score = (trace.basis.mH.to(spectrum.U) @ spectrum.U[:, core:]).double().square().sum(dim=0)
        if self.score == "energy":
            score = score * spectrum.s[core:].double().square()
        grid = tie_tolerance(trace.basis.dtype) * float(score.max().clamp(min=1e-300))
        tail = torch.argsort(torch.round(score / grid), descending=True, stable=True)[: budget - core]
        return torch.cat([torch.arange(core), core + tail.sort().values.cpu()])

    def effective(self, state: GLoRAState) -> LoRA:
        return whole(state.spectrum)

    def diagnostics(self, state: GLoRAState) -> Mapping[str, object]:
        cut = {} if state.cut is None else {f.name: getattr(state.cut, f.name) for f in fields(Cut)}
        return {
            "rank": state.spectrum.rank,
            **cut,
            "singular_values": [float(s) for s in state.spectrum.s],
            "deviations": self.deviations,
        }

    @property
    def deviations(self) -> tuple[str, ...]:
        """The options in force that differ from the paper's literal choice, as "option=value"."""
        paper = self.PRESETS["paper"]
        return tuple(f"{name}={getattr(self, name)}" for name, value in paper.items() if getattr(self, name) != value)

    def _tolerance(self, stored: torch.dtype) -> float:
        return rank_tolerance(stored) if self.rank_tol is None else self.rank_tol

    def _trace(self, state: GLoRAState, client: str | None) -> Trace | None:
        """Where H_i is: the newest trace of the client that `history_lag` allows; None where there is none."""
        traces = state.history.get(client, ()) if client is not None else ()
        usable = [trace for trace in traces if trace.round <= state.round - self.history_lag]
        return usable[-1] if usable else None


def _side_by_side(fixed: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """M = [sqrt(p_i) U_i] and N = [sqrt(p_i) Ahat_i]."""
    per_column = [p for p, (U, _) in zip(weights, fixed, strict=True) for _ in range(U.shape[1])]
    root = torch.tensor(per_column, dtype=torch.float64).sqrt().to(fixed[0][0])
    M = torch.cat([U for U, _ in fixed], dim=1).mul_(root)
    return M, torch.cat([Ahat for _, Ahat in fixed], dim=0).mul_(root[:, None])
