"""Which way round a base model keeps the weight of each kind of layer, and whether an update fits it.

    layer                       stored as                       update (d_out, d_in)
    torch.nn.Linear             (d_out, d_in)                   as it is
    transformers' Conv1D        (d_in, d_out)                   transposed
    torch.nn.Embedding          (vocabulary, d)                 (d, vocabulary), transposed
    convolutions                (c_out, c_in, k...)             (c_out, c_in k...), folded
    nn.MultiheadAttention       in_proj_weight (3 d, d)         as it is
    parameters, 2 dimensions    (d_out, d_in)                   as it is
    experts                     (E, d_out, d_in)                as they are
    experts, is_transposed      (E, d_in, d_out)                transposed

The rules are peft's (0.21: lora.Linear, lora.Embedding, lora.ParamWrapper). Only the architecture says which layers are
Conv1D and which experts are transposed; where it is not known, a shape that fits one way only may tell for experts, and
nothing is guessed.
"""

from __future__ import annotations

import math

from fedlora.adapters.architecture import Architecture
from fedlora.adapters.layouts import Layout
from fedlora.errors import AdapterFormatError


def is_transposed(
    architecture: Architecture,
    name: str,
    layout: Layout,
    update: tuple[int, int],
    weight: tuple[int, ...],
    *,
    surely_linear: bool = False,
) -> bool:
    """Whether an update (d_out, d_in) must be transposed to be added to the stored weight of that shape.

    Args:
        name: of the weight, as the adapter's model has it.
        weight: its shape. A convolution's update is flat.
        surely_linear: whatever the architecture is (nn.MultiheadAttention).

    Raises:
        AdapterFormatError: it does not fit, or which way round it fits cannot be told.
    """
    if layout.kind == "conv":
        fits = len(weight) > 2 and weight[2:] == layout.kernel and update == (weight[0], math.prod(weight[1:]))
        return _refused_unless(fits, name, update, weight, f"a convolution with kernel {layout.kernel}")
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    if layout.kind == "embedding":
        if architecture.is_embedding(leaf) is False:
            raise AdapterFormatError(f"{name!r} gets the update of an embedding, and in {architecture} it is none.")
        _refused_unless(weight == update[::-1], name, update, weight, "an embedding, (vocabulary, d)")
        return True
    if layout.kind == "parameter":
        return _experts_transposed(architecture, name, layout, update, weight)
    if len(weight) != 2:
        return _refused_unless(False, name, update, weight, "the weight of a linear layer, a matrix")
    if architecture.is_embedding(leaf):
        raise AdapterFormatError(f"{name!r} is an embedding in {architecture}, and gets the update of a linear layer.")
    conv1d = False if surely_linear else architecture.conv1d(leaf)
    if conv1d is True:
        _refused_unless(weight == update[::-1], name, update, weight, "a Conv1D, (d_in, d_out)")
        return True
    if conv1d is False:
        return _refused_unless(weight == update, name, update, weight, "a linear layer, (d_out, d_in)")
    if weight[0] == weight[1] == update[0] == update[1]:
        raise _not_told(architecture, name, weight)
    if architecture.types and len(architecture.types) > 1 and weight == update[::-1] and _is_conv1d(architecture, leaf):
        return True
    return _refused_unless(weight == update, name, update, weight, "a linear layer, (d_out, d_in)")


def _is_conv1d(architecture: Architecture, leaf: str) -> bool:
    """Whether one part of a model of several parts has Conv1D layers of that name."""
    return any(Architecture({"model_type": t}, {}).conv1d(leaf) for t in architecture.types)


def _experts_transposed(
    architecture: Architecture, name: str, layout: Layout, update: tuple[int, int], weight: tuple[int, ...]
) -> bool:
    if len(weight) == 2:
        return _refused_unless(layout.experts == 1 and weight == update, name, update, weight, "a matrix")
    if len(weight) != 3 or weight[0] != layout.experts:
        what = f"a tensor of {layout.experts} experts"
        return _refused_unless(False, name, update, weight, what)
    one, in_first = weight[1:], architecture.experts_in_first
    square = one[0] == one[1]
    if in_first is None and square:
        raise _not_told(architecture, name, weight)
    if in_first is None or (architecture.converted and not square):
        fits = update in (one, one[::-1])
        _refused_unless(fits, name, update, weight, "experts")
        return update != one
    if in_first and layout.experts == 1:
        raise AdapterFormatError(f"{name!r} is one transposed expert, which peft itself cannot load.")
    want = one[::-1] if in_first else one
    _refused_unless(
        update == want, name, update, weight, "experts, " + ("(E, d_in, d_out)" if in_first else "(E, d_out, d_in)")
    )
    return in_first


def _refused_unless(fits: bool, name: str, update: tuple[int, int], weight: tuple[int, ...], what: str) -> bool:
    if not fits:
        raise AdapterFormatError(
            f"{name!r} gets an update of {update}, but the base model's weight is {weight}, where {what} is needed: "
            f"the adapter is of another model."
        )
    return False


def _not_told(architecture: Architecture, name: str, weight: tuple[int, ...]) -> AdapterFormatError:
    return AdapterFormatError(
        f"{name!r} is square {weight}, and which way round {architecture} keeps it is not known here. Merge this "
        f"adapter with peft's merge_and_unload."
    )
