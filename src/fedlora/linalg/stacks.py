"""Many small matrices in few calls: those of one kind as one stack, with the bits that each would have alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

X = TypeVar("X")
Y = TypeVar("Y")

# Bytes of one stacked operand in float64. Larger stacks lose more where one of them goes another way, and fresh memory
# of this size is slow. Tall products go by panels, which stay in a core's cache (`factored.PANEL`).
CACHED = 2**21


def in_stacks(
    work: Callable[[list[X]], list[Y] | None], items: Sequence[X], kind: Callable[[X], tuple[Hashable, int]]
) -> list[Y]:
    """The result of each item. kind: what the items of one stack share, and the bytes of one of them in float64.

    work: returns None, or raises, if the items of a stack do not all go the same way; then each goes alone. So no item
    changes another one's result: what decides is an item's own data.
    """
    alike: dict[Hashable, list[int]] = {}
    size = {}
    for k, item in enumerate(items):
        key, size[k] = kind(item)
        alike.setdefault(key, []).append(k)
    found: dict[int, Y] = {}
    for members in alike.values():
        most = max(1, CACHED // max(1, size[members[0]]))
        for at in (members[first : first + most] for first in range(0, len(members), most)):
            found |= zip(at, _worked(work, [items[k] for k in at]), strict=True)
    return [found[k] for k in range(len(items))]


def _worked(work: Callable[[list[X]], list[Y] | None], stack: list[X]) -> list[Y]:
    if len(stack) > 1:
        try:
            if (made := work(stack)) is not None:
                return made
        except ArithmeticError:  # of one of them, which raises it again when it goes alone
            pass
        return [y for x in stack for y in _worked(work, [x])]
    made = work(stack)
    assert made is not None, "one item always goes the same way as itself"
    return made


def aligned(*sides: int) -> bool:
    """Whether matrices of these sides, and of an even number of columns, begin at a multiple of 64 bytes in a float64
    stack, as torch lets a lone one begin. BLAS rounds differently where they do not."""
    return all(side % 4 == 0 for side in sides)


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """The matrices as one tensor (m, ...); a single one is not copied."""
    return torch.stack(list(matrices)) if len(matrices) > 1 else matrices[0][None]
