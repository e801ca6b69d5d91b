"""Which change is made now, which places were passed, and the import of modules with switches in them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from mutation.sites import SOURCE, Change, switched

made: int | None = None  # the change that is made
passed: set[int] = set()


def on(number: int) -> bool:
    """Is this change made?"""
    passed.add(number)
    return number == made


class _Loader(importlib.machinery.SourceFileLoader):
    numbers: Mapping[str, int]

    def get_code(self, fullname: str) -> CodeType:
        file = self.get_filename(fullname)
        tree = switched(file.removeprefix(f"{SOURCE}/"), self.numbers)
        return compile(tree, file, "exec", dont_inherit=True)


class _Finder:
    """Stands before Python's own finders, for the files that have a change."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._files: dict[str, dict[str, int]] = {}
        for number, change in enumerate(changes):
            self._files.setdefault(str(SOURCE / change.file), {})[change.id] = number

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("fedlora"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in self._files:
            return None
        loader = _Loader(name, spec.origin)
        loader.numbers = self._files[spec.origin]
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


def install(changes: Sequence[Change]) -> None:
    """From now on fedlora's modules have switches. Before the first import of fedlora."""
    assert "fedlora" not in sys.modules, "fedlora is imported already, without switches"
    sys.meta_path.insert(0, _Finder(changes))  # type: ignore[arg-type]
