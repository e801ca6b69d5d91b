"""Columns that several pairs have in common, once: a server sends the same few to many clients."""

from __future__ import annotations

import torch

from fedlora.linalg.shapes import Tensor


def distinct(left: Tensor, right: Tensor, since: int = 0) -> tuple[Tensor, Tensor]:
    """(columns to keep, where each one is among them): of those from `since` on equal ones once.

    left (d_out, S), right (S, d_in): a column is left[:, j] with right[j]. They are told apart by a product with
    fixed numbers, and compared before one stands for another.
    """
    count = left.shape[1]
    numbers = torch.linspace(1.0, 2.0, left.shape[0], dtype=left.dtype, device=left.device).square()
    more = torch.linspace(3.0, 1.0, right.shape[1], dtype=left.dtype, device=left.device).square()
    marks = (numbers @ left[:, since:]).tolist(), (right[since:] @ more).tolist()
    first: dict[tuple[float, float], int] = {}
    same = list(range(since)) + [first.setdefault(mark, since + k) for k, mark in enumerate(zip(*marks, strict=True))]
    stand = torch.tensor(same, device=left.device)
    later = stand != torch.arange(count, device=left.device)
    equal = (left[:, later] == left[:, stand[later]]).all() & (right[later] == right[stand[later]]).all()
    if not bool(equal):
        stand = torch.arange(count, device=left.device)
    at, place = torch.unique(stand, return_inverse=True)
    return at, place
