"""Every error that fedlora raises on purpose, from the docstrings of `fedlora.errors`."""

from __future__ import annotations

import inspect

from fedlora import errors
from generate.markdown import entry, line


def page() -> str:
    """As Markdown, in the order of the file: the name, what it is besides a `FedLoRAError`, what it means."""
    found = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.FedLoRAError)]
    found = sorted(set(found), key=lambda cls: inspect.getsourcelines(cls)[1])
    return "\n".join(entry(cls.__name__, _also(cls), _meaning(cls)) for cls in found)


def _also(cls: type) -> list[str]:
    plain = [f"`{base.__name__}`" for base in cls.__bases__ if base.__module__ == "builtins"]
    return [f"also a {' and a '.join(plain)}"] if plain and cls is not errors.FedLoRAError else []


def _meaning(cls: type) -> str:
    return line((inspect.getdoc(cls) or "").partition("\n\nExample:")[0])
