"""How far apart two values or states of a method are: bit for bit, or in what the server and clients see of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.method import Method
from fedlora.testing.federations import Ranks


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; ||got|| if want is zero, like a fresh adapter's product."""
    return float(torch.linalg.vector_norm(got - want) / (torch.linalg.vector_norm(want) if bool(want.any()) else 1.0))


def leaves(value: Any, path: str = "") -> dict[str, object]:
    """Path -> content: a tensor's dtype, shape and numbers (bit for bit, but for the sign of zero), or the type and
    `repr` of anything else."""
    if isinstance(value, Tensor):
        return {path: (value.dtype, tuple(value.shape), value.tolist())}
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    elif isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {path: (type(value).__name__, repr(value))}
    found: dict[str, object] = {}
    for key, item in value.items():
        found |= leaves(item, f"{path}/{key}")
    return found


def differing(got: Any, want: Any) -> list[str]:
    """The paths at which two values differ in any bit."""
    here, there = leaves(got), leaves(want)
    return sorted(path for path in here.keys() | there.keys() if here.get(path) != there.get(path))


def drift(method: Method[Any], got: Any, want: Any, ranks: Ranks) -> float:
    """How far apart two states are in the server's update; in readouts, if there is none."""
    ours, theirs = method.effective(got), method.effective(want)
    if ours is None or theirs is None:
        return readout_drift(method, got, want, ranks)
    return relative(ours.delta(), theirs.delta())


def readout_drift(method: Method[Any], got: Any, want: Any, ranks: Ranks) -> float:
    """The largest over clients, of the product, or of the one factor that travels."""
    drifts = []
    for name, r in ranks.items():
        ours, theirs = (method.readout(state, name, r) for state in (got, want))
        drifts.append(relative(_whole(ours), _whole(theirs)))
    return max(drifts, default=0.0)


def _whole(lora: LoRA) -> Tensor:
    """The product, or the one factor that travels."""
    parts = list(lora.tensors().values())
    return lora.delta() if len(parts) == 2 else parts[0]


def moved(method: Method[Any], got: Any, want: Any, ranks: Ranks) -> float:
    return max(drift(method, got, want, ranks), readout_drift(method, got, want, ranks))
