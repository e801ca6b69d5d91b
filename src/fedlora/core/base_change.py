"""How one matrix's base weight has moved since pre-training: the total change, and its newest steps.

FedEx-LoRA and FLoRA move the base weight in every round. A client that took part recently needs only the newest steps;
a new client, or one that was away, needs more of them or the total. Both are factor pairs; the smaller one is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, stack
from fedlora.linalg import Spectrum, svd_of_product

# The most that all recompressions together may cut, relative to the change: 1,000 steps stay within 1e-9 of their sum
# even if every one cuts that much in the same direction. docs/decisions.md, 0013
_INVISIBLE = 1e-12


@dataclass(frozen=True, eq=False)
class BaseChange:
    """total: the change since pre-training in float64, of at most min(d_out, d_in) columns, so that a thousand steps do
    not drift from their sum.

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


def moved(base: BaseChange | None, step: Spectrum, dtype: torch.dtype) -> BaseChange | None:
    """`base` after one more step; unchanged if the step is zero.

    step: in float64, as the total adds it. dtype: how the step is kept and sent.
    """
    cut = _cut(step, _INVISIBLE)
    exact, sent = LoRA(*cut.balanced()), _stored(cut, dtype)
    if sent.rank == 0:
        return base
    if base is None:
        return BaseChange(exact, 1, (sent,))
    total = _joined(base.total, exact)
    steps = (*base.steps, sent)
    while sum(kept.rank for kept in steps) > total.rank:
        steps = steps[1:]
    return BaseChange(total, base.version + 1, steps)


def added(total: LoRA, step: LoRA) -> LoRA:
    """total + step as one balanced float64 pair with as many columns as its rank."""
    return _balanced(stack([total.map(Tensor.double), step.map(Tensor.double)], [1.0, 1.0]))


def _joined(total: LoRA, step: LoRA) -> LoRA:
    """total + step, float64: side by side; from min(d_out, d_in) columns on, as the matrix itself beside I.

    Steps hardly ever share directions, so an SVD of all columns in each round would find nothing to leave out. Only
    where they cancel, and a narrow dtype would round columns much larger than their sum, it is made.
    """
    pair = stack([total, step], [1.0, 1.0])
    B, A = pair.factors
    if pair.rank >= min(len(B), A.shape[1]):
        one = torch.eye(min(len(B), A.shape[1])).to(B)
        return LoRA(B @ A, one) if A.shape[1] <= len(B) else LoRA(one, B @ A)
    products = (B.mT @ B) * (A @ A.mT)  # <b_j a_j, b_k a_k>
    cancels = float(products.sum()) < float(products.diagonal().sum()) / 16
    return _balanced(pair) if cancels else pair


def _balanced(lora: LoRA) -> LoRA:
    """`lora` (float64) as a balanced pair in energy order, less what is invisible."""
    return LoRA(*_cut(svd_of_product(*lora.factors), _INVISIBLE).balanced())


def _stored(spectrum: Spectrum, dtype: torch.dtype) -> LoRA:
    return LoRA(*_cut(spectrum, torch.finfo(dtype).eps / 8).balanced()).map(lambda t: t.to(dtype).contiguous())


def _cut(spectrum: Spectrum, invisible: float) -> Spectrum:
    """Less a tail whose norm is at most `invisible` of its own."""
    left_out = spectrum.s.square().flip(0).cumsum(0).flip(0)
    return spectrum.head(int((left_out > invisible**2 * left_out[:1]).sum()))
