"""A run's state as adapters that load on the pre-trained base, whatever the method changed."""

from __future__ import annotations

from fedlora.adapters.io import pad_rank
from fedlora.core.lora import Adapter
from fedlora.server.server import Server
from fedlora.server.state import RunState


def global_adapter(server: Server, state: RunState) -> Adapter:
    """The server's model as one adapter: its whole update at full rank, base change included, and the heads."""
    update = server.global_update(state.server)
    return Adapter({name: pad_rank(lora, 1) for name, lora in update.items()}, state.server.heads)
