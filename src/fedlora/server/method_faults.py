"""Checks what a method returns before it is used, so that no client is blamed for a method's fault."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor

from fedlora.core.base_change import BaseChange
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.method import Method, Readout, Role, Roles
from fedlora.core.method import readouts as method_readouts
from fedlora.errors import FedLoRAError, MethodFault


@contextmanager
def blamed_on(method: Method[Any], function: str) -> Iterator[None]:
    """Errors inside a method's function become a `MethodFault` with its name. fedlora's own errors pass."""
    try:
        yield
    except FedLoRAError:
        raise
    except Exception as error:
        raise MethodFault(
            f"{method.name}.{function} raised {type(error).__name__}: {error}. This is a fault of the method, not of "
            f"a client or a setting; `fedlora methods check` runs the contracts that a method must keep."
        ) from error


def checked_state(method: Method[Any], function: str, state: Any) -> Any:
    """`state`, if it is one of the method's. Raises `MethodFault`."""
    if type(state) is not method.State:  # no checkpoint could read back a subclass
        raise MethodFault(
            f"{method.name}.{function} returned a {type(state).__name__}; its State is {method.State.__name__}."
        )
    return state


def checked_diagnostics(method: Method[Any], state: Any) -> Mapping[str, object]:
    """The method's diagnostics of a state, if they are a mapping. Raises `MethodFault`."""
    with blamed_on(method, "diagnostics"):
        made = method.diagnostics(state)
    if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
        raise MethodFault(f"{method.name}.diagnostics(state) returned {made!r:.80}; names and plain values are needed.")
    return made


def checked_update(method: Method[Any], made: Any, start: LoRA) -> LoRA:
    """`made`, if it is a whole update of the same matrix as `start`. Raises `MethodFault`."""
    what = f"{method.name}.effective(state) returned"
    if not isinstance(made, LoRA) or len(made.tensors()) < 2:
        raise MethodFault(f"{what} {made!r:.80}; a LoRA with both factors is needed, or None for no global model.")
    (B, A), (of_B, of_A) = made.factors, start.factors
    if (B.shape[0], A.shape[1]) != (of_B.shape[0], of_A.shape[1]):
        raise MethodFault(
            f"{what} an update of a matrix {(B.shape[0], A.shape[1])}; the module is {(of_B.shape[0], of_A.shape[1])}."
        )
    return made


def checked_readout(method: Method[Any], made: Any, start: LoRA, rank: int, roles: Roles) -> Readout:
    """`made`, if a client can start from it: its rank, its matrix's shape, one dtype, and the parts that roles require.

    Args:
        start: the module's, for d_out and d_in.

    Raises:
        MethodFault: it is anything else.
    """
    what = f"{method.name}.readout(state, client, {rank}) returned"
    if not isinstance(made, Readout) or not isinstance(made.lora, LoRA):
        raise MethodFault(f"{what} {made!r:.80}; a Readout of a LoRA is needed.")
    B, A = start.factors
    parts = made.lora.tensors()
    expected = {"B": (B.shape[0], rank), "A": (rank, A.shape[1])}
    for factor, tensor in parts.items():
        if tuple(tensor.shape) != expected[factor]:
            raise MethodFault(f"{what} {factor} of shape {tuple(tensor.shape)}; it must be {expected[factor]}.")
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.device != B.device:
            raise MethodFault(
                f"{what} {factor} as {tensor.dtype} on {tensor.device}; float32 or float64 on {B.device} are needed."
            )
        _require_finite(f"{what} {factor}", tensor)
    if len({tensor.dtype for tensor in parts.values()}) > 1:
        raise MethodFault(f"{what} factors of two dtypes: {', '.join(f'{f} {t.dtype}' for f, t in parts.items())}.")
    wanted = {factor for factor in ("B", "A") if getattr(roles, factor) != "local"}
    if wanted - set(parts):
        lacks = ", ".join(sorted(wanted - set(parts)))
        raise MethodFault(f"{what} no {lacks}, which its roles do not leave to the client ({roles}).")
    if set(parts) - wanted:
        more = ", ".join(sorted(set(parts) - wanted))
        raise MethodFault(
            f"{what} {more}, which its roles leave to the client: it would overwrite what the client keeps."
        )
    if made.base is not None and not isinstance(made.base, BaseChange):
        raise MethodFault(f"{what} {made.base!r:.80} as a change of the base weight; a BaseChange is needed.")
    if made.base is not None:
        if not roles.moves_base:
            raise MethodFault(f"{what} a change of the base weight, and its roles do not say moves_base.")
        for moved in (made.base.total, *made.base.steps):
            _, right = moved.factors
            if (moved.factors[0].shape[0], right.shape[1]) != (B.shape[0], A.shape[1]):
                raise MethodFault(f"{what} a change of the base weight that is {moved!r}; the matrix is of {start!r}.")
            for tensor in moved.factors:
                _require_finite(f"{what} a change of the base weight that", tensor)
    return made


def readouts(
    method: Method[Any], states: Mapping[str, Any], start: Adapter, client: str, ranks: Mapping[str, int], roles: Roles
) -> dict[str, Readout]:
    """Module -> the readout for the client, at these ranks. states: module -> state; start: gives the shapes.

    Raises:
        MethodFault: no client can start from a readout. RankMismatch: the method cannot serve that rank.
    """
    with blamed_on(method, "readout"):
        made = method_readouts(method, [states[name] for name in ranks], client, list(ranks.values()))
        found = dict(zip(ranks, made, strict=True))
    return {name: checked_readout(method, one, start.modules[name], ranks[name], roles) for name, one in found.items()}


def checked_roles(method: Method[Any], made: Any) -> Roles:
    """`made`, if it is a `Roles`. Raises `MethodFault`."""
    if not isinstance(made, Roles) or not {made.B, made.A, made.heads} <= set(get_args(Role)):
        raise MethodFault(f"{method.name}.roles(round) returned {made!r:.80}; Roles of {get_args(Role)} are needed.")
    return made


def _require_finite(what: str, tensor: Tensor) -> None:
    # A sum is finite only if every entry is, almost always: one pass without a mask, for every client's download.
    if not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        raise MethodFault(
            f"{what} holds NaN or Inf, but the clients' uploads did not. The method or its numerics failed; no "
            f"client is to blame."
        )
