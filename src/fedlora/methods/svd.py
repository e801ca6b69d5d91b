"""SVD: average the updates, keep the directions with most of the energy, send them to everyone (FLoRIST's server).

    Delta W = sum_i p_i B_i A_i = U diag(s) V^T
    R = least rank with sum_{j <= R} s_j^2 >= energy ||Delta W||^2, or a rank of your own
    read out: the r_i strongest of those R, B = U_r diag(s_r), A = V_r^T

Exact up to the share 1 - energy of ||Delta W||^2, with the least error at its rank, gauge-invariant, any ranks. After
Ramesh and Dass, "FLoRIST" (2506.09199, MLSys 2026), which gives all clients rank R; here each gets its own. One SVD of
the small core instead of two of the stacks and one of the core, with the same result. Cost: O(S^2 (d_out + d_in)),
S = sum r_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedlora.core.lora import LoRA
from fedlora.core.method import LinearIn, Method, Update
from fedlora.errors import HyperparameterError
from fedlora.linalg import Spectrum
from fedlora.methods._shared import balanced, diagnostics_of, mean_products, spectrum_of


@dataclass(frozen=True)
class SVD(Method[Spectrum]):
    """Use it for the least server error at a given size, if clients need nothing of their own. State: what is kept.

    Args:
        energy: the share of ||Delta W||_F^2 to keep, in (0, 1]; 1 keeps everything.
        rank: R itself instead; overrides energy.
    """

    name: ClassVar[str] = "svd"
    paper: ClassVar[str] = "arXiv 2506.09199 (FLoRIST), its server"
    State: ClassVar[type] = Spectrum
    linear_in: ClassVar[LinearIn] = "products"

    energy: float = 0.9
    rank: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.energy <= 1:
            raise HyperparameterError(f"svd: energy is the share of the update to keep, in (0, 1]; got {self.energy}.")
        if self.rank is not None and not (isinstance(self.rank, int) and self.rank >= 1):
            raise HyperparameterError(f"svd: rank is a whole number >= 1, or None to use energy; got {self.rank!r}.")

    @property
    def claims(self) -> frozenset[str]:
        exact = self.energy == 1 and self.rank is None
        return frozenset({"gauge", "readouts", "halves"} | ({"exact"} if exact else set()))

    def init(self, seed: LoRA) -> Spectrum:
        return spectrum_of(seed)

    def aggregate(self, state: Spectrum, updates: Sequence[Update]) -> Spectrum:
        return SVD.aggregate_all(self, [state], [updates])[0]

    def aggregate_all(self, states: Sequence[Spectrum], updates: Sequence[Sequence[Update]]) -> list[Spectrum]:
        return [self._kept(mean) for mean in mean_products(updates)]

    def _kept(self, mean: Spectrum) -> Spectrum:
        return mean.head(self.rank if self.rank is not None else mean.rank_of_energy(self.energy))

    def readout(self, state: Spectrum, client: str | None, rank: int) -> LoRA:
        best = state.head(min(rank, state.sound))
        return LoRA(best.U * best.s, best.Vh)

    def effective(self, state: Spectrum) -> LoRA:
        return balanced(state)

    def diagnostics(self, state: Spectrum) -> Mapping[str, object]:
        return diagnostics_of(state)
