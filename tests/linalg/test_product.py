"""The SVD of a weighted sum of products: sizes first, factors later. Kind of evidence: oracle (dense float64 SVD)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fedlora.errors import LostUpdate
from fedlora.linalg import product as module
from fedlora.linalg.product import Product, product


def factors(dtype: torch.dtype, ranks: Sequence[int] = (4, 6), seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    Bs = [torch.randn(40, r, generator=g, dtype=torch.float64).to(dtype) for r in ranks]
    As = [torch.randn(r, 30, generator=g, dtype=torch.float64).to(dtype) for r in ranks]
    return Bs, As


def dense(Bs: Sequence[Tensor], As: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([w * (B.double() @ A.double()) for B, A, w in zip(Bs, As, weights, strict=True)]).sum(dim=0)


def decomposed(Bs: Sequence[Tensor], As: Sequence[Tensor], weights: Sequence[float], dtype: torch.dtype) -> Product:
    return product(Bs, As, weights, tolerance=1e-11, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_the_dense_sum(dtype: torch.dtype) -> None:
    """To 1e-14 of its size in float64; what narrower factors mean is computed to as many digits."""
    for weights in ((0.3, 0.7), (1.0, -2.0), (1e-2, 1e2), (0.0, 1.0)):
        Bs, As = factors(dtype)
        want = dense(Bs, As, weights)
        found = decomposed(Bs, As, weights, torch.float64)
        s = torch.linalg.svdvals(want)
        assert (
            found.s == pytest.approx(s[: found.rank].tolist(), rel=1e-9)
            and float(s[found.rank :].norm()) < 1e-14 * s[0]
        )
        for rank in (found.rank, 3):
            B, A = found.balanced(rank)
            assert float((B @ A - want).norm()) <= float(s[rank:].norm()) * (1 + 1e-12) + 2e-14 * float(want.norm())
            torch.testing.assert_close(B.mT @ B, A @ A.mT, rtol=1e-9, atol=1e-9 * float(s[0]))  # balanced


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 1e-9, 0.0])
def test_columns_that_nearly_depend_on_each_other(spread: float) -> None:
    """The second client is the first and a little noise: the Cholesky factor would lose digits, and QR takes over."""
    Bs, As = factors(torch.float64, (5, 5))
    Bs, As = [Bs[0].float(), (Bs[0] + spread * Bs[1]).float()], [As[0].float(), (As[0] + spread * As[1]).float()]
    want = dense(Bs, As, (0.5, 0.5))
    found = decomposed(Bs, As, (0.5, 0.5), torch.float64)
    B, A = found.balanced(found.rank)
    assert float((B @ A - want).norm() / want.norm()) < 1e-13
    for columns in (B / B.norm(dim=0), A.mT / A.norm(dim=1)):  # components stay orthogonal, the small ones too
        torch.testing.assert_close(columns.mT @ columns, torch.eye(found.rank).double(), rtol=0, atol=1e-7)


def test_cholesky_is_used_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else merging would silently take twice the time."""
    Bs, As = factors(torch.float32)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("QR of well-conditioned float32 factors")

    monkeypatch.setattr(module.torch.linalg, "qr", forbidden)
    assert decomposed(Bs, As, (0.5, 0.5), torch.float32).rank == 10


def test_zero_and_cancelling_updates_have_no_components() -> None:
    Bs, As = factors(torch.float32, (3,))
    assert decomposed([B * 0 for B in Bs], As, (1.0,), torch.float32).rank == 0
    assert decomposed([Bs[0], Bs[0]], [As[0], As[0]], (1.0, -1.0), torch.float32).rank == 0
    B, A = decomposed([Bs[0] * 0], As, (1.0,), torch.float32).balanced(0)
    assert (B.shape, A.shape) == ((40, 0), (0, 30))


def test_more_columns_than_rows() -> None:
    Bs, As = factors(torch.float32, (30, 30))
    want = dense(Bs, As, (0.5, 0.5))
    B, A = decomposed(Bs, As, (0.5, 0.5), torch.float64).balanced(30)
    assert float((B @ A - want).norm() / want.norm()) < 1e-13


def test_what_a_type_cannot_hold_is_an_error() -> None:
    Bs, As = factors(torch.float64, (3,))
    with pytest.raises(OverflowError):
        decomposed([Bs[0] * 1e30], [As[0] * 1e30], (1.0,), torch.float32)
    with pytest.raises(OverflowError):
        decomposed([Bs[0] * 1e200], [As[0] * 1e200], (1.0,), torch.float64)
    with pytest.raises(LostUpdate):
        decomposed([Bs[0] * 1e-30], [As[0] * 1e-30], (1.0,), torch.float32)


def test_signs_are_canonical() -> None:
    """The entry of largest magnitude of each column of B is positive, whatever the order of the clients."""
    Bs, As = factors(torch.float32)
    one, two = decomposed(Bs, As, (0.5, 0.5), torch.float64), decomposed(Bs[::-1], As[::-1], (0.5, 0.5), torch.float64)
    for a, b in zip(one.balanced(10), two.balanced(10), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    B, _ = one.balanced(10)
    assert bool((B.amax(dim=0) >= -B.amin(dim=0)).all())
