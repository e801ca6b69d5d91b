"""FlexLoRA: average the updates, then send each client the best approximation at its rank (Bai et al., 2402.11505).

    Delta W = sum_i p_i B_i A_i = U diag(s) V^T        read out: B = U_r diag(s_r), A = V_r^T

Exact before truncation, gauge-invariant, any ranks. All energy is in B, as in the authors' code. The SVD is that of the
small core between orthonormal bases; the paper computes Delta W and its full SVD. Components that may be rounding are
not read out. Cost: O((sum r_i)^2 (d_out + d_in)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Update
from fedlora.linalg import Spectrum
from fedlora.methods._shared import balanced, diagnostics_of, mean_product, mean_products, spectrum_of


@dataclass(frozen=True)
class FlexLoRA(Method[Spectrum]):
    """Use it for clients of different ranks that should all get the strongest directions. State: the mean's SVD."""

    name: ClassVar[str] = "flexlora"
    paper: ClassVar[str] = "arXiv 2402.11505"
    State: ClassVar[type] = Spectrum
    claims: ClassVar[frozenset[str]] = frozenset({"exact", "gauge", "readouts", "halves"})
    linear_in: ClassVar[LinearIn] = "products"

    def init(self, seed: LoRA) -> Spectrum:
        return spectrum_of(seed)

    def aggregate(self, state: Spectrum, updates: Sequence[Update]) -> Spectrum:
        return mean_product(updates)

    def aggregate_all(self, states: Sequence[Spectrum], updates: Sequence[Sequence[Update]]) -> list[Spectrum]:
        return mean_products(updates)

    def readout(self, state: Spectrum, client: str | None, rank: int) -> LoRA:
        best = state.head(min(rank, state.sound))
        return LoRA(best.U * best.s, best.Vh)

    def effective(self, state: Spectrum) -> LoRA:
        return balanced(state)

    def diagnostics(self, state: Spectrum) -> Mapping[str, object]:
        return diagnostics_of(state)
