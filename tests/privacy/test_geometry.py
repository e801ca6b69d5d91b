"""The spaces in which changes are summed. Kinds of evidence: oracle (dense float64 products), property (gauges)."""

from __future__ import annotations

import math

import pytest
import torch

from fedlora.core.lora import LoRA
from fedlora.privacy.geometry import Bases, Layout, bases_of


def pair(d_out: int, d_in: int, r: int, seed: int) -> LoRA:
    g = torch.Generator().manual_seed(seed)
    return LoRA(torch.randn(d_out, r, generator=g, dtype=torch.float64), torch.randn(r, d_in, generator=g).double())


def regauged(lora: LoRA, condition: float, seed: int) -> LoRA:
    B, A = lora.factors
    g = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(lora.rank, lora.rank, generator=g, dtype=torch.float64)).Q for _ in range(2))
    sizes = torch.logspace(0, -math.log10(condition), lora.rank, dtype=torch.float64)
    return LoRA(B @ (U * sizes) @ V, V.T @ torch.diag(1 / sizes) @ U.T @ A)


@pytest.mark.parametrize(("dims", "a", "b"), [(None, 9, 7), (5, 5, 5)])
def test_there_and_back_is_the_projection(dims: int | None, a: int, b: int) -> None:
    """Oracle: Q Q^T X P P^T of the dense matrix. Q and P are orthonormal."""
    bases = bases_of(pair(9, 7, 2, 0), dims, "q", round=3, seed=1)
    assert bases.shape == (a, b)
    X = pair(9, 7, 4, 1)
    Q = torch.eye(9, dtype=torch.float64) if bases.Q is None else bases.Q
    P = torch.eye(7, dtype=torch.float64) if bases.P is None else bases.P
    assert torch.allclose(Q.T @ Q, torch.eye(a, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(P.T @ P, torch.eye(b, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(bases.project(X), Q.T @ X.delta() @ P, atol=1e-13)
    lifted = bases.lift(bases.project(X))
    assert lifted.rank == min(a, b)
    assert torch.allclose(lifted.delta(), Q @ Q.T @ X.delta() @ P @ P.T, atol=1e-13)


def test_released_directions_are_kept_and_the_rest_is_fresh() -> None:
    """Expected: a released update of rank 3 lies in 8 directions whole, in 4 with a quarter fresh too; in 2 its
    strongest direction does. A change in what was never released is partly seen in other rounds."""
    released = pair(40, 30, 3, 0)
    for dims in (4, 8):
        bases = bases_of(released, dims, "q", round=1, seed=0)
        assert torch.allclose(bases.lift(bases.project(released)).delta(), released.delta(), atol=1e-12)
    U, s, Vh = torch.linalg.svd(released.delta())
    strongest = LoRA(U[:, :1] * s[0], Vh[:1])
    bases = bases_of(released, 2, "q", round=1, seed=0)
    assert torch.allclose(bases.lift(bases.project(strongest)).delta(), strongest.delta(), atol=1e-12)
    other = pair(40, 30, 1, 9)
    seen = [bases_of(released, 8, "q", round=r, seed=0).project(other).norm() for r in range(4)]
    assert len({round(float(x), 9) for x in seen}) == 4 and min(seen) > 0


def test_bases_are_a_function_of_what_is_public() -> None:
    """The same bits for the same (released, module, round, seed); other directions for another round, module, seed; the
    same space in another gauge of condition 1e6 (to what the gauge's own rounding leaves)."""
    released = pair(20, 15, 3, 0)
    first = bases_of(released, 6, "q", round=1, seed=0)
    again = bases_of(released, 6, "q", round=1, seed=0)
    assert first.Q is not None and again.Q is not None and torch.equal(first.Q, again.Q)
    for public in (("q", 2, 0), ("v", 1, 0), ("q", 1, 1)):
        other = bases_of(released, 6, *public)
        assert other.Q is not None and not torch.allclose(first.Q @ first.Q.T, other.Q @ other.Q.T, atol=1e-3)
    moved = bases_of(regauged(released, 1e6, 1), 6, "q", round=1, seed=0)
    assert moved.Q is not None and torch.allclose(first.Q @ first.Q.T, moved.Q @ moved.Q.T, atol=1e-7)


def test_a_layout_holds_all_modules_and_heads_in_one_order() -> None:
    layout = Layout({"v": Bases(4, 3), "k": bases_of(pair(5, 3, 1, 0), 2, "k", 1, 0)}, {"b": (2, 2), "a": (3,)})
    assert layout.size == 12 + 4 + 3 + 4
    change, head = pair(4, 3, 2, 0), torch.arange(3.0)
    vector = layout.vector({"v": change}, {"a": head})
    assert vector.dtype == torch.float64 and vector.shape == (layout.size,)
    modules, heads = layout.parts(vector)
    assert torch.allclose(modules["v"].delta(), change.delta()) and not modules["k"].delta().any()
    assert heads["a"].tolist() == [0, 1, 2] and heads["b"].shape == (2, 2) and not heads["b"].any()
    assert torch.equal(vector[4:16], change.delta().reshape(-1))  # after the four of k
    assert vector.norm() == pytest.approx(math.hypot(change.norm(), float(head.norm())))
