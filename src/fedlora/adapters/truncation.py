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
from fedlora.linalg import Spectrum, norm, rank_tolerance, svd_of_product, unit_roundoff

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_FLOAT64 = 8 * 2.0**-52  # bound on a sum's error relative to its terms; we measured up to 5 roundings
_TOLD = 1e-9  # relative errors of float64 below this are not reported


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


@dataclass(frozen=True, eq=False)
class Combined:
    """One module's weighted sum in energy order, in float64, before truncation. stacked: the sum of the inputs' ranks.
    lost: a bound on what summing has lost of it, absolute; 0 if that cannot be seen in the result."""

    module: str
    stacked: int
    spectrum: Spectrum
    lost: float

    def cut(self, rule: RankRule = RankRule("exact")) -> tuple[LoRA, ModuleReport]:
        """The best balanced pair that the rule keeps, and its report."""
        full = self.spectrum.rank
        kept = {
            "exact": full, "rank": min(int(rule.value), full),
            "energy": self.spectrum.rank_of_energy(rule.value) if rule.kind == "energy" else 0,
        }[rule.kind]  # fmt: skip
        s = tuple(self.spectrum.s.tolist())
        unit = s[0] if s else 1.0
        energy = [(x / unit) ** 2 for x in s]  # unscaled squares would underflow or overflow
        total = math.fsum(energy)
        error = math.sqrt(math.fsum(energy[kept:]) / total) if total else 0.0
        error = math.hypot(error, self.lost / (math.sqrt(total) * unit)) if total else error
        report = ModuleReport(self.module, self.stacked, full, kept, error, math.sqrt(total) * unit, s)
        return LoRA(*self.spectrum.head(kept).balanced), report


def combine(name: str, loras: Sequence[LoRA], weights: Sequence[float], dtype: torch.dtype | None = None) -> Combined:
    """The weighted sum of updates in energy order.

    Args:
        loras: of one matrix, any ranks and types. weights: one each; they need not sum to 1. dtype: the result's, for
            the tail of components that it cannot tell from zero; None: float64 if a factor is, otherwise float32.

    Raises:
        ShapeError: the updates belong to different matrices. AdapterFormatError: their sum overflows.
    """
    pairs = [lora.factors for lora in loras]
    shapes = sorted({(len(B), A.shape[1]) for B, A in pairs})
    if len(shapes) > 1:
        raise ShapeError(f"module {quoted(name)}: the updates belong to different matrices, {shapes}.")
    wide = reduce(torch.promote_types, [t.dtype for pair in pairs for t in pair], torch.float32)
    # A weight is folded into B, which rounds it in float32. The largest is a factor of the whole instead, so that equal
    # weights round nothing; where signs differ, terms may cancel, and we sum in float64.
    unit = max(map(abs, weights)) or 1.0
    if any(w < 0 for w in weights):
        wide = torch.float64
    B = torch.cat([B.to(wide) * (w / unit) for (B, _), w in zip(pairs, weights, strict=True)], dim=1)
    A = torch.cat([A.to(wide) for _, A in pairs])
    stored = max(rank_tolerance(t.dtype) for pair in pairs for t in pair)
    try:
        found = svd_of_product(B, A, tolerance=stored, dtype=torch.float64)
        if not math.isfinite(float(found.s.sum()) * unit):
            raise OverflowError("float64 holds up to 1.8e308")
    except OverflowError as error:
        raise AdapterFormatError(
            f"module {quoted(name)}: the sum of its updates overflows ({error}). Training does "
            f"not produce such weights: a file is damaged, or a scaling is wrong."
        ) from error
    terms = float(norm(norm(B, dim=0).double() * norm(A, dim=1).double()))
    tail = max(0.25 * unit_roundoff(dtype or wide) * float(norm(found.s)), _FLOAT64 * terms)
    left_out = found.s.square().flip(0).cumsum(0).flip(0).sqrt()  # by a cut before each component
    found = found.head(int((left_out > tail).sum()))
    rounds = wide == torch.float32 and len(set(weights)) > 1
    lost, told = (unit_roundoff(wide) * terms, 4 * unit_roundoff(wide)) if rounds else (_FLOAT64 * terms, _TOLD)
    lost = lost * unit if lost > told * float(norm(found.s)) else 0.0
    return Combined(name, sum(lora.rank for lora in loras), replace(found, s=found.s * unit), lost)


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
    found = tensor.to(dtype)
    if not bool(torch.isfinite(found).all()):
        raise AdapterFormatError(
            f"{what} has values up to {float(tensor.abs().max()):.3g}, but {name_of(dtype)} holds up to "
            f"{torch.finfo(dtype).max:.3g}: choose another type with --dtype (bfloat16 or float32)."
        )
    return found


def narrowed_pair(lora: LoRA, dtype: torch.dtype, module: str) -> tuple[LoRA, float]:
    """A pair in `dtype`, and the norm of the resulting change in its update; 0 if `dtype` has 32 bits or more.

    B' A' - B A = dB A' + B dA with the roundings dB and dA, as one pair of twice the rank.
    """
    B, A = lora.factors
    what = f"module {quoted(module)}"
    stored = LoRA(narrowed(B, dtype, what), narrowed(A, dtype, what))
    if dtype.itemsize >= 4 or torch.promote_types(dtype, B.dtype) == dtype:
        return stored, 0.0
    new_B, new_A = (t.double() for t in stored.factors)
    left = torch.cat([new_B - B, B.double()], dim=1)
    right = torch.cat([new_A, new_A - A])
    square = float(((left.mT @ left) * (right @ right.mT)).sum())  # dB and dA are no part of B and A: nothing cancels
    return stored, math.sqrt(max(square, 0.0))


def overall(reports: Sequence[ModuleReport], errors: Sequence[float]) -> float:
    """The relative error over all modules, of each module's relative error."""
    if any(math.isinf(e) for e in errors):
        return math.inf
    unit = max((r.norm for r in reports), default=0.0)
    if not unit:
        return 0.0
    size = math.fsum((r.norm / unit) ** 2 for r in reports)
    return math.sqrt(math.fsum((e * (r.norm / unit)) ** 2 for e, r in zip(errors, reports, strict=True)) / size)
