"""Estimates an operation's memory and work from the shapes in the headers, and refuses it before it begins.

The estimates are upper bounds on peak use; `tests/adapters/test_limits.py` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import SIZES, Stored
from fedlora.errors import AdapterFormatError

Pair = Sequence[Stored]  # the stored tensors of one module: B, A, and AdaLoRA's E


def bytes_to_read(tensors: Iterable[Stored]) -> int:
    """To hold scaled tensors in memory: as stored, widened to float32 or float64, and multiplied."""
    return sum(t.size + 2 * math.prod(t.shape) * max(4, SIZES[t.dtype]) for t in tensors)


def bytes_to_merge(pairs: Sequence[Pair]) -> int:
    """To merge one module of several adapters (`truncation.combine`).

    The peak holds the pairs as read; their float64 copies, stacked and weighted; four matrices of their size (Q of both
    sides, U, V) in float32, or float64 if a factor is; and a few R x R matrices, with R the sum of ranks.
    """
    numbers = sum(math.prod(t.shape) for pair in pairs for t in pair)
    rank = sum(pair[1].shape[0] for pair in pairs)
    wide = max([4, *(SIZES[t.dtype] for pair in pairs for t in pair)])
    least = sum(min(pair[0].shape[0], math.prod(pair[1].shape[1:])) for pair in pairs)
    square = min(rank, max(least, 1)) ** 2
    return sum(bytes_to_read(pair) for pair in pairs) + numbers * (3 * 8 + 4 * wide) + 6 * square * 8


def work_to_merge(pairs: Sequence[Pair]) -> int:
    """Floating-point operations for one module's weighted sum: QR of both sides, then an SVD of the core."""
    rank = sum(pair[1].shape[0] for pair in pairs)
    sides = max(pair[0].shape[0] for pair in pairs), max(math.prod(pair[1].shape[1:]) for pair in pairs)
    core = min(rank, *sides)
    return 4 * sum(sides) * rank * core + 40 * core**3


def bytes_to_average(tensors: Sequence[Stored]) -> int:
    """To average one fully trained tensor of several adapters: each stored and widened, plus their mean."""
    return 2 * bytes_to_read(tensors)


def check_work(modules: Iterable[Sequence[Pair]], limits: Limits) -> None:
    """Raise `AdapterFormatError` if summing all modules takes more work than `limits.work`."""
    work = sum(map(work_to_merge, modules))
    hours = work / 10**10 / 3600
    limits.check("work", work, f"the ranks of these adapters need {work:,} operations, some {hours:.2g} h on two cores")


def check(needed: int, what: str, limits: Limits) -> None:
    """Raise `AdapterFormatError` if an operation would exceed `limits.memory`. what: such as "merging 'q'"."""
    if needed > limits.memory:
        raise AdapterFormatError(
            f"{what} would take {needed:,} bytes of memory, more than the {limits.memory:,} allowed (by default half "
            f"of this machine's); --limit memory={needed} would allow it."
        )
