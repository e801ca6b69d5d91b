"""The methods, one paper a file; what several of them share stands in files with a leading underscore.

`METHODS` is the whole list and `build` makes one by name. Methods know no server and no transport, and not each other.
"""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.methods.registry import METHODS, build

__getattr__ = face(
    "fedlora.methods",
    {
        "registry": ("METHODS", "build"),
    },
)

__all__ = ["METHODS", "build"]
