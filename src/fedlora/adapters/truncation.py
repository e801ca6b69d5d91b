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
from fedlora.linalg import unit_roundoff

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_FLOAT64 = 8 * 2.0**-52  # bound on a sum's error relative to its terms; we measured up to 5 roundings
_TOLD = 1e-9  # relative errors of a sum below this are not reported
# The Gram matrix squares the condition. Up to this one of unit columns, Q is orthonormal to 1e-10.
_CONDITION = 1e3
_PANEL, _STRIP = 512, 64  # rows in float64 at a time, which stay in a core's cache; columns of a Gram matrix


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
    """One module's weighted sum, before truncation: Q_B O diag(s) W^T Q_A^T with orthonormal O and W, all in float64.

    stacked: the sum of the inputs' ranks. s: descending. lost: a bound on what summing has lost, absolute; 0 if that
    cannot be seen in the result.
    """

    module: str
    stacked: int
    s: tuple[float, ...]
    lost: float
    _left: _Side
    _right: _Side
    _O: Tensor
    _W: Tensor

    def cut(self, rule: RankRule = RankRule("exact")) -> tuple[LoRA, ModuleReport]:
        """The best pair of the rank that the rule keeps, with sqrt(s) on both sides, and its report."""
        unit = self.s[0] if self.s else 1.0
        energy = [(x / unit) ** 2 for x in self.s]  # unscaled squares would underflow or overflow
        total = math.fsum(energy)
        kept = rule.keep(energy)
        error = math.sqrt(math.fsum(energy[kept:]) / total) if total else 0.0
        error = math.hypot(error, self.lost / (math.sqrt(total) * unit)) if total else error
        root = torch.tensor(self.s[:kept], dtype=torch.float64).sqrt()
        B, A = self._left.times(self._O[:, :kept] * root), self._right.times(self._W[:, :kept] * root)
        if kept:  # the largest entry of each column is positive, so that equal sums are stored as equal files
            sign = torch.where(B.amax(dim=0) >= -B.amin(dim=0), 1.0, -1.0).double()
            B, A = B * sign, A * sign
        norm = math.sqrt(total) * unit
        report = ModuleReport(self.module, self.stacked, len(self.s), kept, error, norm, self.s)
        return LoRA(B, A.mT), report


def combine(name: str, loras: Sequence[LoRA], weights: Sequence[float], dtype: torch.dtype | None = None) -> Combined:
    """The weighted sum of updates in energy order.

    The stacked factors stay as they are stored; weights, products and the result are float64, so that nothing rounds
    before the result is written:

        [B_1 B_2 ..] = Q_B R_B,   [A_1; A_2; ..]^T = Q_A R_A,   R_B diag(w) R_A^T = O diag(s) W^T

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
    wide = reduce(torch.promote_types, [t.dtype for pair in pairs for t in pair], torch.float32)
    left = _side(torch.cat([B.to(wide) for B, _ in pairs], dim=1))
    right = _side(torch.cat([A.to(wide) for _, A in pairs]).mT)
    scales = [w for lora, w in zip(loras, weights, strict=True) for _ in range(lora.rank)]
    w = torch.tensor(scales, dtype=torch.float64)
    core = (left.R * w) @ right.R.mT
    if not bool(torch.isfinite(core).all()):
        raise AdapterFormatError(
            f"module {quoted(name)}: the sum of its updates overflows float64. Training does not produce such weights: "
            f"a file is damaged, or a scaling is wrong."
        )
    O, s, Wh = torch.linalg.svd(core, full_matrices=False)
    largest = float(s[0]) or 1.0  # squares of tiny numbers are zero
    size, terms = (float(torch.linalg.vector_norm(x / largest)) for x in (s, left.sizes * w * right.sizes))
    tail = max(0.25 * unit_roundoff(dtype or wide) * size, _FLOAT64 * terms)
    left_out = (s / largest).square().flip(0).cumsum(0).flip(0).sqrt()  # by a cut before each component
    keep = int((left_out > tail).sum())
    lost = _FLOAT64 * terms * largest if _FLOAT64 * terms > _TOLD * size else 0.0
    return Combined(name, len(w), tuple(s[:keep].tolist()), lost, left, right, O, Wh.mT)


@dataclass(frozen=True, eq=False)
class _Side:
    """One side of the stacked factors, X (d, n) = Q R. R (k, n), float64. sizes (n,): the columns' norms. Q is
    `tall`, or tall @ small, which is never formed."""

    R: Tensor
    sizes: Tensor
    tall: Tensor
    small: Tensor | None

    def times(self, Y: Tensor) -> Tensor:
        """Q @ Y (d, l), in float64."""
        inner = Y if self.small is None else self.small @ Y
        return torch.cat([panel.double() @ inner for panel in torch.split(self.tall, _PANEL)])


def _side(X: Tensor) -> _Side:
    """Q and R by Cholesky of the Gram matrix, which reads X once and never forms Q; where that loses digits, or X is
    float64, which would show it, by Householder."""
    if X.dtype != torch.float64 and X.shape[1] <= X.shape[0]:
        G = torch.zeros(X.shape[1], X.shape[1], dtype=torch.float64)
        for panel in torch.split(X, _PANEL):
            P = panel.double()
            for at in range(0, len(G), _STRIP):  # its lower triangle: half of the work
                G[at:, at : at + _STRIP].addmm_(P[:, at:].mT, P[:, at : at + _STRIP])
        sizes = G.diagonal().sqrt()
        unit = sizes + (sizes == 0)  # a padded slot, both here and in R
        G = (G.tril() + G.tril(-1).mT) / unit / unit[:, None]
        G.diagonal().fill_(1.0)
        R, failed = torch.linalg.cholesky_ex(G, upper=True)
        inverse = torch.linalg.solve_triangular(R, torch.eye(len(R)).to(R), upper=True)
        if not failed and float(torch.linalg.matrix_norm(inverse)) <= _CONDITION:
            return _Side(R * sizes, sizes, X, inverse / unit[:, None])
    Q, R = torch.linalg.qr(X.double())
    return _Side(R, torch.linalg.vector_norm(R, dim=0), Q, None)


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

    B' A' - B A = dB A' + B dA with the roundings dB and dA, as one pair of twice the rank.
    """
    B, A = lora.factors
    what = f"module {quoted(module)}"
    stored = LoRA(narrowed(B, dtype, what), narrowed(A, dtype, what))
    if torch.promote_types(dtype, B.dtype) == dtype:
        return stored, 0.0
    units = [2.0 ** math.frexp(float(t.abs().max()))[1] for t in (B, A)]  # squares of tiny numbers are zero
    B, A, new_B, new_A = (t.double() / u for t, u in zip((B, A, *stored.factors), units * 2, strict=True))
    left, right = torch.cat([new_B - B, B], dim=1), torch.cat([new_A, new_A - A])
    square = float(((left.mT @ left) * (right @ right.mT)).sum())  # dB and dA are no part of B and A: nothing cancels
    return stored, math.sqrt(max(square, 0.0)) * units[0] * units[1]


def overall(reports: Sequence[ModuleReport], errors: Sequence[float]) -> float:
    """The relative error over all modules, of each module's relative error."""
    if any(math.isinf(e) for e in errors):
        return math.inf
    unit = max((r.norm for r in reports), default=0.0)
    if not unit:
        return 0.0
    size = math.fsum((r.norm / unit) ** 2 for r in reports)
    return math.sqrt(math.fsum((e * (r.norm / unit)) ** 2 for e, r in zip(errors, reports, strict=True)) / size)
