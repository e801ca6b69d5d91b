"""fedlora: federated LoRA. What a server should represent when clients send low-rank updates.

The names here need only torch, safetensors and numpy (`results` needs `fedlora[train]`) and are imported on first use.
Training, configs and plots live in separate modules (`fedlora[train]`, `fedlora[plot]`): import them from there.
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.adapters.io import read_adapter
    from fedlora.adapters.writer import AdapterSpec, write_adapter
    from fedlora.client import keep, receive, send
    from fedlora.core.lora import Adapter, LoRA
    from fedlora.core.messages import Client, Download, Upload
    from fedlora.core.method import Method, Roles, Update
    from fedlora.errors import FedLoRAError
    from fedlora.experiments.results import results
    from fedlora.methods.registry import METHODS, build
    from fedlora.server.kept import Kept
    from fedlora.server.private import Private
    from fedlora.server.server import Server
    from fedlora.server.state import ServerState
    from fedlora.server.streamed import Streamed

__version__ = "0.1.0"

__getattr__ = face(
    "fedlora",
    {
        "client": ("keep", "receive", "send"),
        "core": ("Adapter", "Client", "Download", "LoRA", "Method", "Roles", "Update", "Upload"),
        "errors": ("FedLoRAError",),
        "experiments.results": ("results",),
        "methods": ("METHODS", "build"),
        "adapters": ("AdapterSpec", "read_adapter", "write_adapter"),
        "server": ("Kept", "Private", "Server", "ServerState", "Streamed"),
    },
)

__all__ = [
    "METHODS",
    "Adapter",
    "AdapterSpec",
    "Client",
    "Download",
    "FedLoRAError",
    "Kept",
    "LoRA",
    "Method",
    "Private",
    "Roles",
    "Server",
    "ServerState",
    "Streamed",
    "Update",
    "Upload",
    "build",
    "keep",
    "read_adapter",
    "receive",
    "results",
    "send",
    "write_adapter",
]
