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
from torch import Tensor

from fedlora.adapters.merge_report import ModuleReport
from fedlora.core.lora import LoRA, stack
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError, HyperparameterError, ShapeError
from fedlora.linalg import Components, Term, unit_roundoff

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_FLOAT64 = 8 * 2.0**-52  # bound on a sum's error relative to its terms; we measured up to 5 roundings
_TOLD = 1e-9  # relative errors of a sum below this are not reported


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

    def keep(self, energy: Sequence[float]) -> int:
        """How many components to keep. energy: of each, descending."""
        if self.kind == "exact" or (self.kind == "energy" and self.value == 1):
            return len(energy)
        if self.kind == "rank":
            return min(int(self.value), len(energy))
        left = [math.fsum(energy[k:]) for k in range(len(energy))]
        most = (1 - self.value) * (1 + 1e-9) * left[0] if left else 0.0  # 1 - 0.8 is a little less than 0.2
        return max(sum(x > most for x in left), min(1, len(energy)))


@dataclass(frozen=True, eq=False)
class Combined:
    """One module's weighted sum in energy order, before truncation.

    stacked: the sum of the inputs' ranks. full: how many components the result's type can hold beside the largest.
    lost: a bound on what summing has lost, absolute; 0 if that cannot be seen in the result.
    """

    module: str
    stacked: int
    full: int
    lost: float
    components: Components

    def cut(self, rule: RankRule = RankRule("exact")) -> tuple[LoRA, ModuleReport]:
        """The best pair of the rank that the rule keeps, float64, with sqrt(s) on both sides, and its report."""
        s = self.components.s[: self.full].tolist()
        unit = s[0] if s else 1.0
        energy = [(x / unit) ** 2 for x in s]  # unscaled squares would underflow or overflow
        total = math.fsum(energy)
        norm = math.sqrt(total) * unit
        kept = rule.keep(energy)
        error = math.hypot(math.sqrt(math.fsum(energy[kept:]) / total), self.lost / norm) if s else 0.0
        report = ModuleReport(self.module, self.stacked, self.full, kept, error, norm, tuple(s))
        return LoRA(*self.components.pair(kept)), report


def combine(name: str, loras: Sequence[LoRA], weights: Sequence[float], dtype: torch.dtype | None = None) -> Combined:
    """The weighted sum of updates in energy order. The factors stay as they are stored; weights, products and the
    result are float64, so that nothing rounds before the result is written.

    Args:
        loras: of one matrix, any ranks and types. weights: one each; they need not sum to 1. dtype: the result's, which
            cannot tell a tail of small components from zero; None: float64 if a factor is, otherwise float32.

    Raises:
        ShapeError: the updates belong to different matrices. AdapterFormatError: their sum overflows.
    """
    pairs = [lora.factors for lora in loras]
    shapes = sorted({(len(B), A.shape[1]) for B, A in pairs})
    if len(shapes) > 1:
        raise ShapeError(f"module {quoted(name)}: the updates belong to different matrices, {shapes}.")
    try:
        made = Components.of([Term(B, A, w, 0.0) for (B, A), w in zip(pairs, weights, strict=True)])
    except OverflowError as error:
        raise AdapterFormatError(
            f"module {quoted(name)}: the sum of its updates overflows float64. Training does not produce such weights: "
            f"a file is damaged, or a scaling is wrong."
        ) from error
    largest = float(made.s[:1].sum()) or 1.0  # squares of tiny numbers are zero
    size, terms = float(torch.linalg.vector_norm(made.s / largest)), made.terms / largest
    wide = dtype or reduce(torch.promote_types, [t.dtype for pair in pairs for t in pair], torch.float32)
    tail = max(0.25 * unit_roundoff(wide) * size, _FLOAT64 * terms)
    left_out = (made.s / largest).square().flip(0).cumsum(0).flip(0).sqrt()  # by a cut before each component
    lost = _FLOAT64 * terms * largest if _FLOAT64 * terms > _TOLD * size else 0.0
    return Combined(name, sum(lora.rank for lora in loras), int((left_out > tail).sum()), lost, made)


def against_mean(lora: LoRA, report: ModuleReport, mean: tuple[LoRA, ModuleReport]) -> tuple[LoRA, ModuleReport]:
    """Report a module that a method made, compared with the exact mean: `error` is its distance from that."""
    exact, of_mean = mean
    off = stack([lora.map(Tensor.double), exact.map(Tensor.double)], [1.0, -1.0]).norm()
    error = off / of_mean.norm if of_mean.norm else (math.inf if off else 0.0)
    return lora, replace(report, stacked=of_mean.stacked, full=of_mean.full, error=error, norm=of_mean.norm)


# ---------------------------------------------------------------------------------------------------- the result's type


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_type(text: str) -> torch.dtype:
    """Raises `ConfigError` for a name that is not an output dtype."""
    if text not in TYPES:
        raise ConfigError(f"the dtype of a result must be one of {', '.join(TYPES)}; got {text[:80]!r}.")
    return TYPES[text]


def narrowed(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """The tensor in `dtype`. Raises `AdapterFormatError` if `dtype` cannot hold a value."""
    found = tensor.to(dtype).contiguous()
    if not bool(torch.isfinite(found).all()):
        raise AdapterFormatError(
            f"{what} has values up to {float(tensor.abs().max()):.3g}, but {name_of(dtype)} holds up to "
            f"{torch.finfo(dtype).max:.3g}: choose another type with --dtype (bfloat16 or float32)."
        )
    return found


def narrowed_pair(lora: LoRA, dtype: torch.dtype, module: str) -> tuple[LoRA, float]:
    """A pair in `dtype`, and the norm of the resulting change in its update.

    B' A' - B A = dB A' + B dA with the roundings dB and dA: one pair of twice the rank, whose norm is that of the
    product of its Gram matrices. Neither half is the other's opposite, so nothing cancels.
    """
    B, A = lora.factors
    what = f"module {quoted(module)}"
    stored = LoRA(narrowed(B, dtype, what), narrowed(A, dtype, what))
    if torch.promote_types(dtype, B.dtype) == dtype:
        return stored, 0.0
    new_B, new_A = (t.double() for t in stored.factors)
    left = torch.cat([new_B - B, B.double()], dim=1)
    right = torch.cat([new_A, new_A - A]).mT
    units = [float(t.abs().max()) or 1.0 for t in (left, right)]  # squares of tiny numbers are zero
    G_left, G_right = (t.mT @ t for t in (left / units[0], right / units[1]))
    return stored, math.sqrt(max(float((G_left * G_right).sum()), 0.0)) * units[0] * units[1]


def overall(reports: Sequence[ModuleReport], errors: Sequence[float]) -> float:
    """The relative error over all modules, of each module's relative error."""
    if any(math.isinf(e) for e in errors):
        return math.inf
    unit = max((r.norm for r in reports), default=0.0)
    if not unit:
        return 0.0
    size = math.fsum((r.norm / unit) ** 2 for r in reports)
    return math.sqrt(math.fsum((e * (r.norm / unit)) ** 2 for e, r in zip(errors, reports, strict=True)) / size)
