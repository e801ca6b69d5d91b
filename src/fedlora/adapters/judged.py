"""Checks that an adapter's config and tensors fit each other as peft loads them; a mismatch is refused by name.

A file that peft cannot load is damaged or made up and has no defined meaning, and a result that kept its fields could
not be loaded either. Where peft is silent (factors it would leave out, halves it would ignore), we still refuse. Pure
functions of what `parsed` found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlora.adapters.config_fields import LARGEST_SCALE
from fedlora.adapters.config_meaning import MAGNITUDE, SAVED_FOR, TOKENS, check_left_to_base, names_rows, ties_saved
from fedlora.adapters.limits import Limits
from fedlora.adapters.module_names import may_be_embedding, plain, saved_modules
from fedlora.adapters.parsed import Meaning, Parsed
from fedlora.adapters.untrusted_files import FLOATS
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

# Beyond this, sums of squares in float32 come near its end (3e38), and no model's weight is anywhere near.
_LARGEST_NUMBER = 1e15
_ONLY_UPDATES = (
    "DoRA: each weight's rows are also rescaled, to the norms in lora_magnitude_vector, so only a base model shows the "
    "whole change; norms and spectra are of s B A alone."
)


def judge(parsed: Parsed, meaning: Meaning, limits: Limits, scaling: float, *, with_base: bool) -> tuple[str, ...]:
    """Notes for the user about what cannot be decided without the base model.

    scaling: the unit for all scales. with_base: the base model is consulted later.

    Raises:
        AdapterFormatError: the first mismatch.
    """
    config = parsed.config
    if meaning.twice:
        raise AdapterFormatError(
            f"target_modules names {quoted(meaning.twice[0])}, and target_parameters one of its parameters: peft "
            f"takes one of the two."
        )
    _check_targets(parsed, meaning)
    kinds = {name: meaning.layouts[path].kind for path, name in left_to_base(meaning).items()}
    notes = check_left_to_base(config, kinds, with_base=with_base)
    layouts = meaning.layouts.values()
    experts, count = max(layout.experts for layout in layouts), sum(max(layout.experts, 1) for layout in layouts)
    limits.check("experts", experts, f"a tensor has {experts:,} experts")
    limits.check("modules", count, f"the adapter has {count:,} modules")
    for path in parsed.pairs:
        _check_pair(parsed, meaning, path)
        scale = meaning.scale(path)
        if not (scale <= LARGEST_SCALE and 1e-30 < scale / scaling < 1e30):
            raise AdapterFormatError(
                f"module {quoted(path)} has alpha / r = {scale:.3g}, a scale that no adapter is trained with."
            )
    _check_added(parsed)
    if config.get("use_dora"):
        _check_magnitudes(parsed, meaning)
        notes += () if with_base else (_ONLY_UPDATES,)
    lacking = _check_saved(config, [path for path, (_, kind) in parsed.beside.items() if kind == "head"])
    if lacking and not with_base:
        notes += (
            f"the file has no tensor of {' or '.join(map(quoted, lacking))}, where peft expects a head for task_type = "
            f"{quoted(config.get('task_type'))}: it loads only beside a model whose head has another name, and was "
            f"not trained. fedlora validate --base checks with a base model.",
        )
    rows = {plain(path.removesuffix(TOKENS)): parsed.tensors[key].shape
            for path, (key, kind) in parsed.beside.items() if kind == "tokens"}  # fmt: skip
    _check_tokens(config, rows)
    return notes


def left_to_base(meaning: Meaning) -> dict[str, str]:
    """Path of each pair on which only the base model decides -> the name that peft matches."""
    return {path: meaning.asked[path] for path, targeted in meaning.targeted.items() if targeted is None}


def _check_targets(parsed: Parsed, meaning: Meaning) -> None:
    """peft silently leaves out factors of modules that the config does not target."""
    for path, targeted in meaning.targeted.items():
        if targeted is False:
            raise AdapterFormatError(
                f"holds factors of {quoted(path)}, which its config does not target: peft would leave them out "
                f"(target_modules = {quoted(parsed.config.get('target_modules'), 80)}; see exclude_modules, "
                f"layers_to_transform and modules_to_save too)."
            )


def _check_pair(parsed: Parsed, meaning: Meaning, path: str) -> None:
    """A pair must have the shapes of its layer kind, and the rank that the config gives."""
    layout, B, A = meaning.layouts[path], parsed.shape(path, "B"), parsed.shape(path, "A")
    if 0 in (*B[:1], *A[1:]) or (0 in (*B, *A) and layout.kind != "adalora"):  # AdaLoRA may prune a module away
        raise AdapterFormatError(
            f"module {quoted(path)} is empty: B {B}, A {A}. DeepSpeed's ZeRO-3 saves parameters like this if it has "
            f"not gathered them: save under deepspeed.zero.GatheredParameters, or convert its checkpoint with "
            f"zero_to_fp32.py."
        )
    r, says = layout.rank(B, A), meaning.ranks[path]
    if r is None or (layout.kind == "adalora" and parsed.shape(path, "E") != (r, 1)):
        needed = {
            "conv": "B (c_out, r, 1, ...) and A (r, c_in, k, ...); grouped convolutions are not supported",
            "parameter": f"B (d_out, r E) and A (r E, d_in) of E = {layout.experts}",
        }.get(layout.kind, "B (d_out, r) and A (r, d_in)")
        raise AdapterFormatError(
            f"module {quoted(path)} is no LoRA of a {layout.kind} layer, which needs {needed}; got B {B} and A {A}."
        )
    if r != says:
        raise AdapterFormatError(f"module {quoted(path)} has rank {r}, but its config says {says}.")
    init = parsed.config.get("init_lora_weights", True)
    if layout.kind == "embedding" and parsed.config.get("lora_bias"):
        raise AdapterFormatError(f"{quoted(path)} is an embedding, for which peft takes no lora_bias.")
    if layout.kind == "conv" and init in ("eva", "orthogonal"):
        raise AdapterFormatError(
            f"{quoted(path)} is a convolution, and peft cannot initialise it with init_lora_weights = {init!r}."
        )
    if init == "orthogonal" and layout.kind in ("linear", "parameter") and r % 2:
        raise AdapterFormatError(
            f"{quoted(path)} has rank {r}; peft allows even ranks only with init_lora_weights = 'orthogonal'."
        )


def _check_added(parsed: Parsed) -> None:
    """An added bias must belong to a pair and have one value per output."""
    for path, (key, kind) in parsed.beside.items():
        if kind != "added":
            continue
        module, stored = path.removesuffix(".lora_B.bias"), parsed.tensors[key]
        if module not in parsed.pairs:
            raise AdapterFormatError(f"{quoted(path)} does not belong to any pair of factors.")
        d_out = parsed.shape(module, "B")[0]
        if stored.dtype not in FLOATS or stored.shape != (d_out,):
            raise AdapterFormatError(
                f"{quoted(path)} has shape {stored.shape} and type {stored.dtype}; its module has {d_out} outputs."
            )


def _check_magnitudes(parsed: Parsed, meaning: Meaning) -> None:
    """Each pair must have a magnitude with one value per output, and each magnitude a pair."""
    found = {
        path.removesuffix(MAGNITUDE): parsed.tensors[key]
        for path, (key, kind) in parsed.beside.items()
        if kind == "magnitude"
    }
    odd = next(iter(sorted(found.keys() ^ parsed.pairs.keys())), None)
    if odd is not None:
        what = "a magnitude without a pair of factors" if odd in found else "no lora_magnitude_vector, which DoRA needs"
        raise AdapterFormatError(f"module {quoted(odd)} has {what}.")
    for path, stored in found.items():
        kind, d_out = meaning.layouts[path].kind, parsed.shape(path, "B")[0]
        if kind != "linear":
            raise AdapterFormatError(f"{quoted(path)} is DoRA of a {kind} layer; fedlora reads that of linear layers.")
        if stored.dtype not in FLOATS or stored.shape != (d_out,):
            raise AdapterFormatError(
                f"the magnitude of {quoted(path)} has shape {stored.shape} and type {stored.dtype}; its module has "
                f"{d_out} outputs."
            )


def _check_saved(config: Mapping[str, Any], given: list[str]) -> list[str]:
    """Every module in modules_to_save needs tensors: peft asks the file for each. given: the heads' paths.

    Names that peft itself adds for a task are exempt, since a model has one of them or a head of another name. Returns
    those names if the file has none of them.
    """
    names: list[str] = list(config.get("modules_to_save") or ())
    lacking = [name for name in names if not any(f"{name}." in path for path in given)]
    for path in given:  # the outer module's wrapper hides the inner module from peft
        around = saved_modules(path, names)
        if any(module.count(".") != around[0].count(".") + 2 for module in around[1:]):
            raise AdapterFormatError(
                f"modules_to_save names {quoted(around[0])} and {quoted(around[1])} inside it: peft cannot load one "
                f"saved module within another. Name only the outer one."
            )
    added = {name for adds in SAVED_FOR.values() for name in adds}
    some = bool(added.intersection(names).difference(lacking))
    by_peft = [name for name in lacking if name in (added if some else SAVED_FOR.get(config.get("task_type"), ()))]
    for name in lacking:
        if name in by_peft:
            continue
        if ties_saved(config) and given and may_be_embedding(name):  # peft stores one copy for all tied modules
            continue
        raise AdapterFormatError(f"modules_to_save names {quoted(name)}, but the file has no tensor of it.")
    return [] if some else by_peft


def _check_tokens(config: Mapping[str, Any], rows: Mapping[str, tuple[int, ...]]) -> None:
    """Check trainable_token_indices against the file's rows: module whose tokens were trained -> their shape."""
    said = config.get("trainable_token_indices")
    if said is None:
        return
    if not isinstance(said, Mapping):
        if not rows:
            raise AdapterFormatError("trainable_token_indices names tokens, but the file has no rows of them.")
        wanted = dict.fromkeys(rows, said)
    else:
        wanted = {path: said[name] for path in rows for name in names_rows(said, path)}
        stored = list(wanted.values())
        for name, indices in said.items():
            there = any(name in names_rows(said, path) for path in rows)
            if not there and indices not in stored:  # peft stores one of several tied layers with the same tokens
                raise AdapterFormatError(
                    f"trainable_token_indices names {quoted(name)}, but the file has no rows of it."
                )
    for path, shape in rows.items():
        if path not in wanted and may_be_embedding(path) and (shape[0] if shape else 0) in map(len, stored):
            continue  # a tied copy, if `copies_in` finds the same numbers
        if path not in wanted:
            raise AdapterFormatError(
                f"the file has rows for {quoted(path)}, which trainable_token_indices does not name."
            )
        if len(shape) != 2 or shape[0] != len(wanted[path]):
            raise AdapterFormatError(
                f"the rows of {quoted(path)} have shape {shape}; trainable_token_indices names {len(wanted[path])}."
            )


def check_size(key: str, size: float) -> None:
    """Raise `AdapterFormatError` if a tensor's largest number is NaN, Inf or absurdly large."""
    if not size < math.inf:
        raise AdapterFormatError(f"{quoted(key)} holds NaN or Inf.")
    if size > _LARGEST_NUMBER:
        raise AdapterFormatError(
            f"{quoted(key)} holds a number of size {size:.3g}; up to {_LARGEST_NUMBER:g} are allowed, so that "
            f"results stay finite."
        )


def check_update(path: str, rank: int, sizes: list[float], scale: float) -> None:
    """Bound an update by its factors: no entry exceeds the product of their sizes times rank and scale."""
    most = max(rank, 1) * math.prod(sizes) * max(scale, 1)
    if not most <= _LARGEST_NUMBER:
        raise AdapterFormatError(
            f"the update of module {quoted(path)} may be as large as {most:.3g} by its factors; up to "
            f"{_LARGEST_NUMBER:g} are allowed, so that it stays finite."
        )
