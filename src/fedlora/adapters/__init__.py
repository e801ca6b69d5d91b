"""PEFT adapter files: reading them without trust, writing them atomically, merging and resizing them.

alpha / r ends here: inside fedlora an update is B A. Only `untrusted_files` opens strangers' files, and only LoRA of
linear layers with saved modules is read (`config`, `reader`). For operations that need the base model, see `export`.
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.adapters.io import read_adapter
    from fedlora.adapters.merge_report import MergeReport
    from fedlora.adapters.merging import merge, resize
    from fedlora.adapters.reader import AdapterFile
    from fedlora.adapters.writer import AdapterSpec, write_adapter

__getattr__ = face(
    "fedlora.adapters",
    {
        "io": ("read_adapter",),
        "merge_report": ("MergeReport",),
        "merging": ("merge", "resize"),
        "reader": ("AdapterFile",),
        "writer": ("AdapterSpec", "write_adapter"),
    },
)

__all__ = [
    "AdapterFile",
    "AdapterSpec",
    "MergeReport",
    "merge",
    "read_adapter",
    "resize",
    "write_adapter",
]
