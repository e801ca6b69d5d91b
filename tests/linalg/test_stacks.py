"""A matrix has the same bits alone and beside any other. Kind of evidence: property."""

from __future__ import annotations

import torch

from fedlora.linalg import Budget, Contributions, consensus_means, rank_tolerance, unit_roundoff

F32 = torch.float32


def sent(seed: int, near: float = 0.0) -> Contributions:
    """Three clients of rank 4. near: how far each one's last column is from the mean of its others, if not 0."""
    g = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(96, 4, generator=g), torch.randn(4, 80, generator=g)) for _ in range(3)]
    for B, _ in pairs if near else []:
        B[:, 3] = B[:, :3].mean(dim=1) + near * B[:, 3]
    return Contributions(pairs, [0.2, 0.3, 0.5], [unit_roundoff(F32)] * 3, [rank_tolerance(F32)] * 3)


def test_a_neighbour_with_nearly_dependent_columns_changes_no_bit() -> None:
    """One threshold over the whole batch once chose the dtype of every client's basis."""
    a, b = sent(0), sent(1, near=0.03)
    alone, beside = (consensus_means(some, [Budget(12)] * len(some))[0] for some in ([a], [a, b]))
    for one, other in zip(alone.bases, beside.bases, strict=True):
        assert torch.equal(one, other)
