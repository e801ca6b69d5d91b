"""The pieces of `fedlora.linalg`, by hand and against float64. Kinds of evidence: oracle, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedlora.linalg import Spectrum, norm, rank_tolerance, unit_roundoff, weighted_mean
from fedlora.linalg.factored import gram
from fedlora.linalg.spectrum import canonical_signs, cut_by_rounding
from support.federations import noise

F64 = torch.float64


def test_unit_roundoff_is_half_the_spacing_at_one() -> None:
    """2^-53, 2^-24, 2^-8, 2^-11: IEEE 754 and bfloat16, with 53, 24, 8 and 11 significand bits."""
    bits = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
    assert all(unit_roundoff(dtype) == 2.0**-n for dtype, n in bits.items())
    assert [rank_tolerance(2.0**-n) for n in (53, 24)] == [1e-11, 2.0**-24]


def test_gram_by_panels_and_strips_is_the_product() -> None:
    """Over the sizes at which the strips and panels begin and end, in both layouts."""
    for d, n in ((5, 3), (2047, 64), (2048, 65), (2049, 144), (4100, 150)):
        X = noise((2, d, n), d).float()
        want = X.double().mT @ X.double()
        for got in (gram(X), gram(X.mT.contiguous().mT)):
            assert got.dtype == F64 and torch.allclose(got, want, rtol=1e-12, atol=1e-9)


def test_signs_make_the_largest_entry_positive() -> None:
    for d, n in ((7, 5), (48, 3), (64, 1)):
        X = noise((3, d, n), d)
        largest = X.gather(1, X.abs().argmax(dim=1, keepdim=True))[:, 0]
        assert torch.equal(canonical_signs(X), largest.sign().float())


def test_norms_are_float64s_of_any_numbers() -> None:
    """Also of those whose squares float32 cannot hold."""
    X = noise((5, 3), "X").float()
    for unit in (1.0, 2.0**100, 2.0**-100):
        assert norm(X * unit) == pytest.approx(float(X.double().square().sum().sqrt()) * unit, rel=1e-12)
    assert (norm(0 * X), norm(X[:, :0])) == (0.0, 0.0) and math.isnan(norm(X * math.nan))


def test_a_weighted_mean_that_cancels_keeps_its_digits() -> None:
    """0.5 a - 0.5 b in float64 for float32 a, b that differ in their last bits."""
    a = noise((9,), "a").float()
    b = torch.nextafter(a, torch.tensor(math.inf))
    assert torch.equal(weighted_mean([a, b], [0.3, -0.3]), (0.3 * a.double() - 0.3 * b.double()).float())


def test_where_rounding_cuts_a_spectrum() -> None:
    """By hand, with u = 2^-53: terms of 1e6 leave 4 u 1e6 = 4.4e-10 invisible and doubt 64 u 1e6 = 7.1e-9; of 1e3 a
    thousandth, and then it is the factors, rounded to 1e-8, that say where the doubt begins: at the third component."""

    def cut(s: list[float], terms: float, floor: float) -> tuple[object, ...]:
        return tuple(cut_by_rounding(s, terms, floor, F64))

    assert cut([3.0, 2.0, 1e-9, 3e-10], 1e6, 0.0) == (3, 2, pytest.approx(1e-18 / 13, rel=0.1), pytest.approx(9e-20))
    assert cut([3.0, 2.0, 1e-9, 3e-13], 1e3, 1e-8) == (3, 2, pytest.approx(1e-18 / 13), pytest.approx(9e-26))
    assert cut([3.0, 2.0, 1e-9], 1e3, 0.0) == (3, 3, 0.0, 0.0)
    # A quarter of float32's u, 1.5e-8, beside 100: 1.5e-6 is invisible.
    assert cut_by_rounding([100.0, 1e-6], 100.0, 0.0, torch.float32).keep == 1
    assert cut_by_rounding([100.0, 2e-6], 100.0, 0.0, torch.float32).keep == 2
    assert cut([1e-3, 1e-4], 1e13, 0.0) == (0, 0, 0.0, pytest.approx(1.01e-6)), "64 u 1e13 is 0.07: all rounding"
    assert cut([1.0, 1.0, 1.0], 2.0, 9.0)[:3] == (3, 3, 1.0), "too much to leave out, and none of equals is"
    assert cut([1.0, 0.02, 0.01, 0.01], 2.0, 0.5)[1] == 1, "4e-4 and twice 1e-4 are less than a thousandth"
    assert cut([1.0, 0.04, 0.01, 0.01], 2.0, 0.5)[1] == 2


def test_a_head_and_the_rank_of_an_energy() -> None:
    """By hand: squares 16, 4, 1 of 21."""
    s = torch.tensor([4.0, 2.0, 1.0])
    spectrum = Spectrum(torch.eye(5, 3) * s.sqrt(), s, torch.eye(3, 4) * s.sqrt()[:, None], sound=2)
    assert [spectrum.rank_of_energy(share) for share in (0.1, 16 / 21, 0.77, 20 / 21, 0.96, 1.0)] == [1, 1, 2, 2, 3, 3]
    head = spectrum.head(2)
    assert (head.rank, head.sound, head.B.shape, head.A.shape) == (2, 2, (5, 2), (2, 4)) and head.B.is_contiguous()
    assert torch.equal(spectrum.U, torch.eye(5, 3)) and torch.equal(spectrum.Vh, torch.eye(3, 4))
    B, A = spectrum.balanced(torch.tensor([0, 2]))
    assert torch.equal(B, spectrum.B[:, [0, 2]]) and torch.equal(A, spectrum.A[[0, 2]])
