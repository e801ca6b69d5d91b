"""What peft's layers change in the model's parameters, and whether merged weights can express it.

The reference is what the model computes with the adapter attached. If peft's layer takes no part in that, or a layer
computes something of its own around its weight, merging would compute something else: we refuse such layers by name.
To decide, we inspect the objects, their classes, and the source code around them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from peft.tuners.lora.layer import MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedlora.adapters.config_meaning import TOKENS
from fedlora.adapters.module_names import plain
from fedlora.applying.model import WAY_OUT, Built
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

NAME = "default"  # the adapter's name in the peft model
_STOCK = {kind.forward for kind in (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)}
_FACTS = ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_quantized", "requires_grad", "is_cuda")


def parameter_of(found: Built, path: str, layer: Any) -> str:
    """The name of the base parameter that a peft LoRA layer updates.

    Raises:
        AdapterFormatError: merged weights would compute something else; the message omits the adapter's directory.
    """
    module, base = plain(path), layer.get_base_layer()
    around = found.model.get_submodule(module.rpartition(".")[0])
    if isinstance(layer, MultiheadAttention) or isinstance(around, nn.MultiheadAttention):
        raise AdapterFormatError(
            f"{quoted(module)} belongs to nn.MultiheadAttention, whose out_proj peft updates either twice or not at "
            f"all. {WAY_OUT}"
        )
    parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    if isinstance(layer, ParamWrapper):
        if layer.num_experts == 1 and getattr(base, parameter).dim() == 3 and getattr(base, "is_transposed", False):
            raise AdapterFormatError(f"{quoted(module)} is one transposed expert, which peft itself cannot load")
    elif isinstance(layer.base_layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise AdapterFormatError(f"{quoted(module)} is adapted in two ways that exclude each other")
    else:
        _check_forward(found, module, layer, base)
    if parameter not in base._parameters:
        raise AdapterFormatError(
            f"{quoted(f'{module}.{parameter}')} of {found} is computed from other parameters. {WAY_OUT}"
        )
    _check_read(found, module, parameter)
    return f"{module}.{parameter}"


def token_rows(found: Built, beside: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(a parameter's name, path of the tensor with its trained rows, their indices), including what peft ties to it.

    Raises:
        AdapterFormatError: as in `parameter_of`; or a token that the parameter does not have.
    """
    paths = dict(within(beside))
    for path, wrapper in paths.items():
        if not isinstance(wrapper, TrainableTokensWrapper):
            continue
        adapter, name = wrapper.token_adapter, f"{plain(path)}.weight"
        base, rows = adapter.base_layer, tuple(adapter.token_indices[NAME])
        own = next((p for p, module in paths.items() if module is adapter.tied_adapter), f"{path}.token_adapter")
        if len(set(rows)) < len(rows):
            twice = next(row for row in rows if rows.count(row) > 1)
            raise AdapterFormatError(f"trainable_token_indices names token {twice} of {quoted(name)} twice")
        odd = next((row for row in rows if not 0 <= row < base.weight.shape[0]), None)
        if odd is not None:
            last = base.weight.shape[0] - 1
            raise AdapterFormatError(f"trainable_token_indices names token {odd}, but {quoted(name)} has 0 to {last}")
        if getattr(base, "bias", None) is not None:
            raise AdapterFormatError(
                f"it trains rows of a layer with a bias, {quoted(name)}, but peft omits that bias while the adapter is "
                f"attached: merged, it would compute something else"
            )
        _check_forward(found, plain(path), adapter, base)
        _check_read(found, plain(path), "weight")
        yield name, f"{own.removesuffix('.token_adapter')}{TOKENS}", rows


def within(beside: Any) -> Iterator[tuple[str, nn.Module]]:
    """A peft model's modules, by their paths in adapter files."""
    prefix = "base_model.model."
    for name, module in beside.named_modules():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), module


def asks_whether_tied(model: nn.Module) -> str:
    """The class in a model whose own code depends on `tie_word_embeddings`; "" if there is none."""
    kinds: dict[Any, None] = dict.fromkeys(type(module) for module in model.modules())
    for kind in kinds:
        if kind.__module__.startswith("transformers.") and _asks(kind, "tie_word_embeddings"):
            return str(kind.__name__)
    return ""


def _check_forward(found: Built, module: str, layer: Any, base: nn.Module) -> None:
    """Refuse a layer whose class computes something around its weight; peft knows an embedding's scale."""
    scaled = isinstance(base, nn.Embedding) and layer._get_embed_scale() is not None
    if type(base).forward not in _STOCK and not scaled:
        raise AdapterFormatError(
            f"{quoted(module)} of {found} is a {type(base).__name__} with a forward of its own, for which an "
            f"attached and a merged adapter may differ. {WAY_OUT}"
        )
    if getattr(base, "max_norm", None) is not None:
        raise AdapterFormatError(f"{quoted(module)} of {found} changes its weight on reading (max_norm). {WAY_OUT}")


def _check_read(found: Built, module: str, parameter: str) -> None:
    """Refuse a weight that code in a surrounding module reads directly, bypassing the layer's forward."""
    *around, leaf = module.split(".")
    if found.config.model_type == "bloom" and not found.config.slow_but_exact:
        return  # its code reads them only under that switch
    for depth in range(len(around) + 1):
        kind: Any = type(found.model.get_submodule(".".join(around[:depth])))
        if kind.__module__.startswith("transformers.") and (leaf, parameter) in _reads(kind):
            raise AdapterFormatError(
                f"it changes {quoted(f'{module}.{parameter}')}, which {kind.__name__} reads without calling its layer: "
                f"peft's attached adapter would have no effect there, but a merged one would"
            )


@cache
def _asks(kind: Any, field: str) -> bool:
    """Whether the class's own code, apart from construction and tying, reads that field of its config."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.ctx, ast.Load)
        for function in _functions(kind)
        for node in ast.walk(function)
    )


def _functions(kind: Any) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        if isinstance(node, ast.FunctionDef) and not re.search("init|tie|embeddings", node.name):
            yield node


@cache
def _reads(kind: Any) -> frozenset[tuple[str, str]]:
    """(layer, parameter) pairs the class's own code computes with, such as `self.q_proj.weight`; not dtype or shape."""
    found = set()
    for function in _functions(kind):
        nodes = list(ast.walk(function))
        facts = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _FACTS}
        for call in nodes:
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "isinstance":
                facts |= {id(argument) for argument in call.args}
        for node in nodes:
            match node:
                case ast.Attribute(ast.Attribute(attr=layer), attr=parameter, ctx=ast.Load()) if id(node) not in facts:
                    found.add((layer, parameter))
    return frozenset(found)
