"""The mean of fully trained heads, from whole uploads or from sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.core.messages import Upload
from fedlora.core.read_only import ReadOnly
from fedlora.linalg import weighted_mean


def mean_heads(before: Mapping[str, Tensor], uploads: Sequence[Upload], weights: Sequence[float]) -> dict[str, Tensor]:
    """sum_i p_i head_i, computed in float32 or wider, stored in the dtypes of `before`."""

    def mean(name: str, like: Tensor) -> Tensor:
        dtype = torch.promote_types(like.dtype, torch.float32)
        return weighted_mean([u.adapter.heads[name].detach().to(dtype) for u in uploads], weights).to(like.dtype)

    return {name: mean(name, head) for name, head in before.items()}


@dataclass(frozen=True, eq=False)
class HeadSums:
    """sum_i n_i head_i for each head, float64, and sum_i n_i. Sums can be added."""

    sums: Mapping[str, Tensor]
    examples: float

    @classmethod
    def of(cls, heads: Mapping[str, Tensor], examples: float) -> HeadSums:
        """One client's sums."""
        return cls(ReadOnly({name: examples * head.detach().double() for name, head in heads.items()}), examples)

    def __add__(self, other: HeadSums) -> HeadSums:
        sums = {name: head + other.sums[name] for name, head in self.sums.items()}
        return HeadSums(ReadOnly(sums), self.examples + other.examples)

    def mean(self, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean heads, stored in the dtypes of `before`."""
        return {name: (self.sums[name] / self.examples).to(head.dtype) for name, head in before.items()}
