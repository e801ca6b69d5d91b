"""The numerical primitives against dense numpy, and what they must never do. Kinds: oracle, structural."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jaxtyping
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.analysis.audit import padded_average_error
from fedlora.linalg import (
    gauge_fix,
    gauge_splits,
    rank_tolerance,
    right_svd,
    svd_of_product,
    unit_roundoff,
)
from fedlora.linalg.batches import in_batches, norms
from fedlora.linalg.parallel import X, Y
from fedlora.linalg.spectrum import cut_by_rounding
from support import families


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_batches_are_of_one_kind_and_give_results_by_place() -> None:
    """By hand: two kinds, at most two of 8 bytes at once, in any order of the batches."""
    seen: list[list[int]] = []

    def work(at: list[int]) -> list[str]:
        seen.append(at)
        return [f"{k}" for k in at]

    def backwards(work: Callable[[X], Y], items: Sequence[X], /) -> list[Y]:
        return [work(item) for item in items[::-1]][::-1]

    assert in_batches(work, ["a", "b", "a", "a"], [8] * 4, backwards, most=16) == ["0", "1", "2", "3"]
    assert sorted(seen) == [[0, 2], [1], [3]]


def test_norms_of_many_are_those_of_each_in_float64() -> None:
    """Against float64, of sizes whose squares are no numbers of float32, of no entries, and of what is not finite."""
    plain = [randn(5, 3), randn(5, 3, seed=1) * 1e25, randn(7), randn(2, 0), randn(3, 3).mT[1:], torch.tensor(-2.0)]
    tensors = [t.to(dtype) for t in plain for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert norms(tensors) == pytest.approx([float(t.double().square().sum().sqrt()) for t in tensors], rel=1e-5)
    bad = [torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.ones(2)]
    assert [math.isfinite(x) for x in norms(bad)] == [False, False, True]


def orthonormality(U: Tensor) -> float:
    return float(torch.linalg.matrix_norm(U.mT.double() @ U.double() - torch.eye(U.shape[1], dtype=torch.float64)))


class _Largest(TorchDispatchMode):
    """Remembers the largest result of any torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("name", ["glora", "flexlora", "fedex-lora", "fedit", "padded-average"])
def test_no_matrix_of_the_size_of_the_weight_is_ever_formed(name: str) -> None:
    """While sum r_i < min(d_out, d_in): init, aggregate, download, global update, diagnostics, every torch result."""
    for dtype in (torch.float32, torch.float64):
        d_out, d_in, r = 300, 260, 4
        seed = Adapter({"m": LoRA(torch.zeros(d_out, r, dtype=dtype), randn(r, d_in, dtype=dtype))})
        pairs = {
            c: LoRA(randn(d_out, r, seed=k, dtype=dtype), randn(r, d_in, seed=-k, dtype=dtype))
            for k, c in enumerate("abc")
        }
        sent = [Upload(Client(c, r), 1, Adapter({"m": lora})) for c, lora in pairs.items()]
        server = Server(build(name))
        with _Largest() as largest:
            state = server.aggregate(server.init(seed), sent)
            server.download(state, Client("a", r))
            server.global_update(state)
            server.diagnostics(state)
            padded_average_error(state, sent, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
        assert largest.numel < d_out * d_in / 4
        with _Largest() as largest:  # the watch works
            server.global_update(state)["m"].delta()
        assert largest.numel == d_out * d_in


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_svd_is_numpys(dtype: torch.dtype) -> None:
    X = randn(40, 7, dtype=dtype)
    s, V = right_svd(X)
    want = np.linalg.svd(X.double().numpy())
    np.testing.assert_allclose(s.numpy(), want[1], rtol=1e-12 if dtype == torch.float64 else 1e-7)
    np.testing.assert_allclose(np.abs((V.numpy() * want[2].T).sum(0)), 1, atol=1e-7)
    assert s.dtype == V.dtype == torch.float64


def test_gauge_fix_survives_what_breaks_a_float32_gram() -> None:
    """A column at 1e-6 of the others is signal, not noise: found, orthonormal, product kept to float64 round-off."""
    B, A = randn(50, 4), randn(4, 30, seed=1)
    B[:, 2] *= 1e-6
    for dtype in (torch.float32, torch.float64):
        stored = B.to(dtype), A.to(dtype)
        U, Ahat = gauge_fix(*stored, tolerance=rank_tolerance(dtype))
        assert U.shape == (50, 4)
        assert U.dtype == torch.float64
        assert orthonormality(U) < 1e-11
        want = stored[0].double() @ stored[1].double()
        assert float(torch.linalg.matrix_norm(U @ Ahat - want) / torch.linalg.matrix_norm(want)) < 1e-14


def test_the_fast_gauge_fix_is_the_simple_one() -> None:
    """`gauge_splits` against `gauge_fix`, client by client, on every hard family: ranks, spans and products."""
    for name in families.FAMILIES:
        case = families.family(name, dtype=np.float32)
        pairs = [tuple(torch.from_numpy(x.copy()) for x in pair) for _, pair in sorted(case.uploads.items())]
        tolerance = rank_tolerance(torch.float32)
        fast = gauge_splits(pairs, tolerances=[tolerance] * len(pairs))  # type: ignore[arg-type]
        for (B, A), (U, Ahat) in zip(pairs, fast, strict=True):
            simple, coordinates = gauge_fix(B, A, tolerance=tolerance)
            assert U.shape == simple.shape, name
            assert orthonormality(U) < 1e-9
            assert float(torch.linalg.matrix_norm(U @ U.mT - simple @ simple.mT)) < 1e-8
            product = simple @ coordinates
            off = float(torch.linalg.matrix_norm(U @ Ahat - product))
            assert off <= 1e-12 * float(torch.linalg.matrix_norm(product))


def test_gauge_fix_of_nothing_has_rank_zero() -> None:
    zero_B, zero_A = (torch.zeros(9, 3), randn(3, 7)), (randn(9, 3), torch.zeros(3, 7))
    for B, A in (zero_B, zero_A, (torch.zeros(9, 0), torch.zeros(0, 7))):
        U, Ahat = gauge_fix(B.double(), A.double(), tolerance=1e-11)
        assert U.shape == (9, 0)
        assert Ahat.shape == (0, 7)


def test_noise_in_svd_form_is_no_direction() -> None:
    """A client that sends (U S, V^T) of a rank-3 update at r = 6: columns of size 1e-16 are rounding."""
    U, s, Vh = torch.linalg.svd(randn(40, 3) @ randn(3, 30, seed=1), full_matrices=False)
    for dtype in (torch.float64, torch.float32):
        B, A = (U[:, :6] * s[:6]).to(dtype), Vh[:6].to(dtype)
        ((found, _),) = gauge_splits([(B, A)], tolerances=[rank_tolerance(dtype)])
        assert found.shape[1] == 3


def test_a_large_row_of_a_behind_a_zero_column_of_b_hides_nothing() -> None:
    """A dead slot must not raise the noise level of the others: B tiny after a first step, one slot untouched."""
    B, A = 1e-7 * randn(30, 4), randn(4, 20, seed=1)
    B[:, 3] = 0
    U, _ = gauge_fix(B.float(), A.float(), tolerance=rank_tolerance(torch.float32))
    assert U.shape[1] == 3


def test_svd_of_product_agrees_with_dense_svd() -> None:
    B, A = randn(30, 6), randn(6, 25, seed=1)
    U, s, Vt = np.linalg.svd((B @ A).numpy())
    got = svd_of_product(B, A, tolerance=1e-11)
    np.testing.assert_allclose(got.s.numpy(), s[:6], rtol=1e-12)
    np.testing.assert_allclose(((got.U * got.s) @ got.Vh).numpy(), (U[:, :6] * s[:6]) @ Vt[:6], atol=1e-11)
    largest = got.U.gather(0, got.U.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


@pytest.mark.parametrize("near", [1.0, 1e-2, 1e-3, 1e-5, 1e-7])
def test_svd_of_product_is_right_where_terms_nearly_cancel(near: float) -> None:
    """[B, -B'] @ [A; A] in float32 with B' near B: the float64 product of the stored factors, to storing."""
    B, A = randn(60, 4).float(), randn(4, 50, seed=1).float()
    other = B + near * randn(60, 4, seed=2).float()
    stacked = torch.cat([B, -other], dim=1), torch.cat([A, A])
    want = stacked[0].double() @ stacked[1].double()
    got = svd_of_product(*stacked, tolerance=rank_tolerance(torch.float32))
    found = (got.U.double() * got.s) @ got.Vh.double()
    assert float(torch.linalg.matrix_norm(found - want) / torch.linalg.matrix_norm(want)) < 1e-7
    assert got.sound == 4


def test_svd_of_product_sees_cancellation_as_zero() -> None:
    """[B, -B] @ [A; A] is zero up to rounding of its terms: rank 0, not noise of full rank."""
    B, A = randn(30, 4).float(), randn(4, 20, seed=1).float()
    assert svd_of_product(torch.cat([B, -B], 1), torch.cat([A, A]), tolerance=rank_tolerance(torch.float32)).rank == 0


@pytest.mark.parametrize("size", [1.0, 1e-200, 1e150])
def test_where_rounding_cuts_a_spectrum(size: float) -> None:
    """By hand, with u = 2^-53: terms of 1e6 leave 4 u 1e6 = 4.4e-10 invisible and doubt 64 u 1e6 = 7.1e-9; of 1e3 a
    thousandth, and then it is the factors, rounded to 1e-8, that say where the doubt begins: at the third component."""

    def cut(s: list[float], terms: float, stored: float) -> tuple[int, float, float]:
        keep, level, share = cut_by_rounding(
            [x * size for x in s], terms=terms * size, stored=stored * size, stored_in=torch.float64
        )
        return keep, level / size, share

    assert cut([3, 2, 1e-9, 3e-10], 1e6, 0.0) == (3, pytest.approx(64 * 2**-53 * 1e6), 0.0)
    assert cut([3, 2, 1e-9, 3e-13], 1e3, 1e-8) == (3, pytest.approx(1e-9), pytest.approx(1e-18 / 13))
    assert cut([1e-3, 1e-4], 1e13, 0.0) == (0, 0.0, 0.0), "64 u 1e13 is 0.07: rounding from end to end"


def test_unit_roundoff_is_half_the_spacing_at_one() -> None:
    """2^-53, 2^-24, 2^-8, 2^-11: IEEE 754 and bfloat16, with 53, 24, 8 and 11 significand bits."""
    bits = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
    assert all(unit_roundoff(dtype) == 2.0**-n for dtype, n in bits.items())


def test_shapes_are_checked_in_tests() -> None:
    """The jaxtyping hook (pyproject, addopts) is on: factors that share no S are an error of type, not a broadcast."""
    with pytest.raises(jaxtyping.TypeCheckError):
        gauge_fix(torch.zeros(5, 3), torch.zeros(4, 2), tolerance=1e-9)
