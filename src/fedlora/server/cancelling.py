"""Uploads whose columns are huge and almost cancel: a small update that carries a large rounding error.

    terms = sum_j ||b_j|| ||a_j||        ||B A|| may be any fraction of it, in bad coordinates or by intent

Columns of 2^20 that cancel add their rounding to everybody's mean, and a rule measures a change only up to it. So an
upload that float64 cannot tell from the rounding of its own terms is refused, and the log names one whose terms are far
larger than their sum: averages of factors move by the terms, whatever the sum.

A diagonal gauge, columns of 1e6 with rows of 1e-6, has no terms that cancel: averages of factors stay exposed to it.
"""

from __future__ import annotations

import logging

import torch

from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.errors import UploadRefused
from fedlora.linalg import norm, unit_roundoff

log = logging.getLogger("fedlora.server")

_ARITHMETIC = 64 * unit_roundoff(torch.float64)  # the rounding of a float64 sum, relative to its terms
_BLURRED = 1e-3  # relative to the update: less rounding hides nothing that matters
_SILENT = 1e4  # terms of 1e4 move an average of factors by 1e2; audits themselves use coordinates of condition 1e3


def require_measured(upload: Upload) -> None:
    """Raises `UploadRefused` if rounding of the terms could make up one of its updates; warns if terms are large."""
    client, worst = upload.client.id, (0.0, "")
    for name, lora in upload.adapter.modules.items():
        terms, size = terms_and_size(lora)
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


def terms_and_size(lora: LoRA) -> tuple[float, float]:
    """(sum_j ||b_j|| ||a_j||, ||B A||). Cost: r^2 (d_out + d_in), and two QRs in float64 if terms cancel."""
    B, A = (t.detach() for t in lora.factors)
    if not (bool(B.any()) and bool(A.any())):
        return 0.0, 0.0
    wide = torch.promote_types(torch.promote_types(B.dtype, A.dtype), torch.float32)
    B, A = B.to(wide), A.to(wide)
    of_B, of_A = B.mT @ B, A @ A.mT
    terms = float((of_B.diagonal() * of_A.diagonal()).sqrt().sum(dtype=torch.float64))
    square = float((of_B * of_A).sum(dtype=torch.float64))
    if 1e-15 < terms < 1e15 and square > (1e-2 * terms) ** 2:  # beyond, float32 loses the sum or overflows
        return terms, square**0.5
    return float((norm(B, dim=0) * norm(A, dim=1)).sum()), lora.norm()
