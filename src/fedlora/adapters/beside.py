"""Tensors other than LoRA pairs in several adapters: which adapters each is taken from in a merge, and their mean.

Added biases (lora_bias) are part of the update and are weighted like their module. The others are whole weights rather
than updates, and one of several rules (`--heads`, below) says which adapters they come from.

A tensor that the base model ties is a single tensor, but peft stores it under one or several names, depending on what
else the adapter holds. A file reveals this only through its numbers (`Collection.same`); if an adapter lacks a name,
we use the same tensor under its other name.

    average   the weighted mean over all adapters, each of which must have it
    first     the first adapter's
    drop      none
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlora.adapters import allocation
from fedlora.adapters.collection import TIED, Collection
from fedlora.adapters.module_names import plain
from fedlora.adapters.narrowing import common_type, narrowed
from fedlora.adapters.reader import AdapterFile
from fedlora.core.messages import Missing
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg import weighted_mean

HeadRule = Literal["average", "first", "drop"]
Held = list[tuple[AdapterFile, float, str]]  # an adapter, its weight, and its name for the tensor
_KINDS = ("added", "head", "bias", "tokens", "base")  # if adapters disagree on a tensor's kind, the first of these wins
_WAYS: Mapping[HeadRule, str] = {
    "first": "--heads first takes the first adapter's fully trained tensors",
    "drop": "--heads drop leaves out all fully trained tensors",
}


@dataclass(frozen=True, eq=False)
class Beside:
    """A result's tensors other than pairs, by the base model's names for them.

    saved: the modules_to_save that they require. weights: path -> each adapter's weight, as used. left: path -> kind,
    for those the rule leaves out. rounding: path -> relative change from writing it in its dtype, where not zero.
    """

    tensors: Mapping[str, Tensor]
    saved: Sequence[str]
    weights: Mapping[str, tuple[float, ...]]
    left: Mapping[str, str]
    rounding: Mapping[str, float]


def averaged(
    given: Collection, rule: HeadRule, dtype: torch.dtype | None = None, missing: Missing = "zero", *,
    added: torch.dtype | None = None,
) -> Beside:  # fmt: skip
    """The tensors other than pairs: added biases summed as part of the update, the others by `rule`.

    dtype: for floating-point tensors; None: their own. missing: as for modules, for added biases. added: the added
    biases' dtype, which is that of the factors; None: their own.

    Raises:
        AdapterFormatError: as `_kept`; shapes differ; integers differ; or the weights do not add up to 1 and whole
            tensors differ, since these are no updates.
    """
    found, used, left, rounding = {}, {}, {}, {}
    wide = torch.promote_types(dtype or added or torch.float32, torch.float32)
    for path, (kind, held) in sorted(_kept(given, rule).items()):
        own, _ = common_type(file.stored_head(name).dtype for file, _, name in held)
        needed = allocation.bytes_to_average([file.stored_head(name) for file, _, name in held])
        allocation.check(needed, f"averaging {quoted(path)}", given.files[0].limits)
        if kind == "added":  # an adapter that lacks it adds zero, even if no adapter has it
            module = path.removesuffix(".lora_B.bias")
            held = [(file, w, path) for file, w in given.holders(module, missing) if file.has_head(path)]
            if held:
                mean = weighted_mean([_widened(t, wide) for t in _alike(path, held)], [w for _, w, _ in held])
            else:
                mean = torch.zeros(given.outputs(module), dtype=wide)
        elif not held:
            left[path] = kind
            continue
        else:
            mean = _mean(path, held, wide, signed=given.sum and kind != "base")
            total = math.fsum(w for _, w, _ in held)
            held = [(f, w / total, name) for f, w, name in held] if total else []  # 0 only if all tensors are equal
        if held:
            used[path] = given.effective([(file, w) for file, w, _ in held])
        own = added if kind == "added" and added is not None else own
        found[path] = narrowed(mean, dtype or own, f"tensor {quoted(path)}")
        moved = _moved(mean, found[path])
        if moved:
            rounding[path] = moved
    return Beside(found, _saved_names(given, rule, found), used, left, rounding)


# -------------------------------------------------------------------------------------------- which adapters hold them


def _kept(given: Collection, rule: HeadRule) -> dict[str, tuple[str, Held]]:
    """Tensor other than a pair -> (its kind, the adapters the rule takes it from, with their weights; none: left out).

    Raises:
        AdapterFormatError: the rule does not apply to some tensor (the message lists rules that do), or one adapter has
            LoRA on an embedding and another lora_bias, which peft cannot combine.
    """
    found = _held(given, rule)
    why = _obstacle(given, found, rule)
    if why is not None:
        ways = [way for other, way in _WAYS.items() if _obstacle(given, _held(given, other), other) is None]
        raise AdapterFormatError(f"{why} {', '.join(ways)}.")
    tables = [path for path, layout in given.layouts.items() if layout.kind == "embedding"]
    biases = [path for path, (kind, _) in found.items() if kind == "added"]
    if tables and biases:
        raise AdapterFormatError(
            f"{quoted(tables[0])} is an embedding, for which peft takes no lora_bias, but another adapter has "
            f"{quoted(biases[0])}: no adapter holds both."
        )
    return found


def _held(given: Collection, rule: HeadRule) -> dict[str, tuple[str, Held]]:
    """peft applies lora_bias to all modules or none: if one adapter has it, modules that only others have get a bias of
    zeros."""
    found: dict[str, tuple[str, Held]] = {}
    for path in dict.fromkeys(path for file in given.files for path in file.heads):
        all_of_it = [(file, w, name) for file, w in zip(given.files, given.weights, strict=True)
                     if (name := _name_in(given, file, path)) is not None]  # fmt: skip
        held = all_of_it
        if rule == "first":
            held = [(file, 1.0, path) for file in given.files[:1] if file.has_head(path)]
        kinds = {file.kind(name) for file, _, name in held or all_of_it}
        kind = next(kind for kind in _KINDS if kind in kinds)
        found[path] = (kind, all_of_it if kind == "added" else [] if rule == "drop" else held)
    if any(kind == "added" for kind, _ in found.values()):
        for module in given.layouts:
            found.setdefault(f"{module}.lora_B.bias", ("added", []))
    return found


def _name_in(given: Collection, file: AdapterFile, path: str) -> str | None:
    """An adapter's name for a tensor: `path` itself, or another name of the same tied tensor."""
    if file.has_head(path):
        return path
    return next((name for name in given.same.get(path, ()) if file.has_head(name) and file.kind(name) in TIED), None)


def _obstacle(given: Collection, found: Mapping[str, tuple[str, Held]], rule: HeadRule) -> str | None:
    """Why a rule does not apply to some tensor, judged by names alone; None if it applies to all."""
    updated: dict[str, list[AdapterFile]] = {}  # a layer or its bias -> adapters whose pairs change it
    for file in given.files:
        for path in file.layouts:
            updated.setdefault(plain(path), []).append(file)
        for path in file.heads:
            if file.kind(path) == "added":
                updated.setdefault(f"{plain(path.removesuffix('.lora_B.bias'))}.bias", []).append(file)
    for path, (kind, held) in sorted(found.items()):
        if kind in ("added", "tokens") or not held:
            continue
        whole = {file: file.kind(name) for file, _, name in held}
        around = [path[:k] for k, letter in enumerate(path) if letter == "."] if kind == "head" else [path]
        for name, file in [(layer, file) for layer in around for file in updated.get(layer, ())]:
            if kind == "head" or (kind == "bias" and file not in whole):
                trained = next(other for other, its in whole.items() if its == kind)
                return (
                    f"{file.directory} has an update of {quoted(name)}, which {trained.directory} trained in full. "
                    f"Without the base model that change is unknown, so no adapter can hold the sum of the two."
                )
        lacks = next((file for file in given.files if file not in whole), None)
        if rule == "average" and kind != "base" and lacks is not None:
            return (
                f"{lacks.directory} has no {quoted(path)}, which others trained in full, and its value in the base "
                f"model is unknown here."
            )
    return None


def _saved_names(given: Collection, rule: HeadRule, found: Mapping[str, Tensor]) -> list[str]:
    """modules_to_save of the adapters that the rule takes whole tensors from, minus those left out."""
    takes = given.files[:1] if rule == "first" else given.files
    names = {name for file in takes for name in file.config.get("modules_to_save") or ()}
    heads = {path for file in takes for path in file.heads if file.kind(path) == "head"}
    gone, stays = heads.difference(found), heads.intersection(found)
    names |= {path.rpartition(".")[0] for path in stays if not any(f"{name}." in path for name in names)}  # tied

    def left_out(name: str) -> bool:
        return any(f"{name}." in path for path in gone) and not any(f"{name}." in path for path in stays)

    return sorted(name for name in names if not left_out(name))


# ----------------------------------------------------------------------------------------------------------- their mean


def _mean(path: str, held: Held, wide: torch.dtype, *, signed: bool) -> Tensor:
    """A tensor's weighted mean over its holders, computed in `wide` or wider. signed: the weights belong to a sum and
    the tensor was trained, so they must add up to 1, even if all holders agree."""
    tensors, weights = _alike(path, held), [w for _, w, _ in held]
    total = math.fsum(weights)
    if signed and abs(total - 1) > 1e-9:
        raise AdapterFormatError(
            f"{quoted(path)} was trained in full and is not an update, so weights that add up to {total:g} have no "
            f"meaning for it: --heads first takes the first adapter's, drop leaves it out."
        )
    if all(torch.equal(t, tensors[0]) for t in tensors[1:]):
        return tensors[0]
    if not all(t.is_floating_point() for t in tensors):
        raise AdapterFormatError(f"{quoted(path)} holds integers that differ, so there is no mean; see --heads.")
    if not total:
        raise ConfigError(f"{quoted(path)} is only in adapters of weight 0.")
    return weighted_mean([_widened(t, wide) for t in tensors], [w / total for w in weights])


def _moved(before: Tensor, after: Tensor) -> float:
    """The relative change when a tensor is cast to another type."""
    if before.dtype == after.dtype or torch.promote_types(before.dtype, after.dtype) == after.dtype:
        return 0.0
    wide = before.double()
    size = float(torch.linalg.vector_norm(wide))
    return float(torch.linalg.vector_norm(after.double() - wide)) / size if size else 0.0


def _alike(path: str, held: Held) -> list[Tensor]:
    tensors = [file.head(name) for file, _, name in held]
    shapes = {str(file.directory): tuple(t.shape) for (file, _, _), t in zip(held, tensors, strict=True)}
    if len(set(shapes.values())) > 1:
        raise AdapterFormatError(f"{quoted(path)} has different shapes, so there is no mean: {str(shapes)[:400]}.")
    return tensors


def _widened(tensor: Tensor, wide: torch.dtype) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, wide))
