"""Whether an adapter fits a base model, and what it does to each of its tensors: one judgement, for `apply` and
`validate --base`, on the meta device, where no number is read.

transformers builds the model, peft puts the adapter beside it; their objects are asked, and compared with the file, key
by key and shape by shape. peft passes over much in silence: targets without factors, factors without a target, saved
modules that are not there. Here each is refused by name. So is what peft computes beside the model and merged weights
could not say, or what peft itself gets wrong.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from peft import PeftModel
from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.layer import Embedding, LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedlora.adapters.reader import PREFIX, AdapterFile
from fedlora.adapters.resolved import plain
from fedlora.applying.base_folder import BaseFiles
from fedlora.applying.model import WAY_OUT, Built, built, load, quiet, said
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError, FedLoRAError

NAME = "default"  # of the adapter in the peft model
_TOKENS = ".token_adapter.trainable_tokens_delta"
# What concerns only how an adapter starts, or runs: peft is not told, so that it loads and imports nothing for it.
_NEUTRAL = frozenset((
    "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "runtime_config", "auto_mapping",
    "base_model_name_or_path", "revision", "peft_version", "lora_dropout", "inference_mode", "megatron_config", "megatron_core",
))  # fmt: skip
_STOCK = {kind.forward for kind in (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)}
_FACTS = ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_quantized", "requires_grad", "is_cuda")


@dataclass(frozen=True)
class Change:
    """One thing that the adapter does to one parameter or buffer.

    kind: "update", W + s B A of the pair at the path `source`; "value", the saved tensor `source` in its place; "bias",
    W + the added bias `source`; "rows", the rows `source` in the places `rows`.
    """

    kind: str
    source: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Judged:
    """built: the model, before peft. peft: the same with the adapter beside it, both on the meta device. changes: name
    in the model -> what happens to it, in order. untied: whether tied parameters must become several. notes: lines."""

    built: Built
    peft: Any
    changes: Mapping[str, tuple[Change, ...]]
    untied: bool
    notes: tuple[str, ...]


def judged(file: AdapterFile, base: BaseFiles) -> Judged:
    """What the adapter does to the base model.

    Raises:
        AdapterFormatError: it does not fit, in a line. ConfigError: the base is none that transformers builds.
    """
    if file.config.get("layer_replication"):
        raise _refused(file, "layer_replication makes another model, which is not written here")
    found = built(file, base)
    names = {name: id(p) for name, p in found.model.named_parameters(remove_duplicate=False)}
    state = {name: tuple(tensor.shape) for name, tensor in found.model.state_dict().items()}
    beside = _beside(file, found)
    layers = {path: layer for path, layer in _within(beside) if isinstance(layer, LoraLayer)}
    _check_keys(file, found, beside, layers)
    ties = _ties(names)
    wanted: dict[str, list[Change]] = {}
    for path, layer in layers.items():
        name = _parameter_of(file, found, path, layer)
        if name not in names:
            raise _refused(file, f"{quoted(path)} has no parameter {name!r} of its own in {found}: it is computed from others")
        wanted.setdefault(name, []).append(Change("update", path))
    for name, change in (*_heads(file, state, ties), *_tokens(file, found, beside)):
        wanted.setdefault(name, []).append(change)
    changes = {name: _in_order(file, name, changes) for name, changes in wanted.items()}
    lacking = sorted(name for name in found.missing - set(changes) if name in state)
    if lacking:
        raise _refused(
            file, f"{found} has {quoted(lacking[0])} ({len(lacking):,} such tensors), which neither its files nor the adapter hold"
        )
    untied = _must_untie(file, base, found, ties, changes)
    return Judged(found, beside, changes, untied, found.notes)


def _refused(file: AdapterFile, why: str) -> AdapterFormatError:
    return AdapterFormatError(f"{file.directory}: {why}.")


# --------------------------------------------------------------------------------------------------------------- peft


def _beside(file: AdapterFile, found: Built) -> Any:
    """peft's model: a copy of the base on the meta device with the adapter's empty layers in it."""
    given = {key: copy.deepcopy(_plain(value)) for key, value in file.config.items()}
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[given["peft_type"]]
    known = {field.name for field in fields(kind) if field.init} - _NEUTRAL - {"peft_type"}
    with quiet():
        try:
            if given["peft_type"] == "ADALORA":
                known.discard("rank_pattern")  # see `_prune`
            config = kind(**{key: value for key, value in given.items() if key in known}, inference_mode=True)
            wrap = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
            beside = wrap(copy.deepcopy(found.model), config, NAME, low_cpu_mem_usage=True)
            _prune(file, beside, config)
            return beside
        except (FedLoRAError, MemoryError):
            raise
        except Exception as error:
            raise _refused(file, f"peft does not put it beside {found}: {said(error)}") from error


def _prune(file: AdapterFile, beside: Any, config: Any) -> None:
    """AdaLoRA's layers at the ranks that were kept, as peft makes them when it loads; itself it cannot on meta."""
    for path, layer in _within(beside):
        if hasattr(layer, "lora_E") and path in file.layouts:
            layer.update_layer(NAME, file.pair(path)[1].shape[0], config.lora_alpha, config=config)
            began_with = torch.tensor([float(config.init_r)], dtype=torch.float64)
            layer.ranknum[NAME] = nn.Parameter(began_with, requires_grad=False)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _within(beside: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the peft model, by the paths that files use."""
    for name, module in beside.named_modules():
        if name.startswith(PREFIX):
            yield name.removeprefix(PREFIX), module


def _check_keys(file: AdapterFile, found: Built, beside: Any, layers: Mapping[str, Any]) -> None:
    """Raises `AdapterFormatError` where peft would load other tensors than the file has, or in other shapes."""
    absent, idle = sorted(set(layers) - set(file.layouts)), sorted(set(file.layouts) - set(layers))
    if idle:
        raise _refused(
            file, f"it has factors of {quoted(idle[0])} ({len(idle):,} such modules), which peft would leave out beside "
            f"{found}: its config does not make peft target that there, or in a layer of another kind. Name the modules in "
            f"target_modules"
        )  # fmt: skip
    if absent:
        raise _refused(
            file, f"peft would adapt {quoted(absent[0])} of {found} too ({len(absent):,} such modules), and the file has no "
            f"factors for that: it is damaged, or of another model. Name in target_modules what was trained"
        )  # fmt: skip
    for path, layer in layers.items():
        _check_scale(file, path, layer)
    with quiet():
        try:
            peft = get_peft_model_state_dict(beside, save_embedding_layers=False)
        except Exception as error:
            raise _refused(file, f"peft does not tell its tensors beside {found}: {said(error)}") from error
    for key, tensor in sorted(peft.items()):
        stored = file.stored.get(key)
        if stored is None:
            raise _refused(file, f"the file lacks {quoted(key.removeprefix(PREFIX))}, which peft asks for beside {found}")
        if stored.shape != tuple(tensor.shape):
            raise _refused(
                file, f"{quoted(key.removeprefix(PREFIX))} has shape {stored.shape}, and beside {found} peft needs {tuple(tensor.shape)}: "
                f"the adapter is of another model, or its vocabulary or labels were changed. Save the base model so, and apply to that"
            )  # fmt: skip
    ours = {f"{PREFIX}{head}" for head in file.heads if file.kind(head) in ("added", "tokens")}
    saved = {key for key in file.stored if _head_name(key) in file.heads and file.kind(_head_name(key)) == "head"}
    for key in sorted((ours | saved) - set(peft)):
        raise _refused(file, f"{quoted(key.removeprefix(PREFIX))} is in the file, and peft would leave it out beside {found}")


def _head_name(key: str) -> str:
    return plain(key.removeprefix(PREFIX))


def _check_scale(file: AdapterFile, path: str, layer: Any) -> None:
    """By rank_pattern and alpha_pattern, as peft reads them on this base's names."""
    if hasattr(layer, "lora_E"):
        return  # AdaLoRA's: one scale for all
    peft, ours = float(layer.scaling[NAME]), file.scale(file.layouts[path].modules(path)[0])
    if not math.isclose(peft, ours, rel_tol=1e-9):
        raise _refused(
            file, f"{quoted(path)} counts {ours:g} times by the file's names, and {peft:g} times by peft: rank_pattern or "
            f"alpha_pattern means another module here. Name the modules in full"
        )  # fmt: skip


# -------------------------------------------------------------------------------------------------- single parameters


def _parameter_of(file: AdapterFile, found: Built, path: str, layer: Any) -> str:
    """The base parameter that a layer of peft updates; refused where merged weights would compute something else."""
    module, base = plain(path), layer.get_base_layer()
    parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    if isinstance(layer, MultiheadAttention) or isinstance(_around(found, module), nn.MultiheadAttention):
        raise _refused(
            file, f"{quoted(module)} is of PyTorch's nn.MultiheadAttention, of which peft counts or reads the update of out_proj "
            f"otherwise than merged weights would. {WAY_OUT}"
        )  # fmt: skip
    if isinstance(layer, ParamWrapper):
        if layer.num_experts == 1 and getattr(base, parameter).dim() == 3 and getattr(base, "is_transposed", False):
            raise _refused(file, f"{quoted(module)} is one transposed expert, which peft itself cannot load")
    else:
        if isinstance(layer.base_layer, BaseTunerLayer):
            raise _refused(file, f"{quoted(module)} is adapted in two ways that exclude each other")
        _check_forward(file, found, module, layer if isinstance(layer, Embedding) else None, base)
    _check_read(file, found, module, parameter)
    if isinstance(layer, LoraLayer) and layer.lora_bias.get(NAME) and getattr(base, "bias", None) is None:
        raise _refused(file, f"it adds a bias to {quoted(module)}, and {found} has no {quoted(module + '.bias')}")
    return f"{module}.{parameter}"


def _around(found: Built, module: str) -> nn.Module:
    around: nn.Module = found.model.get_submodule(module.rpartition(".")[0])
    return around


def _check_forward(file: AdapterFile, found: Built, module: str, embedding: Any, base: nn.Module) -> None:
    """A layer whose class computes something of its own around the weight."""
    scaled = embedding is not None and embedding._get_embed_scale() is not None
    if type(base).forward not in _STOCK and not scaled:
        raise _refused(
            file, f"{quoted(module)} of {found} is a {type(base).__name__} with a forward of its own, where an adapter beside the "
            f"weight and in it need not be the same. {WAY_OUT}"
        )  # fmt: skip
    if getattr(base, "max_norm", None) is not None:
        raise _refused(file, f"{quoted(module)} of {found} is an embedding that changes its weight as it is read (max_norm)")


def _check_read(file: AdapterFile, found: Built, module: str, parameter: str) -> None:
    *around, leaf = module.split(".")
    if leaf in ("dense", "dense_4h_to_h") and found.config.model_type == "bloom" and not found.config.slow_but_exact:
        return  # read only under that switch
    for depth in range(len(around), -1, -1):
        kind = type(found.model.get_submodule(".".join(around[:depth])))
        if kind.__module__.startswith("transformers.models.") and (leaf, parameter) in _reads(kind):
            raise _refused(
                file, f"it changes {quoted(f'{module}.{parameter}')}, which the code of {kind.__name__} uses past its layer: "
                f"beside the model, peft's adapter has no part in it there, and merged it would have"
            )  # fmt: skip


@cache
def _reads(kind: type) -> frozenset[tuple[str, str]]:
    """(layer, parameter) that the class's own code takes for computing: `self.q_proj.weight`, not its dtype or shape."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if any(word in function.name for word in ("init", "tie", "embeddings")):
            continue
        facts = {id(n.value) for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr in _FACTS}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if getattr(call.func, "id", "") == "isinstance":
                facts |= {id(argument) for argument in call.args}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Attribute):
                if id(node) not in facts:
                    found.add((node.value.attr, node.attr))
    return frozenset(found)


def _heads(file: AdapterFile, state: Mapping[str, tuple[int, ...]], ties: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Change]]:
    """The tensors beside the pairs, but for tokens."""
    for head in file.heads:
        kind = file.kind(head)
        if kind == "tokens":
            continue
        if kind == "added":
            yield f"{plain(head.removesuffix('.lora_B.bias'))}.bias", Change("bias", head)
            continue
        shape = file.stored_head(head).shape
        if state.get(head) != shape:
            raise _refused(
                file, f"{quoted(head)} has shape {shape}, the base model's {state.get(head)}: the vocabulary or the labels were "
                f"changed. Save the base model so, and apply to that"
            )  # fmt: skip
        # peft copies a bias or a base weight into the parameter itself; a saved module is a copy beside it.
        for name in (head,) if kind == "head" else ties.get(head, (head,)):
            yield name, Change("value", head)


def _tokens(file: AdapterFile, found: Built, beside: Any) -> Iterator[tuple[str, Change]]:
    """Rows of embeddings, and of what peft ties to them."""
    for path, wrapper in _within(beside):
        if not isinstance(wrapper, TrainableTokensWrapper):
            continue
        adapter, module = wrapper.token_adapter, plain(path)
        weight = adapter.base_layer.weight
        own = next((p for p, other in _within(beside) if other is adapter.tied_adapter), None)
        source = f"{own.removesuffix('.token_adapter') if own else path}{_TOKENS}"
        rows = tuple(adapter.token_indices[NAME])
        if len(set(rows)) < len(rows):
            raise _refused(file, f"trainable_token_indices names a token of {quoted(module)} twice")
        odd = [row for row in rows if not 0 <= row < weight.shape[0]]
        if odd:
            raise _refused(
                file, f"trainable_token_indices names token {odd[0]}, {quoted(module + '.weight')} has 0 to {weight.shape[0] - 1}"
            )
        if getattr(adapter.base_layer, "bias", None) is not None:
            raise _refused(
                file, f"it trains rows of a layer with a bias, {quoted(module + '.bias')}, which peft leaves out as long as the "
                f"adapter lies beside the model: merged, it would compute something else"
            )  # fmt: skip
        scaled = adapter._get_embed_scale() is not None
        if type(adapter.base_layer).forward not in _STOCK and not scaled:
            raise _refused(file, f"it trains rows of {quoted(module)}, a {type(adapter.base_layer).__name__} with a forward of its own")
        _check_read(file, found, module, "weight")
        yield f"{module}.weight", Change("rows", source, rows)


def _in_order(file: AdapterFile, name: str, changes: Sequence[Change]) -> tuple[Change, ...]:
    """First what takes the place, then what is added; a copy that a tie stores twice counts once. Refused: two of one
    kind, and rows of what changes otherwise."""
    changes = [change for k, change in enumerate(changes) if not any(_same(file, change, other) for other in changes[:k])]
    kinds = [change.kind for change in changes]
    saved = any(change.kind == "value" and file.kind(change.source) == "head" for change in changes)
    if len(set(kinds)) < len(kinds) or (len(kinds) > 1 and ("rows" in kinds or saved)):
        raise _refused(file, f"{quoted(name)} is changed in two ways that exclude each other")
    return tuple(sorted(changes, key=lambda change: change.kind != "value"))


# --------------------------------------------------------------------------------------------------------------- ties


def _ties(names: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Name -> all names of the same parameter, of those that have several."""
    by_object: dict[int, list[str]] = {}
    for name, number in names.items():
        by_object.setdefault(number, []).append(name)
    return {name: tuple(group) for group in by_object.values() if len(group) > 1 for name in group}


def ties_of(model: Any) -> dict[str, tuple[str, ...]]:
    return _ties({name: id(p) for name, p in model.named_parameters(remove_duplicate=False)})


def _must_untie(
    file: AdapterFile, base: BaseFiles, found: Built, ties: Mapping[str, Sequence[str]], changes: Mapping[str, tuple[Change, ...]]
) -> bool:
    """Whether uses of one parameter change differently, so that there must be several. Refused where the class ties them
    whatever its config says."""
    odd = [group for name, group in ties.items() if name in changes and not _alike(file, [changes.get(n, ()) for n in group])]
    if not odd:
        return False
    model, _, _ = load(found.kind, untied(found.config), base, most=file.limits.tensors)
    left = ties_of(model)
    for group in odd:
        for name in group:
            if any(not _alike(file, [changes.get(n, ()), changes.get(name, ())]) for n in left.get(name, ())):
                raise _refused(
                    file, f"it changes one of {', '.join(map(repr, group[:4]))}, which are one tensor in {found} whatever "
                    f"tie_word_embeddings says: merged, the others would change too"
                )  # fmt: skip
    return True


def untied(config: Any) -> Any:
    """A copy that ties nothing, in any of its parts."""
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None:
            part.tie_word_embeddings = False
    return config


def _alike(file: AdapterFile, several: Sequence[tuple[Change, ...]]) -> bool:
    """Whether all of them do the same to a parameter."""
    first = several[0]
    return all(len(other) == len(first) and all(_same(file, a, b) for a, b in zip(first, other, strict=True)) for other in several)


def _same(file: AdapterFile, one: Change, other: Change) -> bool:
    if one == other or one.kind != other.kind:
        return one == other
    if one.kind == "update":
        (a, of_a), (b, of_b) = file.unscaled(one.source), file.unscaled(other.source)
        turned = torch.equal(a.B, b.A.mT) and torch.equal(a.A, b.B.mT) if a.B.shape == b.A.mT.shape else False
        return of_a == of_b and (turned or (a.B.shape == b.B.shape and torch.equal(a.B, b.B) and torch.equal(a.A, b.A)))
    return one.rows == other.rows and torch.equal(file.head(one.source), file.head(other.source))
