"""What an adapter does to one stored tensor, computed in float64 and rounded once.

Update     W + B A, turned as the weight is kept       linear layers, Conv1D, convolutions, embeddings, experts
Replaced   the adapter's own tensor                    modules_to_save, trained biases, embeddings saved in full
Added      W + b                                       the bias of lora_B
Rows       W with some rows replaced                   trainable_token_indices
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.adapters.layouts import Layout
from fedlora.adapters.reader import AdapterFile
from fedlora.errors import AdapterFormatError
from fedlora.linalg import norm

_BLOCK = 2**21  # numbers that are held in float64 at a time

# (matrix, first row, end, rows in float64) -> the rows, changed, and what was added to them: their difference would
# lose an update that is small beside them.
Changing = Callable[[int, int, int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Update:
    """The update of the pair at `path`. transposed: the weight is kept the other way round. times: how often it
    counts."""

    file: AdapterFile
    path: str
    layout: Layout
    transposed: bool
    times: float = 1.0

    def ready(self) -> Changing:
        pairs = []
        for module in self.layout.modules(self.path):
            pair, scale = self.file.unscaled(module)
            B, A = (factor.double() for factor in pair.factors)
            B = B * (self.times * scale)
            pairs.append((A.mT, B.mT) if self.transposed else (B, A))

        def change(m: int, i: int, j: int, rows: Tensor) -> tuple[Tensor, Tensor]:
            added = pairs[m][0][i:j] @ pairs[m][1]
            return rows + added, added

        return change


@dataclass(frozen=True, eq=False)
class Replaced:
    file: AdapterFile
    head: str

    def ready(self) -> Changing:
        (value,) = matrices(self.file.head(self.head), experts=False)
        return lambda m, i, j, rows: (value[i:j].double(), value[i:j].double() - rows)


@dataclass(frozen=True, eq=False)
class Added:
    file: AdapterFile
    head: str

    def ready(self) -> Changing:
        (value,) = matrices(self.file.head(self.head), experts=False)
        return lambda m, i, j, rows: (rows + value[i:j].double(), value[i:j].double())


@dataclass(frozen=True, eq=False)
class Rows:
    """indices: the row of the weight that each row of the adapter's tensor takes the place of."""

    file: AdapterFile
    head: str
    indices: Sequence[int]

    def ready(self) -> Changing:
        value, place = self.file.head(self.head), {row: k for k, row in enumerate(self.indices)}

        def change(m: int, i: int, j: int, rows: Tensor) -> tuple[Tensor, Tensor]:
            here = [row for row in range(i, j) if row in place]
            if not here:
                return rows, torch.zeros_like(rows)
            new = rows.clone()
            new[[row - i for row in here]] = value[[place[row] for row in here]].double()
            return new, new - rows

        return change


Step = Update | Replaced | Added | Rows


@dataclass(frozen=True)
class Rounding:
    """What writing in a narrow type costs: the norms of the update and of what is lost of it. vanished: no number of a
    tensor changed, though it should."""

    update: float = 0.0
    lost: float = 0.0
    vanished: bool = False

    @property
    def loss(self) -> float:
        """|written - meant| / |update|, 0 for no update."""
        return self.lost / self.update if self.update else 0.0


def matrices(weight: Tensor, *, experts: bool) -> list[Tensor]:
    """A tensor as matrices that share its memory: one, or one for each expert."""
    if experts and weight.dim() == 3:
        return list(weight)
    return [weight.reshape(-1, 1) if weight.dim() < 2 else weight.flatten(1)]


def changed(name: str, before: Tensor, steps: Sequence[Step], dtype: torch.dtype) -> tuple[Tensor, Rounding]:
    """The tensor with all steps done, in `dtype`, and what rounding to it has cost.

    Raises:
        AdapterFormatError: a number is beyond what `dtype` holds, or the base model's own are not finite.
    """
    if not before.is_floating_point():
        return _exchanged(name, before, steps), Rounding()
    ready = [step.ready() for step in steps]
    experts = any(isinstance(step, Update) and step.layout.kind == "parameter" for step in steps)
    after = torch.empty(before.shape, dtype=dtype)
    update = lost = 0.0
    same = True
    for m, (old, new) in enumerate(
        zip(matrices(before, experts=experts), matrices(after, experts=experts), strict=True)
    ):
        height = max(1, _BLOCK // max(1, old.shape[1]))
        for i in range(0, len(old), height):
            j = min(i + height, len(old))
            start = old[i:j].double()
            exact, meant = start, torch.zeros_like(start)
            for change in ready:
                exact, added = change(m, i, j, exact)
                meant += added
            new[i:j] = exact.to(dtype)
            written = new[i:j].double()
            _refuse_infinite(name, start, exact, written, dtype)
            update = math.hypot(update, float(norm(meant)))
            lost = math.hypot(lost, float(norm((written - start) - meant)))
            same = same and torch.equal(written, start)
    return after, Rounding(update, lost, vanished=same and update > 0)


def _refuse_infinite(name: str, start: Tensor, exact: Tensor, written: Tensor, dtype: torch.dtype) -> None:
    if bool(torch.isfinite(written).all()):
        return
    short = str(dtype).removeprefix("torch.")
    if not bool(torch.isfinite(start).all()):
        raise AdapterFormatError(f"the base model's {name!r} holds NaN or Inf itself.")
    worst = float(exact.abs().max())
    raise AdapterFormatError(
        f"{name!r} would hold {worst:.6g} with the adapter in it, beyond {short}'s largest number "
        f"{torch.finfo(dtype).max:.6g}. Write with --dtype float32, or ask how the adapter came to such an update."
    )


def _exchanged(name: str, before: Tensor, steps: Sequence[Step]) -> Tensor:
    """A tensor of whole numbers, such as a buffer of a saved module: replaced by one of its own type, or refused."""
    if len(steps) == 1 and isinstance(steps[0], Replaced):
        value = steps[0].file.head(steps[0].head)
        if value.dtype == before.dtype:
            return value.reshape(before.shape)
    kind = str(before.dtype).removeprefix("torch.")
    raise AdapterFormatError(f"the base model's {name!r} is of type {kind}: whole numbers cannot take an update.")
