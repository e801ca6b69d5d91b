"""Imports the two libraries that privacy relies on, only when needed."""

from __future__ import annotations

import importlib
from typing import Any

from fedlora.errors import HyperparameterError


def opendp() -> Any:
    """`opendp.prelude`, which samples the noise. Raises `HyperparameterError` if it is not installed."""
    return _loaded(
        "opendp.prelude", "opendp", "draws the noise (an exact discrete Gaussian, of the system's randomness)"
    )


def accounting(module: str) -> Any:
    """A module of `dp_accounting`, which computes the spending. Raises `HyperparameterError` if it is missing."""
    return _loaded(f"dp_accounting{module}", "dp-accounting", "computes epsilon (privacy loss distributions)")


def _loaded(module: str, package: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HyperparameterError(
            f"privacy needs the library {package}, which {what}; it cannot be imported ({error}). Nothing replaces "
            f"it: pip install 'fedlora[privacy]'."
        ) from error
