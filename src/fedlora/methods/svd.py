"""SVD: average the updates, keep the directions with most of the energy, send them to everyone (FLoRIST's core).

    Delta W = sum_i p_i B_i A_i = U S V^T
    R = least rank with sum_{j <= R} s_j^2 >= energy ||Delta W||^2
    read out: the r_i strongest of those R, sqrt(s) on both factors

Exact up to the share 1 - energy of ||Delta W||^2, with the least error at its rank, gauge-invariant, any ranks. After
Ramesh and Dass, "FLoRIST" (2506.09199), which gives all clients rank R; here each gets its own. Deviation: one SVD of
the small core instead of two of the stacks and one of the core, with the same result. Cost: O(S^2 (d_out + d_in)),
S = sum r_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating
from fedlora.core.lora import LoRA
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.multiplied import How, TakesMultipliers
from fedlora.core.summing import FromSums, Summing, Sums
from fedlora.errors import HyperparameterError
from fedlora.linalg import Spectrum, svd_of_matrix
from fedlora.methods._spectral import accumulated_spectrum, instantiate, mean_spectrum, start_spectrum, whole


@dataclass(frozen=True, eq=False)
class SVDState:
    """spectrum: the kept part of the mean update. start: the rows of A from a fresh common start; None later."""

    key: int
    round: int
    spectrum: Spectrum
    start: Tensor | None
    full_rank: int


@dataclass(frozen=True)
class SVD(FromSums[SVDState], Accumulating[SVDState], TakesMultipliers):
    """Use it for the least server error at a given size, if clients need nothing of their own.

    Args:
        energy: the share of ||Delta W||_F^2 to keep, in (0, 1]; 1 keeps everything.
    """

    name: ClassVar[str] = "svd"
    paper: ClassVar[str] = "arXiv 2506.09199 (FLoRIST), its server"
    State: ClassVar[type] = SVDState

    energy: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.energy <= 1:
            raise HyperparameterError(f"svd: energy is the share of the update to keep, in (0, 1]; got {self.energy}.")

    def init(self, seed: LoRA, key: int) -> SVDState:
        spectrum, start = start_spectrum(seed)
        return SVDState(key, 0, spectrum, start, spectrum.rank)

    def roles(self, round: int) -> Roles:
        return Roles()

    @property
    def multiplied(self) -> How:
        """Only products are used, of any rank."""
        return "products"

    def aggregate(self, state: SVDState, updates: Sequence[Update]) -> SVDState:
        return self._after(state, mean_spectrum(updates))

    def summing(self) -> Summing:
        """It needs only the mean."""
        return Summing()

    def from_sums(self, state: SVDState, sums: Sums) -> SVDState:
        return self._after(state, svd_of_matrix(sums.mean, terms=sums.terms, stored=sums.floor, dtype=sums.dtype))

    def _after(self, state: SVDState, every: Spectrum) -> SVDState:
        return SVDState(state.key, state.round + 1, every.head(every.rank_of_energy(self.energy)), None, every.rank)

    def require_accumulating(self) -> None:
        """Every option is possible: the energy refers to what was released."""

    def accumulated(self, state: SVDState, change: LoRA, rank: int) -> SVDState:
        every, kept = accumulated_spectrum(state.spectrum, change, rank)
        share = every.rank_of_energy(self.energy)
        return SVDState(state.key, state.round + 1, kept.head(share), None, every.rank)

    def readout(self, state: SVDState, client: str | None, rank: int) -> Readout:
        chosen = torch.arange(min(rank, state.spectrum.sound))
        seed = (state.key, state.round, client or "")
        lora = instantiate(state.spectrum, chosen, rank, split="balanced", start=state.start, seed=seed)
        return Readout(lora, fresh=True)

    def effective(self, state: SVDState) -> LoRA:
        return whole(state.spectrum)

    def diagnostics(self, state: SVDState) -> Mapping[str, object]:
        values = state.spectrum.s.tolist()
        return {
            "rank": state.spectrum.sound, "full_rank": state.full_rank, "rounding": state.spectrum.rounding,
            "singular_values": values,
        }  # fmt: skip
