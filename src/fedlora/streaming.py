"""Uploads that are folded in and dropped: what `OpenRound` does once a round's uploads outgrow the server's memory.

While they fit in half of it they are kept as they came, and the round is `Method.aggregate`, bit for bit. Beyond that,
this half takes in new ones until it is full, and the other holds what all before were folded into (`columns` for each
matrix). A method takes part by two functions more, `fold` and `aggregate_folded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from fedlora.client import Upload
from fedlora.errors import HyperparameterError
from fedlora.lora import Adapter
from fedlora.method import Update
from fedlora.parallel import Each

S = TypeVar("S")
F = TypeVar("F")


@runtime_checkable
class FoldingMethod(Protocol[S, F]):
    """A method that can forget uploads before the round is over. Updates come with weights n_i, not yet shares.

    F: what it folds them into, any value that knows its `nbytes`.
    """

    def require_folding(self) -> None:
        """Raises `HyperparameterError` where its options need all uploads at once."""

    def fold(self, folded: F | None, updates: Sequence[Update], columns: int) -> F:
        """`folded` (None: nothing yet) and some more updates of one matrix, in at most `columns` columns."""

    def aggregate_folded(self, state: S, folded: F, total: float) -> S:
        """The next state from all that was folded, total: what the weights add up to."""


class Stream:
    """What one round's uploads were folded into. Mutable, as the open round that owns it.

    Args:
        method: a `FoldingMethod`. start: gives each matrix's shape. memory: bytes, for what is held and for what it was
            folded into together; while folding, as much again for a moment.

    Raises:
        HyperparameterError: the memory is less than `start` needs twice.
    """

    def __init__(self, method: FoldingMethod[Any, Any], start: Adapter, memory: float) -> None:
        self.room = memory / 2
        column = 4 * sum(B.shape[0] + A.shape[1] for B, A in (lora.factors for lora in start.modules.values()))
        self.columns = int(self.room // column)
        largest = max(start.ranks.values())
        if self.columns < largest:
            raise HyperparameterError(
                f"Server: {memory / 2**20:g} MB leave room for {self.columns} columns in each matrix, and one client "
                f"of rank {largest} needs {largest}. Give at least {2 * largest * column / 2**20:.1f} MB."
            )
        self._method = method
        self._folded: dict[str, Any] = {}
        self._weights: dict[str, float] = {}
        self._heads: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what was folded so far."""
        return sum(folded.nbytes for folded in self._folded.values())

    @property
    def used(self) -> bool:
        """Whether anything was folded yet."""
        return bool(self._weights)

    def take(
        self, updates: Mapping[str, Sequence[Update]], heads: Sequence[tuple[Mapping[str, Tensor], float]], each: Each
    ) -> None:
        """Fold in some uploads: module -> updates with weights n_i; and each one's heads with its n_i."""

        def folded(name: str) -> Any:
            us = updates[name]
            columns = self.columns * 4 // us[0].B.element_size()
            return self._method.fold(self._folded.get(name), us, columns)

        sent = [name for name, us in updates.items() if us]
        self._folded |= dict(zip(sent, each(folded, sent), strict=True))
        for name, us in updates.items():
            self._weights[name] = self._weights.get(name, 0.0) + sum(u.weight for u in us)
        for tensors, n in heads:
            for name, head in tensors.items():
                more = n * head.detach().double()
                self._heads[name] = self._heads[name] + more if name in self._heads else more

    def modules(self, states: Mapping[str, Any], everyone: float | None, each: Each) -> dict[str, Any]:
        """The next states. everyone: the sum of all clients' n_i where those without a module count as zero updates."""

        def after(name: str) -> Any:
            return self._method.aggregate_folded(states[name], self._folded[name], everyone or self._weights[name])

        return {**states, **dict(zip(self._folded, each(after, list(self._folded)), strict=True))}

    def heads(self, before: Mapping[str, Tensor], everyone: float) -> dict[str, Tensor]:
        """The mean heads, in the dtypes of `before`."""
        return {name: (self._heads[name] / everyone).to(head.dtype) for name, head in before.items()}


def size(upload: Upload) -> int:
    """Bytes of an upload's tensors."""
    factors = [t for lora in upload.adapter.modules.values() for t in lora.tensors().values()]
    return sum(t.nbytes for t in (*factors, *upload.adapter.heads.values()))
