"""The server's workloads W1 to W4 of the design notes, as synthetic uploads: shapes, ranks, weights, factors.

A workload has modules of a few shapes, each so many times. A contest runs a sample of each shape and counts it up to
the whole. Imported by the benchmarks, not run by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora import LoRA


@dataclass(frozen=True)
class Shape:
    """`count` modules of (d_out, d_in), of which a contest runs `sample`, and in quick mode `quick`."""

    d_out: int
    d_in: int
    count: int
    sample: int
    quick: int

    def run(self, quick: bool) -> int:
        return min(self.quick if quick else self.sample, self.count)


@dataclass(frozen=True)
class Workload:
    """repeats: how many there are in all for each that was asked for, since short ones scatter more."""

    name: str
    what: str
    shapes: tuple[Shape, ...]
    ranks: tuple[int, ...]
    repeats: int = 1

    @property
    def S(self) -> int:
        """sum r_i"""
        return sum(self.ranks)

    @property
    def modules(self) -> int:
        return sum(shape.count for shape in self.shapes)

    @property
    def weights(self) -> list[float]:
        """p_i, unequal, so that no eigenvalues tie by construction."""
        raw = [k + 2.0 for k in range(len(self.ranks))]
        return [x / sum(raw) for x in raw]

    def budget(self, rho: float) -> int:
        """R = ceil(rho S)."""
        return math.ceil(rho * self.S - 1e-9)


_ALL = (
    Workload("W1", "RoBERTa-base q, v; 3 clients of rank 8", (Shape(768, 768, 24, 24, 24),), (8,) * 3, repeats=3),
    Workload("W2", "LLaMA-1B q, v; 5 clients of ranks 4 to 64", (Shape(2048, 2048, 44, 11, 2),), (4, 8, 16, 32, 64)),
    Workload("W3", "Qwen2-7B q, v; 10 clients of rank 16", (Shape(3584, 3584, 28, 4, 1), Shape(512, 3584, 28, 4, 1)),
             (16,) * 10),
    Workload("W4", "Llama-7B, all linear layers; 20 clients of rank 16",
             (Shape(4096, 4096, 128, 1, 1), Shape(11008, 4096, 64, 1, 1), Shape(4096, 11008, 32, 1, 1)), (16,) * 20),
)  # fmt: skip
WORKLOADS = {w.name: w for w in _ALL}


def draw_factors(d_out: int, d_in: int, ranks: tuple[int, ...], seed: int, eps: float = 0.3) -> list[LoRA]:
    """Clients that share their start: B_i = B0 + eps noise, A_i = A0 + eps noise, in float32. Training leaves them
    closer than 0.3, which makes columns more dependent: 0.01 is a row of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B0, A0 = draw(d_out, max(ranks)), draw(max(ranks), d_in)
    return [LoRA(B0[:, :r] + eps * draw(d_out, r), A0[:r] + eps * draw(r, d_in)) for r in ranks]


@dataclass(frozen=True, eq=False)
class Core:
    """What the paper's server starts from, in float32: pairs (U_i, Ahat_i), and with the p_i in them, for those that
    take all clients as one, M = [sqrt(p_i) U_i] and N = [sqrt(p_i) Ahat_i].
    """

    pairs: list[tuple[Tensor, Tensor]]
    M: Tensor
    N: Tensor


def gauge_fixed(loras: list[LoRA], weights: list[float]) -> Core:
    """The clients' part, which the paper does not time: U_i T_i = B_i, Ahat_i = T_i A_i."""
    pairs = []
    for B, A in (lora.factors for lora in loras):
        U, T = torch.linalg.qr(B.double())
        pairs.append((U.float(), (T @ A.double()).float()))
    root = [math.sqrt(p) for p in weights]
    M = torch.cat([U * p for (U, _), p in zip(pairs, root, strict=True)], dim=1)
    N = torch.cat([Ahat * p for (_, Ahat), p in zip(pairs, root, strict=True)])
    return Core(pairs, M, N)
