"""The installed versions, read from package metadata; quick, because nothing is imported."""

from __future__ import annotations

import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

# The packages that determine how a run behaves; a fault report should name them.
TOLD = ("torch", "safetensors", "numpy", "transformers", "peft", "flwr", "opendp")
_BOUND = re.compile(r"^([A-Za-z0-9._-]+)[^;]*?>=\s*([0-9.]+)")


@cache  # a run's manifest, and each message of a site, say a handful of versions
def installed(name: str) -> str | None:
    """The version of a distribution, None if it is not installed. torch's version includes its device build."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def least(name: str) -> str:
    """The oldest version of a requirement that fedlora allows, from its metadata (`pyproject.toml`)."""
    found = (_BOUND.match(line) for line in requires("fedlora") or ())
    return next(match[2] for match in found if match and match[1].lower() == name.lower())


def report() -> str:
    """One line each: fedlora, Python, the machine, and the installed packages of `TOLD`."""
    rows = {"fedlora": installed("fedlora"), "python": platform.python_version(), "platform": platform.platform()}
    rows |= {name: installed(name) for name in TOLD}
    return "\n".join(f"{name:<14}{found}" for name, found in rows.items() if found)
