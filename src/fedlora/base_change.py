"""How the base weight of one matrix has moved since pre-training: the whole change, and its newest steps.

FedEx-LoRA and FLoRA move the base weight in every round. A client that took part lately needs the newest steps only;
one that was away, or is new, needs more of them or the whole. Both are factor pairs, and whichever is smaller travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedlora.linalg import rank_tolerance, svd_of_product
from fedlora.lora import LoRA, stack


@dataclass(frozen=True, eq=False)
class BaseChange:
    """total: the change since pre-training, recompressed exactly (rank <= min(d_out, d_in)).

    version: how many steps it is made of. steps: the newest of them, oldest first. Older ones are dropped once all
    steps kept would be larger than the total itself, so the state is at most twice its size.
    """

    total: LoRA
    version: int
    steps: tuple[LoRA, ...]

    def since(self, version: int) -> tuple[LoRA, ...] | None:
        """The steps after `version`; None where not all of them are kept, so that the total has to do."""
        behind = self.version - version
        if not 0 <= behind <= len(self.steps):
            return None
        return self.steps[len(self.steps) - behind :]


def moved(base: BaseChange | None, step: LoRA) -> BaseChange | None:
    """`base` after one more step, both recompressed exactly; unchanged where the step is zero."""
    step = compressed(step)
    if step.rank == 0:
        return base
    if base is None:
        return BaseChange(step, 1, (step,))
    total = compressed(stack([base.total, step], [1.0, 1.0]))
    steps = (*base.steps, step)
    while sum(kept.rank for kept in steps) > total.rank:
        steps = steps[1:]
    return BaseChange(total, base.version + 1, steps)


def compressed(lora: LoRA) -> LoRA:
    """The same update with as many columns as it has rank, balanced."""
    B, A = lora.factors
    spectrum = svd_of_product(B, A, tolerance=rank_tolerance(B.dtype))
    root = spectrum.s.sqrt()
    return LoRA(spectrum.U * root, spectrum.Vh * root[:, None])
