"""Methods from elsewhere: entry points of installed packages, and your own classes by "module:Class"."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedlora.errors import FilesChanged, HyperparameterError

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
    new = module not in sys.modules
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
    if new and isinstance(found, type):
        code_of(found)  # record the code now: its file may change before a run asks
    return found


def _reach(top: str) -> None:
    """Append the working directory to the path if only it has the module or package `top`."""
    here = Path.cwd()
    beside = (here / f"{top}.py").is_file() or (here / top / "__init__.py").is_file()
    if beside and str(here) not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(str(here))
        importlib.invalidate_caches()


# ---- its code --------------------------------------------------------------------------------------------------------

_IMPORTING = ("import_module", "__import__")
_KNOWN_BY_VERSION = frozenset((*sys.stdlib_module_names, "fedlora", "torch", "numpy", "transformers", "peft")) - {
    "__main__"
}
_INSTALLED = frozenset(("site-packages", "dist-packages"))


def code_of(cls: type[Any]) -> dict[str, str]:
    """File ("package/module.py") -> SHA-256, for the code of a class and its bases: their modules, whole packages, and
    imported files beside them. Empty for fedlora's own, which version and commit identify.

    Raises:
        FilesChanged: this process runs an older content of a file.
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        file = getattr(module, "__file__", None)
        top = base.__module__.partition(".")[0]
        if file is None or top in _KNOWN_BY_VERSION:
            continue
        root = Path(file).parents[base.__module__.count(".") + (Path(file).name == "__init__.py")]
        if top == "__main__":
            root, top = Path(file).parent, Path(file).stem
        for path in _sources(root, top) or {Path(file)}:  # compiled code has no source
            name = path.relative_to(root)
            parts = name.with_suffix("").parts
            whose = base.__module__ if path == Path(file) else ".".join(p for p in parts if p != "__init__")
            found[name.as_posix()] = _digest(path, sys.modules.get(whose))
    return dict(sorted(found.items()))


# File -> (its import, None if it was not imported; its SHA-256), as this process saw it last.
_SEEN: dict[Path, tuple[object, str]] = {}


def _digest(path: Path, module: ModuleType | None) -> str:
    """The SHA-256 of a file, the source of a module. A module that is imported again has another spec."""
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    imported = getattr(module, "__spec__", None) or module
    before, known = _SEEN.get(path, (None, now))
    if known != now and imported is not None and (before is None or before is imported):
        raise FilesChanged(
            f"{path} changed after this process imported it, but the process still runs the old code. Results are "
            f"stored as made by the old code. To use the new code, start the command (or the kernel) again."
        )
    _SEEN[path] = imported, now
    return now


def _sources(root: Path, top: str) -> set[Path]:
    """The .py files of a module or package in `root`, and of the modules beside it that it imports; only its own files
    if it is installed."""
    found: set[Path] = set()
    todo, seen = [top], {top}
    while todo:
        name = todo.pop()
        files = {root / f"{name}.py"} if (root / f"{name}.py").is_file() else set((root / name).rglob("*.py"))
        found |= files
        beside = {} if _INSTALLED & {*root.parts} else dict.fromkeys(n for file in files for n in _imported(file))
        for n in beside:
            if n not in seen and n not in _KNOWN_BY_VERSION:
                seen.add(n)
                todo.append(n)
    return found


def _imported(file: Path) -> Iterator[str]:
    """The top-level names that a file imports, by statement or by `import_module("name")`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a package may contain files that nobody imports
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _IMPORTING:
            yield from (n.value.partition(".")[0] for n in node.args[:1] if isinstance(n, ast.Constant)
                        if isinstance(n.value, str))  # fmt: skip
