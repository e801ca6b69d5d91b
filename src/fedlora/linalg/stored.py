"""A tensor's bytes as they lie in memory, for files and digests. Torch needs numpy for this, which the core lacks."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def stored_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any shape, dtype and device, row by row, in the machine's order.

    A contiguous tensor on the CPU is not copied: the view then shows later writes to it.
    """
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if not size:
        return memoryview(b"")
    there = _bytes_that_hold(size).from_address(plain.data_ptr())
    there.held = plain  # keeps the tensor's memory alive as long as the view
    return memoryview(there).cast("B")


def _bytes_that_hold(size: int) -> Any:
    """A class of `size` bytes whose instances can have attributes."""
    return type("Bytes", (ctypes.c_ubyte * size,), {})
