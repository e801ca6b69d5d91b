"""Checks what a method returns before it is used, so that no client is blamed for a method's fault."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import torch

from fedlora.core.base_change import BaseChange
from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Role, Roles
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


def checked_states(method: Method[Any], function: str, made: Any, count: int) -> list[Any]:
    """`made`, if it is `count` of the method's states. Raises `MethodFault`."""
    # No checkpoint could read back a subclass.
    if not isinstance(made, list) or [type(state) for state in made] != [method.State] * count:
        raise MethodFault(
            f"{method.name}.{function} returned {made!r:.80}; {count} of its State {method.State.__name__} are needed."
        )
    return made


def checked_diagnostics(method: Method[Any], state: Any) -> Mapping[str, object]:
    """The method's diagnostics of a state, if they are a mapping. Raises `MethodFault`."""
    with blamed_on(method, "diagnostics"):
        made = method.diagnostics(state)
    if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
        raise MethodFault(f"{method.name}.diagnostics(state) returned {made!r:.80}; names and plain values are needed.")
    return made


def checked_effective(method: Method[Any], state: Any, start: LoRA) -> LoRA | None:
    """The method's whole update, if it is one of the same matrix as `start`, or None. Raises `MethodFault`."""
    with blamed_on(method, "effective"):
        made = method.effective(state)
    if made is not None:
        _require_pair(f"{method.name}.effective(state) returned", made, start)
    return made


def checked_base(method: Method[Any], state: Any, start: LoRA) -> BaseChange | None:
    """How the base weight has moved, if it is a change of the same matrix as `start`, or None. Raises `MethodFault`."""
    with blamed_on(method, "base"):
        made = method.base(state)
    if made is not None:
        what = f"{method.name}.base(state) returned"
        if not isinstance(made, BaseChange):
            raise MethodFault(f"{what} {made!r:.80}; a BaseChange is needed, or None.")
        for moved in (made.total, *made.steps):
            _require_pair(what, moved, start)
    return made


def checked_readout(method: Method[Any], made: Any, start: LoRA, rank: int, roles: Roles) -> LoRA:
    """The parts of `made` that travel, if a client can start from them: slots, shapes, one dtype, finite numbers.

    Args:
        start: the module's, for d_out and d_in.

    Raises:
        MethodFault: it is anything else.
    """
    what = f"{method.name}.readout(state, client, {rank}) returned"
    if not isinstance(made, LoRA):
        raise MethodFault(f"{what} {made!r:.80}; a LoRA is needed.")
    wanted = tuple(factor for factor in ("B", "A") if getattr(roles, factor) != "local")
    parts = {factor: t for factor, t in made.tensors().items() if factor in wanted}
    if len(parts) < len(wanted):
        raise MethodFault(f"{what} {made!r}; its roles ({roles}) send {' and '.join(wanted)}.")
    if made.rank > rank or (made.rank < rank and not roles.both_shared):
        least = "at most" if roles.both_shared else "exactly, because no server can fill a frozen or local factor"
        raise MethodFault(f"{what} {made.rank} slots; {rank} are needed, {least}.")
    B, A = start.factors
    expected = {"B": (B.shape[0], made.rank), "A": (made.rank, A.shape[1])}
    for factor, tensor in parts.items():
        if tuple(tensor.shape) != expected[factor]:
            raise MethodFault(f"{what} {factor} of shape {tuple(tensor.shape)}; it must be {expected[factor]}.")
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.device != B.device:
            raise MethodFault(
                f"{what} {factor} as {tensor.dtype} on {tensor.device}; float32 or float64 on {B.device} are needed."
            )
        # A sum is finite only if every entry is, almost always: one pass without a mask, for every client's download.
        if not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            raise MethodFault(
                f"{what} {factor} that holds NaN or Inf, but the clients' uploads did not. The method or its numerics "
                f"failed; no client is to blame."
            )
    if len({tensor.dtype for tensor in parts.values()}) > 1:
        raise MethodFault(f"{what} factors of two dtypes: {', '.join(f'{f} {t.dtype}' for f, t in parts.items())}.")
    return LoRA(parts.get("B"), parts.get("A")) if parts else made


def checked_roles(method: Method[Any], round: int) -> Roles:
    """The method's roles in a round, if they are `Roles`. Raises `MethodFault`."""
    with blamed_on(method, "roles"):
        made = method.roles(round)
    if not isinstance(made, Roles) or not {made.B, made.A, made.heads} <= set(get_args(Role)):
        raise MethodFault(f"{method.name}.roles(round) returned {made!r:.80}; Roles of {get_args(Role)} are needed.")
    return replace(made, moves_base=method.moves_base)


def _require_pair(what: str, made: Any, start: LoRA) -> None:
    (B, A) = start.factors
    pair = isinstance(made, LoRA) and len(made.tensors()) == 2
    if not pair or (made.factors[0].shape[0], made.factors[1].shape[1]) != (B.shape[0], A.shape[1]):
        raise MethodFault(f"{what} {made!r:.80}; both factors of an update like {start!r} are needed.")
