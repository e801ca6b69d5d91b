"""How far each client's update moves from its readout, and which clients move much further than the others.

The log reports it for people; a robust rule (`fedlora.server.robust_rules`) is what weighs changes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, change_of
from fedlora.core.messages import Download, Upload

FAR = 10.0  # times the median


def update_norm(upload: Upload, download: Download) -> float:
    """sqrt of the sum over modules of ||B A - B_0 A_0||_F^2: how far the client moved from its readout (B_0, A_0).

    Heads do not count. A frozen factor is the download's. If a factor stays at the client, it is the norm of only the
    other one's change, which depends on coordinates, but equally for all clients of the round.
    """
    begun = download.adapter.modules
    return math.hypot(*(_moved(lora, begun.get(name)) for name, lora in upload.adapter.modules.items()))


def _moved(lora: LoRA, begun: LoRA | None) -> float:
    if begun is not None and len(begun.tensors()) == 2:
        return change_of(lora, begun).norm()
    if len(lora.tensors()) == 2:
        return lora.norm()
    ((factor, tensor),) = lora.map(Tensor.double).tensors().items()
    was = None if begun is None else begun.tensors().get(factor)
    return float(torch.linalg.vector_norm(tensor if was is None or was.shape != tensor.shape else tensor - was))


def far_ones(norms: Mapping[str, float]) -> dict[str, float]:
    """client -> its norm in medians, for clients above `FAR`; infinite if the median is zero.

    Of an even number of norms it takes the lower median: with two clients, the smaller norm.

    Example:
        >>> far_ones({"a": 1.0, "b": 1.2, "c": 90.0})
        {'c': 75.0}
    """
    if len(norms) < 2:
        return {}
    middle = statistics.median_low(norms.values())
    found = {name: norm / middle if middle else (math.inf if norm else 0.0) for name, norm in norms.items()}
    return {name: ratio for name, ratio in found.items() if ratio > FAR}


__all__ = ["FAR", "far_ones", "update_norm"]
