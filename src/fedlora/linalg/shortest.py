"""A sum of products as one pair of factors that do not cancel: QR of both sides, the SVD of the small core between.

    sum_i w_i B_i A_i = (Q O sqrt(s)) (sqrt(s) W^T P^T),      [B_1 B_2 ..] = Q R,  [A_1; A_2; ..]^T = P T

Rounding this pair to a dtype costs a roundoff of the sum itself, in any coordinates. Rounding the terms costs a
roundoff of the terms, which may be many times larger. Cost: O(S^2 (d_out + d_in)).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedlora.linalg.basics import norm, unit_roundoff
from fedlora.linalg.shapes import Tensor


def shortest(parts: Sequence[tuple[float, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(B, A) with B A = sum_i w_i B_i A_i: orthogonal columns of B and rows of A, largest first, with equal norms.

    Args:
        parts: (w_i, B_i (d_out, r_i), A_i (r_i, d_in)) of any floating types.

    Returns:
        float64, as many columns as exceed float64 rounding of the terms; one zero column if none does.
    """
    B = torch.cat([B.detach().double() for _, B, _ in parts], dim=1)
    A = torch.cat([A.detach().double() for _, _, A in parts], dim=0)
    w = torch.cat([torch.full((B.shape[1],), float(w), dtype=B.dtype, device=B.device) for w, B, _ in parts]).to(B)
    left, right = norm(B, dim=0), norm(A, dim=1)
    of_B, of_A, of_w = (torch.frexp(x).exponent.clamp(-1000, 1000) for x in (left, right, w))
    some = (left > 0) & (right > 0) & (w != 0)
    exponents = of_B + of_A + of_w
    top = int(exponents[some].max()) if bool(some.any()) else 0
    sizes = torch.ldexp(torch.ldexp(w, -of_w), (exponents - top).clamp(-1000, 0))
    Q, R = torch.linalg.qr(torch.ldexp(B, -of_B))  # powers of two do not round
    P, T = torch.linalg.qr(torch.ldexp(A, -of_A[:, None]).mT)
    O, s, Wh = torch.linalg.svd((R * sizes) @ T.mT, full_matrices=False)
    keep = int((s > 4 * unit_roundoff(torch.float64) * float(sizes[some].abs().sum())).sum())
    if keep == 0:
        return torch.zeros_like(B[:, :1]), torch.zeros_like(A[:1])
    root = s[:keep].sqrt() * 2.0 ** (top / 2)
    return (Q @ O[:, :keep]) * root, (P @ (Wh[:keep].mT * root)).mT.contiguous()
