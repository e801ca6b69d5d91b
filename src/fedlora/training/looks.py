"""The models that can be measured in a state, for `AdaptedModel.activate`: the server's, and each client's own."""

from __future__ import annotations

from fedlora.adapters.io import pad_rank
from fedlora.client import receive
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, ClientMemory
from fedlora.server.server import Server
from fedlora.server.state import ServerState


def server_model(server: Server, state: ServerState, *, quantised: bool = False) -> Adapter:
    """W0 + the server's whole update, with its heads: the base includes the update, and the adapter is zero.

    quantised: the base cannot be changed, so the whole update is the adapter.

    Raises:
        NoGlobalModel: the method has none.
    """
    update = server.global_update(state)
    if quantised:
        rank = 1 << max(max(lora.rank for lora in update.values()) - 1, 0).bit_length()  # a power of two: few variants
        return Adapter({name: pad_rank(lora, rank) for name, lora in update.items()}, state.heads)
    nothing = {
        name: LoRA(*(f[:, :1] * 0 if k == 0 else f[:1] * 0 for k, f in enumerate(lora.factors)))
        for name, lora in state.start.modules.items()
    }
    return Adapter(nothing, state.heads, update)


def client_model(server: Server, state: ServerState, client: Client, memory: ClientMemory) -> Adapter:
    """The model `client` would start its next round with: its readout, completed by what it kept."""
    return receive(server.download(state, client), memory.kept)
