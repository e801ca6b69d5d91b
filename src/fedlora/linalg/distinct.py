"""Merges columns that several pairs share: a server sends the same few columns to many clients."""

from __future__ import annotations

import torch

from fedlora.linalg.shapes import Tensor

_LOOKED_AT = 64  # the entries of a column by which possible duplicates are found


def distinct(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(columns to keep, the index of each column among them).

    left (d_out, S), right (S, d_in): a column is left[:, j] with right[j]. Some of its entries find a possible
    duplicate; the columns are compared whole before one replaces the other.
    """
    some_left = left[:: max(1, len(left) // _LOOKED_AT)].mT
    some_right = right[:, :: max(1, right.shape[1] // _LOOKED_AT)]
    first: dict[tuple[float, ...], int] = {}
    marks = torch.cat([some_left, some_right], dim=1).tolist()
    stand = torch.tensor([first.setdefault(tuple(mark), k) for k, mark in enumerate(marks)], dtype=torch.long)
    stand = stand.to(left.device)
    later = (stand != torch.arange(len(stand), device=left.device)).nonzero()[:, 0]
    other = stand[later]
    equal = (right[later] == right[other]).all(dim=1)
    equal &= (left.index_select(1, later) == left.index_select(1, other)).all(dim=0)
    stand[later[~equal]] = later[~equal]
    at, place = torch.unique(stand, return_inverse=True)
    return at, place
