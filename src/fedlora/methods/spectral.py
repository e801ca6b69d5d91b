"""What the methods that keep the server's update as its SVD share: an adapter made of chosen components."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedlora.linalg import Spectrum, rank_tolerance, svd_of_product
from fedlora.lora import LoRA, revive

FactorSplit = Literal["balanced", "left"]


def start_spectrum(seed: LoRA) -> tuple[Spectrum, Tensor | None]:
    """The state that a common start means: its SVD; and for a fresh start (B = 0) the rows of A that clients share."""
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
    """The adapter of exactly `rank` made of the components `chosen`, alive in every slot.

    Args:
        chosen: (k,) indices into the spectrum, k <= rank.
        split: "balanced" puts sqrt(s_j) on both factors (paper Eq. (balanced readout)); "left" puts s_j on B, as
            FlexLoRA does.
        start: (r_max, d_in) rows of A for the slots that no component fills, in the first round; None later.
        seed: names the fresh rows for slots still empty; they carry B = 0, so the update is the chosen sum exactly.
    """
    U, s, Vh = spectrum.U[:, chosen], spectrum.s[chosen], spectrum.Vh[chosen]
    on_B, on_A = (s.sqrt(), s.sqrt()) if split == "balanced" else (s, torch.ones_like(s))
    B = U.new_zeros(U.shape[0], rank)
    A = Vh.new_zeros(rank, Vh.shape[1])
    k = len(s)
    B[:, :k] = U * on_B
    A[:k] = Vh * on_A[:, None]
    if start is not None:
        A[k : len(start)] = start[k:rank]
    return revive(LoRA(B, A), *seed)


def whole(spectrum: Spectrum) -> LoRA:
    """The full update as a balanced factor pair of rank l."""
    root = spectrum.s.sqrt()
    return LoRA(spectrum.U * root, spectrum.Vh * root[:, None])
