"""Computes one changed tensor in float64, rounds it once, and measures the rounding. What peft adds to it is compared
with our own reading of the adapter file.

Large tensors are processed in blocks of rows, so that float64 never holds a whole copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters.reader import AdapterFile
from fedlora.applying.layers import NAME, within
from fedlora.errors import AdapterFormatError
from fedlora.linalg import norm

BLOCK = 2**21  # numbers held in float64 at a time
_FACTOR = re.compile(r"(\.lora_[AB])(\.weight)$")


@dataclass(frozen=True)
class Rounding:
    """The cost of writing in a narrow type: the norms of the update and of the part lost. vanished: no number in the
    tensor changed, though some should."""

    update: float = 0.0
    lost: float = 0.0
    vanished: bool = False

    @property
    def loss(self) -> float:
        """|written - meant| / |update|, 0 for no update."""
        return self.lost / self.update if self.update else 0.0


def changed(
    name: str,
    before: Tensor,
    dtype: torch.dtype,
    *,
    value: Tensor | None = None,
    delta: Tensor | None = None,
    magnitude: Tensor | None = None,
) -> tuple[Tensor, Rounding]:
    """(value or `before`) + delta in `dtype`, and the cost of rounding to it.

    Args:
        value: replaces `before`, with its shape. delta: float64, a matrix whose rows are the first dimension.
        magnitude: float64, the norm to which each row of the sum is rescaled (DoRA); None: the sum itself.

    Raises:
        AdapterFormatError: a number exceeds `dtype`'s range, the base model's own are not finite, or integers would be
            changed by anything but integers.
    """
    if not before.is_floating_point():
        if value is None or value.dtype != before.dtype or delta is not None:
            raise AdapterFormatError(
                f"the base model's {name!r} is of type {_short(before.dtype)}: whole numbers cannot take an update."
            )
        return value.reshape(before.shape).clone(), Rounding()
    after = torch.empty(before.shape, dtype=dtype)
    old, new = _matrix(before), _matrix(after)
    instead = None if value is None else _matrix(value)
    update = lost = 0.0
    same = True
    height = max(1, BLOCK // max(1, old.shape[1]))
    for i in range(0, len(old), height):
        j = min(i + height, len(old))
        start = old[i:j].double()
        exact = start if instead is None else instead[i:j].double()
        meant = exact - start
        if delta is not None:
            added = delta[i:j]
            exact, meant = exact + added, meant + added  # not exact - start, which would lose a small update
        if magnitude is not None:
            exact = exact * (magnitude[i:j] / norm(exact, dim=1))[:, None]
            meant = exact - start
        new[i:j] = exact.to(dtype)
        written = new[i:j].double()
        _refuse_infinite(name, start, exact, written, dtype)
        update = math.hypot(update, float(norm(meant)))
        lost = math.hypot(lost, float(norm((written - start) - meant)))
        same = same and torch.equal(written, start)
    return after, Rounding(update, lost, vanished=same and update > 0)


def converted(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """An unchanged tensor in another type. Raises `AdapterFormatError` if that type cannot hold it."""
    if value.dtype == dtype:
        return value
    after = value.to(dtype)
    if not torch.equal(torch.isfinite(after), torch.isfinite(value)):
        most = float(value[torch.isfinite(value)].abs().max())
        raise AdapterFormatError(
            f"the base model's {name!r} holds {most:.6g}, beyond {_short(dtype)}'s largest number "
            f"{torch.finfo(dtype).max:.6g}; name another --dtype."
        )
    return after


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor.flatten(1)


def _refuse_infinite(name: str, start: Tensor, exact: Tensor, written: Tensor, dtype: torch.dtype) -> None:
    if bool(torch.isfinite(written).all()):
        return
    if not bool(torch.isfinite(start).all()):
        raise AdapterFormatError(f"the base model's {name!r} holds NaN or Inf itself.")
    worst = float(exact.abs().max())
    raise AdapterFormatError(
        f"{name!r} would hold {worst:.6g} with the adapter in it, beyond {_short(dtype)}'s largest number "
        f"{torch.finfo(dtype).max:.6g}. Write with --dtype float32, or find out where such a large update comes from."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def filled(file: AdapterFile, beside: Any) -> Mapping[str, Any]:
    """peft's layers by path, holding the file's factors in float64. The rest of peft's model stays on meta."""
    factors = {key: _FACTOR.sub(rf"\1.{NAME}\2", key) for key in file.stored if _FACTOR.search(key)}
    state = {name: file.tensor(key).double() for key, name in factors.items()}
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
    delta: Tensor = layer.get_delta_weight(NAME)
    pair, scale = file.unscaled(path)
    B, A = (factor.double() for factor in pair.factors)
    same = tuple(delta.shape) == tuple(shape)
    same = same and any(_agrees(delta, left * scale, right) for left, right in ((B, A), (A.mT, B.mT)))
    if not same:
        raise AdapterFormatError(
            f"{file.directory}: peft's update of {path!r}, {tuple(delta.shape)} for a weight {tuple(shape)}, is not "
            f"the one in the file. Nothing is written; one of the two is wrong."
        )
    return delta


def _agrees(part: Tensor, left: Tensor, right: Tensor) -> bool:
    """Whether part = left @ right up to float64 rounding, checked in blocks of rows."""
    if part.shape != (left.shape[0], right.shape[1]):
        return False
    step = max(1, BLOCK // max(1, right.shape[1]))
    for rows, its in zip(torch.split(part, step), torch.split(left, step), strict=True):
        if not bool(((rows - its @ right).abs() <= 1e-9 * (its.abs() @ right.abs()) + 1e-300).all()):
            return False
    return True
