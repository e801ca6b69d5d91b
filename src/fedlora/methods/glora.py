"""GLoRA: averages updates in a consensus subspace, reads out what suits each client (the paper, sections 4.1-4.3).

    B_i A_i = U_i Ahat_i,  U_i^T U_i = I             gauge fixing: span(U_i) and Ahat_i are what B_i, A_i mean
    U_ref   = TopEig_R( sum_i p_i U_i U_i^T )        consensus basis, R = ceil(rho sum_i r_i) or absolute
    Z_g     = U_ref^T sum_i p_i B_i A_i              U_ref Z_g is the mean update, projected; exact if R >= union rank
    U_ref Z_g = U diag(s) V^T                        state: the spectrum, and each client's last U_i (its history H_i)
    read out: components 1..floor(gamma r_i), then those best aligned with H_i, up to r_i; sqrt(s) on both factors

Gauge-invariant in the update and in the state. Any ranks. Unrelated to PEFT's tuner of the same name ("Generalized
LoRA"). Each deviation from the paper is an option, and the diagnostics name it (`preset="paper"` takes the paper's
choices): energy breaks ties at the cut; col(B_i A_i) instead of col(B_i); the freshest history; R from nominal ranks.
Two deviations always apply: components that are rounding noise do not count, and unfilled slots start as in LoRA.
Cost: O(S^2 (d_out + d_in) + S^3), S = sum r_i; reading out for a client that was not in the last round costs O(r_i R
d_out) for its alignment scores. All terms: docs/explanation/scale.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating, options_without_effect
from fedlora.core.lora import LoRA
from fedlora.core.method import NOBODY, AllAtOnce, Readout, Roles, Update
from fedlora.core.multiplied import How, TakesMultipliers
from fedlora.core.summing import FromSums, Summing, Sums
from fedlora.errors import HyperparameterError
from fedlora.linalg import (
    Budget,
    Canonical,
    ConsensusMean,
    Contributions,
    Spectrum,
    consensus_means,
    consensus_of_sums,
    gauge_splits,
    rank_tolerance,
    unit_roundoff,
)
from fedlora.linalg.batches import in_batches, stacked
from fedlora.linalg.consensus import Basis, Tie
from fedlora.linalg.parallel import Each, one_by_one
from fedlora.methods._rank_partition import Weighting, partitioned
from fedlora.methods._spectral import FactorSplit, accumulated_spectrum, instantiate, start_spectrum, whole

PRIVATE = "private sum"  # what replaced the uploads, in `Cut.approximation`
CountRanks = Literal["nominal", "revealed"]
Score = Literal["alignment", "energy"]


@dataclass(frozen=True, eq=False)
class Trace:
    """One client's history: the basis U_i (d_out, k_i) of its upload in the aggregation that made state `round`.

    roundoff: of the dtype in which that upload arrived, which moves U_i by as much; 0: of the dtype of the basis.
    """

    TAG: ClassVar[str] = "glora-trace/1"

    round: int
    basis: Tensor
    roundoff: float = 0.0


@dataclass(frozen=True)
class Cut:
    """What the last aggregation kept, as measured. union_rank, gap, tied, captured, dropped, error and rounding as in
    `linalg.ConsensusMean`.

    server_rank: R. total_rank: sum r_i. client_ranks: of the clients' updates. union_rank is None if uploads were
    summed without votes, because R leaves nothing out. approximation: None, or "private sum"
    (`server.private_round`), for which only its own size is known.
    """

    TAG: ClassVar[str] = "glora-cut/1"

    server_rank: int
    total_rank: int | None
    union_rank: int | None
    gap: float | None
    tied: bool
    captured: float
    client_ranks: Mapping[str, int]
    approximation: str | None = None
    error: float = 0.0
    dropped: float = 0.0
    rounding: float = 0.0


@dataclass(frozen=True, eq=False)
class GLoRAState:
    """(U_ref, Z_g) as the SVD of its product, each client's newest traces, and the last cut.

    start: the rows of A that a fresh start shares; None later. alignment: client -> ||U_i^T u_j||^2 (l,) of its upload
    in the last aggregation with each component; absent if the aggregation did not compute it anyway.
    """

    TAG: ClassVar[str] = "glora/1"

    key: int
    round: int
    spectrum: Spectrum
    start: Tensor | None
    history: Mapping[str, tuple[Trace, ...]]
    cut: Cut | None
    alignment: Mapping[str, Tensor] = field(default_factory=dict)


class _Asked(NamedTuple):
    """For one matrix and client: everybody gets components 0..core; `score` (n,), which begins at `core`, chooses the
    others up to `budget`; None: in order. roundoff: of the basis behind the scores."""

    core: int
    budget: int
    roundoff: float = 0.0
    score: Tensor | None = None


@dataclass(frozen=True)
class GLoRA(AllAtOnce[GLoRAState], FromSums[GLoRAState], Accumulating[GLoRAState], TakesMultipliers):
    """Use it for clients with different ranks and data if the result must not depend on anyone's coordinates.

    Args:
        rho: rank budget R as a share of the participants' total rank, in (0, 1]; 1 is always exact.
        rank: absolute R instead; overrides rho.
        gamma: core ratio in [0, 1]: the share of a readout that is the same for every client of that rank.
        tie: at equal eigenvalues, "energy" (unique), "paper" (whatever the solver returns) or "error".
        basis: "projector" (the paper: a client's subspace counts by p_i alone, which bounds a large client's
            influence) or "energy" (top-R of the mean update itself: least error, unbounded influence).
        canonical: subspace of the product B_i A_i, or of B_i alone as in the paper.
        budget: R from "nominal" ranks r_i or from the "revealed" rank(B_i) of the paper's footnote.
        history_lag: 0 reads out by the latest upload; 1 by the newest one older than the state, as Algorithm 1.
        score: tail components by "alignment" ||H_i^T u_j||^2, or by "energy" s_j^2 ||H_i^T u_j||^2.
        factor_split: "balanced" (sqrt(s) on both) or "left" (s on B).
        rank_tol: relative tolerance in (0, 1) for a client's votes in K, instead of `linalg.rank_tolerance` of the
            stored dtype; never applied to the mean.
        history_limit: how many clients' histories are kept; None: all, 0: none. Clients without one read out by
            energy. A history takes 4 d_out r_i bytes for each matrix.
        weighting: "examples" uses the server's p_i; "rank-partition" gives components that only high-rank clients hold
            the weight among these clients (raFLoRA's cure for rank collapse).
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
    budget: CountRanks = "nominal"
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
            "tie": Tie, "basis": Basis, "canonical": Canonical, "budget": CountRanks,
            "score": Score, "factor_split": FactorSplit,
        }.items():  # fmt: skip
            require(getattr(self, name) in get_args(options), name, f"one of {get_args(options)}")
        ways = f"one of {get_args(Weighting)} (1/n for everybody is server.weighting = 'uniform')"
        require(self.weighting in get_args(Weighting), "weighting", ways)

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
        """`aggregate` for several matrices; faster than one by one if they are small and of one shape."""
        dtypes = [us[0].B.dtype for us in updates]
        if self.weighting == "rank-partition":
            updates = [partitioned(us) for us in updates]
        sent = [self._sent(us, dtype) for us, dtype in zip(updates, dtypes, strict=True)]
        made = consensus_means(sent, [self._budget(us, s) for us, s in zip(updates, sent, strict=True)], each)
        return [self._after(*one) for one in zip(states, updates, made, strict=True)]

    def _after(self, state: GLoRAState, updates: Sequence[Update], made: ConsensusMean) -> GLoRAState:
        """The next state, from one aggregation of known updates."""
        known = list(zip(_of_clients(updates), made.bases, made.alignments, strict=True))
        revealed = {u.client: U.shape[1] for u, U, _ in known}
        rank = self._rank(_columns(updates), sum(revealed.values()) + _columns(updates[len(known) :]))
        bases = {u.client: (U, unit_roundoff(u.stored)) for u, U, _ in known}
        after = self._next(state, made, rank, sum(u.rank for u, _, _ in known), revealed, bases)
        alignment = {u.client: a.to(made.spectrum.s) for u, _, a in known if u.client in after.history}
        return replace(after, alignment=alignment)

    def _next(
        self,
        state: GLoRAState,
        made: ConsensusMean,
        rank: int,
        total_rank: int,
        ranks: Mapping[str, int],
        bases: Mapping[str, tuple[Tensor, float]],
        *,
        voted: bool = True,
    ) -> GLoRAState:
        """The next state and every client's history. bases: client -> (U_i, the roundoff in which it arrived). voted:
        whether the directions that R chose among are known."""
        cut = Cut(
            rank, total_rank, made.union_rank if voted else None, made.gap, made.tied, made.captured, ranks,
            error=made.error, dropped=made.dropped, rounding=made.rounding,
        )  # fmt: skip
        round = state.round + 1
        traces = {c: Trace(round, U, roundoff) for c, (U, roundoff) in bases.items() if U.shape[1]}
        kept = {c: state.history.get(c, ())[-1:] if self.history_lag else () for c in traces}
        history = {**state.history, **{c: (*kept[c], trace) for c, trace in traces.items()}}
        if self.history_limit is not None:  # clients that have been absent longest go first
            newest = sorted(history, key=lambda c: (history[c][-1].round, c), reverse=True)[: self.history_limit]
            history = {c: history[c] for c in sorted(newest)}
        return GLoRAState(state.key, round, made.spectrum, None, history, cut, {})

    def _sent(self, updates: Sequence[Update], dtype: torch.dtype) -> Contributions:
        clients = _of_clients(updates)
        rest = updates[-1] if len(clients) < len(updates) else None
        return Contributions(
            [(u.B, u.A) for u in clients],
            [u.weight for u in clients],
            [unit_roundoff(u.stored) for u in clients],
            [self._tolerance(u.stored) for u in clients],
            None if rest is None else (rest.B, rest.A),
            dtype,
        )

    def _budget(self, updates: Sequence[Update], sent: Contributions) -> Budget:
        revealed: list[int] = []
        if self.budget == "revealed" and self.rank is None:
            fixed = gauge_splits(sent.pairs, tolerances=sent.tolerances, canonical=self.canonical)
            revealed = [*(U.shape[1] for U, _ in fixed), _columns(updates[len(fixed) :])]
        return Budget(self._rank(_columns(updates), sum(revealed)), self.tie, self.basis, self.canonical)

    @property
    def multiplied(self) -> How:
        """Only products enter, of any rank."""
        return "products"

    def require_multipliers(self, columns: int | None = None) -> None:
        """R must reach the union of all subspaces, or the basis must be the reweighted mean's strongest directions.

        A subspace counts by p_i, however small its client's change is: with a smaller R, a hostile client's tiny change
        would push out others' directions.
        """
        if self.weighting != "examples":
            raise HyperparameterError(
                f"glora: weighting = {self.weighting!r} weighs clients again after the robust rule did. Leave it out."
            )
        if self.basis == "energy":
            return
        advice = "Set basis = 'energy', or leave rho and rank out"
        if self.rank is None and self.rho < 1:
            raise HyperparameterError(
                f"glora: rho = {self.rho:g} cuts by the clients' subspaces (basis = 'projector'). These count by p_i, "
                f"however small a change is, so a tiny hostile change would buy directions despite the rule. {advice}."
            )
        if self.rank is not None and columns is not None and self.rank < columns:
            raise HyperparameterError(
                f"glora: rank = {self.rank} cuts the {columns} directions that clients may have (r_i, and those they "
                f"were sent) by their subspaces, which count by p_i, however small a change is. {advice}."
            )

    def summing(self) -> Summing:
        """What it needs from a round whose uploads do not fit in memory."""
        if self.weighting == "rank-partition":
            raise HyperparameterError("glora: rank-partition weighting needs all uploads at once; set no memory.")
        if self.history_limit is None:
            raise HyperparameterError(
                "glora: it keeps every client's U_i, 4 d_out r_i bytes for each matrix, which grows with the clients "
                "as their uploads do. With server.memory, set history_limit: how many of the newest clients to keep, "
                "or 0 for none (readouts then go by energy)."
            )
        cuts = self.basis == "projector" and (self.rank is not None or self.rho < 1)
        return Summing(cuts, self.history_limit, self.canonical, self.rank_tol)

    def from_sums(self, state: GLoRAState, sums: Sums) -> GLoRAState:
        rank = self._rank(sums.nominal, sum(sums.ranks.values()))
        made = consensus_of_sums(
            sums.mean, sums.votes, sums.doubts, Budget(rank, self.tie, self.basis, self.canonical), dtype=sums.dtype,
            roundoff=sums.roundoff, floor=sums.floor, terms=sums.terms,
        )  # fmt: skip
        voted = sums.votes is not None or self.basis == "energy"
        return self._next(state, made, rank, sums.nominal, sums.ranks, sums.bases, voted=voted)

    def require_accumulating(self) -> None:
        """Raises `HyperparameterError` for options of consensus and histories, because a private round has neither."""
        kept = ("factor_split",)
        if why := options_without_effect(
            self, self.name, {f.name: f.default for f in fields(GLoRA) if f.name not in kept}
        ):
            raise HyperparameterError(why)

    def accumulated(self, state: GLoRAState, change: LoRA, rank: int) -> GLoRAState:
        """The next state, without histories: all clients of one rank get the same, strongest components."""
        every, spectrum = accumulated_spectrum(state.spectrum, change, rank)
        left_out = every.s[rank:].double().square().sum()
        size = every.s.double().square().sum()
        error = math.sqrt(float(left_out / size)) if every.rank > rank else 0.0
        cut = Cut(rank, None, None, None, False, 1 - error**2, {}, PRIVATE, error=error)
        return GLoRAState(state.key, state.round + 1, spectrum, None, {}, cut, {})

    def _rank(self, nominal: int | None, revealed: int | None) -> int:
        """R, from the sum of the clients' ranks. Source: paper section 4.2, R = ceil(rho sum r_i)."""
        total = (nominal if self.budget == "nominal" else revealed) or 0
        return self.rank or max(1, math.ceil(self.rho * total - 1e-9))

    def readout(self, state: GLoRAState, client: str | None, rank: int) -> Readout:
        return self.readouts([state], client, [rank])[0]

    def readouts(self, states: Sequence[GLoRAState], client: str | None, ranks: Sequence[int]) -> list[Readout]:
        made = []
        for state, rank, chosen in zip(states, ranks, self.selected(states, client, ranks), strict=True):
            seed = (state.key, state.round, client or "")
            lora = instantiate(state.spectrum, chosen, rank, split=self.factor_split, start=state.start, seed=seed)
            made.append(Readout(lora, fresh=True))
        return made

    def select(self, state: GLoRAState, client: str | None, rank: int) -> Tensor:
        """`selected` for one matrix."""
        return self.selected([state], client, [rank])[0]

    def selected(self, states: Sequence[GLoRAState], client: str | None, ranks: Sequence[int]) -> list[Tensor]:
        """Indices of the components that `client` gets of each matrix, ascending: the core, then the best aligned tail.

        At most the rank, and at most as many as there are. Alignment scores that rounding of the client's upload cannot
        tell apart go in spectral order, so the set depends on the subspaces alone. Source: paper section 4.3,
        Algorithm 3 lines 4-10.
        """
        asked = [self._asked(state, client, rank) for state, rank in zip(states, ranks, strict=True)]

        def chosen(members: list[int]) -> Sequence[Tensor]:
            core, budget, _, score = asked[members[0]]
            if score is None:
                return [torch.arange(budget)] * len(members)
            scores = stacked([asked[k].score for k in members]).double()  # type: ignore[misc]
            roundoffs = torch.tensor([asked[k].roundoff for k in members], dtype=torch.float64).to(scores)
            grid = roundoffs.sqrt() * scores.amax(dim=1).clamp(min=1e-300)
            order = torch.argsort(torch.round(scores / grid[:, None]), dim=1, descending=True, stable=True)
            tails = core + order[:, : budget - core].sort(dim=1).values.cpu()
            return torch.cat([torch.arange(core).expand(len(members), core), tails], dim=1).unbind()

        kinds = [(a.core, a.budget, a.score is None or (a.score.shape, a.score.dtype, a.score.device)) for a in asked]
        return in_batches(chosen, kinds, [8 * state.spectrum.rank for state in states])

    def _asked(self, state: GLoRAState, client: str | None, rank: int) -> _Asked:
        spectrum, trace = state.spectrum, self._trace(state, client)
        budget = min(rank, spectrum.sound)
        core = min(math.floor(self.gamma * rank + 1e-9), budget)
        if trace is None or core == budget:
            return _Asked(core, budget)
        at = slice(core, spectrum.sound)
        known = state.alignment.get(client or "") if trace.round == state.round else None
        if known is not None:
            score = known[at]
        else:
            score = (trace.basis.mH.to(spectrum.U) @ spectrum.U[:, at]).double().square().sum(dim=0)
        if self.score == "energy":
            score = score.double() * spectrum.s[at].double().square()
        return _Asked(core, budget, max(trace.roundoff, unit_roundoff(trace.basis.dtype)), score)

    def effective(self, state: GLoRAState) -> LoRA:
        return whole(state.spectrum)

    def diagnostics(self, state: GLoRAState) -> Mapping[str, object]:
        cut = {} if state.cut is None else vars(state.cut)
        return {
            "rank": state.spectrum.sound,
            "components": state.spectrum.rank,
            **cut,
            "singular_values": state.spectrum.s.tolist(),
            "deviations": self.deviations,
        }

    @cached_property
    def deviations(self) -> tuple[str, ...]:
        """The options in force that differ from the paper's literal choice, as "option=value"."""
        paper = self.PRESETS["paper"]
        return tuple(f"{name}={getattr(self, name)}" for name, value in paper.items() if getattr(self, name) != value)

    def _tolerance(self, stored: torch.dtype) -> float:
        return rank_tolerance(stored) if self.rank_tol is None else self.rank_tol

    def _trace(self, state: GLoRAState, client: str | None) -> Trace | None:
        """H_i's trace: the client's newest one that `history_lag` allows; None if there is none."""
        traces = state.history.get(client, ()) if client is not None else ()
        usable = [trace for trace in traces if trace.round <= state.round - self.history_lag]
        return usable[-1] if usable else None


def _of_clients(updates: Sequence[Update]) -> Sequence[Update]:
    """The clients' updates, without the last if it belongs to nobody: what the server sent in place of changes."""
    return updates[:-1] if updates[-1].client == NOBODY else updates


def _columns(updates: Sequence[Update]) -> int:
    """sum r_i, including columns that belong to nobody."""
    return sum(u.rank for u in updates)
