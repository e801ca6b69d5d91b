"""Rank-partition weighting: average each stretch of components over the clients whose rank reaches it (raFLoRA,
2602.13486).

    B_i A_i = U_i diag(s_i) V_i^T,  component k gets weight p_i / sum_{j: r_j >= r(k)} p_j

r(k) is the smallest rank in the round that is at least k. With p_i alone, directions that only high-rank clients can
hold are divided by everybody's weight in every round, until the energy sits in the smallest rank ("rank collapse"). The
rule depends only on products, so it is gauge-invariant; with equal ranks it is the plain mean. We reconstructed it from
the paper's abstract. An option of glora and flexlora.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from fedlora.core.lora import LoRA
from fedlora.core.method import Update
from fedlora.linalg import svd_of_product

Weighting = Literal["examples", "rank-partition"]


def partitioned(updates: Sequence[Update]) -> list[Update]:
    """The same updates, in float64, with component k of each scaled by sum_j p_j / sum_{j: r_j >= r(k)} p_j."""
    ranks = sorted({u.rank for u in updates})
    everyone = sum(u.weight for u in updates)
    gains: list[float] = []  # by component
    for r in ranks:
        reach = sum(u.weight for u in updates if u.rank >= r)
        gains += [everyone / reach if reach else 1.0] * (r - len(gains))
    return [replace(u, lora=_scaled(u, gains)) for u in updates]


def _scaled(update: Update, gains: Sequence[float]) -> LoRA:
    spectrum = svd_of_product(update.B, update.A, tolerance=0.0, dtype=torch.float64)
    return LoRA(spectrum.U * (spectrum.s * spectrum.s.new_tensor(gains[: spectrum.rank])), spectrum.Vh)
