"""What all sides agree on: adapters, the protocol of a method, the messages that travel, and how values are stored.

Read `method` first. Everything here is an immutable value or a pure function; torch and safetensors are all it needs,
and what does without them (`files`, `echo`, ...) is imported without them.
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.core.lora import Adapter, LoRA
    from fedlora.core.messages import Client, Download, Upload
    from fedlora.core.method import Method, Readout, Roles, Update
    from fedlora.core.trainer import Trained, Trainer

__getattr__ = face(
    "fedlora.core",
    {
        "lora": ("Adapter", "LoRA"),
        "messages": ("Client", "Download", "Upload"),
        "method": ("Method", "Readout", "Roles", "Update"),
        "trainer": ("Trained", "Trainer"),
    },
)

__all__ = [
    "Adapter",
    "Client",
    "Download",
    "LoRA",
    "Method",
    "Readout",
    "Roles",
    "Trained",
    "Trainer",
    "Update",
    "Upload",
]
