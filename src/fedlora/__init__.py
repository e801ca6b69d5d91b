"""fedlora: federated LoRA. What a server should represent when clients send low-rank updates.

The names here need torch and safetensors only, and are imported when they are first used. Training, configs and plots
live in their own modules (`fedlora[train]`, `fedlora[plot]`) and are imported from there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlora.client import Client, Download, Upload, keep, receive, send
    from fedlora.errors import FedLoRAError
    from fedlora.lora import Adapter, LoRA
    from fedlora.method import Method, Readout, Roles, Update
    from fedlora.methods import METHODS, build
    from fedlora.peft_io import AdapterSpec, read_adapter, write_adapter
    from fedlora.server import Server, ServerState

__version__ = "0.1.0"

_HOMES = {
    "client": ("Client", "Download", "Upload", "keep", "receive", "send"),
    "errors": ("FedLoRAError",),
    "lora": ("Adapter", "LoRA"),
    "method": ("Method", "Readout", "Roles", "Update"),
    "methods": ("METHODS", "build"),
    "peft_io": ("AdapterSpec", "read_adapter", "write_adapter"),
    "server": ("Server", "ServerState"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"fedlora.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'fedlora' has no attribute {name!r}")


__all__ = [
    "METHODS",
    "Adapter",
    "AdapterSpec",
    "Client",
    "Download",
    "FedLoRAError",
    "LoRA",
    "Method",
    "Readout",
    "Roles",
    "Server",
    "ServerState",
    "Update",
    "Upload",
    "build",
    "keep",
    "read_adapter",
    "receive",
    "send",
    "write_adapter",
]
