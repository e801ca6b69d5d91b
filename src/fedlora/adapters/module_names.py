"""A module's names: in the base model, in a file, and as peft matches it with a config."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fedlora.errors import AdapterFormatError

_BASE_LAYER = ".base_layer"
_WRAPPERS = ("base_layer", "token_adapter")
_MOST_PARAMETERS = 6  # of one module
# Names of embeddings and heads in real models: these may be tied to each other.
_EMBEDDING = re.compile(
    r"\w*emb\w*|wte|wpe|shared|\w*lm_head\w*|\w*vocab\w*|word\w*|tok\w*|decoder|output|head|proj_out|\w*predict\w*",
    re.IGNORECASE,
)


def plain(path: str) -> str:
    """The base model's own name for a module or tensor, without the parts that peft's wrappers add."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def wrapped(name: str, wraps: Mapping[str, Sequence[str]]) -> str:
    """The inverse: a base tensor's stored name. wraps: module -> the parts that wrapping adds after its name."""
    parts: list[str] = []
    for k, part in enumerate(names := name.split(".")):
        parts += [part, *wraps.get(".".join(names[: k + 1]), ())]
    return ".".join(parts)


def may_be_embedding(module: str) -> bool:
    """Whether some model has an embedding or a head of this name."""
    return _EMBEDDING.fullmatch(module.rpartition(".")[2]) is not None


def saved_modules(path: str, names: Collection[str]) -> list[str]:
    """The modules around a tensor that modules_to_save names, outermost first; as in peft, their paths end in it."""
    around = [path[:k] for k, letter in enumerate(path) if letter == "."]
    return [module for module in around if names and module.endswith(tuple(names))]


class Parameters:
    """The bare parameters in target_parameters, by owning module."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._by_owner: dict[str, set[str]] = {}
        for name in config.get("target_parameters") or ():
            owner, _, short = name.rpartition(".")
            self._by_owner.setdefault(owner, set()).add(short)

    def of(self, module: str, pairs: int | None = None) -> list[str]:
        """Their own names, sorted: ["down", "up"]. A name without a module applies to every module that has one.

        pairs: how many pairs the file has at this module. If that many are named with the module, names without one
        belong elsewhere: peft turns "all-linear" on a mixture of experts into ["gate.weight", "gate_up_proj",
        "down_proj"].
        """
        found: set[str] = set()
        begin = 0
        while self._by_owner and begin <= len(module):
            found |= self._by_owner.get(module[begin:], set())
            begin = module.find(".", begin) + 1 or len(module) + 1
        return sorted(found if len(found) == pairs else found | self._by_owner.get("", set()))

    def candidates(self, modules: Iterable[str]) -> list[str]:
        """The full names of all parameters that pairs at these modules may adapt."""
        return [f"{module}.{short}" for module in modules for short in self.of(module)[: _MOST_PARAMETERS + 1]]


def asked_as(path: str, paths: Collection[str], parameters: Parameters) -> str:
    """The name by which peft matches the module whose pair is stored at `path`.

    It omits the .base_layer that wrapping adds. A projection inside an attention (X.base_layer.out_proj) is matched as
    the attention X, if X is in `paths`; inside a module with wrapped bare parameters, it is matched as itself.
    """
    outer = path.rpartition(f"{_BASE_LAYER}.")[0]
    if outer in paths and not parameters.of(plain(outer)):
        return asked_as(outer, paths, parameters)
    return plain(path)


def check_names(pairs: Collection[str], parameters: Parameters) -> None:
    """Raise `AdapterFormatError` if two stored names mean one module, or one could be taken for another."""
    found: dict[str, list[str]] = {}
    for path in pairs:
        if path.endswith("]") and path.rpartition("[")[2][:-1].isdecimal():
            raise AdapterFormatError(f"module {path!r} is named as an expert would be: PATH[e] of a parameter at PATH.")
        found.setdefault(plain(path), []).append(path)
    for module, paths in found.items():
        nested = [min(paths) + _BASE_LAYER * k for k in range(len(paths))]
        if len(paths) > 1 and (not parameters.of(module) or sorted(paths) != nested):
            raise AdapterFormatError(
                f"module {module!r} has several pairs of factors, at {paths[0]!r} and {paths[1]!r}, but only the "
                f"parameters of one module may have several, each in the base_layer of the next."
            )
