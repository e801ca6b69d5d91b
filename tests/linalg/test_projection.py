"""The projected sum against dense float64, over every hard family of `families.py`. Kind of evidence: oracle
(`support/dense_mean.py`), and what reviews found once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlora.errors import LostUpdate
from fedlora.linalg import Spectrum, Term, projected_sum, unit_roundoff
from support import dense_mean as oracle
from support import families
from support.federations import noise

U64, U32 = (unit_roundoff(t) for t in (torch.float64, torch.float32))
SHAPES = ((48, 40), (40, 60), (24, 70))  # d_out x d_in; the last has fewer rows than the clients have columns
CLEAR = ("generic", "near_equal_1e-1", "gauge_1e1", "column_scales", "dominant_rank")  # with wide gaps between votes


def terms_of(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Term]:
    stored = np.float64 if dtype == torch.float64 else np.float32
    case = families.family(name, seed=seed, d_out=shape[0], d_in=max(shape[1], shape[0] // 4 + 2), dtype=stored)
    pairs = {c: [torch.from_numpy(x.copy()).to(dtype) for x in pair] for c, pair in sorted(case.uploads.items())}
    return [Term(B, A, case.weights[c], unit_roundoff(dtype), votes=True) for c, (B, A) in pairs.items()]


def product(spectrum: Spectrum) -> Tensor:
    return spectrum.B.double() @ spectrum.A.double()


def apart(a: Tensor, b: Tensor, size: float) -> float:
    return float((a - b).norm()) / size


def require_orthonormal(spectrum: Spectrum) -> None:
    for side in (spectrum.U.double(), spectrum.Vh.double().mT):
        assert float((side.mT @ side - torch.eye(spectrum.rank)).abs().max()) < 1e-6 if spectrum.rank else True


@pytest.mark.quick(23)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_it_is_the_sum_or_its_projection_and_says_how_far_off(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """R from 1 to all: the dense sum projected on the result's own columns, to what storing costs, which is the sum if
    R holds all; and `error`, `captured`, `dropped`, `size` are what the dense matrices say."""
    terms = terms_of(name, shape, dtype)
    mean, S = oracle.dense(terms), sum(t.rank for t in terms)
    size, u = float(mean.norm()), U64 if dtype == torch.float64 else U32
    arithmetic = 256 * U64 * oracle.size_of_terms(terms) / size  # below it the report is only a bound
    for R in sorted({1, 3, S // 3, S // 2, S - 1, S} - {0, -1}):
        made = projected_sum(terms, R)
        require_orthonormal(made.spectrum)
        U, got = made.spectrum.U.double(), product(made.spectrum)
        off = apart(got, mean, size)
        assert apart(got, U @ (U.mT @ mean), size) < max(6 * u, arithmetic)
        assert off <= made.error * (1 + 1e-6) and made.error <= 2 * off + 4 * arithmetic
        assert made.captured == pytest.approx(1 - off**2, abs=1e-11 + 5 * (off + u) * (u + arithmetic))
        assert made.size == pytest.approx(size, rel=1e-12 + 4 * arithmetic)
        if min(S, shape[0]) <= R:
            assert made.gap == math.inf and made.union_rank is None and off < max(6 * u, arithmetic)
            assert made.dropped < (6 * u + 2 * arithmetic) ** 2
    assert projected_sum(terms).error == projected_sum(terms, S).error


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("name", CLEAR)
def test_the_directions_that_are_kept_are_the_consensus(name: str, shape: tuple[int, int]) -> None:
    """U_ref U_ref^T mean with U_ref from the dense K, at each R where the dense eigenvalues are far apart; the gap, the
    bases and the alignments of the clients are the dense ones too."""
    terms, seen = terms_of(name, shape), 0
    mean, S = oracle.dense(terms), sum(t.rank for t in terms)
    bases = [oracle.subspace(t) for t in terms]
    values = torch.linalg.svdvals(torch.cat([math.sqrt(t.weight) * U for t, U in zip(terms, bases, strict=True)], 1))
    for R in range(1, min(S, len(mean))):
        gap = 1 - float(values[R] / values[R - 1]) ** 2
        if gap < 0.02:
            continue
        seen, made = seen + 1, projected_sum(terms, R)
        assert apart(product(made.spectrum), oracle.consensus(terms, R) @ mean, float(mean.norm())) < 1e-5
        assert (made.gap, made.tied, made.union_rank) == (pytest.approx(gap, abs=1e-5), False, S)
        for mine, want, score in zip(made.bases, bases, made.alignments, strict=True):
            assert mine.dtype == torch.float32 and mine.is_contiguous()
            assert float((mine.double() @ mine.double().mT - want @ want.mT).norm()) < 1e-5
            assert float((score - (want.mT @ made.spectrum.U.double()).square().sum(dim=0)).abs().max()) < 1e-5
    assert seen > 3


@pytest.mark.quick(20)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_what_is_no_clients_belongs_to_the_sum_and_has_no_vote(name: str, shape: tuple[int, int]) -> None:
    """Also with a negative weight. Where R cuts, directions that only such a term has go first."""
    clients = terms_of(name, shape)
    rest = Term(noise((shape[0], 3), "B").float(), noise((3, clients[0].A.shape[1]), "A").float(), -0.7, U32)
    mean = oracle.dense([*clients, rest])
    made = projected_sum([*clients, rest])
    assert apart(product(made.spectrum), mean, float(mean.norm())) < 1e-6
    assert len(made.bases) == len(made.alignments) == len(clients)
    if name in CLEAR:
        S = sum(t.rank for t in clients)
        cut, voters = projected_sum([*clients, rest], S), torch.cat([oracle.subspace(t) for t in clients], dim=1)
        V, U = torch.linalg.qr(voters).Q, cut.spectrum.U.double()
        assert float((U - V @ (V.mT @ U)).norm()) < 1e-5
        assert (cut.gap, cut.union_rank) == (1.0, S + 3)
        idle = replace(rest, B=0 * rest.B)
        assert projected_sum([*clients, rest, idle], S + 3).gap == math.inf, "nothing but zeros was lost"


# ------------------------------------------------------------------------------------------------------- each choice


@pytest.mark.parametrize("near", [1.0, 1e-2, 1e-3, 3e-5, 1e-6, 0.0])
def test_gram_where_it_is_sound_and_householder_elsewhere(near: float) -> None:
    """The last column is another one and `near` of noise: of condition 1/near for unit columns. The result is exact to
    storing either way, and says which."""
    (first, *others) = terms_of("generic", (60, 50))
    B = first.B.clone()
    B[:, -1] = B[:, 0] + near * noise((60,), "near").float()
    terms = [replace(first, B=B), *others]
    made = projected_sum(terms)
    assert made.factored == ("gram/gram" if near >= 1e-3 else "qr/gram")
    require_orthonormal(made.spectrum)
    assert apart(product(made.spectrum), oracle.dense(terms), float(oracle.dense(terms).norm())) < 1e-7


def test_float64_and_wide_stacks_go_by_householder() -> None:
    """A Gram matrix would cost float64 half of its digits, and of more columns than rows it is singular."""
    assert projected_sum(terms_of("generic", (48, 40), torch.float64)).factored == "qr/qr"
    assert projected_sum(terms_of("wide", (24, 70))).factored.startswith("qr")
    (idle, *others) = terms_of("generic", (60, 50))
    assert projected_sum([replace(idle, B=0 * idle.B), *others]).factored == "gram/gram", "an idle client"


@pytest.mark.parametrize("shape", [(8, 30), (30, 8)])
def test_a_client_of_more_columns_than_the_matrix_has(shape: tuple[int, int]) -> None:
    """Rank 40 beside rank 4. The oracle is the dense sum; nobody's basis has more columns than the matrix has rows."""
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(shape[0], r, generator=draw), torch.randn(r, shape[1], generator=draw)) for r in (40, 4)]
    made = projected_sum([Term(B, A, 0.5, U32, votes=True) for B, A in pairs])
    dense = sum(0.5 * B.double() @ A.double() for B, A in pairs)
    assert apart(product(made.spectrum), dense, float(dense.norm())) < 2e-7
    assert [U.shape[1] for U in made.bases] == [8, 4]


def test_the_unit_of_an_update_decides_nothing() -> None:
    """Powers of two round no number, so they change none."""
    terms = terms_of("gauge_1e1", (96, 80))
    want = projected_sum(terms, 9)
    for unit in (2.0**-40, 2.0**40):
        got = projected_sum([replace(t, A=t.A * unit) for t in terms], 9)
        assert torch.equal(got.spectrum.s / unit, want.spectrum.s)
        assert (got.error, got.captured, got.gap, got.union_rank) == (
            want.error, want.captured, want.gap, want.union_rank,
        )  # fmt: skip


def test_what_a_type_cannot_hold_is_an_error() -> None:
    B, A = noise((40, 3), "B"), noise((3, 30), "A")
    for size, dtype, error in ((1e-30, torch.float32, LostUpdate), (1e30, torch.float32, OverflowError),
                               (1e200, torch.float64, OverflowError)):  # fmt: skip
        with pytest.raises(error):
            projected_sum([Term(B * size, A * size, 1.0, U64)], dtype=dtype)


def test_zero_and_cancelling_sums_have_no_components() -> None:
    B, A = noise((40, 3), "B").float(), noise((3, 30), "A").float()
    for terms in ([Term(0 * B, A, 1.0, U32, True)], [Term(B, A, 0.5, U32, True), Term(-B, A, 0.5, U32, True)],
                  [Term(B[:, :0], A[:0], 1.0, U32, True)]):  # fmt: skip
        for R in (None, 1):
            made = projected_sum(terms, R)
            assert (made.spectrum.rank, made.spectrum.B.shape, made.spectrum.A.shape) == (0, (40, 0), (0, 30))
            assert (made.error, made.captured, made.size) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_direction_that_a_client_s_a_never_uses_has_no_vote(dtype: torch.dtype) -> None:
    """A of rank 2 at r = 4, B of rank 4: col(B A), not col(B). Beside a client of another rank, and one of none."""
    A = noise((4, 2), "mix") @ noise((2, 30), "rows")
    pairs = [(noise((40, 4), "B"), A), (noise((40, 7), "b"), noise((7, 30), "a")), (torch.zeros(40, 2), noise((2, 30)))]
    terms = [Term(B.to(dtype), C.to(dtype), 0.3, unit_roundoff(dtype), votes=True) for B, C in pairs]
    made = projected_sum(terms)
    assert [U.shape[1] for U in made.bases] == [2, 7, 0]
    for U, term in zip(made.bases[:2], terms, strict=False):
        want = oracle.subspace(term)
        assert apart(U.double() @ U.double().mT, want @ want.mT, 1.0) < 1e-5


# ------------------------------------------------------------------------------------- what a review once found


def test_votes_are_ranked_by_each_client_s_own_rounding() -> None:
    """A bfloat16 client of weight 1 beside float32 ones of 1e-5: K ranks them by weight, not by energy."""
    frame = torch.linalg.qr(noise((30, 3), "frame"))[0]
    kinds = ((torch.bfloat16, 1.0, 1.0), (torch.float32, 1e-5, 1.0), (torch.float32, 5e-6, 100.0))
    terms = [
        Term((s * frame[:, k : k + 1]).to(t), noise((1, 20), k).to(t), p, unit_roundoff(t), votes=True)
        for k, (t, p, s) in enumerate(kinds)
    ]
    made = projected_sum(terms, 2)
    inside = (made.spectrum.U.double().mT @ frame).norm(dim=0)
    assert float(inside[1]) > 0.99 and float(inside[2]) < 0.1 and made.union_rank == 3


@pytest.mark.parametrize(("weights", "tied"), [((1.0, 1.0, 1.2), True), ((1.04, 1.0, 1.2), False)])
def test_ties_are_of_the_clients_in_the_tie(weights: tuple[float, ...], tied: bool) -> None:
    """Of equal votes those go first that hold most of the mean. Two float32 clients of weights 1.04 : 1 are no tie,
    whatever the dtype of a third one whose subspace is elsewhere."""
    frame, kinds = torch.linalg.qr(noise((30, 9), "frame"))[0], (torch.float32, torch.float32, torch.bfloat16)
    terms = [
        Term(
            frame[:, 3 * k : 3 * k + 3].to(t), noise((3, 20), k).to(t) * (10.0 if k == 1 else 1.0), p, unit_roundoff(t),
            votes=True,
        )
        for k, (t, p) in enumerate(zip(kinds, weights, strict=True))
    ]  # fmt: skip
    made = projected_sum(terms, 6)
    assert made.tied == tied and made.gap == pytest.approx(0.0 if tied else 1 - 1 / 1.04, abs=1e-3)
    inside = (made.spectrum.U.double().mT @ frame).square().sum(dim=0)
    assert (inside[3:6] > 0.99).all() if tied else (inside[:3] > 0.99).all()


@pytest.mark.parametrize("shape", [(300, 24), (24, 300), (200, 200)], ids=str)
def test_a_decaying_spectrum_keeps_both_sides_orthonormal(shape: tuple[int, int]) -> None:
    """Down to components of 1e-7 of the largest: both sides to 1e-6, and the mean to what storing costs."""
    for top in (-2, -4, -7):
        space = torch.linalg.qr(noise((shape[0], 24), "space"))[0] * torch.logspace(0, top, 24).double()
        pairs = [((space @ noise((24, 8), k, "B")).float(), noise((8, shape[1]), k, "A").float()) for k in range(5)]
        terms = [Term(B, A, 0.2, U32, True) for B, A in pairs]
        made, mean = projected_sum(terms), oracle.dense(terms)
        require_orthonormal(made.spectrum)
        assert apart(product(made.spectrum), mean, float(mean.norm())) < 2e-7


def test_a_client_that_sends_its_svd_votes_for_its_rank_alone() -> None:
    """(U S, V^T) of a rank-3 update at r = 6: columns of size 1e-16 are rounding. And a large row of A behind a zero
    column of B hides nothing: B tiny after a first step, one slot untouched."""
    U, s, Vh = torch.linalg.svd(noise((40, 3), "l") @ noise((3, 30), "r"), full_matrices=False)
    B, A = 1e-7 * noise((40, 4), "B"), noise((4, 30), "A")
    B[:, 3] = 0
    for dtype in (torch.float64, torch.float32):
        for pair in ((U[:, :6] * s[:6], Vh[:6]), (B, A)):
            term = Term(*(t.to(dtype) for t in pair), 1.0, unit_roundoff(dtype), votes=True)  # type: ignore[arg-type]
            made = projected_sum([term])
            assert made.bases[0].shape == (40, 3)
            basis, want = made.bases[0].double(), oracle.subspace(term)
            assert float((basis - want @ (want.mT @ basis)).norm()) < 1e-6
