"""How two values differ bit by bit, as flat tables of their contents; and how far two states are apart, relatively."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.messages import Client
from fedlora.linalg.stored import stored_bytes
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.testing.federations import Ranks


def leaves(value: Any, path: str = "") -> dict[str, object]:
    """Path -> content: a tensor's dtype, shape and bytes, or the type and `repr` of anything else."""
    if isinstance(value, Tensor):
        return {path: (value.dtype, tuple(value.shape), bytes(stored_bytes(value)))}
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        inside = {str(key): item for key, item in value.items()}
    elif isinstance(value, tuple | list):
        inside = {str(k): item for k, item in enumerate(value)}
    else:
        return {path: (type(value).__name__, repr(value))}
    found: dict[str, object] = {}
    for key, item in inside.items():
        found |= leaves(item, f"{path}/{key}")
    return found


def differing(got: Any, want: Any) -> list[str]:
    """The paths at which two values differ in any bit."""
    return changed(leaves(got), leaves(want))


def changed(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """The paths at which two tables of `leaves` differ."""
    return sorted(path for path in here.keys() | there.keys() if here.get(path) != there.get(path))


def seen(server: Server, state: ServerState, ranks: Ranks) -> dict[str, Any]:
    """All that clients and evaluation can see of a state: downloads, heads, and the server's update."""
    downloads = {name: server.download(state, Client(name, rank)) for name, rank in ranks.items()}
    update = server.global_update(state) if server.has_global_model(state) else None
    return {"downloads": downloads, "heads": state.heads, "update": update}


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; ||got|| if want is zero, like a fresh adapter's product."""
    return float(torch.linalg.vector_norm(got - want) / (torch.linalg.vector_norm(want) if bool(want.any()) else 1.0))


def model_drift(server: Server, got: ServerState, want: ServerState) -> float:
    """The relative drift of the server's update, the largest over modules."""
    updates = server.global_update(got), server.global_update(want)
    return max(relative(updates[0][name].delta(), updates[1][name].delta()) for name in want.modules)


def readout_drift(server: Server, got: ServerState, want: ServerState, ranks: Ranks) -> float:
    """The relative drift of the updates that clients start from, the largest over clients and modules."""
    drifts = []
    for name, rank in ranks.items():
        here, there = (server.download(s, Client(name, rank)).adapter.modules for s in (got, want))
        drifts += [relative(_whole(here[m]), _whole(there[m])) for m in there]
    return max(drifts, default=0.0)


def moved_by(server: Server, got: ServerState, want: ServerState, ranks: Ranks) -> float:
    """The larger of both drifts; without a global model, the readouts' drift."""
    drift = readout_drift(server, got, want, ranks)
    return max(drift, model_drift(server, got, want)) if server.has_global_model(want) else drift


def _whole(lora: LoRA) -> Tensor:
    """The product, or the one factor that travels."""
    parts = list(lora.tensors().values())
    return lora.delta() if len(parts) == 2 else parts[0]
