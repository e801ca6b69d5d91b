"""A package's face without its cost: names that are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def face(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562). homes: module below `package` -> the names that it has."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return find
