"""Which versions are installed, by their metadata: nothing is imported, so it is quick."""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

# What decides how a run behaves, and so what a report of a fault should name.
TOLD = ("torch", "safetensors", "numpy", "transformers", "peft", "flwr", "opendp")
_BOUND = re.compile(r"^([A-Za-z0-9._-]+)[^;]*?>=\s*([0-9.]+)")


@cache  # a run's manifest, and each message of a site, say a handful of versions
def installed(name: str) -> str | None:
    """The version of a distribution, None where it is not installed. torch's says for which device it was built."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def least(name: str) -> str:
    """The oldest version of a requirement that fedlora allows, as its own metadata has it: `pyproject.toml`."""
    found = (_BOUND.match(line) for line in requires("fedlora") or ())
    return next(match[2] for match in found if match and match[1].lower() == name.lower())


def report() -> str:
    """A line each: fedlora, Python, the machine, and those of `TOLD` that are installed."""
    rows = {"fedlora": installed("fedlora"), "python": platform.python_version(), "platform": platform.platform()}
    rows |= {name: installed(name) for name in TOLD}
    return "\n".join(f"{name:<14}{found}" for name, found in rows.items() if found)


__all__ = ["TOLD", "installed", "least", "report"]
