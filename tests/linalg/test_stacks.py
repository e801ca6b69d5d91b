"""A matrix has the same bits alone and beside any other. Kind of evidence: property."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fedlora.linalg import ProjectedSum, Term, projected_sum, projected_sums, unit_roundoff
from fedlora.linalg.stacks import CACHED, aligned, in_stacks


def sent(
    seed: int, shape: tuple[int, int] = (96, 80), ranks: Sequence[int] = (4, 4, 4), near: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> list[Term]:  # fmt: skip
    """near: how far each client's last column is from the mean of its others, if not 0."""
    g = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(shape[0], r, generator=g), torch.randn(r, shape[1], generator=g)) for r in ranks]
    for B, _ in (pair for pair in pairs if near and pair[0].shape[1] > 1):
        B[:, -1] = B[:, :-1].mean(dim=1) + near * B[:, -1]
    return [Term(B.to(dtype), A.to(dtype), 0.1 * k + 0.2, unit_roundoff(dtype), True) for k, (B, A) in enumerate(pairs)]


def bits(made: ProjectedSum) -> list[Tensor]:
    numbers = torch.tensor([made.error, made.captured, made.dropped, made.size, made.gap], dtype=torch.float64)
    return [made.spectrum.B, made.spectrum.s, made.spectrum.A, *made.bases, *made.alignments, numbers]


def require_equal(one: ProjectedSum, other: ProjectedSum) -> None:
    assert all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))
    facts = [(x.factored, x.union_rank, x.spectrum.sound) for x in (one, other)]
    assert facts[0] == facts[1]


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("shape", "ranks", "dtype"),
    [
        *itertools.product(
            [(16, 16), (48, 40), (768, 768), (96, 3000), (20, 70), (300, 24), (37, 41)],
            [(4, 4, 4), (8, 8, 8), (1, 2, 9), (5,), (4, 8, 16)],
            [torch.float32, torch.float64, torch.bfloat16],
        )
    ],
)
def test_alone_or_in_any_stack(shape: tuple[int, int], ranks: Sequence[int], dtype: torch.dtype) -> None:
    """Ordinary ones, and some that are nearly deficient; whole and cut; in stacks of two to eleven."""
    many = [sent(k, shape, ranks, 1e-6 if k > 8 else 0.0, dtype) for k in range(11)]
    for R in (None, sum(ranks) // 2):
        alone = [projected_sum(terms, R) for terms in many]
        for count in (2, 5, 9, 11):
            for one, other in zip(alone, projected_sums(many[:count], [R] * count), strict=False):
                require_equal(one, other)


def test_each_matrix_gets_its_own_whatever_its_shape_and_rank() -> None:
    many = [sent(0), sent(1, (120, 80)), sent(2), sent(3, ranks=(4, 8, 4))]
    for rank, terms, made in zip((7, None, 7, 3), many, projected_sums(many, (7, None, 7, 3)), strict=True):
        require_equal(projected_sum(terms, rank), made)


def test_items_of_one_kind_go_together_and_a_refused_stack_one_by_one() -> None:
    """By hand: two kinds; a stack holds two of a kind; a stack with "no" in it is refused, one with "bad" raises."""
    seen: list[list[str]] = []

    def work(items: list[str]) -> list[str] | None:
        seen.append(items)
        if items == ["bad"] or (len(items) > 1 and "bad" in items):
            raise OverflowError(items)
        return None if len(items) > 1 and "no" in items else [f"<{x}>" for x in items]

    made = in_stacks(work, ["a", "bb", "c", "no", "e"], lambda x: (len(x), CACHED // 2))
    assert made == ["<a>", "<bb>", "<c>", "<no>", "<e>"]
    assert seen == [["a", "c"], ["e"], ["bb", "no"], ["bb"], ["no"]]
    with pytest.raises(OverflowError, match=r"\['bad'\]"):
        in_stacks(work, ["abc", "bad"], lambda x: (len(x), 8))


def test_matrices_are_aligned_whose_columns_begin_at_64_bytes() -> None:
    """Of an even number of columns, 8 bytes each: sides of 4 k numbers. That BLAS rounds alike elsewhere is luck."""
    assert aligned(96, 80, 4, 8)
    assert not any(aligned(*sides) for sides in ((97, 80, 4), (96, 82, 4), (96, 80, 4, 2)))
