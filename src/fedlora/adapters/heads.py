"""The fully trained tensors (modules_to_save) of several adapters: whole weights, no updates.

average   the weighted mean; every adapter must have trained them
first     the first adapter's
drop      none
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import narrowed
from fedlora.adapters.untrusted_files import FLOATS
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError
from fedlora.linalg import weighted_mean

HeadRule = Literal["average", "first", "drop"]
_WAYS = "--heads first takes the first adapter's, --heads drop leaves out all saved modules."


@dataclass(frozen=True, eq=False)
class Heads:
    """A result's tensors of saved modules. left: names that the rule leaves out. rounding: name -> relative change from
    writing it in its dtype, where not zero."""

    tensors: Mapping[str, Tensor]
    left: tuple[str, ...]
    rounding: Mapping[str, float]


def heads_by(
    files: Sequence[AdapterFile], weights: Sequence[float], rule: str, dtype: torch.dtype | None = None
) -> Heads:
    """The tensors of saved modules by a `HeadRule`. dtype: of the result; None: their own, or the wider one.

    Raises:
        AdapterFormatError: an adapter lacks a tensor that others trained, or has another shape of it; or the weights do
            not add up to 1, which has no meaning for whole weights.
    """
    every = tuple(dict.fromkeys(path for file in files for path in file.heads))
    if rule == "drop":
        return Heads({}, every, {})
    if rule == "first":
        files, weights = files[:1], [1.0]
    found, rounding = {}, {}
    for path in every if rule == "average" else files[0].heads:
        lacks = next((file for file in files if path not in file.heads), None)
        if lacks is not None:
            raise AdapterFormatError(
                f"{lacks.directory} has no {quoted(path)}, which others trained in full, and its value in the base "
                f"model is unknown here. {_WAYS}"
            )
        if not math.isclose(math.fsum(weights), 1, rel_tol=1e-9):
            raise AdapterFormatError(
                f"{quoted(path)} was trained in full and is no update, so weights that add up to "
                f"{math.fsum(weights):g} have no meaning for it. {_WAYS}"
            )
        shapes = {str(file.directory): file.stored_head(path).shape for file in files}
        if len(set(shapes.values())) > 1:
            raise AdapterFormatError(
                f"{quoted(path)} has different shapes, so there is no mean: {quoted(shapes, 400)}. {_WAYS}"
            )
        stored = reduce(torch.promote_types, (FLOATS[file.stored_head(path).dtype] for file in files))
        wide = torch.promote_types(torch.promote_types(stored, dtype or stored), torch.float32)
        tensors = [file.head(path).to(wide) for file in files]
        same = all(torch.equal(t, tensors[0]) for t in tensors[1:])
        mean = tensors[0] if same else weighted_mean(tensors, weights)
        found[path] = narrowed(mean, dtype or stored, f"tensor {quoted(path)}")
        if moved := _moved(mean, found[path]):
            rounding[path] = moved
    return Heads(found, tuple(path for path in every if path not in found), rounding)


def _moved(before: Tensor, after: Tensor) -> float:
    """The relative change when a tensor is cast to another type."""
    wide = before.double()
    size = float(torch.linalg.vector_norm(wide))
    return float(torch.linalg.vector_norm(after.double() - wide)) / size if size else 0.0
