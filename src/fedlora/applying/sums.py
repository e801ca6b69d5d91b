"""Computes one changed tensor in float64, rounds it once, and measures the rounding.

Large tensors are processed in blocks of rows, so that float64 never holds a whole copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.errors import AdapterFormatError
from fedlora.linalg import norm

BLOCK = 2**21  # numbers held in float64 at a time


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
