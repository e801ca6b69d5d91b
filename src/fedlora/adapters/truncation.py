"""Sums updates of one matrix exactly, then cuts the sum to a rank: the core of merging adapters.

    Delta W = sum_i w_i B_i A_i = U S V^T exactly, in factored form; keep the strongest components, sqrt(s) on each side

No other adapter of that rank is closer to the sum (Eckart-Young), and the discarded singular values give the distance.
Pure functions; for files, see `reader`, `writer` and `merging`.
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
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, HyperparameterError, ShapeError
from fedlora.linalg import Spectrum, Term, norm, projected_sum, unit_roundoff

_FLOAT64 = 8 * 2.0**-52  # bound on a sum's error relative to its terms; we measured up to 5 roundings
_TOLD = 1e-9  # relative errors below this are not reported


@dataclass(frozen=True)
class RankRule:
    """How many components to keep: "exact" all, "rank" at most `value`, "energy" the fewest that hold this share."""

    kind: Literal["exact", "rank", "energy"]
    value: float = 0.0

    @classmethod
    def parse(cls, text: str | int) -> RankRule:
        """From "exact", a whole number or "energy=0.99". Raises `HyperparameterError`."""
        if isinstance(text, bool) or not isinstance(text, str | int):
            text = f"<{type(text).__name__}>"
        text = str(text)
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
        raise HyperparameterError(
            f"a rank is a whole number from 1 to 999999, 'exact', or 'energy=SHARE' with a share in (0, 1]; "
            f"got {text[:80]!r}."
        )

    def keep(self, found: Spectrum) -> int:
        """The number of components this rule keeps."""
        if self.kind == "exact":
            return found.rank
        if self.kind == "rank":
            return min(int(self.value), found.rank)
        return found.rank_of_energy(self.value)


@dataclass(frozen=True)
class ModuleReport:
    """One module's result. stacked: the sum of the inputs' ranks. full: the rank of their sum. error: relative, from
    truncation, plus float64's own error if terms nearly cancel. norm: of the sum. rounding: relative, from writing it
    in a narrow type."""

    module: str
    stacked: int
    full: int
    kept: int
    error: float
    norm: float
    singular_values: tuple[float, ...]
    rounding: float = 0.0


@dataclass(frozen=True, eq=False)
class Combined:
    """One module's weighted sum in energy order, before truncation. terms: the size of what was added up."""

    module: str
    stacked: int
    spectrum: Spectrum
    terms: float

    def cut(self, rank: int) -> tuple[LoRA, ModuleReport]:
        """The best balanced pair of that rank, and its report."""
        s = tuple(self.spectrum.s.double().tolist())
        kept, unit = min(rank, len(s)), s[0] if s else 1.0
        energy = [(x / unit) ** 2 for x in s]  # unscaled squares would underflow or overflow
        total = math.fsum(energy)
        error = math.sqrt(math.fsum(energy[kept:]) / total) if total else 0.0
        lost = _FLOAT64 * self.terms / (math.sqrt(total) * unit) if total else 0.0
        error = math.hypot(error, lost) if lost > _TOLD else error
        report = ModuleReport(self.module, self.stacked, len(s), kept, error, math.sqrt(total) * unit, s)
        return LoRA(*self.spectrum.head(kept).balanced()), report


def combine(name: str, loras: Sequence[LoRA], weights: Sequence[float], dtype: torch.dtype | None = None) -> Combined:
    """The weighted sum of updates in energy order.

    Args:
        loras: of one matrix, any ranks and types; computed in float64. weights: one each; they need not sum to 1.
        dtype: the result's; None: float64 if a factor is, otherwise float32.

    Raises:
        ShapeError: the updates belong to different matrices. AdapterFormatError: their sum overflows its type.
    """
    pairs = [lora.factors for lora in loras]
    shapes = sorted({(len(B), A.shape[1]) for B, A in pairs})
    if len(shapes) > 1:
        raise ShapeError(f"module {quoted(name)}: the updates belong to different matrices, {shapes}.")
    dtype = dtype or reduce(torch.promote_types, [t.dtype for pair in pairs for t in pair], torch.float32)
    terms = [Term(B, A, w, unit_roundoff(dtype)) for (B, A), w in zip(pairs, weights, strict=True)]
    sizes = [abs(t.weight) * norm(t.B, dim=0) * norm(t.A, dim=1) for t in terms]
    try:
        found = projected_sum(terms, dtype=dtype).spectrum
    except OverflowError as error:
        raise AdapterFormatError(
            f"module {quoted(name)}: the sum of its updates overflows ({error}). Training does "
            f"not produce such weights: a file is damaged, or a scaling is wrong."
        ) from error
    return Combined(name, sum(lora.rank for lora in loras), found, float(norm(torch.cat(sizes))))


def against_mean(lora: LoRA, report: ModuleReport, mean: tuple[LoRA, ModuleReport]) -> tuple[LoRA, ModuleReport]:
    """Report a module that a method made, compared with the exact mean: `error` is its distance from that."""
    exact, of_mean = mean
    off = stack([lora.map(torch.Tensor.double), exact.map(torch.Tensor.double)], [1.0, -1.0]).norm()
    error = off / of_mean.norm if of_mean.norm else (math.inf if off else 0.0)
    return lora, replace(report, stacked=of_mean.stacked, full=of_mean.full, error=error, norm=of_mean.norm)


def total_error(reports: Sequence[ModuleReport]) -> float:
    """The relative truncation error over all modules."""
    return _total(reports, [r.error for r in reports])


def total_rounding(reports: Sequence[ModuleReport]) -> float:
    """The relative error from writing in a narrow type, over all modules."""
    return _total(reports, [r.rounding for r in reports])


def _total(reports: Sequence[ModuleReport], errors: Sequence[float]) -> float:
    if any(math.isinf(e) for e in errors):
        return math.inf
    unit = max((r.norm for r in reports), default=0.0)
    if not unit:
        return 0.0
    size = math.fsum((r.norm / unit) ** 2 for r in reports)
    return math.sqrt(math.fsum((e * (r.norm / unit)) ** 2 for e, r in zip(errors, reports, strict=True)) / size)
