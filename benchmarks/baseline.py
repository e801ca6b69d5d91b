"""The thin SVD of a mean update, written down here so that changes of the library do not change what it is.

`bare_thin_svd` is what one would type. `thin_svd` adds canonical signs and leaves out components that are rounding: the
row that all results so far are ratios to. Imported by the benchmarks, not run by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Thin(NamedTuple):
    """U (d_out, l), s (l,), Vh (l, d_in)."""

    U: Tensor
    s: Tensor
    Vh: Tensor


def bare_thin_svd(B: Tensor, A: Tensor) -> Thin:
    """B (d_out, S) @ A (S, d_in) by QR of B, QR of A^T and the SVD of the core; that in float64, the rest as B is."""
    Q_B, R_B = torch.linalg.qr(B)
    Q_A, R_A = torch.linalg.qr(A.mH)
    O, s, Wh = torch.linalg.svd(R_B.double() @ R_A.double().mH, full_matrices=False)
    return Thin(Q_B @ O.to(B), s.to(B), Wh.to(A) @ Q_A.mH)


def thin_svd(B: Tensor, A: Tensor, tolerance: float) -> Thin:
    """The same with the largest entry of each u_j positive, and without what is below 4 `tolerance` of all terms."""
    made = bare_thin_svd(B, A)
    terms = torch.linalg.vector_norm(B.double(), dim=0) * torch.linalg.vector_norm(A.double(), dim=1)
    rank = int((made.s > 4 * tolerance * float(torch.linalg.vector_norm(terms))).sum())
    U, s, Vh = made.U[:, :rank], made.s[:rank], made.Vh[:rank]
    sign = U.gather(0, U.abs().argmax(dim=0, keepdim=True)).sign()
    return Thin(U.mul_(sign).contiguous(), s, Vh.mul_(sign.mT).contiguous())
