"""Shared by the methods that keep the server's update as its SVD: builds an adapter from chosen components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import LoRA, fresh_rows, revive, stack
from fedlora.core.method import Update
from fedlora.linalg import Spectrum, norm, rank_tolerance, svd_of_product
from fedlora.linalg.product import product

FactorSplit = Literal["balanced", "left"]


def mean_spectrum(updates: Sequence[Update], dtype: torch.dtype | None = None) -> Spectrum:
    """sum_i p_i B_i A_i in energy order: every component, and the level below which they may be rounding. dtype: of the
    result; None: that of the updates."""
    Bs, As, p = [u.B for u in updates], [u.A for u in updates], [u.weight for u in updates]
    return product(Bs, As, p, tolerance=_per_column(updates), dtype=dtype or Bs[0].dtype).spectrum()


def mean_pair(updates: Sequence[Update]) -> LoRA:
    """sum_i p_i B_i A_i as one float64 pair: if terms cancel, rounding of p_i B_i would show."""
    return stack([u.lora.map(Tensor.double) for u in updates], [u.weight for u in updates])


def rounding_share(updates: Sequence[Update], mean: LoRA) -> float:
    """`Spectrum.rounding` of the updates' mean pair, for methods that keep no spectrum; 0 if it is below one
    hundredth."""
    B, A = mean.factors
    stored = float(norm(norm(B, dim=0) * norm(A, dim=1) * _per_column(updates)))
    return mean_spectrum(updates).rounding if stored * mean.rank**0.5 > 0.1 * mean.norm() else 0.0


def _per_column(updates: Sequence[Update]) -> Tensor:
    each = [rank_tolerance(u.stored) for u in updates for _ in range(u.lora.rank)]
    return torch.tensor(each, dtype=torch.float64, device=updates[0].B.device)


def accumulated_spectrum(before: Spectrum, change: LoRA, rank: int) -> tuple[Spectrum, Spectrum]:
    """(every component of before + change, the `rank` strongest), in the dtype of `before`; summed in float64.

    The change carries no rounding from uploads: the server chose and released it itself.
    """
    own = LoRA(before.U.double() * before.s.double(), before.Vh.double())
    B, A = stack([own, change.map(lambda t: t.to(own.factors[0]))], [1.0, 1.0]).factors
    every = svd_of_product(B, A, tolerance=0.0, dtype=before.s.dtype)
    return every, every.head(rank)


def start_spectrum(seed: LoRA) -> tuple[Spectrum, Tensor | None]:
    """The state for a common start: its SVD; for a fresh start (B = 0) also the rows of A that clients share."""
    B, A = seed.factors
    return svd_of_product(B, A, tolerance=rank_tolerance(B.dtype)), (A if not bool(B.any()) else None)


def instantiate(
    spectrum: Spectrum,
    chosen: Tensor,
    rank: int,
    *,
    split: FactorSplit,
    start: Tensor | None,
    seed: tuple[str | int, ...],
) -> LoRA:
    """The adapter of exactly `rank` built from the components `chosen`, trainable in every slot.

    Args:
        chosen: (k,) indices into the spectrum, k <= rank.
        split: "balanced" puts sqrt(s_j) on both factors (paper Eq. (balanced readout)); "left" puts s_j on B, as
            FlexLoRA does.
        start: (r_max, d_in) rows of A for the slots without a component, in the first round; None later.
        seed: names the fresh rows for slots still empty; they carry B = 0, so the update is the chosen sum exactly.
    """
    chosen = chosen.to(spectrum.s.device)
    B, A = spectrum.U.index_select(1, chosen), spectrum.Vh.index_select(0, chosen)
    if split == "balanced":
        root = spectrum.root.index_select(0, chosen)
        B, A = B.mul_(root), A.mul_(root[:, None])
    else:
        B = B.mul_(spectrum.s[chosen])
    empty = rank - chosen.shape[0]
    if empty == 0:
        return LoRA(B, A)
    B = pad(B, (0, empty))
    if start is None:
        return LoRA(B, torch.cat([A, fresh_rows(rank, A.shape[1], *seed, like=A)[len(chosen) :]]))
    A = pad(A, (0, 0, 0, empty))
    A[len(chosen) : len(start)] = start[len(chosen) : rank]
    return revive(LoRA(B, A), *seed)


def whole(spectrum: Spectrum) -> LoRA:
    """The full update as a balanced factor pair of rank l."""
    return LoRA(*spectrum.balanced)
