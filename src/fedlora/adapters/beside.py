"""The tensors beside the pairs of several adapters: whose each is in a merge, and their mean.

Added biases (lora_bias) are part of the update, and count as their module does. The others are whole weights, no
updates: one of several rules (`--heads`, below) says whose are taken.

What a base model ties is one tensor, and peft stores it under one name or several, by what else an adapter has there.
Nothing in a file says so but its numbers (`Collection.same`); an adapter counts, for a name that it lacks, by what it
holds of the same tensor under another.

    average   the weighted mean of what all of them have
    holders   the weighted mean over those that trained it
    first     the first adapter's
    drop      none
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedlora.adapters import allocation
from fedlora.adapters.collection import TIED, Collection
from fedlora.adapters.module_names import plain
from fedlora.adapters.narrowing import common_type, narrowed
from fedlora.adapters.reader import AdapterFile
from fedlora.core.echo import quoted
from fedlora.core.messages import Missing
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.weighted_mean import weighted_mean

HeadRule = Literal["average", "holders", "first", "drop"]
Held = list[tuple[AdapterFile, float, str]]  # an adapter, its weight, and the name by which it has the tensor
_KINDS = ("added", "head", "bias", "tokens", "base")  # the first of those that adapters call a tensor counts
_WAYS: Mapping[HeadRule, str] = {
    "holders": "--heads holders averages over the adapters that trained it",
    "first": "--heads first takes what the first adapter trained whole",
    "drop": "--heads drop leaves out all that was trained whole",
}


@dataclass(frozen=True, eq=False)
class Beside:
    """The tensors beside the pairs of a result, by the base model's names of them.

    saved: modules_to_save as they need it. weights: path -> each adapter's, as used. left: path -> its kind, of those
    that the rule leaves out. rounding: path -> by how much writing moves it, relative to its own size, of those that it
    moves.
    """

    tensors: Mapping[str, Tensor]
    saved: Sequence[str]
    weights: Mapping[str, tuple[float, ...]]
    left: Mapping[str, str]
    rounding: Mapping[str, float]


def kept(given: Collection, rule: HeadRule) -> dict[str, tuple[str, Held]]:
    """Name of each tensor beside the pairs -> (its kind, the adapters that the rule takes it from with their weights;
    none: it is left out).

    Raises:
        ConfigError: no such rule. AdapterFormatError: it gives some tensor no meaning, with the rules that do; or one
            adapter has LoRA of an embedding, another lora_bias: peft takes one of them.
    """
    if rule not in get_args(HeadRule):
        raise ConfigError(f"--heads must be one of {', '.join(get_args(HeadRule))}; got {str(rule)[:80]!r}.")
    found = _held(given, rule)
    why = _obstacle(given, found, rule)
    if why is not None:
        ways = [way for other, way in _WAYS.items() if _obstacle(given, _held(given, other), other) is None]
        raise AdapterFormatError(f"{why} {', '.join(ways)}.")
    tables = [path for path, layout in given.layouts.items() if layout.kind == "embedding"]
    biases = [path for path, (kind, _) in found.items() if kind == "added"]
    if tables and biases:
        raise AdapterFormatError(
            f"{quoted(tables[0])} is an embedding, for which peft takes no lora_bias, and another adapter has "
            f"{quoted(biases[0])}: no adapter holds both."
        )
    return found


def averaged(
    given: Collection, rule: HeadRule, dtype: torch.dtype | None = None, missing: Missing = "zero", *,
    added: torch.dtype | None = None,
) -> Beside:  # fmt: skip
    """The tensors beside the pairs: added biases as the update that they are part of, the others by `rule`.

    dtype: of floating-point ones; None: their own. missing: as of the modules, for added biases. added: the dtype of
    these, which is that of the factors; None: their own.

    Raises:
        AdapterFormatError: as `kept`; shapes that differ; whole numbers that differ; different tensors under weights
            that do not add up to 1, for they are no updates.
    """
    found, used, left, rounding = {}, {}, {}, {}
    wide = torch.promote_types(dtype or added or torch.float32, torch.float32)
    for path, (kind, held) in sorted(kept(given, rule).items()):
        own, _ = common_type(file.stored_head(name).dtype for file, _, name in held)
        needed = allocation.bytes_to_average([file.stored_head(name) for file, _, name in held])
        allocation.check(needed, f"averaging {quoted(path)}", given.files[0].limits)
        if kind == "added":  # one that lacks it adds zero, and so does every one where none has it
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
            held = [(f, w / total, name) for f, w, name in held] if total else []  # else they are all the same tensor
        if held:
            used[path] = given.effective([(file, w) for file, w, _ in held])
        own = added if kind == "added" and added is not None else own
        found[path] = narrowed(mean, dtype or own, f"tensor {quoted(path)}")
        moved = _moved(mean, found[path])
        if moved:
            rounding[path] = moved
    return Beside(found, _saved_names(given, rule, found), used, left, rounding)


# ------------------------------------------------------------------------------------------------------ whose they are


def _held(given: Collection, rule: HeadRule) -> dict[str, tuple[str, Held]]:
    """A copy of a base weight has a part in the mean of all, and where nobody trained that weight. lora_bias is for all
    modules or none: where one adapter has it, those that others alone have get an added bias of zeros."""
    found: dict[str, tuple[str, Held]] = {}
    for path in dict.fromkeys(path for file in given.files for path in file.heads):
        all_of_it = [(file, w, name) for file, w in zip(given.files, given.weights, strict=True)
                     if (name := _name_in(given, file, path)) is not None]  # fmt: skip
        trained = [(file, w, name) for file, w, name in all_of_it if file.kind(name) != "base"]
        held = all_of_it if rule != "holders" else trained or all_of_it
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
    """The name by which an adapter has a tensor beside the pairs: its own, or one of the same tensor."""
    if file.has_head(path):
        return path
    return next((name for name in given.same.get(path, ()) if file.has_head(name) and file.kind(name) in TIED), None)


def _obstacle(given: Collection, found: Mapping[str, tuple[str, Held]], rule: HeadRule) -> str | None:
    """Why a rule gives some tensor no meaning, by names alone; None where it gives all of them one."""
    updated: dict[str, list[AdapterFile]] = {}  # a layer, or the bias of one -> whose pairs change it
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
                    f"{file.directory} has an update of {quoted(name)}, which {trained.directory} trained whole. "
                    f"Without the base model that change is unknown, so no adapter can hold the sum of the two."
                )
        lacks = next((file for file in given.files if file not in whole), None)
        if rule == "average" and kind != "base" and lacks is not None:
            return (
                f"{lacks.directory} has no {quoted(path)}, which others trained whole, and its value in the base "
                f"model is unknown here."
            )
    return None


def _saved_names(given: Collection, rule: HeadRule, found: Mapping[str, Tensor]) -> list[str]:
    """modules_to_save of the adapters that the rule takes whole tensors from, but for what is left out."""
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
    """The weighted mean of a tensor over its holders, computed in `wide` or wider. signed: the weights are of a sum and
    the tensor was trained, so they must add up to 1, also where all hold the same."""
    tensors, weights = _alike(path, held), [w for _, w, _ in held]
    total = math.fsum(weights)
    if signed and abs(total - 1) > 1e-9:
        raise AdapterFormatError(
            f"{quoted(path)} was trained in full and is not an update, so weights that add up to {total:g} have no "
            f"meaning "
            f"for it: --heads first takes the first adapter's, drop leaves it out."
        )
    if all(torch.equal(t, tensors[0]) for t in tensors[1:]):
        return tensors[0]
    if not all(t.is_floating_point() for t in tensors):
        raise AdapterFormatError(f"{quoted(path)} holds integers that differ, so there is no mean; see --heads.")
    if not total:
        raise ConfigError(f"{quoted(path)} is only in adapters of weight 0.")
    return weighted_mean([_widened(t, wide) for t in tensors], [w / total for w in weights])


def _moved(before: Tensor, after: Tensor) -> float:
    """By how much another type moves a tensor, relative to its size."""
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
