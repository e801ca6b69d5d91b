"""fedlora: federated LoRA. What a server should represent when clients send low-rank updates.

The names here need torch and safetensors only. Training, configs and plots live in their own modules (`fedlora[train]`,
`fedlora[plot]`) and are imported from there.
"""

from fedlora.client import Client, Download, Upload, keep, receive, send
from fedlora.errors import FedLoRAError
from fedlora.lora import Adapter, LoRA
from fedlora.method import Method, Readout, Roles, Update
from fedlora.methods import METHODS, build
from fedlora.peft_io import AdapterSpec, read_adapter, write_adapter
from fedlora.server import Server, ServerState

__version__ = "0.1.0"

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
