"""The round that keeps every upload: for all methods, the same bits in any order, and with a robust rule.

Without a rule the updates are the uploads, with weights p_i. A rule gives coefficients c_i of the changes
X_i = D_i - R_i (D_i sent back, R_i sent out), and

    sum_i p_i R_i + c_i X_i  =  sum_i c_i D_i  +  sum_i (p_i - c_i) R_i

so D_i goes in with weight c_i, and R_i as a term of nobody with weight p_i - c_i. In methods of products all R_i are
one term of weight 1, with their weights in B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA, compute_dtype
from fedlora.core.messages import Upload
from fedlora.core.method import Method, Roles, Update
from fedlora.errors import HyperparameterError
from fedlora.linalg import weighted_mean
from fedlora.server.changes import distinct_slots, gram_of_changes
from fedlora.server.judged import Judged, verdicts
from fedlora.server.rounds import OpenRound, RoundKind, Weighting, require_counting, roundoff_of, shares
from fedlora.server.rules import Rule
from fedlora.server.state import ServerState

if TYPE_CHECKING:
    from fedlora.server.server import Server

_ROUNDING = 1e-15  # of a sum of weights, which are at most 1


@dataclass(frozen=True)
class Kept(RoundKind):
    """Every upload is kept until the round closes: all methods, the same bits in any order.

    Args:
        rule: a robust rule, or None; `Tally.judged` says what it made of each client. weighting: p_i by "examples" or
            "uniform"; None is "uniform" with a rule, because Byzantine clients may lie about their examples, otherwise
            "examples". quorum: None, or how many good uploads a round needs (`OpenRound`).

    Example:
        >>> from fedlora.server.rules import GeometricMedian
        >>> Kept().weighs_by, Kept(GeometricMedian()).weighs_by
        ('examples', 'uniform')
    """

    rule: Rule | None = None
    weighting: Weighting | None = None
    quorum: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule | None):
            raise HyperparameterError(f"Kept: rule is a robust rule, as Krum(f=1), or None; got {self.rule!r:.80}.")
        require_counting(self, self.weighting, self.quorum)

    @property
    def weighs_by(self) -> Weighting:
        return self.weighting or ("examples" if self.rule is None else "uniform")

    def require(self, method: Method[Any], roles: Roles) -> None:
        if self.rule is None:
            return
        if method.linear_in == "clients":
            raise HyperparameterError(
                f"{self.rule.name} weighs changes, and {method} has weights or votes of its own, which would undo "
                f"that. Use glora with rho = 1, flexlora or flora; or, to cut the result to a rank, svd with that rank."
            )
        if method.linear_in == "factors" and roles.both_shared:
            raise HyperparameterError(
                f"{self.rule.name} compares how far the products B A moved, and {method.name} averages B and A: one "
                f"client that sends an honest product in bad coordinates, (B Q, Q^-1 A), can move that average "
                f"anywhere, and no rule sees it. Use a method that averages products: glora, svd, flexlora, flora."
            )

    def open(self, server: Server, state: ServerState) -> OpenRound:
        return _KeptRound(server, state)


class _KeptRound(OpenRound):
    def __init__(self, server: Server, state: ServerState) -> None:
        super().__init__(server, state)
        self._server = server
        self._kept: dict[str, Upload] = {}
        self._begun: dict[str, Adapter] = {}  # client -> what it was sent; only a rule needs it
        self._multipliers: dict[str, float] = {}  # client -> c_i / p_i: how many times its change counts

    def _take(self, upload: Upload, count: float) -> None:
        self._kept[upload.client.id] = upload

    def _settle(self) -> Judged | None:
        self._kept = {client: self._kept[client] for client in sorted(self._kept)}  # the same bits in any order
        rule, p = self.kind.rule, shares({client: self.counts[client] for client in self._kept})
        if rule is None:
            return None
        if len(p) < (least := rule.least(len(p))):
            self._too_few(f"{rule} needs {least} clients, and {len(p)} came: lower f, or take a rule without it")
        uploads = list(self._kept.values())
        self._begun = {u.client.id: self._server.download(self.state, u.client).adapter for u in uploads}
        heads = self.state.heads if self.roles.heads == "shared" else {}
        gram = gram_of_changes(uploads, list(self._begun.values()), heads)
        found = verdicts(rule, gram, p)
        self._multipliers = {client: one.coefficient / one.weight for client, one in found.items()}
        return Judged(str(rule), found)

    def _weights(self, holders: Sequence[Upload]) -> list[tuple[float, float]]:
        """For each holder (p_i, c_i), with p_i normalised over the holders."""
        p = list(shares({u.client.id: self.counts[u.client.id] for u in holders}).values())
        if not self._multipliers:
            return [(x, x) for x in p]
        c = [x * self._multipliers.get(u.client.id, 1.0) for x, u in zip(p, holders, strict=True)]
        # In a module that few hold, p_i grow with normalising: Krum's one client of n has c_i / p_i = n, and would
        # count n / 2 times in a module of two. No change may count for more than itself.
        most = math.fsum(c)
        return [(x, y / most if most > 1 + 1e-9 else y) for x, y in zip(p, c, strict=True)]

    def _updates(self, module: str) -> list[Update]:
        holders = [u for u in self._kept.values() if module in u.adapter.modules]
        sent = [u.adapter.modules[module] for u in holders]
        dtype = compute_dtype(sent)
        updates, rest = [], []
        for u, lora, (p, c) in zip(holders, sent, self._weights(holders), strict=True):
            if c:
                own = lora.map(lambda t: t.detach().to(dtype))
                updates.append(Update(u.client.id, c, lora.rank, own, roundoff_of(lora)))
            if p != c:
                R = self._begun[u.client.id].modules[module].tensors()
                rest.append((p - c, LoRA(*(R[f].to(dtype) if f in lora.tensors() else None for f in ("B", "A")))))
        if self.method.linear_in == "products" and not self.method.one_rank:  # fedex-lora averages factors as well
            return updates + _merged(rest)
        return updates + [Update(None, w, R.rank, R, roundoff_of(R)) for w, R in rest]

    def _mean_heads(self) -> dict[str, Tensor]:
        uploads = list(self._kept.values())
        weights = self._weights(uploads)
        means = {}
        for name, head in self.state.heads.items():
            wide = torch.promote_types(head.dtype, torch.float32)
            terms = [(c, u.adapter.heads[name].detach().to(wide)) for u, (_, c) in zip(uploads, weights, strict=True)]
            terms += [(p - c, head.to(wide)) for p, c in weights if p != c]
            means[name] = weighted_mean([t for _, t in terms], [w for w, _ in terms]).to(head.dtype)
        return means


def _merged(terms: Sequence[tuple[float, LoRA]]) -> list[Update]:
    """A sum of products as one term of nobody with weight 1: the terms' weights are in B, slot by slot.

    Readouts share slots, so that a stack of them all has equal columns, which cost the method time and conditioning.
    """
    if not terms:
        return []
    slots, places = distinct_slots([R for _, R in terms])
    w = torch.zeros(slots.rank, dtype=torch.float64)
    for (weight, _), at in zip(terms, places, strict=True):
        w.index_add_(0, torch.tensor(at, dtype=torch.long), torch.full((len(at),), weight, dtype=w.dtype))
    some = w.abs() > _ROUNDING  # coefficients that sum to 1 leave nothing of a slot that all got
    B, A = slots.factors
    rest = LoRA(B[:, some] * w[some].to(B), A[some])
    return [Update(None, 1.0, rest.rank, rest, roundoff_of(rest))] if rest.rank else []
