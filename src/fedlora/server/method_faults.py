"""Calls a method's functions, so that no client is blamed for a method's fault. The contracts say more of a method."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Roles
from fedlora.errors import FedLoRAError, MethodFault


def call(method: Method[Any], function: str, *given: Any) -> Any:
    """What the method's function returns. Its errors become a `MethodFault` with its name; fedlora's own pass."""
    try:
        return getattr(method, function)(*given)
    except FedLoRAError:
        raise
    except Exception as error:
        raise MethodFault(
            f"{method.name}.{function} raised {type(error).__name__}: {error}. This is a fault of the method, not of "
            f"a client or a setting; `fedlora methods check` runs the contracts that a method must keep."
        ) from error


def checked_states(method: Method[Any], function: str, made: list[Any], count: int) -> list[Any]:
    """`made`, if it is `count` of the method's states. Raises `MethodFault`."""
    # No checkpoint could read back a subclass.
    if [type(state) for state in made] != [method.State] * count:
        raise MethodFault(
            f"{method.name}.{function} returned {made!r:.80}; {count} of its State {method.State.__name__} are needed."
        )
    return made


def checked_readout(method: Method[Any], made: LoRA, start: LoRA, rank: int, roles: Roles) -> LoRA:
    """The parts of `made` that travel, if a client can start from them: slots, shapes, dtype, finite numbers.

    Args:
        start: the module's, for d_out, d_in and the device.

    Raises:
        MethodFault: it is anything else.
    """
    what, (B, A) = f"{method.name}.readout(state, client, {rank}) returned", start.factors
    if not isinstance(made, LoRA):
        raise MethodFault(f"{what} {made!r:.60}; a LoRA is needed.")
    if made.rank > rank or (made.rank < rank and not roles.both_shared):
        least = "at most" if roles.both_shared else "exactly, because no server can fill a frozen or local factor"
        raise MethodFault(f"{what} {made.rank} slots; {rank} are needed, {least}.")
    parts: dict[str, Tensor | None] = {"B": None, "A": None}
    for factor, shape in (("B", (B.shape[0], made.rank)), ("A", (made.rank, A.shape[1]))):
        if getattr(roles, factor) == "local":
            continue
        tensor = parts[factor] = made.tensors().get(factor)
        if tensor is None or tuple(tensor.shape) != shape:
            raise MethodFault(f"{what} {made!r}; {factor} of shape {shape} is needed.")
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.device != B.device:
            raise MethodFault(
                f"{what} {factor} as {tensor.dtype} on {tensor.device}; float32 or float64 on {B.device} are needed."
            )
        # A sum is finite only if every entry is, almost always: one pass without a mask, for every client's download.
        if not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise MethodFault(f"{what} {factor} that holds NaN or Inf, and no upload did: its numerics failed.")
    return LoRA(**parts)
