"""Processes many small matrices in few calls: stacks those of one kind, as many as fit in a core's cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from fedlora.linalg.parallel import Each, Y, one_by_one
from fedlora.linalg.shapes import Tensor

# Bytes of one stacked operand, so that it and its products stay in a core's cache.
CACHED = 2**20


def in_batches(
    work: Callable[[list[int]], Sequence[Y]],
    kinds: Sequence[Hashable],
    nbytes: Sequence[int],
    each: Each = one_by_one,
    most: int = CACHED,
) -> list[Y]:
    """Calls `work` on the indices of equal kinds, in batches of about `most` bytes, and returns the results by index.
    `each` runs the batches; it does not change them.

    Example:
        >>> in_batches(lambda at: [f"{k} of {at}" for k in at], ["a", "b", "a"], nbytes=[8] * 3)
        ['0 of [0, 2]', '1 of [1]', '2 of [0, 2]']
    """
    alike: dict[Hashable, list[int]] = {}
    for k, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(k)
    batches = []
    for members in alike.values():
        at_once = max(1, most // max(1, nbytes[members[0]]))
        batches += [members[first : first + at_once] for first in range(0, len(members), at_once)]
    found: dict[int, Y] = {}
    for members, made in zip(batches, each(work, batches), strict=True):
        found |= zip(members, made, strict=True)
    return [found[k] for k in range(len(kinds))]


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """The matrices as one tensor; a single one is not copied."""
    return torch.stack(list(matrices)) if len(matrices) > 1 else matrices[0][None]


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """||X||_F of each, tensors of one shape at once: in float32; in float64 if float32 overflows or the tensor is
    float64. Not finite if an entry is not."""
    kinds = [(t.shape, t.dtype, t.device) for t in tensors]
    return in_batches(partial(_norms, tensors), kinds, [8 * t.numel() for t in tensors])


def _norms(tensors: Sequence[Tensor], members: list[int]) -> list[float]:
    """The norms of the tensors at `members`, which have one shape and dtype."""
    X = stacked([tensors[k].detach() for k in members])
    X = X.reshape(len(members), X[0].numel())
    wide = torch.promote_types(X.dtype, torch.float32)
    plain: list[float] = torch.linalg.vector_norm(X, dim=1, dtype=wide).tolist()
    return [
        n if math.isfinite(n) else float(torch.linalg.vector_norm(x, dtype=torch.float64))
        for n, x in zip(plain, X, strict=True)
    ]
