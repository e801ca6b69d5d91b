"""raFLoRA: average each rank slot over the clients that have it, then read out as FlexLoRA (2602.13486).

    Delta W = sum_h sum_{i: r_i >= h} (p_i / P_h) B_i[:, l:h] A_i[l:h],    P_h = sum_{i: r_i >= h} p_i
            = U diag(s) V^T                  read out: the r_i strongest, sqrt(s) on both factors

h runs over the ranks, l is the one below. With p_i alone, slots that only high-rank clients have are divided by
everybody's weight in every round, until the energy sits in the smallest rank ("rank collapse"). With equal ranks it is
the plain mean. Otherwise it is not, on purpose, and not gauge-invariant: which slot holds what is a matter of
coordinates. Cost as FlexLoRA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import Method, Update
from fedlora.linalg import Spectrum
from fedlora.methods._shared import balanced, diagnostics_of, mean_product, spectrum_of


@dataclass(frozen=True)
class RaFLoRA(Method[Spectrum]):
    """Use it to see whether weights by rank help clients of high rank. State: the SVD of the sum."""

    name: ClassVar[str] = "raflora"
    paper: ClassVar[str] = "arXiv 2602.13486"
    State: ClassVar[type] = Spectrum
    claims: ClassVar[frozenset[str]] = frozenset({"halves"})

    def init(self, seed: LoRA) -> Spectrum:
        return spectrum_of(seed)

    def aggregate(self, state: Spectrum, updates: Sequence[Update]) -> Spectrum:
        return mean_product(list(_partitions(updates)))

    def readout(self, state: Spectrum, client: str | None, rank: int) -> LoRA:
        return balanced(state.head(min(rank, state.sound)))

    def effective(self, state: Spectrum) -> LoRA:
        return balanced(state)

    def diagnostics(self, state: Spectrum) -> Mapping[str, object]:
        return diagnostics_of(state)


def _partitions(updates: Sequence[Update]) -> Iterator[Update]:
    """Slots l to h of each client that has them, with its share of the weight of all these clients."""
    low = 0
    for high in sorted({u.rank for u in updates}):
        holders = [u for u in updates if u.rank >= high]
        P = math.fsum(u.weight for u in holders)
        for u in holders:
            B, A = u.lora.factors
            yield replace(u, weight=u.weight / P, lora=LoRA(B[:, low:high], A[low:high]))
        low = high
