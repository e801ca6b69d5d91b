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

from peft.tuners.lora.layer import MultiheadAttention
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedlora.applying.model import WAY_OUT, Built
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

NAME = "default"  # the adapter's name in the peft model
_STOCK = {kind.forward for kind in (nn.Linear, Conv1D)}
_FACTS = ("dtype", "device", "shape", "size", "ndim", "dim", "numel", "is_quantized", "requires_grad", "is_cuda")


def parameter_of(found: Built, path: str, layer: Any) -> str:
    """The name of the base parameter that a peft LoRA layer updates.

    Raises:
        AdapterFormatError: merged weights would compute something else; the message omits the adapter's directory.
    """
    base = layer.get_base_layer()
    around = found.model.get_submodule(path.rpartition(".")[0])
    if isinstance(layer, MultiheadAttention) or isinstance(around, nn.MultiheadAttention):
        raise AdapterFormatError(
            f"{quoted(path)} belongs to nn.MultiheadAttention, whose out_proj peft updates either twice or not at "
            f"all. {WAY_OUT}"
        )
    if isinstance(layer.base_layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise AdapterFormatError(f"{quoted(path)} is adapted in two ways that exclude each other")
    _check_forward(found, path, base)
    if "weight" not in base._parameters:
        raise AdapterFormatError(f"{quoted(f'{path}.weight')} of {found} is computed from other parameters. {WAY_OUT}")
    _check_read(found, path, "weight")
    return f"{path}.weight"


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


def _check_forward(found: Built, module: str, base: nn.Module) -> None:
    """Refuse a layer whose class computes something around its weight."""
    if type(base).forward not in _STOCK:
        raise AdapterFormatError(
            f"{quoted(module)} of {found} is a {type(base).__name__} with a forward of its own, for which an "
            f"attached and a merged adapter may differ. {WAY_OUT}"
        )


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
