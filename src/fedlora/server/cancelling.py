"""Uploads whose columns are huge and almost cancel: a small update that carries a large rounding error.

    terms = sum_j ||b_j|| ||a_j||        ||B A|| may be any fraction of it, in bad coordinates or by intent

Columns of 2^20 that cancel add their rounding to everybody's mean, and a rule measures a change only up to it. So an
upload that float64 cannot tell from the rounding of its own terms is refused, and the log names one whose terms are far
larger than their sum: averages of factors move by the terms, whatever the sum.

A diagonal gauge, columns of 1e6 with rows of 1e-6, has no terms that cancel: averages of factors stay exposed to it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import torch

from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.errors import UploadRefused
from fedlora.linalg import norm, unit_roundoff
from fedlora.linalg.stacks import in_stacks, stacked

log = logging.getLogger("fedlora.server")

_ARITHMETIC = 64 * unit_roundoff(torch.float64)  # the rounding of a float64 sum, relative to its terms
_BLURRED = 1e-3  # relative to the update: less rounding hides nothing that matters
_SILENT = 1e4  # terms of 1e4 move an average of factors by 1e2; audits themselves use coordinates of condition 1e3


def require_measured(upload: Upload) -> None:
    """Raises `UploadRefused` if rounding of the terms could make up one of its updates; warns if terms are large."""
    client, modules, worst = upload.client.id, upload.adapter.modules, (0.0, "")
    for name, (terms, size) in zip(modules, terms_and_sizes([*modules.values()]), strict=True):
        if _ARITHMETIC * terms > _BLURRED * size:
            raise UploadRefused(
                client,
                f"its update of {name!r} cannot be measured: terms of size {terms:.2g} cancel to {size:.2g}, and their "
                f"rounding would enter everybody's mean. Send the same update in other coordinates, such as balanced "
                f"factors.",
            )
        if terms > _SILENT * size:
            worst = max(worst, (terms / size, name))
    if worst[1]:
        log.warning(
            "the terms of %s's factors are up to %.1e times their sum (in %s): bad coordinates, or a hostile client. "
            "Methods that average products still get the right mean.", client, *worst,
        )  # fmt: skip


def terms_and_sizes(loras: Sequence[LoRA]) -> list[tuple[float, float]]:
    """(sum_j ||b_j|| ||a_j||, ||B A||) of each. Cost: r^2 (d_out + d_in), and two QRs in float64 if terms cancel."""

    def kind(lora: LoRA) -> tuple[Hashable, int]:
        B, A = lora.factors
        return (B.shape, A.shape, B.dtype, A.dtype, B.device), 8 * max(B.numel(), A.numel())

    def work(alike: list[LoRA]) -> list[tuple[float, float]]:
        first, other = alike[0].factors
        wide = torch.promote_types(torch.promote_types(first.dtype, other.dtype), torch.float32)
        B, A = (stacked([t.detach().to(wide) for t in side]) for side in zip(*(x.factors for x in alike), strict=True))
        of_B, of_A = B.mT @ B, A @ A.mT
        terms = (of_B.diagonal(dim1=1, dim2=2) * of_A.diagonal(dim1=1, dim2=2)).sqrt().sum(dim=1, dtype=torch.float64)
        squares = (of_B * of_A).sum(dim=(1, 2), dtype=torch.float64)
        # Beyond these bounds float32 loses the sum or overflows.
        sound = [
            1e-15 < t < 1e15 and x > (1e-2 * t) ** 2 for t, x in zip(terms.tolist(), squares.tolist(), strict=True)
        ]
        return [
            (float(t), float(x) ** 0.5) if ok else _in_float64(lora)
            for lora, t, x, ok in zip(alike, terms, squares, sound, strict=True)
        ]

    return in_stacks(work, loras, kind)


def _in_float64(lora: LoRA) -> tuple[float, float]:
    B, A = (t.detach() for t in lora.factors)
    return float((norm(B, dim=0) * norm(A, dim=1)).sum()), lora.norm()
