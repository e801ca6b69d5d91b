"""Parses an adapter's two files into parts (`parse`), and applies its config to them (`understand`).

Both are pure functions of a config that passed `config_fields` and the weights' header. `judged` then checks that the
two fit each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlora.adapters.config_fields import is_adalora
from fedlora.adapters.config_meaning import (
    TOKENS,
    Resolved,
    adalora_ranks,
    extra_kind,
    names_rows,
    parameter_names,
    resolve,
)
from fedlora.adapters.layouts import Layout
from fedlora.adapters.module_names import Parameters, asked_as, check_names, plain
from fedlora.adapters.untrusted_files import FLOATS, Stored
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB])|([ABE]))")


@dataclass(frozen=True, eq=False)
class Parsed:
    """The files' contents, by name.

    config: adapter_config.json. tensors: key -> its header entry. pairs: path -> factor (A, B, AdaLoRA's E) -> key.
    beside: name of each other tensor -> (key, kind as in `extra_kind`): its name in the base model without wrappers;
    for added biases, token rows and magnitudes, their path.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    pairs: Mapping[str, Mapping[str, str]]
    beside: Mapping[str, tuple[str, str]]

    def shape(self, path: str, factor: str) -> tuple[int, ...]:
        """Shape of a stored factor."""
        return self.tensors[self.pairs[path][factor]].shape


@dataclass(frozen=True, eq=False)
class Meaning:
    """What the config says about each stored pair, by its path.

    asked: the name by which peft matches it. layouts: how it is stored. ranks: r from the config; 0 for a module that
    AdaLoRA pruned away. said: the config with its patterns resolved. targeted: whether the config targets it; None if
    the base model decides; bare parameters are left out. twice: modules that are targeted both themselves and through
    a parameter.
    """

    asked: Mapping[str, str]
    layouts: Mapping[str, Layout]
    ranks: Mapping[str, int]
    said: Resolved
    targeted: Mapping[str, bool | None]
    twice: tuple[str, ...]

    def scale(self, path: str, scaling: float = 1.0) -> float:
        """A module's own alpha / r, in units of `scaling`."""
        return self.said.scale(self.layouts[path].pattern or self.asked[path], scaling)


def parse(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Parsed:
    """Sort the tensors by what they are.

    Raises:
        AdapterFormatError: a key that peft does not write under this config, half a pair, or two names for one tensor.
    """
    pairs: dict[str, dict[str, str]] = {}
    beside: dict[str, tuple[str, str]] = {}
    for key in sorted(tensors):
        path = _path(key)
        found = _FACTOR.fullmatch(path)
        if found:
            _add_factor(pairs.setdefault(found[1], {}), found[2] or found[3] or found[4], key, tensors[key])
            continue
        kind = extra_kind(path, config)
        if kind is None:
            raise AdapterFormatError(
                f"key {quoted(key)} is neither a LoRA factor nor a tensor that its config saves (modules_to_save = "
                f"{quoted(config.get('modules_to_save') or [])}, bias = "
                f"{quoted(config.get('bias', 'none'))}, lora_bias = {bool(config.get('lora_bias'))})."
            )
        if kind == "copy":
            continue
        name = path if kind in ("added", "tokens", "magnitude") else plain(path)
        if name in beside:
            raise AdapterFormatError(f"{beside[name][0]!r} and {key!r} are one tensor of the base model.")
        beside[name] = (key, kind)
    if not pairs:
        raise AdapterFormatError("holds no lora_A / lora_B pair.")
    needed = {"A", "B", "E"} if is_adalora(config) else {"A", "B"}
    for path, pair in pairs.items():
        if set(pair) != needed:
            odd = sorted(needed ^ set(pair))[0]
            what = "lacks" if odd in needed else "has, without being AdaLoRA's,"
            raise AdapterFormatError(f"module {quoted(path)} {what} lora_{odd}.")
    return Parsed(config, tensors, ReadOnly(pairs), ReadOnly(beside))


def understand(parsed: Parsed, seconds: float) -> Meaning:
    """What the config says about the pairs. seconds: processor time for its patterns.

    Raises:
        AdapterFormatError: names collide, a pattern is refused, nested parameters cannot be told apart, or one pair's
            factors belong to different kinds of layers.
    """
    config, pairs = parsed.config, parsed.pairs
    parameters = Parameters(config)
    check_names(pairs, parameters)
    asked = {path: asked_as(path, pairs, parameters) for path in pairs}
    modules: dict[str, list[str]] = {}
    for path in sorted(pairs, key=len):
        modules.setdefault(plain(path), []).append(path)
    said = resolve(config, list(asked.values()), parameters.candidates(modules), seconds=seconds)
    bare: dict[str, str] = {}  # path -> the parameter that its pair adapts
    layers = [module for module, paths in modules.items() if said.targeted.get(asked[paths[0]])]
    for module, paths in modules.items() if config.get("target_parameters") else ():
        if said.targeted.get(asked[paths[0]]):
            continue
        rows = [(parsed.shape(path, "A") or (0,))[0] for path in paths]
        names = parameter_names(module, rows, parameters.of(module, len(paths)), said)
        bare |= zip(paths, names, strict=True) if names is not None else ()
    layouts = {path: _layout(parsed, path, bare.get(path), said) for path in pairs}
    allotted = adalora_ranks(config, asked.values()) if is_adalora(config) else None
    ranks = {path: said.rank(bare.get(path) or name) if allotted is None else allotted[name]
             for path, name in asked.items()}  # fmt: skip
    targeted = {path: said.targeted[name] for path, name in asked.items() if path not in bare}
    twice = tuple(module for module in layers if {"weight", "bias"} & set(parameters.of(module)))
    return Meaning(ReadOnly(asked), ReadOnly(layouts), ReadOnly(ranks), said, ReadOnly(targeted), twice)


def copies_in(parsed: Parsed) -> dict[str, list[str]]:
    """Key of each tensor that the file must repeat -> keys of which one must hold the same numbers.

    peft stores a saved module again under its wrapper's name, and trained rows of an embedding again for each output
    tied to it. A plain list of tokens means the rows of one embedding; if several modules are named, rows of an unnamed
    module copy those of a named one.
    """
    found = {}
    for key in parsed.tensors:
        first = key.replace(".modules_to_save.", ".", 1)
        if first != key and first in parsed.tensors:
            found[key] = [first]
    said = parsed.config.get("trainable_token_indices")
    rows = {plain(path.removesuffix(TOKENS)): key for path, (key, kind) in parsed.beside.items() if kind == "tokens"}
    named = [key for path, key in rows.items() if not isinstance(said, Mapping) or names_rows(said, path)]
    own = named if isinstance(said, Mapping) else named[:1]
    return found | {key: own for key in rows.values() if key not in own and own}


# -------------------------------------------------------------------------------------------------------------- inside


def _path(key: str) -> str:
    if not key.startswith(PREFIX):
        raise AdapterFormatError(f"key {quoted(key)} does not start with {PREFIX!r}: not a PEFT LoRA file.")
    path = key.removeprefix(PREFIX)
    if path.startswith(PREFIX):
        raise AdapterFormatError(
            f"key {quoted(key)} has the prefix twice, so peft probably wrapped the model twice: peft would load none "
            f"of it. Save the inner model, or remove one prefix from every key."
        )
    return path


def _add_factor(pair: dict[str, str], factor: str, key: str, stored: Stored) -> None:
    if stored.dtype not in FLOATS:
        raise AdapterFormatError(
            f"{quoted(key)} has type {stored.dtype}; updates must be floating-point numbers ({', '.join(FLOATS)})."
        )
    if factor in pair:
        raise AdapterFormatError(f"{quoted(pair[factor])} and {quoted(key)} are both lora_{factor} of one module.")
    pair[factor] = key


def _layout(parsed: Parsed, path: str, parameter: str | None, said: Resolved) -> Layout:
    """The kind of layer that a pair adapts, from its names and shapes."""
    pair = parsed.pairs[path]
    ends = {key.removeprefix(f"{PREFIX}{path}.lora_").replace(factor, "", 1) for factor, key in pair.items()}
    if len(ends) > 1 or (is_adalora(parsed.config) != (ends == {""})):
        raise AdapterFormatError(f"the factors of module {quoted(path)} belong to different kinds of layers.")
    if ends == {"embedding_"}:
        return Layout("embedding")
    if ends == {""}:
        return Layout("adalora")
    A = parsed.shape(path, "A")
    if len(A) > 2:
        return Layout("conv", kernel=A[2:])
    if parameter is None:
        return Layout()
    return Layout("parameter", experts=(A or (0,))[0] // said.rank(parameter), pattern=parameter)
