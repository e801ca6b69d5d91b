"""A package's public names without their import time: each is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def face(package: str, homes: Mapping[str, Sequence[str]], extra: str | None = None) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562). homes: module below `package` -> its names. extra: the extra that installs
    what these modules import beyond torch; the error names it if an import is missing."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{home_of[name]}"), name)
        except ModuleNotFoundError as error:
            if extra is None or (error.name or "fedlora").partition(".")[0] == "fedlora":
                raise
            message = f"{package}.{name} needs {error.name}, which is not installed: pip install 'fedlora[{extra}]'."
            raise ModuleNotFoundError(message, name=error.name) from error

    return find
