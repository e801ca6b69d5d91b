"""Whether an adapter fits a base model, and what it changes in each tensor: one judgement for `export` and
`validate --base`, made on the meta device without reading the base's numbers.

transformers builds the model and peft adds the adapter. We compare the outcome with the file key by key and shape by
shape: peft silently ignores much (targets without factors, factors without a target, missing saved modules), and we
refuse each of these by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from fedlora.adapters.reader import PREFIX, AdapterFile
from fedlora.applying.base_folder import BaseFiles
from fedlora.applying.layers import NAME, asks_whether_tied, parameter_of, within
from fedlora.applying.model import WAY_OUT, Built, built, load, quiet, said
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, FedLoRAError, escaped

# Fields that only concern initialisation or running: peft does not get them, so it loads and imports nothing for them.
_NEUTRAL = frozenset((
    "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "runtime_config",
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "lora_dropout", "inference_mode",
    "megatron_config", "megatron_core", "peft_type",
))  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One change the adapter makes to one parameter or buffer.

    kind: "update", W + s B A for the module `source`; "value", replaced by the tensor `source`; "magnitude", after the
    update, each row rescaled to its norm (DoRA) for the module `source`.
    """

    kind: str
    source: str


@dataclass(frozen=True)
class Judged:
    """built: the base on the meta device. beside: peft's model, also on meta. changes: name in the model -> its
    changes, in order. untied: tied parameters must become separate, and the config must say so."""

    file: AdapterFile
    base: BaseFiles
    built: Built
    beside: Any
    changes: Mapping[str, tuple[Change, ...]]
    untied: bool


def judged(file: AdapterFile, base: BaseFiles) -> Judged:
    """What the adapter changes in the base model.

    Raises:
        AdapterFormatError: it does not fit, in one line. ConfigError: transformers cannot build the base.
    """
    try:
        return _judged(file, base)
    except AdapterFormatError as error:
        if escaped(str(file.directory)) in str(error):
            raise
        raise AdapterFormatError(f"{file.directory}: {str(error).rstrip('.')}.") from error


def _judged(file: AdapterFile, base: BaseFiles) -> Judged:
    found = built(file, base)
    beside = _beside(file, found)
    layers = {path: module for path, module in within(beside) if isinstance(module, LoraLayer)}
    _check_targets(file, found, layers)
    _check_keys(file, found, beside)
    _check_dora(file, layers)
    ties, wanted = ties_of(found.model), [(parameter_of(found, p, x), Change("update", p)) for p, x in layers.items()]
    wanted += [*_heads(file, found)]
    wanted += [(f"{module}.weight", Change("magnitude", module)) for module in file.magnitudes]
    by_name: dict[str, list[Change]] = {}
    for name, change in wanted:
        by_name.setdefault(name, []).append(change)
    changes = {name: _in_order(file, name, several) for name, several in by_name.items()}
    whole = {name for name, several in changes.items() if any(change.kind == "value" for change in several)}
    lacking = sorted(found.missing - whole)
    if lacking:
        raise AdapterFormatError(
            f"{found} needs {quoted(lacking[0])} ({len(lacking):,} such tensors), but neither its files nor the "
            f"adapter have it in full, under any name: transformers would invent its numbers"
        )
    return Judged(file, base, found, beside, changes, _must_untie(file, base, found, ties, changes))


# ---------------------------------------------------------------------------------------------------------------- peft


def _beside(file: AdapterFile, found: Built) -> Any:
    """peft's model: a copy of the base on the meta device, with the adapter's empty layers added."""
    # The modules are those of the file: what chooses among them may be a stranger's regular expression.
    choosing = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    known = {field.name for field in fields(LoraConfig) if field.init} - _NEUTRAL - choosing
    given = {key: dict(x) if isinstance(x, Mapping) else copy.copy(x) for key, x in file.config.items() if key in known}
    with quiet():
        try:
            config = LoraConfig(**given, target_modules=list(file.modules), inference_mode=True)
            wrap = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
            return wrap(copy.deepcopy(found.model), config, NAME, low_cpu_mem_usage=True)
        except (FedLoRAError, MemoryError):
            raise
        except Exception as error:
            raise AdapterFormatError(f"peft cannot load it beside {found}: {said(error)}") from error


def _check_targets(file: AdapterFile, found: Built, layers: Mapping[str, Any]) -> None:
    """Raise `AdapterFormatError` if peft would adapt other modules than the file has factors for, or scale them
    differently from what the file's own names imply."""
    idle, absent = sorted(set(file.modules) - set(layers)), sorted(set(layers) - set(file.modules))
    if idle:
        raise AdapterFormatError(
            f"it has factors of {quoted(idle[0])} ({len(idle):,} such modules), which peft would leave out with {found}"
        )
    if absent:
        raise AdapterFormatError(
            f"peft would also adapt {quoted(absent[0])} of {found} ({len(absent):,} such modules), whose name ends as "
            f"one in the file, but the file has no factors for it. {WAY_OUT}"
        )
    for path, layer in layers.items():
        peft, ours = float(layer.scaling[NAME]), file.scales[path]
        if not math.isclose(peft, ours, rel_tol=1e-9):
            raise AdapterFormatError(f"{quoted(path)} has scale {ours:g} by the file, but {peft:g} with {found}")


def _check_keys(file: AdapterFile, found: Built, beside: Any) -> None:
    """Raise `AdapterFormatError` if peft would ask for tensors or shapes that the file lacks, or would load differing
    tensors into one of its own."""
    with quiet():
        try:
            state = beside.state_dict(keep_vars=True)
            peft = get_peft_model_state_dict(beside, state_dict=state, save_embedding_layers=False)
        except Exception as error:
            raise AdapterFormatError(f"peft cannot list its tensors with {found}: {said(error)}") from error
    for key, tensor in sorted(peft.items()):
        path, stored = key.removeprefix(PREFIX), file.stored.get(key)
        name = quoted(path)
        if stored is None:
            raise AdapterFormatError(f"the file lacks {name}, which peft needs with {found}")
        if stored.shape != tuple(tensor.shape):
            raise AdapterFormatError(
                f"{name} has shape {stored.shape}, but with {found} peft needs {tuple(tensor.shape)}: the adapter "
                f"belongs to another model, or vocabulary or labels changed. Save such a base model, and apply to it"
            )
    loaded: dict[int, str] = {}  # a tensor of peft's -> the file's first key that loads into it
    for key in sorted(file.stored):
        name = quoted(key.removeprefix(PREFIX))
        if key not in peft:
            raise AdapterFormatError(f"{name} is in the file, but peft would leave it out with {found}")
        first = loaded.setdefault(id(peft[key]), key)
        if first != key and not torch.equal(file.tensor(key), file.tensor(first)):
            raise AdapterFormatError(
                f"{quoted(first.removeprefix(PREFIX))} and {name} are one tensor in {found}, which ties them, but "
                f"their numbers differ: peft keeps one of the two for both. Save the adapter again with peft, with "
                f"that model"
            )


def _check_dora(file: AdapterFile, layers: Mapping[str, Any]) -> None:
    """Raise `AdapterFormatError` for DoRA of weights that are stored transposed: their rows are not outputs."""
    odd = next((path for path, layer in layers.items() if getattr(layer, "fan_in_fan_out", False)), None)
    if file.config.get("use_dora") and odd is not None:
        raise AdapterFormatError(f"{quoted(odd)} is DoRA of a layer whose weight is stored transposed. {WAY_OUT}")


# ------------------------------------------------------------------------------------------------------- other tensors


def _heads(file: AdapterFile, found: Built) -> Iterator[tuple[str, Change]]:
    """The changes from saved modules, each a separate copy in peft."""
    state = found.model.state_dict()
    for head in file.heads:
        shape, wanted = file.stored_head(head).shape, tuple(state[head].shape) if head in state else None
        if shape != wanted:
            raise AdapterFormatError(
                f"{quoted(head)} has shape {shape}, but {found} has {wanted or 'no such tensor'}: the vocabulary "
                f"or the labels changed. Save such a base model, and apply to it"
            )
        yield head, Change("value", head)


def _in_order(file: AdapterFile, name: str, several: Sequence[Change]) -> tuple[Change, ...]:
    """The update before its magnitude; a tied duplicate counts once. Refused: two changes of one kind."""
    changes = [c for k, c in enumerate(several) if not any(_same(file, c, other) for other in several[:k])]
    kinds = [c.kind for c in changes]
    if len(set(kinds)) < len(kinds) or ("value" in kinds and len(kinds) > 1):
        raise AdapterFormatError(f"{quoted(name)} is changed in two ways that exclude each other")
    return tuple(sorted(changes, key=lambda change: change.kind == "magnitude"))


# ---------------------------------------------------------------------------------------------------------------- ties


def ties_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name -> all names of the same parameter, for parameters with several names."""
    by_object: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in by_object.values() if len(group) > 1 for name in group}


def untied(config: Any) -> Any:
    """A copy of the config with tying switched off in all parts."""
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.tie_word_embeddings = False
    return config


def _must_untie(
    file: AdapterFile,
    base: BaseFiles,
    found: Built,
    ties: Mapping[str, Sequence[str]],
    changes: Mapping[str, tuple[Change, ...]],
) -> bool:
    """Whether tied uses of one parameter change differently, so that it must be split. Raises if the class ties them
    whatever its config says."""

    def split(groups: Mapping[str, Sequence[str]]) -> Iterator[Sequence[str]]:
        for name, group in groups.items():
            if name in changes and not all(_alike(file, changes[name], changes.get(n, ())) for n in group):
                yield group

    first = next(split(ties), None)
    if first is None:
        return False
    if kind := asks_whether_tied(found.model):
        raise AdapterFormatError(
            f"it changes one of {', '.join(map(repr, first[:4]))}, which {found} ties, and {kind} computes differently "
            f"without that tie (tie_word_embeddings): merged, it would answer differently. {WAY_OUT}"
        )
    model, _, _ = load(found.kind, untied(found.config), base)
    for group in split(ties_of(model)):
        raise AdapterFormatError(
            f"it changes one of {', '.join(map(repr, group[:4]))}, which are one tensor in {found} whatever "
            f"tie_word_embeddings says: merged, the others would change too"
        )
    return True


def _alike(file: AdapterFile, one: Sequence[Change], other: Sequence[Change]) -> bool:
    return len(one) == len(other) and all(_same(file, a, b) for a, b in zip(one, other, strict=True))


def _same(file: AdapterFile, one: Change, other: Change) -> bool:
    """Whether two changes put the same numbers into a tensor."""
    if one == other or one.kind != other.kind:
        return one == other
    if one.kind == "value":
        return torch.equal(file.head(one.source), file.head(other.source))
    if one.kind == "magnitude":
        return torch.equal(*(file.tensor(file.magnitudes[change.source]) for change in (one, other)))
    ((b, a), s), ((d, c), t) = ((pair.factors, scale) for pair, scale in map(file.unscaled, (one.source, other.source)))
    return s == t and any(torch.equal(b, x) and torch.equal(a, y) for x, y in ((d, c), (c.mT, d.mT)))
