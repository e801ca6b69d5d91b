"""The round that adds every upload to a float64 sum and forgets it: for any number of clients.

    M = sum_i n_i B_i A_i / sum_i n_i        or the same of each factor, as the method is `linear_in`

At close M is one term of nobody; of factors, one for each rank. So nobody has a vote or a history: GLoRA reads such a
round out by energy. In another order of uploads the sums differ in their last bit. Nothing is on disk before the close:
after a kill the round is played again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlora.core.lora import LoRA, compute_dtype
from fedlora.core.messages import Upload
from fedlora.core.method import Method, Roles, Update
from fedlora.server.rounds import OpenRound, RoundKind, Weighting, require_counting, require_sums, roundoff_of
from fedlora.server.state import ServerState

if TYPE_CHECKING:
    from fedlora.server.server import Server


@dataclass(frozen=True)
class Streamed(RoundKind):
    """Any number of clients in the memory of one float64 d_out x d_in matrix per module; the same up to rounding.

    Args:
        weighting: p_i by "examples" or "uniform". quorum: None, or how many good uploads a round needs (`OpenRound`).

    Example:
        >>> server = Server(build("svd", rank=3), round=Streamed())
        >>> after = server.aggregate(server.init(seed_adapter), uploads)  # each is added to a sum, and forgotten
        >>> server.global_update(after)["q"].rank
        3
    """

    weighting: Weighting = "examples"
    quorum: int | None = None

    def __post_init__(self) -> None:
        require_counting(self, self.weighting, self.quorum)

    @property
    def weighs_by(self) -> Weighting:
        return self.weighting

    def require(self, method: Method[Any], roles: Roles) -> None:
        require_sums("Streamed", method)

    def open(self, server: Server, state: ServerState) -> OpenRound:
        return _StreamedRound(server, state)


class _Sum:
    """A weighted sum of pairs, float64. weight: sum of n_i; rank: sum of r_i; dtype, roundoff: the round's."""

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}  # "BA", or the factors that travel
        self.weight, self.rank, self.roundoff, self.dtype = 0.0, 0, 0.0, torch.float32

    def add(self, n: float, lora: LoRA, parts: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            if name not in self.parts:
                self.parts[name] = torch.zeros_like(part, dtype=torch.float64)
            self.parts[name].add_(part, alpha=n)
        self.weight, self.rank = self.weight + n, self.rank + lora.rank
        self.dtype = torch.promote_types(self.dtype, compute_dtype([lora]))
        self.roundoff = max(self.roundoff, roundoff_of(lora))

    def mean(self, total: float) -> Update:
        """The mean as one term of nobody. total: of all weights in the round."""
        share, means = self.weight / total, {name: part / self.weight for name, part in self.parts.items()}
        if "BA" not in means:
            lora = LoRA(means.get("B"), means.get("A")).map(lambda t: t.to(self.dtype))
            return Update(None, share, lora.rank, lora, self.roundoff)
        U, s, Vh = torch.linalg.svd(means["BA"], full_matrices=False)
        U, root, Vh = U[:, : self.rank], s[: self.rank].sqrt(), Vh[: self.rank]  # beyond the sum of ranks is rounding
        lora = LoRA(U * root, root[:, None] * Vh).map(lambda t: t.to(self.dtype))
        return Update(None, share, self.rank, lora, self.roundoff)


class _StreamedRound(OpenRound):
    def __init__(self, server: Server, state: ServerState) -> None:
        super().__init__(server, state)
        self._products = server.method.linear_in == "products"
        # Factors are summed rank by rank, so that the method pads them, or not, as with kept uploads.
        self._sums: dict[str, dict[int, _Sum]] = {name: {} for name in state.modules}
        self._heads: dict[str, Tensor] = {}

    def _take(self, upload: Upload, count: float) -> None:
        for name, lora in upload.adapter.modules.items():
            lora = lora.map(Tensor.detach)
            parts = {"BA": lora.map(Tensor.double).delta()} if self._products else lora.tensors()
            self._sums[name].setdefault(0 if self._products else lora.rank, _Sum()).add(count, lora, parts)
        for name, head in upload.adapter.heads.items():
            if name not in self._heads:
                self._heads[name] = torch.zeros_like(head, dtype=torch.float64)
            self._heads[name].add_(head.detach(), alpha=count)

    def _updates(self, module: str) -> list[Update]:
        sums = self._sums[module]
        total = math.fsum(one.weight for one in sums.values())
        return [one.mean(total) for _, one in sorted(sums.items())]

    def _mean_heads(self) -> dict[str, Tensor]:
        total = math.fsum(self.counts.values())
        return {name: (head / total).to(self.state.heads[name].dtype) for name, head in self._heads.items()}
