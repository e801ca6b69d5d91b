"""What a method may add for robust rules: how it takes an update whose *change* counts m times.

A robust rule (`server.robust_rules`) gives each client a multiplier m for its change, and wants the sum

    sum_i p_i (R_i + m_i (D_i - R_i)),        R_i = B_0 A_0 what client i was sent, D_i = B_i A_i what it sent back

Updates with m = 1 are passed on as they came. For other m, the list becomes one that the method can take:

* "products": D_i with weight m_i p_i, followed by one update that belongs to nobody: sum_i p_i (1 - m_i) R_i, what the
  server sent to clients in place of their changes. All clients were sent the same few columns of the server's, so the
  extra update has only as many columns as there are of these, not r_i more per client. The sum is exact.
* "terms": two updates of the same client, D_i with weight m p_i and R_i with weight (1 - m) p_i, which may be negative.
* "factors": one update of the same shape with each travelling factor moved: B_0 + m (B_i - B_0), A_0 + m (A_i - A_0).
  The sum is exact if one factor travels beside a common one; otherwise it is what this method makes of factors.

A client with m = 0 has no update in the first two forms. A method that does not say gets "factors", which every method
can take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import NOBODY, Update
from fedlora.linalg import distinct, shortest, unit_roundoff

How = Literal["products", "terms", "factors"]


class TakesMultipliers(ABC):
    """A method that says how it takes an update whose change counts m times, or why it cannot do so correctly."""

    @property
    @abstractmethod
    def multiplied(self) -> How:
        """The form in which it takes such updates."""

    def require_multipliers(self, columns: int | None = None) -> None:  # noqa: B027 - most have nothing to refuse
        """Check that this method's options preserve a robust rule's weights.

        Args:
            columns: of all updates of a matrix together, just before a round is aggregated; None: not known yet.

        Raises:
            HyperparameterError: the method has weights of its own, or keeps too little of the sum.
        """


def multiplied_how(method: Any) -> How:
    """The form in which a method takes updates whose change counts m times."""
    return method.multiplied if isinstance(method, TakesMultipliers) else "factors"


def multiplied(how: How, updates: Sequence[Update], begun: Sequence[LoRA], m: Sequence[float]) -> list[Update]:
    """One matrix's updates, with each change from `begun` counted m times.

    Args:
        updates: as they came, all in one compute dtype. begun: what each client was sent. m: >= 0 each; an update with
            m = 1 is returned as it is.
    """
    each = [(u, _like(R, u), k) for u, R, k in zip(updates, begun, m, strict=True)]
    if how == "factors" or any(len(u.lora.tensors()) < 2 for u in updates):
        return [u if k == 1 else replace(u, lora=_between(u.lora, R, k)) for u, R, k in each]
    own = [replace(u, weight=k * u.weight) for u, _, k in each if k]
    rest = [replace(u, weight=(1 - k) * u.weight, lora=R) for u, R, k in each if k != 1]
    if how == "terms" or not rest:
        return own + rest
    sent = _added(rest)
    return [*own, Update(NOBODY, 1.0, sent.rank, sent, sent.factors[0].dtype)] if sent.rank or not own else own


def _like(begun: LoRA, update: Update) -> LoRA:
    """`begun` in the update's compute dtype and on its device."""
    like = next(iter(update.lora.tensors().values()))
    return begun.map(lambda t: t.to(like))


def _added(readouts: Sequence[Update]) -> LoRA:
    """The weighted sum as one pair: each distinct column once, without those whose weights cancel."""
    B, A = (torch.cat([u.lora.factors[k] for u in readouts], dim=1 - k) for k in (0, 1))
    at, place = distinct(B, A)
    weights = torch.tensor([u.weight for u in readouts for _ in range(u.lora.rank)], dtype=torch.float64).to(B.device)
    sums, sizes = (weights.new_zeros(len(at)).index_add_(0, place, w) for w in (weights, weights.abs()))
    B, A = B.index_select(1, at), A[at]
    some = (sums.abs() > 64 * unit_roundoff(sums.dtype) * sizes) & (B != 0).any(dim=0) & (A != 0).any(dim=1)
    return LoRA((B[:, some].double() * sums[some]).to(B.dtype), A[some])


def plain_pair(sent: LoRA) -> LoRA:
    """The same update as a pair of orthogonal columns that do not cancel, with `sent`'s rank and dtype; the last
    columns may be zero."""
    B, A = (t.to(sent.factors[0].dtype) for t in shortest([(1.0, *sent.factors)]))
    return LoRA(_padded(B, len(B), sent.rank), _padded(A, sent.rank, A.shape[1]))


def _between(sent: LoRA, begun: LoRA, m: float) -> LoRA:
    """begun + m (sent - begun) for each factor that travelled."""
    was = begun.tensors()
    parts = {name: _moved(t, was[name], m) for name, t in sent.tensors().items()}
    return LoRA(parts.get("B"), parts.get("A"))


def _moved(sent: Tensor, begun: Tensor, m: float) -> Tensor:
    """begun + m (sent - begun)."""
    return torch.lerp(begun.double(), sent.double(), m).to(sent.dtype)


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]))


__all__ = ["How", "TakesMultipliers", "multiplied", "multiplied_how", "plain_pair"]
