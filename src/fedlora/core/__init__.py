"""Shared ground: adapters, the method protocol, the messages between server and clients, and how values are stored.

Read `method` first. Everything here is an immutable value or a pure function. It needs torch, safetensors and numpy
only, and modules that need none of them (`files`, `text`, ...) import none.
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.core.lora import Adapter, LoRA
    from fedlora.core.messages import Client, Download, Upload
    from fedlora.core.method import Method, Roles, Update
    from fedlora.core.trainer import Trained, Trainer

__getattr__ = face(
    "fedlora.core",
    {
        "lora": ("Adapter", "LoRA"),
        "messages": ("Client", "Download", "Upload"),
        "method": ("Method", "Roles", "Update"),
        "trainer": ("Trained", "Trainer"),
    },
)

__all__ = ["Adapter", "Client", "Download", "LoRA", "Method", "Roles", "Trained", "Trainer", "Update", "Upload"]
