"""Shared by methods that average rank slot by rank slot: zero-padding to a common rank, and cutting to the first r."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.core.lora import LoRA
from fedlora.errors import RankMismatch
from fedlora.linalg.weighted_mean import weighted_mean


def columns(B: Tensor, rank: int) -> Tensor:
    """B (d_out, r) as (d_out, rank): cut, or padded with zero columns."""
    return pad(B[:, :rank], (0, max(0, rank - B.shape[1])))


def rows(A: Tensor, rank: int) -> Tensor:
    """A (r, d_in) as (rank, d_in): cut, or padded with zero rows."""
    return pad(A[:rank], (0, 0, 0, max(0, rank - A.shape[0])))


def paired(B: Tensor, A: Tensor) -> LoRA:
    """The pair in the wider of both dtypes, because the factors may come from different rounds."""
    dtype = torch.promote_types(B.dtype, A.dtype)
    return LoRA(B.to(dtype), A.to(dtype))


def first(lora: LoRA, rank: int) -> LoRA:
    """The first `rank` slots of a pair, padded with zero slots if it has fewer."""
    B, A = lora.factors
    return LoRA(columns(B, rank), rows(A, rank))


def mean_columns(Bs: Sequence[Tensor], weights: Sequence[float], rank: int) -> Tensor:
    """sum_i w_i [B_i 0], (d_out, rank)."""
    return weighted_mean([columns(B, rank) for B in Bs], weights)


def mean_rows(As: Sequence[Tensor], weights: Sequence[float], rank: int) -> Tensor:
    """sum_i w_i [A_i; 0], (rank, d_in)."""
    return weighted_mean([rows(A, rank) for A in As], weights)


def require_slots(method: str, rank: int, asked: Mapping[str, int]) -> None:
    """Raises `RankMismatch` if a client's rank exceeds the common start's, because nobody owns the further slots."""
    beyond = {client: r for client, r in asked.items() if r > rank}
    if beyond:
        raise RankMismatch(
            f"{method} gives every client the first slots of one common frozen factor, which has rank {rank} here; "
            f"{beyond} ask for more. Start the server from an adapter of the largest rank."
        )
