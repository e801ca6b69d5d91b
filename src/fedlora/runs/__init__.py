"""Runs one TOML file into one folder: `load_config`, `prepare` (deal data, load model), `execute` (play, store)."""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.runs.config import RunConfig, load_config
    from fedlora.runs.execution import execute
    from fedlora.runs.folder import RunFolder
    from fedlora.runs.preparation import Prepared, prepare

__getattr__ = face(
    "fedlora.runs",
    {
        "config": ("RunConfig", "load_config"),
        "preparation": ("Prepared", "prepare"),
        "execution": ("execute",),
        "folder": ("RunFolder",),
    },
    extra="train",
)

__all__ = ["Prepared", "RunConfig", "RunFolder", "execute", "load_config", "prepare"]
