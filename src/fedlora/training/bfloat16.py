"""bfloat16 on processors without bfloat16 instructions: the same products, at float32's speed.

On such a processor torch multiplies bfloat16 matrices in a plain loop, ten to thirty times slower than float32
(`benchmarks/bfloat16.py` measures it). The product of two bfloat16 numbers is exact in float32, so a float32 product
rounded at the end equals what the instructions give, up to summation order. This module computes that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = {
    nn.functional.linear,
    *(torch.matmul, torch.mm, torch.bmm),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
}


def has_instructions() -> bool:
    """Whether torch multiplies bfloat16 matrices with native instructions."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def bfloat16_autocast(device: torch.device, on: bool, network: nn.Module | None = None) -> Iterator[None]:
    """The mixed-precision context for the forward pass in training and evaluation. on: False: does nothing.

    network: with gradient checkpointing, the backward pass recomputes the forward one outside this context, so products
    are left to torch.
    """
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on):
        by_hand = on and device.type == "cpu" and not has_instructions()
        again = by_hand and getattr(network, "is_gradient_checkpointing", False)  # asks every module: not for nothing
        products: AbstractContextManager[Any] = _InFloat32() if by_hand and not again else nullcontext()
        with products:
            yield


class _InFloat32(TorchFunctionMode):
    """Computes linear layers and matrix products in float32 and rounds each once, forward and backward."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in _PRODUCTS or any(_left_alone(one) for one in (*args, *named.values())):
            return func(*args, **named)
        with torch.autocast("cpu", enabled=False):
            made: Tensor = func(*map(_rounded, args), **{name: _rounded(one) for name, one in named.items()})
        return made.bfloat16()


def _left_alone(one: Any) -> bool:
    """Autocast leaves float64 alone."""
    return isinstance(one, Tensor) and one.dtype == torch.float64


def _rounded(one: Any) -> Any:
    """The nearest bfloat16 numbers, held in float32. The backward pass rounds their gradient likewise."""
    return one.bfloat16().float() if isinstance(one, Tensor) else one
