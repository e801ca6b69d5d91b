"""What peft adds to a weight, in float64, compared with our own reading of the adapter file as it is computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from fedlora.adapters.reader import WEIGHTS_FILE, AdapterFile
from fedlora.adapters.untrusted_files import StrangersFile, tensor_of
from fedlora.applying.layers import NAME, within
from fedlora.applying.sums import BLOCK
from fedlora.errors import AdapterFormatError

_FACTOR = re.compile(r"(\.lora_(?:embedding_)?[ABE])(\.weight)?$")


def filled(file: AdapterFile, beside: Any) -> Mapping[str, Any]:
    """peft's layers by path, holding the file's factors in float64. The rest of peft's model stays on meta."""
    weights = StrangersFile(file.directory / WEIGHTS_FILE)
    factors = {key: _FACTOR.sub(rf"\1.{NAME}\2", key) for key in file.stored if _FACTOR.search(key)}
    state = {name: tensor_of(weights, file.stored[key]).double() for key, name in factors.items()}
    told = beside.load_state_dict(state, strict=False, assign=True)
    if told.unexpected_keys:
        raise AdapterFormatError(f"{file.directory}: peft has no place for {told.unexpected_keys[0]!r}.")
    return dict(within(beside))


@torch.no_grad()
def update(file: AdapterFile, path: str, layer: Any, shape: Sequence[int]) -> Tensor:
    """What peft adds to a weight of this shape, as a matrix whose rows are its first dimension. It must equal the
    file's own product or its transpose; only peft knows which.

    Raises:
        AdapterFormatError: the two differ.
    """
    if isinstance(layer, ParamWrapper):  # it reads only dtype and device from the weight, which is on meta
        layer.get_param = lambda: torch.empty(0, dtype=torch.float64)
    delta: Tensor = layer.get_delta_weight(NAME)
    delta = delta[None] if delta.dim() + 1 == len(shape) and shape[0] == 1 else delta  # a single expert
    layout = file.layouts[path]
    parts = list(delta) if layout.experts and delta.dim() == 3 else [delta.flatten(1)]
    same = tuple(delta.shape) == tuple(shape) and len(parts) == max(layout.experts, 1)
    for module, part in zip(layout.modules(path), parts, strict=False) if same else ():
        pair, scale = file.unscaled(module)
        B, A = (factor.double() for factor in pair.factors)
        same = same and any(_agrees(part, left * scale, right) for left, right in ((B, A), (A.mT, B.mT)))
    if not same:
        raise AdapterFormatError(
            f"{file.directory}: peft's update of {path!r}, {tuple(delta.shape)} for a weight {tuple(shape)}, is not "
            f"the one in the file. Nothing is written; one of the two is wrong."
        )
    return delta.flatten(1)


def _agrees(part: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether part = left @ right up to float64 rounding, checked in blocks of rows."""
    if part.shape != (left.shape[0], right.shape[1]):
        return False
    step = max(1, BLOCK // max(1, right.shape[1]))
    for rows, its in zip(torch.split(part, step), torch.split(left, step), strict=True):
        if not bool(((rows - its @ right).abs() <= 1e-9 * (its.abs() @ right.abs()) + 1e-300).all()):
            return False
    return True
