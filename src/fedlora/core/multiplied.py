"""The third thing that a method may offer: how an update is handed to it whose *change* counts m times.

A robust rule (`server.robust_rules`) gives each client a multiplier m of its change, and wants the sum

    sum_i p_i (R_i + m_i (D_i - R_i)),        R_i = B_0 A_0 what client i was sent, D_i = B_i A_i what it sent back

An update with m = 1 is handed over as it came. One with another m has to become something that the method can take:

* "products": one update m D_i + (1 - m) R_i, of up to r_i + r_0 columns (`linalg.shortest`). The sum is exact.
* "terms": two updates of the same client, D_i of weight m p_i and R_i of weight (1 - m) p_i, which may be negative.
* "factors": one update of the same shape, each travelling factor moved: B_0 + m (B_i - B_0), A_0 + m (A_i - A_0). The
  sum is exact where one factor travels beside a common one, and is what this method makes of factors elsewhere.

A method that says nothing gets "factors", which every method can take.

Where the terms b_j a_j of an update cancel, its columns are huge beside what they add up to. A method that takes
products gets the update as a pair that does not cancel instead, also with m = 1: what it would round in a float32 of
such columns is as large as everybody's update. The pair is made in float64, and rounded to the dtype of the upload.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.linalg import shortest
from fedlora.linalg.cancelling import cancels

How = Literal["products", "terms", "factors"]

_CANCELS = (
    100.0  # the sum of its terms' norms over the norm of an update, from which on its columns are not handed over
)


class TakesMultipliers(ABC):
    """A method that says how it takes an update whose change counts m times, or why it cannot keep its promise."""

    @property
    @abstractmethod
    def multiplied(self) -> How:
        """The form in which it gets such updates."""

    def require_multipliers(self, columns: int | None = None) -> None:  # noqa: B027 - most have nothing to refuse
        """Whether the weights of a robust rule survive this method's options.

        Args:
            columns: of all updates of a matrix together, where a round is about to be aggregated; None: not known yet.

        Raises:
            HyperparameterError: they would not: the method has weights of its own, or keeps too little of the sum.
        """


def multiplied_how(method: Any) -> How:
    """The form in which a method gets updates whose change counts m times."""
    return method.multiplied if isinstance(method, TakesMultipliers) else "factors"


def multiplied(how: How, sent: LoRA, begun: LoRA, m: float) -> Sequence[tuple[float, LoRA]]:
    """An update whose change from `begun` counts m times: (share of the client's weight, factors), of `sent`'s dtype.

    Args:
        sent: what travelled, one factor or both. begun: what the client was sent. m: >= 0; with 1 the result is `sent`
            itself, unless its terms cancel.
    """
    begun = begun.map(lambda t: t.to(next(iter(sent.tensors().values()))))
    if len(sent.tensors()) < 2 or how == "factors":
        if m == 1:
            return [(1.0, sent)]
        was = begun.tensors()
        parts = {name: _moved(t, was[name], m) for name, t in sent.tensors().items()}
        return [(1.0, LoRA(parts.get("B"), parts.get("A")))]
    if m == 0:
        return [(1.0, begun)]
    if m == 1:
        return [(1.0, _plain(sent))]
    if how == "terms":
        return [(m, _plain(sent)), (1 - m, begun)]
    (B, A), (B_0, A_0) = sent.factors, begun.factors
    return [(1.0, LoRA(*(t.to(B.dtype) for t in shortest([(m, B, A), (1 - m, B_0, A_0)]))))]


def plain_pair(sent: LoRA) -> LoRA:
    """The same update as a pair of orthogonal columns, none of which cancel, of `sent`'s rank and dtype: the last ones
    may be zero."""
    B, A = (t.to(sent.factors[0].dtype) for t in shortest([(1.0, *sent.factors)]))
    return LoRA(_padded(B, len(B), sent.rank), _padded(A, sent.rank, A.shape[1]))


def _plain(sent: LoRA) -> LoRA:
    """`sent` itself, or where its terms cancel its `plain_pair`."""
    return plain_pair(sent) if cancels(*sent.factors, _CANCELS) else sent


def _moved(sent: Tensor, begun: Tensor, m: float) -> Tensor:
    """begun + m (sent - begun); where shapes differ (a client sent fewer columns than it was given), of the larger."""
    if sent.shape != begun.shape:
        rows, columns = (max(a, b) for a, b in zip(sent.shape, begun.shape, strict=True))
        sent, begun = (_padded(t, rows, columns) for t in (sent, begun))
    return torch.lerp(begun.double(), sent.double(), m).to(sent.dtype)


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]))


__all__ = ["How", "TakesMultipliers", "multiplied", "multiplied_how", "plain_pair"]
