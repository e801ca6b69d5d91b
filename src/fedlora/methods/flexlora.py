"""FlexLoRA: average the updates, then send each client the best approximation at its rank (Bai et al., 2402.11505).

    Delta W = sum_i p_i B_i A_i = U S V^T        read out: B = U_r S_r, A = V_r^T

Exact before truncation, gauge-invariant, any ranks. The SVD is by QR, QR and the SVD of the small core; the paper
computes Delta W and its full SVD. All energy is in B, as in the authors' code. Deviations from that code: none in the
rule (their released code never applies different ranks). Cost: O((sum r_i)^2 (d_out + d_in)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from fedlora.core.accumulating import Accumulating, options_without_effect
from fedlora.core.lora import LoRA
from fedlora.core.method import Readout, Roles, Update
from fedlora.core.multiplied import How, TakesMultipliers
from fedlora.core.summing import FromSums, Summing, Sums
from fedlora.errors import HyperparameterError
from fedlora.linalg import Spectrum, svd_of_matrix
from fedlora.methods._rank_partition import Weighting, partitioned
from fedlora.methods._spectral import accumulated_spectrum, instantiate, mean_spectrum, start_spectrum, whole


@dataclass(frozen=True, eq=False)
class FlexLoRAState:
    """spectrum: the mean update as its SVD. start: the rows of A from a fresh common start; None later."""

    TAG: ClassVar[str] = "flexlora/1"

    key: int
    round: int
    spectrum: Spectrum
    start: Tensor | None


@dataclass(frozen=True)
class FlexLoRA(FromSums[FlexLoRAState], Accumulating[FlexLoRAState], TakesMultipliers):
    """Use it for clients of different ranks that should all get the strongest directions.

    Args:
        weighting: "examples" uses the server's p_i; "rank-partition" is raFLoRA (`preset="raflora"`).
    """

    name: ClassVar[str] = "flexlora"
    paper: ClassVar[str] = "arXiv 2402.11505"
    State: ClassVar[type] = FlexLoRAState
    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {"raflora": {"weighting": "rank-partition"}}

    weighting: Weighting = "examples"

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise HyperparameterError(f"flexlora: weighting is one of {get_args(Weighting)}; got {self.weighting!r}.")

    def init(self, seed: LoRA, key: int) -> FlexLoRAState:
        spectrum, start = start_spectrum(seed)
        return FlexLoRAState(key, 0, spectrum, start)

    def roles(self, round: int) -> Roles:
        return Roles()

    @property
    def multiplied(self) -> How:
        """Only products are used, of any rank."""
        return "products"

    def require_multipliers(self, columns: int | None = None) -> None:
        """Rank-partition weighting has its own weights, by rank."""
        if self.weighting != "examples":
            raise HyperparameterError(
                f"flexlora: weighting = {self.weighting!r} gives a few clients of high rank all the weight, after a "
                f"robust rule has weighed them. Leave it out."
            )

    def aggregate(self, state: FlexLoRAState, updates: Sequence[Update]) -> FlexLoRAState:
        dtype = updates[0].B.dtype
        if self.weighting == "rank-partition":
            updates = partitioned(updates)
        return FlexLoRAState(state.key, state.round + 1, mean_spectrum(updates, dtype), None)

    def summing(self) -> Summing:
        """It needs only the mean."""
        if self.weighting != "examples":
            raise HyperparameterError("flexlora: rank-partition weighting needs all uploads at once; set no memory.")
        return Summing()

    def from_sums(self, state: FlexLoRAState, sums: Sums) -> FlexLoRAState:
        spectrum = svd_of_matrix(sums.mean, terms=sums.terms, stored=sums.floor, dtype=sums.dtype)
        return FlexLoRAState(state.key, state.round + 1, spectrum, None)

    def require_accumulating(self) -> None:
        """Raises `HyperparameterError` for rank-partition weighting."""
        if why := options_without_effect(self, self.name, {"weighting": "examples"}):
            raise HyperparameterError(why)

    def accumulated(self, state: FlexLoRAState, change: LoRA, rank: int) -> FlexLoRAState:
        _, kept = accumulated_spectrum(state.spectrum, change, rank)
        return FlexLoRAState(state.key, state.round + 1, kept, None)

    def readout(self, state: FlexLoRAState, client: str | None, rank: int) -> Readout:
        chosen = torch.arange(min(rank, state.spectrum.sound))
        seed = (state.key, state.round, client or "")
        lora = instantiate(state.spectrum, chosen, rank, split="left", start=state.start, seed=seed)
        return Readout(lora, fresh=True)

    def effective(self, state: FlexLoRAState) -> LoRA:
        return whole(state.spectrum)

    def diagnostics(self, state: FlexLoRAState) -> Mapping[str, object]:
        s = state.spectrum
        return {"rank": s.sound, "components": s.rank, "rounding": s.rounding, "singular_values": s.s.tolist()}
