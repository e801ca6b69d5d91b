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
from fedlora.adapters.uploads import labels_of
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError
from fedlora.linalg import weighted_mean

HeadRule = Literal["average", "first", "drop"]
_WAYS = "--heads first takes the first adapter's, --heads drop leaves out all saved modules."


@dataclass(frozen=True, eq=False)
class Heads:
    """A result's tensors of saved modules. left: names that the rule leaves out. rounding: the largest relative change
    of a tensor from writing it in its dtype."""

    tensors: Mapping[str, Tensor]
    left: tuple[str, ...]
    rounding: float


def heads_by(
    files: Sequence[AdapterFile], weights: Sequence[float], rule: str, dtype: torch.dtype | None = None
) -> Heads:
    """The tensors of saved modules by a `HeadRule`, summed in float64. dtype: of the result; None: their own, or the
    wider one.

    Raises:
        AdapterFormatError: an adapter lacks a tensor that others trained, or has another shape of it; or the weights do
            not add up to 1, which has no meaning for whole weights.
    """
    every = tuple(dict.fromkeys(path for file in files for path in file.heads))
    if rule != "average":
        files, weights = files[:1], [1.0]
    found, rounding = {}, 0.0
    for path in {"average": every, "first": files[0].heads, "drop": ()}[rule]:
        _check(path, files, weights)
        tensors = [file.head(path) for file in files]
        mean = weighted_mean([tensor.double() for tensor in tensors], weights)
        own = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        found[path] = narrowed(mean, dtype or own, f"tensor {quoted(path)}")
        size = float(torch.linalg.vector_norm(mean)) or 1.0
        rounding = max(rounding, float(torch.linalg.vector_norm(found[path].double() - mean)) / size)
    return Heads(found, tuple(path for path in every if path not in found), rounding)


def labels_by(files: Sequence[AdapterFile], rule: str) -> tuple[str, ...]:
    """The class names of the result's heads, in order, if a file names them.

    Raises:
        AdapterFormatError: adapters whose heads would be averaged number their classes differently.
    """
    files = {"average": files, "first": files[:1], "drop": ()}[rule]
    named = [(file.directory, names) for file in files if file.heads and (names := labels_of(file.directory))]
    for other, names in named:
        if names != named[0][1]:
            raise AdapterFormatError(
                f"{named[0][0]} and {other} number their classes differently, {quoted(list(named[0][1]))} and "
                f"{quoted(list(names))}, so a mean of their heads would mix classes. {_WAYS}"
            )
    return named[0][1] if named else ()


def _check(path: str, files: Sequence[AdapterFile], weights: Sequence[float]) -> None:
    """Raise `AdapterFormatError` if these have no mean of one saved tensor."""
    for file in files:
        if path not in file.heads:
            raise AdapterFormatError(
                f"{file.directory} has no {quoted(path)}, which others trained in full, and its value in the base "
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
