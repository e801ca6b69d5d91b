"""Combine updates of one matrix by their exact weighted mean, then cut it to a rank: what merging adapters is.

    Delta W = sum_i w_i B_i A_i = U S V^T exactly, in factored form; kept: the strongest components, sqrt(s) on both

No other adapter of that rank is closer to the mean (Eckart-Young), and the distance is known: the singular values left
out. Pure functions; files are `reader`, `writer` and the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch

from fedlora.core.lora import LoRA, stack
from fedlora.errors import HyperparameterError
from fedlora.linalg import Spectrum, rank_tolerance, svd_of_product


@dataclass(frozen=True)
class RankRule:
    """How many components to keep: "exact" all, "rank" at most `value`, "energy" the least that hold this share.

    "budget": as many numbers as rank `value` in every module takes, where they lose least (`budget_ranks`).
    """

    kind: Literal["exact", "rank", "energy", "budget"]
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> RankRule:
        """From "exact", a whole number, "energy=0.99" or "budget=8". Raises `HyperparameterError`."""
        if text == "exact":
            return cls("exact")
        if re.fullmatch(r"[1-9]\d{0,5}", text):
            return cls("rank", int(text))
        kind, _, share = text.partition("=")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if kind == "energy" and 0 < value <= 1:
            return cls("energy", value)
        if kind == "budget" and 0 < value <= 1e6:
            return cls("budget", value)
        raise HyperparameterError(
            f"a rank is a whole number from 1, 'exact', or 'energy=SHARE' with a share in (0, 1], or 'budget=R' with "
            f"the mean rank R of a module; got {text!r}."
        )

    def keep(self, spectrum: Spectrum) -> int:
        """How many components of `spectrum` this rule keeps."""
        if self.kind in ("exact", "budget"):  # a budget is for all modules together: cut later
            return spectrum.rank
        if self.kind == "rank":
            return min(int(self.value), spectrum.rank)
        return spectrum.rank_of_energy(self.value)


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module. stacked: the inputs' ranks added up. full: the rank of their mean. error: relative, of
    what was cut; norm: of the mean."""

    module: str
    stacked: int
    full: int
    kept: int
    error: float
    norm: float
    singular_values: tuple[float, ...]


def merge_module(
    name: str, loras: Sequence[LoRA], weights: Sequence[float], rule: RankRule
) -> tuple[LoRA, ModuleReport]:
    """The weighted sum of updates at the rank that the rule gives, balanced, and what the cut cost.

    Args:
        loras: of one matrix, any ranks and dtypes; computed in float64, the result in float32, or float64 where a
            factor is. weights: one for each; they need not sum to 1.

    Raises:
        ShapeError: the updates are of different matrices.
    """
    stored = [t.dtype for lora in loras for t in lora.factors]
    compute = reduce(torch.promote_types, stored, torch.float32)
    mean = stack([lora.map(torch.Tensor.double) for lora in loras], list(weights))
    spectrum = svd_of_product(*mean.factors, tolerance=rank_tolerance(compute), dtype=compute)
    kept = rule.keep(spectrum)
    energy = [float(s) ** 2 for s in spectrum.s.double()]
    total = math.fsum(energy)
    error = math.sqrt(math.fsum(energy[kept:]) / total) if total else 0.0
    values = tuple(math.sqrt(e) for e in energy)
    report = ModuleReport(name, mean.rank, spectrum.rank, kept, error, math.sqrt(total), values)
    return LoRA(*spectrum.head(kept).balanced), report


def cut(lora: LoRA, report: ModuleReport, rank: int) -> tuple[LoRA, ModuleReport]:
    """A merged module, whose slots are in the order of their size, at a smaller rank, and what that costs."""
    kept = min(rank, report.kept)
    B, A = lora.factors
    energy = [s * s for s in report.singular_values]
    error = math.sqrt(math.fsum(energy[kept:]) / math.fsum(energy)) if report.norm else 0.0
    return LoRA(B[:, :kept], A[:kept]), replace(report, kept=kept, error=error)


def against_mean(lora: LoRA, report: ModuleReport, mean: tuple[LoRA, ModuleReport]) -> tuple[LoRA, ModuleReport]:
    """A module that a method made of several, reported against their exact mean: `error` is how far off it is."""
    exact, of_mean = mean
    off = stack([lora.map(torch.Tensor.double), exact.map(torch.Tensor.double)], [1.0, -1.0]).norm()
    error = off / of_mean.norm if of_mean.norm else (math.inf if off else 0.0)
    return lora, replace(report, stacked=of_mean.stacked, full=of_mean.full, error=error, norm=of_mean.norm)


def budget_ranks(reports: Sequence[ModuleReport], costs: Sequence[int], mean_rank: float) -> list[int]:
    """Each module's rank, so that together they hold as many numbers as rank `mean_rank` everywhere and lose least.

    A component of size s in a module of d_out + d_in = cost numbers a slot saves s^2 of squared error: those with the
    largest s^2 / cost are taken until the next would not fit. Every module keeps one at least.

    Raises:
        HyperparameterError: not even one slot for each module fits.
    """
    budget = mean_rank * sum(costs)
    left = budget - sum(costs)
    if left < 0:
        raise HyperparameterError(f"a budget of mean rank {mean_rank:g} is less than one slot for each module.")
    gains = [
        (s * s / cost, -module, -place)
        for module, (report, cost) in enumerate(zip(reports, costs, strict=True))
        for place, s in enumerate(report.singular_values)
        if place > 0
    ]
    ranks = [min(1, report.full) for report in reports]
    for _, module, _ in sorted(gains, reverse=True):
        if costs[-module] > left:
            break
        ranks[-module] += 1
        left -= costs[-module]
    return ranks


def budgeted(found: Sequence[tuple[LoRA, ModuleReport]], mean: float) -> list[tuple[LoRA, ModuleReport]]:
    """Merged modules, each cut to its share of a budget of `mean` slots a module (`budget_ranks`)."""
    costs = [B.shape[0] + A.shape[1] for B, A in (lora.factors for lora, _ in found)]
    ranks = budget_ranks([report for _, report in found], costs, mean)
    return [cut(lora, report, r) for (lora, report), r in zip(found, ranks, strict=True)]


def total_error(reports: Sequence[ModuleReport]) -> float:
    """The relative truncation error of all modules together."""
    size = math.fsum(r.norm**2 for r in reports)
    return math.sqrt(math.fsum((r.error * r.norm) ** 2 for r in reports) / size) if size else 0.0
