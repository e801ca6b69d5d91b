"""Methods from elsewhere: entry points of installed packages, and your own classes by "module:Class"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from fedlora.errors import HyperparameterError

GROUP = "fedlora.methods"


def offered() -> list[EntryPoint]:
    """The methods that installed packages offer, sorted by name and package."""
    return sorted(entry_points(group=GROUP), key=lambda point: (point.name, package_of(point)))


def package_of(point: EntryPoint) -> str:
    """The distribution that defines an entry point."""
    return point.dist.name if point.dist is not None else "an unnamed package"


def loaded(place: str, name: str) -> Any:
    """The object at "module:Class".

    If a module is not installed, it is searched for in the working directory last, because a console script does not
    have that directory on its path. The directory stays on the path, so that other processes find the class too.

    Raises:
        HyperparameterError: it cannot be imported, whatever error its module raised.
    """
    module, _, path = place.partition(":")
    try:
        _reach(module.partition(".")[0])
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a stranger's module can raise anything on import
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f" fedlora looks on the Python path and in {Path.cwd()}: go to its folder, or install it."
        raise HyperparameterError(
            f"the method {name!r} cannot be made: {type(error).__name__}: {error}. A class is given as "
            f"package.module:Class, and its module must be importable from here.{hint}"
        ) from error
    return found


def _reach(top: str) -> None:
    """Append the working directory to the path if only it has the module or package `top`."""
    here = Path.cwd()
    beside = (here / f"{top}.py").is_file() or (here / top / "__init__.py").is_file()
    if beside and str(here) not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(str(here))
        importlib.invalidate_caches()
