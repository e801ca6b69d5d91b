"""What several methods share: states that are one pair, or one SVD; a round's mean update; zero-padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Update
from fedlora.linalg import Spectrum, Term, projected_sums, svd_of_product


class AveragedPair(Method[LoRA]):
    """A method whose state is one pair: the common start at first, and always the whole update. A client gets the first
    of its slots."""

    def init(self, seed: LoRA) -> LoRA:
        return seed

    def readout(self, state: LoRA, client: str | None, rank: int) -> LoRA:
        return state.first(rank)

    def effective(self, state: LoRA) -> LoRA:
        return state


class AveragedProduct(Method[Spectrum]):
    """A method whose state is the whole update in energy order."""

    State: ClassVar[type] = Spectrum

    def init(self, seed: LoRA) -> Spectrum:
        return svd_of_product(*seed.factors)  # no components if it is fresh (B = 0)

    def effective(self, state: Spectrum) -> LoRA:
        return balanced(state)

    def diagnostics(self, state: Spectrum) -> Mapping[str, object]:
        return diagnostics_of(state)


def mean_product(updates: Sequence[Update]) -> Spectrum:
    """sum_i w_i B_i A_i in energy order: every component, and how many of them are certainly no rounding."""
    return mean_products([updates])[0]


def mean_products(matrices: Sequence[Sequence[Update]], dtype: torch.dtype | None = None) -> list[Spectrum]:
    """`mean_product` of each matrix, in `dtype` (None: that of its updates)."""
    sums = [[Term(*u.lora.factors, u.weight, u.roundoff) for u in updates] for updates in matrices]
    return [made.spectrum for made in projected_sums(sums, [None] * len(sums), dtype)]


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
