"""The fast path against the reference and against dense float64: same aggregate, ranks, cuts, readouts.

Kind of evidence: oracle (dense float64 means of the stored factors; `linalg`, which shares no route with `fastpath` but
the primitives `gram`, `right_svd` and `cut_at`), over every hard family of `families.py`, and property (gauge, order of
modules). `force_reference` runs a whole server on the reference.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

import families
from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build, fastpath, linalg, whole_mean
from fedlora.linalg import ConsensusSpectrum, gauge_fix, gram, rank_tolerance, tie_tolerance
from fedlora.methods import glora as glora_module

U32 = rank_tolerance(torch.float32)
SOUND = ("generic", "near_equal_1e-1", "gauge_1e1", "column_scales", "dominant_rank", "orthogonal_equal", "one_client")
SHAPES = ((48, 40), (40, 60), (24, 70))  # d_out x d_in; the last has fewer rows than there are columns of M


def pairs_of(case: families.Case) -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(B.copy()), torch.from_numpy(A.copy())) for _, (B, A) in sorted(case.uploads.items())]


def fixed(case: families.Case) -> tuple[Tensor, Tensor]:
    """M and N in float32, by the reference."""
    p = [case.weights[c] for c in sorted(case.uploads)]
    each = [gauge_fix(B, A, tolerance=U32) for B, A in pairs_of(case)]
    M = torch.cat([U * math.sqrt(w) for (U, _), w in zip(each, p, strict=True)], dim=1)
    N = torch.cat([Ahat * math.sqrt(w) for (_, Ahat), w in zip(each, p, strict=True)], dim=0)
    return M.float(), N.float()


def dense(c: ConsensusSpectrum) -> Tensor:
    s = c.spectrum
    return (s.U.double() * s.s.double()) @ s.Vh.double()


def apart(a: Tensor, b: Tensor, size: float) -> float:
    return float(torch.linalg.matrix_norm(a - b)) / size


def orthonormality(X: Tensor) -> float:
    X = X.double()
    return float((X.mT @ X - torch.eye(X.shape[1])).abs().max()) if X.shape[1] else 0.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_where_nothing_is_cut_it_is_the_mean(name: str, shape: tuple[int, int]) -> None:
    """R = S: M N itself, to 1e-6 of the size of the terms, with an orthonormal basis."""
    if name == "wide" and shape[0] // 4 + 2 > shape[1]:
        pytest.skip("the family needs more columns")
    M, N = fixed(families.family(name, d_out=shape[0], d_in=shape[1]))
    if M.shape[1] == 0:
        return
    c = fastpath.consensus_spectrum(M, N, M.shape[1], tolerance=U32, tie_tolerance=tie_tolerance(torch.float32))
    assert apart(dense(c), M.double() @ N.double(), float(torch.linalg.matrix_norm(N.double()))) < 1e-6
    assert orthonormality(c.spectrum.U) < 2e-5
    assert (c.gap, c.captured) == (math.inf, 1.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_where_the_budget_cuts_it_is_the_reference(name: str, shape: tuple[int, int]) -> None:
    """R from 1 to S: rank, gap, tie and captured share agree, and so does the aggregate where the cut is well defined.

    Inside a gap g the reference itself moves by u / g (docs/decisions/0004-ties.md), so the tolerance is 3e-7 / g.
    """
    case = families.family(name, d_out=shape[0], d_in=max(shape[1], shape[0] // 4 + 2))
    M, N = fixed(case)
    size = float(torch.linalg.matrix_norm(N.double()))
    for R in sorted({1, 3, M.shape[1] // 3, M.shape[1] // 2, M.shape[1] - 1} - {0, -1}):
        options = {"tolerance": U32, "tie_tolerance": tie_tolerance(torch.float32)}
        got, want = (x.consensus_spectrum(M, N, R, **options) for x in (fastpath, linalg))  # type: ignore[attr-defined]
        assert orthonormality(got.spectrum.U) < 2e-5
        if got.union_rank is None:
            assert min(M.shape) <= R
            continue
        assert (got.union_rank, got.tied) == (want.union_rank, want.tied), R
        if got.gap < math.inf:
            assert got.gap == pytest.approx(want.gap, abs=1e-6)
        if got.tied or got.gap > 1e-2:
            moved = 1e-6 if got.tied else 1e-6 + 3e-7 / got.gap
            assert apart(dense(got), dense(want), size) < moved, R
            assert got.captured == pytest.approx(want.captured, abs=2 * moved + 1e-5)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_alignment_is_that_of_the_columns_with_the_directions(name: str) -> None:
    """The squares of M^T U_s from S x S terms, where it is given, against the tall product."""
    M, N = fixed(families.family(name))
    for R in (max(M.shape[1] // 2, 1), M.shape[1]):
        c = fastpath.consensus_spectrum(M, N, R, tolerance=U32, tie_tolerance=tie_tolerance(torch.float32))
        assert (c.alignment is not None) or name not in SOUND
        if c.alignment is not None:
            assert float((c.alignment - (M.double().mT @ c.spectrum.U.double()).square()).abs().max()) < 1e-5


# ------------------------------------------------------------------------------------ straight from the factors


def large(name: str, seed: int = 0) -> families.Case:
    """Of a matrix that is large enough for `whole_means`."""
    return families.family(name, seed=seed, d_out=96, d_in=80)


def whole(case: families.Case) -> whole_mean.WholeMean | None:
    weights = [case.weights[c] for c in sorted(case.uploads)]
    (mean,) = whole_mean.whole_means([whole_mean.Uncut(pairs_of(case), weights, U32)])
    return mean


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_whole_mean_is_the_dense_one_or_none(name: str) -> None:
    """Against the dense float64 mean, relative to it; its ranks are the nominal ones, or it must not answer."""
    case = large(name)
    mean = whole(case)
    if name in SOUND:
        assert mean is not None
    if mean is None:
        return
    want = torch.from_numpy(families.mean_update(case))
    s = mean.spectrum
    assert s.rank == sum(B.shape[1] for B, _ in pairs_of(case)) == families.union_rank(case)
    assert apart((s.U.double() * s.s) @ s.Vh.double(), want, float(torch.linalg.matrix_norm(want))) < 1e-6
    assert orthonormality(s.U) < 1e-5
    assert orthonormality(s.Vh.mT) < 1e-4
    assert torch.allclose(s.s.double(), torch.linalg.svdvals(want)[: s.rank], rtol=1e-4, atol=1e-6 * float(s.s[0]))
    for (B, A), basis, alignment in zip(pairs_of(case), mean.bases, mean.alignments, strict=True):
        simple, _ = gauge_fix(B, A, tolerance=U32)
        assert orthonormality(basis) < 2e-5
        assert float(torch.linalg.matrix_norm(basis.double() @ basis.double().mT - simple @ simple.mT)) < 2e-5
        assert torch.allclose(alignment, (simple.mT @ s.U.double()).square().sum(dim=0), atol=2e-5)


@pytest.mark.parametrize("name", [n for n in families.FAMILIES if n not in SOUND])
def test_what_is_not_ordinary_gives_no_whole_mean_or_a_right_one(name: str) -> None:
    """Deficient factors must not pass for full rank: a duplicated column, a zero B, cancelling clients, padding."""
    deficient = {
        "zero_B", "zero_column", "duplicated_column", "deficient_A", "zero_padded", "wide", "cancelling",
        "near_equal_1e-4", "near_equal_1e-5", "near_equal_1e-6",
    }  # fmt: skip
    if name in deficient:
        assert whole(large(name)) is None


def test_of_many_matrices_each_gets_its_own() -> None:
    """One call over matrices of two shapes, sound and unsound ones between each other: as one by one, bit for bit."""
    cases = [large(name, k) for k, name in enumerate(("generic", "zero_B", "generic", "deficient_A"))]
    cases += [families.family("generic", seed=9, d_out=120, d_in=80), large("orthogonal_equal", 4)]
    problems = [
        whole_mean.Uncut(pairs_of(case), [case.weights[c] for c in sorted(case.uploads)], U32) for case in cases
    ]
    together = whole_mean.whole_means(problems)
    assert [mean is None for mean in together] == [False, True, False, True, False, False]
    for problem, mean in zip(problems, together, strict=True):
        (alone,) = whole_mean.whole_means([problem])
        if mean is None or alone is None:
            assert mean is alone
            continue
        assert torch.allclose(mean.spectrum.U, alone.spectrum.U, atol=1e-6)
        assert torch.allclose(mean.spectrum.s, alone.spectrum.s, rtol=1e-6)


def test_noise_is_no_full_rank_for_narrow_types() -> None:
    """bfloat16 columns that differ by less than bfloat16 can tell: the reference's rank decision stands."""
    B = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    B[:, 5] = B[:, 4] + 1e-3 * B[:, 3]
    pair = (B, torch.randn(6, 50, generator=torch.Generator().manual_seed(1)))
    narrow, single = (
        whole_mean.whole_means([whole_mean.Uncut([pair], [1.0], rank_tolerance(t))])[0]
        for t in (torch.bfloat16, torch.float32)
    )
    assert narrow is None
    assert single is None or single.spectrum.rank == 6


# ----------------------------------------------------------------------------------------------- a whole server


@pytest.fixture
def force_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs GLoRA on `linalg` alone."""

    def one_by_one(pairs, *, tolerances, canonical="product", dtype=torch.float64):  # type: ignore[no-untyped-def]
        each = [gauge_fix(B, A, tolerance=t, canonical=canonical) for (B, A), t in zip(pairs, tolerances, strict=True)]
        return [(U.to(dtype), Ahat.to(dtype)) for U, Ahat in each]

    monkeypatch.setattr(glora_module, "gauge_fix_all", one_by_one)
    monkeypatch.setattr(glora_module, "consensus_spectrum", linalg.consensus_spectrum)
    monkeypatch.setattr(glora_module, "whole_means", lambda problems, each: [None] * len(problems))


def served(
    cases: list[families.Case], *, workers: int | None = None, **hparams: object
) -> tuple[Server, ServerState, list[Client]]:
    clients = [Client(c, {f"m{k}": case.uploads[c][0].shape[1] for k, case in enumerate(cases)})
               for c in sorted(cases[0].uploads)]  # fmt: skip
    rank = max(B.shape[1] for case in cases for B, _ in case.uploads.values())
    d_out, d_in = (cases[0].uploads["c0"][k].shape[k] for k in (0, 1))
    start = Adapter({f"m{k}": LoRA(torch.zeros(d_out, rank), torch.ones(rank, d_in)) for k in range(len(cases))})
    uploads = [
        Upload(
            client,
            cases[0].weights[client.id],  # type: ignore[arg-type]
            Adapter({f"m{k}": LoRA(*map(torch.from_numpy, case.uploads[client.id])) for k, case in enumerate(cases)}),
        )
        for client in clients
    ]
    server = Server(build("glora", **hparams), workers=workers)
    return server, server.aggregate(server.init(start), uploads), clients


@pytest.mark.parametrize(
    "hparams", [{}, {"rho": 0.5}, {"gamma": 0.0}, {"basis": "energy"}, {"preset": "paper"}], ids=str
)
@pytest.mark.parametrize(
    "name", ["generic", "zero_B", "gauge_1e1", "orthogonal_equal", "column_scales", "dominant_rank"]
)
def test_a_server_on_the_fast_path_is_one_on_the_reference(
    name: str, hparams: dict[str, object], request: pytest.FixtureRequest
) -> None:
    """Update, diagnostics and every client's readout, over two modules; from the same stored float32 factors."""
    cases = [families.family(name, seed=k, d_out=96, d_in=80) for k in range(2)]
    server, fast, clients = served(cases, **hparams)
    request.getfixturevalue("force_reference")
    _, slow, _ = served(cases, **hparams)
    for module in fast.modules:
        a, b = (server.method.effective(s.modules[module]).map(Tensor.double).delta() for s in (fast, slow))  # type: ignore[union-attr]
        assert apart(a, b, float(torch.linalg.matrix_norm(b))) < 2e-6
        mine, reference = (dict(server.method.diagnostics(s.modules[module])) for s in (fast, slow))
        for key in ("rank", "server_rank", "total_rank", "union_rank", "tied", "client_ranks"):
            assert mine[key] == reference[key], key
        for client in clients:
            got, want = (server.download(s, client).adapter.modules[module].delta().double() for s in (fast, slow))
            assert apart(got, want, float(torch.linalg.matrix_norm(want)) + 1e-30) < 1e-4


def test_gram_by_panels_and_strips_is_the_product() -> None:
    """Over the sizes at which the strips and panels begin and end, in both layouts, with a leading dimension."""
    for d, n in ((5, 3), (2047, 96), (2048, 97), (2049, 144), (4100, 150)):
        X = torch.from_numpy(np.random.default_rng(d).standard_normal((d, n)).astype(np.float32))
        want = X.double().mT @ X.double()
        for got in (gram(X), gram(X.mT.contiguous().mT), gram(X[None])[0]):
            assert got.dtype == torch.float64
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-9)
            assert torch.equal(got, got.mT)
        assert gram(X, torch.float32).dtype == torch.float32


def test_the_bits_are_the_same_for_any_number_of_workers() -> None:
    """Over modules of two shapes and a deficient one, for a cut too; whatever torch's own thread count is."""
    cases = [
        families.family(name, seed=k) for k, name in enumerate(("generic", "zero_B", "generic", "duplicated_column"))
    ]
    for hparams in ({}, {"rho": 0.4}):
        seen = set()
        for threads, workers in ((1, None), (1, 1), (1, 3), (2, None), (2, 2)):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                _, state, _ = served(cases, workers=workers, **hparams)
                assert torch.get_num_threads() == threads
            finally:
                torch.set_num_threads(before)
            seen.add(b"".join(s.spectrum.U.numpy().tobytes() for s in state.modules.values()))
        assert len(seen) == 1


# ------------------------------------------------------------------------------------- what a review once found


def alone(B: Tensor, A: Tensor, **hparams: object) -> tuple[Server, ServerState]:
    server = Server(build("glora", **hparams))
    start = Adapter({"m": LoRA(torch.zeros_like(B), torch.ones_like(A))})
    upload = Upload(Client("c", B.shape[1]), 1, Adapter({"m": LoRA(B, A)}))
    return server, server.aggregate(server.init(start), [upload])


@pytest.mark.parametrize("seed", range(10, 30))
def test_terms_that_cancel_to_the_last_bit(seed: int) -> None:
    """[b 3b] [3a; -a] = 0: the energy of the terms may come out below zero, which is no reason to stop."""
    g = torch.Generator().manual_seed(seed)
    b, a = (torch.randint(-99, 100, shape, generator=g).float() / 7 for shape in ((64, 1), (1, 64)))
    server, state = alone(torch.cat([b, 3 * b], dim=1), torch.cat([3 * a, -a]))
    size = float(torch.linalg.matrix_norm(3 * b @ a))
    assert float(torch.linalg.matrix_norm(server.global_update(state)["m"].delta())) < 1e-5 * size


@pytest.mark.parametrize("top", [-2, -3, -4])
@pytest.mark.parametrize("shape", [(300, 24), (24, 300)], ids=str)
def test_a_decaying_spectrum_keeps_both_sides_orthonormal(top: int, shape: tuple[int, int]) -> None:
    """More columns than the smaller side has: the far side is made from the near one, over small singular values."""
    g = torch.Generator().manual_seed(0)
    d_out, d_in = shape
    space = torch.linalg.qr(torch.randn(d_out, 24, generator=g))[0] * torch.logspace(0, top, 24)
    each = [(space @ torch.randn(24, 8, generator=g), torch.randn(8, d_in, generator=g)) for _ in range(5)]
    fixed = [gauge_fix(B, A, tolerance=U32) for B, A in each]
    M, N = (torch.cat(x, dim=k).float() for k, x in ((1, [U for U, _ in fixed]), (0, [Ahat for _, Ahat in fixed])))
    c = fastpath.consensus_spectrum(M, N, 40, tolerance=U32, tie_tolerance=tie_tolerance(torch.float32))
    assert orthonormality(c.spectrum.U) < 2e-5
    assert orthonormality(c.spectrum.Vh.mT) < 1e-3  # as the reference's


def test_a_rank_that_bfloat16_cannot_tell_is_not_told() -> None:
    """16 columns that nearly agree, and one that is noise beside their first singular value, whatever pivots say."""
    g = torch.Generator().manual_seed(0)
    one = torch.randn(64, 1, generator=g)
    M = torch.cat([one + 0.3 * torch.randn(64, 16, generator=g), torch.randn(64, 1, generator=g)], dim=1)
    M = torch.nn.functional.normalize(M, dim=0) * torch.tensor([1.0] * 16 + [0.014])
    N = torch.randn(17, 90, generator=g)
    options = {"tolerance": rank_tolerance(torch.bfloat16), "tie_tolerance": tie_tolerance(torch.bfloat16)}
    got, want = (x.consensus_spectrum(M, N, 17, **options) for x in (fastpath, linalg))  # type: ignore[attr-defined]
    assert (got.union_rank, got.spectrum.rank) == (want.union_rank, want.spectrum.rank)


def test_captured_is_a_share_also_where_clients_cancel() -> None:
    """Two clients that cancel up to 1e-5, some directions kept: the share of the dense mean, in [0, 1]."""
    g = torch.Generator().manual_seed(1)
    U = torch.linalg.qr(torch.randn(60, 4, generator=g))[0]
    other = torch.linalg.qr(U + 1e-5 * torch.randn(60, 4, generator=g))[0]
    M, Z = torch.cat([U, other], dim=1) / 2**0.5, torch.randn(4, 50, generator=g)
    N = torch.cat([Z, -Z + 1e-5 * torch.randn(4, 50, generator=g)]) / 2**0.5
    for rank in (3, 5):
        options = {"tolerance": U32, "tie_tolerance": tie_tolerance(torch.float32)}
        c = fastpath.consensus_spectrum(M, N, rank, **options)
        kept = float(torch.linalg.matrix_norm(dense(c)) / torch.linalg.matrix_norm(M.double() @ N.double())) ** 2
        assert 0 <= c.captured <= 1
        assert c.captured == pytest.approx(min(kept, 1.0), abs=0.02)


def test_threads_to_come_have_as_many_as_before() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        served([large("generic", k) for k in range(2)], workers=2)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


@pytest.mark.parametrize("ranks", [(1,), (1, 1, 1), (1, 4), (8, 8, 8, 8)], ids=str)
@pytest.mark.parametrize("hparams", [{}, {"rho": 0.5}, {"rho": 0.1}], ids=str)
@pytest.mark.parametrize("shape", [(96, 80), (32, 32), (24, 200), (200, 24)], ids=str)
def test_a_state_is_made_of_plain_tensors(
    ranks: tuple[int, ...], hparams: dict[str, object], shape: tuple[int, int]
) -> None:
    """Row after row in memory, also those of one column: what is stored and sent is their bytes."""
    g = torch.Generator().manual_seed(0)
    d_out, d_in = shape
    pairs = [(torch.randn(d_out, r, generator=g), torch.randn(r, d_in, generator=g)) for r in ranks]
    server = Server(build("glora", **hparams))
    start = Adapter({"m": LoRA(torch.zeros(d_out, max(ranks)), torch.ones(max(ranks), d_in))})
    uploads = [Upload(Client(f"c{k}", r), 1, Adapter({"m": LoRA(*pairs[k])})) for k, r in enumerate(ranks)]
    state = server.aggregate(server.init(start), uploads).modules["m"]
    bases = [trace.basis for traces in state.history.values() for trace in traces]
    for t in (state.spectrum.U, state.spectrum.s, state.spectrum.Vh, *bases, *state.alignment.values()):
        assert t.stride(-1) == 1
        assert t.is_contiguous()
