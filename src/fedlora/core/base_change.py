"""How one matrix's base weight has moved since pre-training: the total change, and its newest steps.

FedEx-LoRA and FLoRA move the base weight in every round. A client that took part recently needs only the newest steps;
a new client, or one that was away, needs more of them or the total. Both are factor pairs; the smaller one is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedlora.core.lora import LoRA
from fedlora.linalg import Spectrum, Term, projected_sum

# The most that all recompressions together may cut, relative to the change: 1,000 steps stay within 1e-9 of their sum
# even if every one cuts that much in the same direction. docs/decisions/0013-exact-means-exact.md
_INVISIBLE = 1e-12


@dataclass(frozen=True, eq=False)
class BaseChange:
    """total: the change since pre-training in float64, recompressed (rank <= min(d_out, d_in)), so that a thousand
    steps do not drift from their sum.

    version: the number of steps in it. steps: the newest steps, oldest first. Older steps are dropped once the kept
    ones would be larger than the total, so the state is at most twice the total's size.
    """

    total: LoRA
    version: int
    steps: tuple[LoRA, ...]

    def since(self, version: int) -> tuple[LoRA, ...] | None:
        """The steps after `version`; None if some were dropped, in which case the total must be sent."""
        behind = self.version - version
        if not 0 <= behind <= len(self.steps):
            return None
        return self.steps[len(self.steps) - behind :]


def moved(
    base: BaseChange | None, terms: Sequence[tuple[float, LoRA]], dtype: torch.dtype | None = None
) -> BaseChange | None:
    """`base` after one more step, sum_k w_k B_k A_k, both recompressed exactly; unchanged if the step is zero.

    dtype: how the step is kept and sent; None: as its first term. The total adds the step in float64.
    """
    dtype, exact = dtype or terms[0][1].factors[0].dtype, _sum(terms)
    step = _cut(exact, torch.finfo(dtype).eps / 8).map(lambda t: t.to(dtype))
    if step.rank == 0:
        return base
    if base is None:
        return BaseChange(_cut(exact, _INVISIBLE), 1, (step,))
    total = added(base.total, LoRA(*exact.balanced()))
    steps = (*base.steps, step)
    while sum(kept.rank for kept in steps) > total.rank:
        steps = steps[1:]
    return BaseChange(total, base.version + 1, steps)


def added(total: LoRA, step: LoRA) -> LoRA:
    """total + step as one balanced float64 pair with as many columns as its rank."""
    return _cut(_sum([(1.0, total), (1.0, step)]), _INVISIBLE)


def compressed(lora: LoRA, dtype: torch.dtype | None = None) -> LoRA:
    """The same update as a balanced pair with as many columns as its rank, in `dtype` (None: its own)."""
    dtype = dtype or lora.factors[0].dtype
    return _cut(_sum([(1.0, lora)]), torch.finfo(dtype).eps / 8).map(lambda t: t.to(dtype))


def _sum(terms: Sequence[tuple[float, LoRA]]) -> Spectrum:
    """In float64, from factors as they were stored: narrow ones take the faster way."""
    return projected_sum([Term(*lora.factors, w, 0.0) for w, lora in terms], dtype=torch.float64).spectrum


def _cut(spectrum: Spectrum, invisible: float) -> LoRA:
    """Less a tail whose norm is at most `invisible` of its own."""
    left_out = spectrum.s.square().flip(0).cumsum(0).flip(0)
    kept = spectrum.head(int((left_out > invisible**2 * left_out[:1]).sum()))
    return LoRA(*kept.balanced())
