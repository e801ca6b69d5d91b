"""Values compared bit for bit: a state, a message or an adapter as a flat table of what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from fedlora.core.messages import Client
from fedlora.linalg.stored import stored_bytes
from fedlora.server.server import Server
from fedlora.server.state import ServerState


def leaves(value: Any, path: str = "") -> dict[str, object]:
    """Path -> what is there: a tensor's dtype, shape and bytes, and everything else by its type and `repr`."""
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
    """The paths at which two values differ in a bit."""
    return changed(leaves(got), leaves(want))


def changed(here: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """The paths at which two tables of `leaves` differ."""
    return sorted(path for path in here.keys() | there.keys() if here.get(path) != there.get(path))


def seen(server: Server, state: ServerState, ranks: Mapping[str, int]) -> dict[str, Any]:
    """All that clients and evaluation can see of a state: the downloads, the heads, and the server's update."""
    downloads = {name: server.download(state, Client(name, rank)) for name, rank in ranks.items()}
    update = server.global_update(state) if server.has_global_model(state) else None
    return {"downloads": downloads, "heads": state.heads, "update": update}
