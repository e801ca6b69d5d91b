"""How the base weight of one matrix has moved since pre-training: the whole change, and its newest steps.

FedEx-LoRA and FLoRA move the base weight in every round. A client that took part lately needs the newest steps only;
one that was away, or is new, needs more of them or the whole. Both are factor pairs, and whichever is smaller travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, stack
from fedlora.linalg import svd_of_product

# What a recompression may cut, all together, relative to the change: 1,000 steps stay within 1e-9 of their sum even if
# every one cuts that much in the same direction. docs/decisions/0013-exact-means-exact.md
_INVISIBLE = 1e-12


@dataclass(frozen=True, eq=False)
class BaseChange:
    """total: the change since pre-training in float64, recompressed (rank <= min(d_out, d_in)), so that a thousand
    steps do not drift from their sum.

    version: how many steps it is made of. steps: the newest of them, oldest first. Older ones are dropped once all
    steps kept would be larger than the total itself, so the state is at most twice its size.
    """

    TAG: ClassVar[str] = "base-change/1"

    total: LoRA
    version: int
    steps: tuple[LoRA, ...]

    def since(self, version: int) -> tuple[LoRA, ...] | None:
        """The steps after `version`; None where not all of them are kept, so that the total has to do."""
        behind = self.version - version
        if not 0 <= behind <= len(self.steps):
            return None
        return self.steps[len(self.steps) - behind :]


def moved(base: BaseChange | None, step: LoRA, dtype: torch.dtype | None = None) -> BaseChange | None:
    """`base` after one more step, both recompressed exactly; unchanged where the step is zero.

    dtype: of the step as it is kept and sent; None: its own. The total takes it as it came.
    """
    exact, step = step, compressed(step, dtype)
    if step.rank == 0:
        return base
    if base is None:
        return BaseChange(_balanced(exact.map(Tensor.double), _INVISIBLE), 1, (step,))
    total = added(base.total, exact)
    steps = (*base.steps, step)
    while sum(kept.rank for kept in steps) > total.rank:
        steps = steps[1:]
    return BaseChange(total, base.version + 1, steps)


def added(total: LoRA, step: LoRA) -> LoRA:
    """total + step as one pair in float64, with as many columns as it has rank, balanced."""
    return _balanced(stack([total.map(Tensor.double), step.map(Tensor.double)], [1.0, 1.0]), _INVISIBLE)


def compressed(lora: LoRA, dtype: torch.dtype | None = None) -> LoRA:
    """The same update with as many columns as it has rank, balanced, in a dtype (None: its own)."""
    dtype = dtype or lora.factors[0].dtype
    return _balanced(lora.map(Tensor.double), torch.finfo(dtype).eps / 8).map(lambda t: t.to(dtype))


def _balanced(lora: LoRA, invisible: float) -> LoRA:
    """`lora` (float64) less a tail whose norm is at most `invisible` of its own."""
    B, A = lora.factors
    spectrum = svd_of_product(B, A, tolerance=0.0)
    left_out = spectrum.s.square().flip(0).cumsum(0).flip(0)
    kept = spectrum.head(int((left_out > invisible**2 * left_out[:1]).sum()))
    return LoRA(*kept.balanced)
