"""How far each client's update moves from what it was sent, and who moves much further than the others.

A number to look at, which the log tells; what weighs changes is a robust rule (`fedlora.server.robust_rules`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch

from fedlora.core.lora import LoRA, change_of
from fedlora.core.messages import Download, Upload

FAR = 10.0  # times the median


def update_norm(upload: Upload, download: Download) -> float:
    """sqrt of the sum over modules of ||B A - B_0 A_0||_F^2: how far the client moved from its readout (B_0, A_0).

    The same for every gauge (B Q, Q^-1 A), whatever the rank, and without a dense product. A frozen factor is the
    download's. Where a factor stays at the client it is the norm of the other one's own change, which has no such
    meaning, but is alike for all clients of the round.
    """
    total = 0.0
    for name, lora in upload.adapter.modules.items():
        began = download.adapter.modules.get(name)
        total += _moved(lora, began) ** 2
    return math.sqrt(total)


def far_ones(norms: Mapping[str, float], times: float = FAR) -> dict[str, float]:
    """client -> how many medians its norm is, of those who are over `times`; infinite over a median of zero.

    The lower one of two medians: of two clients, the smaller norm.

    Example:
        >>> far_ones({"a": 1.0, "b": 1.2, "c": 90.0})
        {'c': 75.0}
    """
    if len(norms) < 2:
        return {}
    middle = statistics.median_low(norms.values())
    found = {name: norm / middle if middle else (math.inf if norm else 0.0) for name, norm in norms.items()}
    return {name: ratio for name, ratio in found.items() if ratio > times}


def _moved(lora: LoRA, began: LoRA | None) -> float:
    mine = lora.tensors()
    theirs = {} if began is None else began.tensors()
    if began is not None and len(theirs) == 2:
        return change_of(lora, began).norm()
    B, A = (mine.get(factor, theirs.get(factor)) for factor in ("B", "A"))
    if B is not None and A is not None:
        return LoRA(B, A).norm()
    (factor, moved), *_ = mine.items()
    before = theirs.get(factor)
    alike = before is not None and before.shape == moved.shape
    change = moved.double() - before.double() if before is not None and alike else moved.double()
    return float(torch.linalg.vector_norm(change))


__all__ = ["FAR", "far_ones", "update_norm"]
