"""bfloat16 on processors without instructions for it: the same products, at float32's speed.

On such a processor torch multiplies bfloat16 matrices in a plain loop, ten to thirty times slower than float32 ones
(`benchmarks/bfloat16.py` measures it). A product of two bfloat16 numbers is exact in float32, so that a float32 product
that is rounded at its end is what the instructions give, up to the order of the sum. That is what is done there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def has_instructions() -> bool:
    """Whether torch multiplies bfloat16 matrices by the processor's own instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def bfloat16_products(device: torch.device, on: bool) -> Iterator[None]:
    """Training and evaluation in bfloat16 autocast run in this, backward pass included.

    on: whether they are in bfloat16. Does nothing on other devices, and on a processor that has the instructions.
    """
    if on and device.type == "cpu" and not has_instructions():
        with _InFloat32():  # type: ignore[no-untyped-call]
            yield
    else:
        yield


class _InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives the class no types
    """Computes each product of bfloat16 matrices in float32, and rounds it once."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and all(_narrow(arg) for arg in args if isinstance(arg, Tensor)):
            wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
            return func(*wide, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def _narrow(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"
