"""How much memory and work an operation will take, by the shapes in the headers: refused before it begins.

Upper bounds, by what the operations hold at their fullest; `tests/adapters/test_limits.py` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedlora.adapters.limits import Limits
from fedlora.adapters.untrusted_files import SIZES, Stored
from fedlora.errors import AdapterFormatError

Pair = Sequence[Stored]  # the stored tensors of one module: B, A, and AdaLoRA's E


def bytes_to_read(tensors: Iterable[Stored]) -> int:
    """To have tensors in memory in units of a scaling: as stored, widened to float32 or float64, and multiplied."""
    return sum(t.size + 2 * math.prod(t.shape) * max(4, SIZES[t.dtype]) for t in tensors)


def bytes_to_merge(pairs: Sequence[Pair]) -> int:
    """To merge one module of several adapters (`truncation.merge_module`).

    Held at once: the pairs as read; float64 copies of them, stacked, with weights; and four matrices of their size
    (Q of both sides, U, V) in float32, or float64 where a factor is; beside them a few R x R ones, R the sum of ranks.
    """
    numbers = sum(math.prod(t.shape) for pair in pairs for t in pair)
    rank = sum(pair[1].shape[0] for pair in pairs)
    wide = max([4, *(SIZES[t.dtype] for pair in pairs for t in pair)])
    least = sum(min(pair[0].shape[0], math.prod(pair[1].shape[1:])) for pair in pairs)
    square = min(rank, max(least, 1)) ** 2
    return sum(bytes_to_read(pair) for pair in pairs) + numbers * (3 * 8 + 4 * wide) + 6 * square * 8


def work_to_merge(pairs: Sequence[Pair]) -> int:
    """Floating-point operations of the weighted sum of one module's pairs: QR of both sides, SVD of what is between."""
    rank = sum(pair[1].shape[0] for pair in pairs)
    sides = max(pair[0].shape[0] for pair in pairs), max(math.prod(pair[1].shape[1:]) for pair in pairs)
    core = min(rank, *sides)
    return 4 * sum(sides) * rank * core + 40 * core**3


def bytes_to_average(tensors: Sequence[Stored]) -> int:
    """To average one fully trained tensor of several adapters: each as stored and widened, and their mean."""
    return 2 * bytes_to_read(tensors)


def check_work(modules: Iterable[Sequence[Pair]], limits: Limits) -> None:
    """Raises `AdapterFormatError` where the sums of all modules are more work than `limits.work`."""
    work = sum(map(work_to_merge, modules))
    hours = work / 10**10 / 3600
    limits.check("work", work, f"the ranks of these adapters need {work:,} operations, some {hours:.2g} h on two cores")


def check(needed: int, what: str, limits: Limits) -> None:
    """Raises `AdapterFormatError` where an operation would take more than `limits.memory`. what: "merging 'q'"."""
    if needed > limits.memory:
        raise AdapterFormatError(
            f"{what} would take {needed:,} bytes of memory, more than the {limits.memory:,} allowed (by default half "
            f"of this machine's); --limit memory={needed} would allow it."
        )
