"""What the server's mean is, in dense float64: twenty lines that share nothing with `fedlora.linalg`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedlora.linalg import Term


def dense(terms: Sequence[Term]) -> Tensor:
    """sum_i w_i B_i A_i (d_out, d_in)."""
    return torch.stack([t.weight * (t.B.double() @ t.A.double()) for t in terms]).sum(dim=0)


def subspace(t: Term) -> Tensor:
    """U_i (d_out, k): the left singular vectors of B_i A_i that are no rounding of its stored factors."""
    B, A = t.B.double(), t.A.double()
    U, s, _ = torch.linalg.svd(B @ A, full_matrices=False)
    terms = float((B.norm(dim=0) * A.norm(dim=1)).norm())
    return U[:, s > max(t.roundoff, 1e-11) * terms]


def consensus(terms: Sequence[Term], rank: int) -> Tensor:
    """U_ref U_ref^T (d_out, d_out), of the votes alone; only where the eigenvalues at the cut are far apart."""
    K = torch.stack([t.weight * (U @ U.mT) for t in terms if t.votes for U in [subspace(t)]]).sum(dim=0)
    U_ref = torch.linalg.eigh(K).eigenvectors.flip(1)[:, :rank]
    return U_ref @ U_ref.mT


def size_of_terms(terms: Sequence[Term]) -> float:
    """The norm of what is added up, before anything cancels."""
    sizes = [abs(t.weight) * t.B.double().norm(dim=0) * t.A.double().norm(dim=1) for t in terms]
    return math.hypot(*torch.cat(sizes).tolist())
