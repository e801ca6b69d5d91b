"""A tensor's bytes as they lie in memory, for files and digests. Torch's own way is numpy, which the core lacks."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def stored_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of any shape, dtype and device, row by row, in the machine's order.

    Nothing is copied where the tensor is contiguous and on the CPU: the view then shows what is written to it later.
    """
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    if not size:
        return memoryview(b"")
    there = _bytes_that_hold(size).from_address(plain.data_ptr())
    there.held = plain  # the memory is the tensor's, so it has to stay while anybody looks at it
    return memoryview(there).cast("B")


def _bytes_that_hold(size: int) -> Any:
    """So many bytes as a class, whose values can have attributes."""
    return type("Bytes", (ctypes.c_ubyte * size,), {})
