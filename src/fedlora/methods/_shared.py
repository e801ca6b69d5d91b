"""What several methods share: a round's mean update as one SVD; zero-padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import LoRA
from fedlora.core.method import Update
from fedlora.linalg import Spectrum, Term, projected_sums, svd_of_product


def mean_product(updates: Sequence[Update]) -> Spectrum:
    """sum_i w_i B_i A_i in energy order: every component, and how many of them are certainly no rounding."""
    return mean_products([updates])[0]


def mean_products(matrices: Sequence[Sequence[Update]], dtype: torch.dtype | None = None) -> list[Spectrum]:
    """`mean_product` of each matrix, in `dtype` (None: that of its updates)."""
    sums = [[Term(*u.lora.factors, u.weight, u.roundoff) for u in updates] for updates in matrices]
    return [made.spectrum for made in projected_sums(sums, [None] * len(sums), dtype)]


def spectrum_of(seed: LoRA) -> Spectrum:
    """The common start in energy order; no components if it is fresh (B = 0)."""
    return svd_of_product(*seed.factors)


def balanced(spectrum: Spectrum, chosen: Tensor | None = None) -> LoRA:
    """The pair of the chosen components (None: all), with sqrt(s) on both factors."""
    return LoRA(*spectrum.balanced(chosen))


def diagnostics_of(spectrum: Spectrum) -> dict[str, object]:
    """What a method that keeps its update as a `Spectrum` has to say of it."""
    return {
        "rank": spectrum.sound, "components": spectrum.rank, "rounding": spectrum.rounding, "cut": spectrum.cut,
        "singular_values": spectrum.s.tolist(),
    }  # fmt: skip


def padded(lora: LoRA, rank: int) -> LoRA:
    """[B 0] and [A; 0] of `rank` slots; a factor that did not travel stays absent. It has no more slots than that: the
    server refuses others (`server.checks.unserved`)."""
    B, A, empty = lora.B, lora.A, rank - lora.rank
    assert empty >= 0, (lora.rank, rank)
    return LoRA(None if B is None else pad(B, (0, empty)), None if A is None else pad(A, (0, 0, 0, empty)))
