"""How far two states of a server are from each other, relatively: its update, and what clients get."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.core.messages import Client
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.testing.federations import Ranks


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; ||got|| where want is zero, as a fresh adapter's product is."""
    return float(torch.linalg.vector_norm(got - want) / (torch.linalg.vector_norm(want) if bool(want.any()) else 1.0))


def model_drift(server: Server, got: ServerState, want: ServerState) -> float:
    """Of the server's update, the largest over modules."""
    updates = server.global_update(got), server.global_update(want)
    return max(relative(updates[0][name].delta(), updates[1][name].delta()) for name in want.modules)


def readout_drift(server: Server, got: ServerState, want: ServerState, ranks: Ranks) -> float:
    """Of the updates that clients start from, the largest over clients and modules."""
    drifts = []
    for name, rank in ranks.items():
        here, there = (server.download(s, Client(name, rank)).adapter.modules for s in (got, want))
        drifts += [relative(_whole(here[m]), _whole(there[m])) for m in there]
    return max(drifts, default=0.0)


def moved_by(server: Server, got: ServerState, want: ServerState, ranks: Ranks) -> float:
    """Of both, where there is a server's update."""
    drift = readout_drift(server, got, want, ranks)
    return max(drift, model_drift(server, got, want)) if server.has_global_model(want) else drift


def _whole(lora: LoRA) -> Tensor:
    """The product, or the one factor that travels."""
    parts = list(lora.tensors().values())
    return lora.delta() if len(parts) == 2 else parts[0]
