"""A tensor's bytes as they lie in memory, for files and digests."""

from __future__ import annotations

import torch
from torch import Tensor


def stored_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any shape, dtype and device, row by row, in the machine's order.

    A contiguous tensor on the CPU is not copied: the view then shows later writes to it.
    """
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
