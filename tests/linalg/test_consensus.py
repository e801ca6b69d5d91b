"""The consensus mean against dense float64, and the batched route against the one that is written to be read.

Kind of evidence: oracle (dense float64 means and projections of the stored factors; `linalg.consensus_mean`, which
shares with `linalg.fast` its accounts but no factorisation), over every hard family of `families.py`, and property
(gauge, order of modules). `force_reference` runs a whole server on the reference.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from fedlora.methods._spectral import whole
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.errors import LostUpdate
from fedlora.linalg import (
    Budget,
    ConsensusMean,
    Contributions,
    consensus_mean,
    consensus_means,
    gram,
    rank_tolerance,
    unit_roundoff,
)
from fedlora.linalg.consensus import Basis
from fedlora.linalg.fast import PANEL, _Batch, _panels
from fedlora.methods import glora as glora_module
from support import families
from support.federations import noise

U32 = rank_tolerance(torch.float32)
SOUND = ("generic", "near_equal_1e-1", "gauge_1e1", "column_scales", "dominant_rank", "orthogonal_equal", "one_client")
SHAPES = ((48, 40), (40, 60), (24, 70))  # d_out x d_in; the last has fewer rows than there are columns of M


def pairs_of(case: families.Case) -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(B.copy()), torch.from_numpy(A.copy())) for _, (B, A) in sorted(case.uploads.items())]


def sent(case: families.Case, stored: torch.dtype = torch.float32) -> Contributions:
    n = len(case.uploads)
    weights = [case.weights[c] for c in sorted(case.uploads)]
    return Contributions(pairs_of(case), weights, [unit_roundoff(stored)] * n, [rank_tolerance(stored)] * n)


def fast(what: Contributions, R: int) -> ConsensusMean | None:
    """By the batched route alone; None where it is not sure."""
    if max(what.ranks) > min(len(what.pairs[0][0]), what.pairs[0][1].shape[1]):
        return None
    return _Batch.of([what]).means(Budget(R))[0]


def dense(c: ConsensusMean) -> Tensor:
    """What the server hands out for it, in float64."""
    return whole(c.spectrum).map(Tensor.double).delta()


def apart(a: Tensor, b: Tensor, size: float) -> float:
    return float(torch.linalg.matrix_norm(a - b)) / size


def orthonormality(X: Tensor) -> float:
    X = X.double()
    return float((X.mT @ X - torch.eye(X.shape[1])).abs().max()) if X.shape[1] else 0.0


def budgets(what: Contributions) -> list[int]:
    S = sum(what.ranks)
    return sorted({1, 3, S // 3, S // 2, S - 1, S} - {0, -1})


def every_family(shape: tuple[int, int]) -> dict[str, int]:
    return {"d_out": shape[0], "d_in": max(shape[1], shape[0] // 4 + 2)}


@pytest.mark.quick(23)
@pytest.mark.parametrize("stored", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_it_is_the_mean_or_its_projection_and_says_how_far_off(
    name: str, shape: tuple[int, int], stored: type[np.floating]
) -> None:
    """R from 1 to S against the dense float64 mean: exact at S to what storing costs; below it the projection of the
    mean on the result's own columns; and `error`, `captured` are what the dense matrices say.
    """
    case = families.family(name, **every_family(shape), dtype=stored)
    what, mean = sent(case, torch.from_numpy(np.zeros(1, stored)).dtype), torch.from_numpy(families.mean_update(case))
    size, u = float(torch.linalg.matrix_norm(mean)), unit_roundoff(what.dtype)
    terms = sum(p * float(torch.linalg.matrix_norm(B.double()) * torch.linalg.matrix_norm(A.double()))
                for (B, A), p in zip(what.pairs, what.weights, strict=True))  # fmt: skip
    for R in budgets(what):
        for c in (consensus_mean(what, Budget(R)), consensus_means([what], [Budget(R)])[0]):
            U = c.spectrum.U.double()
            assert orthonormality(c.spectrum.U) < 1e-6 and orthonormality(c.spectrum.Vh.mT) < 1e-6
            assert apart(dense(c), U @ (U.mT @ mean), size) < max(
                6 * u, 100 * unit_roundoff(torch.float64) * terms / size
            )
            off = apart(dense(c), mean, size)
            arithmetic = 256 * unit_roundoff(torch.float64) * terms / size  # below it the report is only a bound
            assert off <= c.error * (1 + 1e-6) and c.error <= 2 * off + 4 * arithmetic
            assert c.captured == pytest.approx(1 - off**2, abs=1e-11 + 5 * (off + u) * (u + arithmetic))
            assert c.dropped <= (4 * u) ** 2 + 4 * arithmetic**2 or what.dtype == torch.float64
            if sum(what.ranks) <= R:
                assert c.gap == math.inf and off < max(6 * u, arithmetic)


@pytest.mark.quick(23)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_batched_route_is_the_reference_where_it_answers(name: str, shape: tuple[int, int]) -> None:
    """Aggregate, ranks, gap, shares, bases and alignments; and it must answer for ordinary families."""
    what = sent(families.family(name, **every_family(shape)))
    for R in budgets(what):
        got, want = fast(what, R), consensus_mean(what, Budget(R))
        if name in SOUND and sum(what.ranks) == R and shape != SHAPES[2]:
            assert got is not None
        if got is None:
            continue
        size = float(torch.linalg.matrix_norm(dense(want)))
        assert apart(dense(got), dense(want), size) < 1e-6 + 1e-9 / max(min(want.gap, 1.0), 1e-9), R
        assert (got.union_rank, got.spectrum.rank, got.tied) == (want.union_rank, want.spectrum.rank, want.tied)
        assert got.gap == pytest.approx(want.gap, abs=1e-6)
        assert got.error == pytest.approx(want.error, rel=0.5) and got.rounding == pytest.approx(
            want.rounding, abs=1e-4
        )
        assert got.spectrum.sound == want.spectrum.sound
        for mine, theirs in zip(got.bases, want.bases, strict=True):
            assert float(torch.linalg.matrix_norm(mine @ mine.mT - theirs @ theirs.mT)) < 1e-5
        for basis, alignment in zip(got.bases, got.alignments, strict=True):
            U = got.spectrum.U.double()
            assert float((alignment - (basis.double().mT @ U).square().sum(dim=0)).abs().max()) < 1e-5


@pytest.mark.quick(20)
@pytest.mark.parametrize("basis", ["projector", "energy"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_what_is_no_clients_belongs_to_the_mean_and_has_no_vote(
    name: str, shape: tuple[int, int], basis: Basis
) -> None:
    """Dense float64: whole at R = S, on both routes; where R cuts, directions that only the rest has go first."""
    case = families.family(name, **every_family(shape))
    generator = torch.Generator().manual_seed(3)
    rest = tuple(torch.randn(*size, generator=generator) for size in ((shape[0], 3), (3, every_family(shape)["d_in"])))
    clients = sent(case)
    what = replace(clients, rest=rest)
    mean = torch.from_numpy(families.mean_update(case)) + rest[0].double() @ rest[1].double()
    size = float(torch.linalg.matrix_norm(mean))
    S = sum(what.ranks)
    assert sum(clients.ranks) + 3 == S
    reference, routed = consensus_mean(what, Budget(S, basis=basis)), consensus_means([what], [Budget(S, basis=basis)])
    for c in (reference, *routed):
        assert apart(dense(c), mean, size) < 1e-6 and len(c.bases) == len(c.alignments) == len(clients.pairs)
    if name in SOUND:
        assert fast(what, S) is not None
    if basis == "projector" and name in SOUND:  # where float32 bases say enough of the clients' span
        voters = consensus_mean(clients, Budget(S))
        cut = consensus_mean(what, Budget(voters.union_rank))
        U, V = cut.spectrum.U.double(), torch.linalg.qr(torch.cat([B.double() for B in voters.bases], dim=1)).Q
        assert float(torch.linalg.matrix_norm(U - V @ (V.mT @ U))) < 1e-4


def test_what_is_not_ordinary_is_left_to_the_reference() -> None:
    """Deficient factors must not pass for full rank: a duplicated column, a zero B, padding."""
    for name in ("zero_B", "zero_column", "duplicated_column", "deficient_A", "zero_padded"):
        what = sent(families.family(name, d_out=96, d_in=80))
        assert all(fast(what, R) is None for R in budgets(what)), name


def test_the_unit_of_an_update_decides_nothing() -> None:
    """Powers of two round no number: the batched route answers with the same mean in another unit, and leaves what it
    is not sure of (a direction of 3e-7 of the largest) to the reference in each."""
    plain = sent(families.family("generic", d_out=96, d_in=80))
    B, A = torch.linalg.qr(noise((96, 2), "B"))[0], torch.linalg.qr(noise((80, 2), "A"))[0].T
    for unit in (2.0**-40, 1.0, 2.0**40):
        moved = replace(plain, pairs=[(B, A * unit) for B, A in plain.pairs])
        for R in budgets(plain):
            got, want = fast(moved, R), fast(plain, R)
            assert got is not None and want is not None
            assert apart(dense(got) / unit, dense(want), float(torch.linalg.matrix_norm(dense(want)))) < 1e-6
        for size, sure in ((2e-6, True), (3e-7, False)):
            pair = B.float(), (torch.tensor([[1.0], [size]]) * A * unit).float()
            weak = replace(plain, pairs=[pair, *plain.pairs[1:]])
            assert (fast(weak, sum(weak.ranks)) is not None) == sure


def test_what_float32_stores_as_zero_is_lost_on_each_route() -> None:
    """2^-160 of an update is below the least number of float32: no mean of zeros is handed out in its place."""
    plain = sent(families.family("generic", d_out=96, d_in=80))
    tiny = replace(plain, pairs=[(B * 2.0**-80, A * 2.0**-80) for B, A in plain.pairs])
    assert fast(tiny, 3) is None
    for mean in (lambda: consensus_mean(tiny, Budget(3)), lambda: consensus_means([tiny], [Budget(3)])):
        with pytest.raises(LostUpdate):
            mean()


def test_of_many_matrices_each_gets_its_own() -> None:
    """One call over matrices of two shapes, ordinary and others between each other: as one by one."""
    cases = [families.family(name, seed=k, d_out=96, d_in=80)
             for k, name in enumerate(("generic", "zero_B", "generic", "deficient_A"))]  # fmt: skip
    cases += [families.family("generic", seed=9, d_out=120, d_in=80), families.family("orthogonal_equal", seed=4)]
    problems = [sent(case) for case in cases]
    rules = [Budget(sum(p.ranks) if k % 2 else 7) for k, p in enumerate(problems)]
    for problem, rule, mean in zip(problems, rules, consensus_means(problems, rules), strict=True):
        (alone,) = consensus_means([problem], [rule])
        assert torch.allclose(mean.spectrum.U, alone.spectrum.U, atol=1e-6)
        assert torch.allclose(mean.spectrum.s, alone.spectrum.s, rtol=1e-6)


# ----------------------------------------------------------------------------------------------- a whole server


@pytest.fixture
def force_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs GLoRA on the reference alone."""
    monkeypatch.setattr(
        glora_module,
        "consensus_means",
        lambda what, rules, each: [consensus_mean(*x) for x in zip(what, rules, strict=True)],
    )


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
    "name", ["generic", "zero_B", "gauge_1e1", "orthogonal_equal", "column_scales", "dominant_rank"]
)
def test_a_server_on_the_fast_path_is_one_on_the_reference(name: str, request: pytest.FixtureRequest) -> None:
    """Update, diagnostics and every client's readout, over two modules; from the same stored float32 factors."""
    cases = [families.family(name, seed=k, d_out=96, d_in=80) for k in range(2)]
    options: tuple[dict[str, object], ...] = (
        {}, {"rho": 0.5}, {"gamma": 0.0}, {"basis": "energy"}, {"preset": "paper"},
    )  # fmt: skip
    on_the_fast_path = [served(cases, **hparams) for hparams in options]
    request.getfixturevalue("force_reference")
    for hparams, (server, fast, clients) in zip(options, on_the_fast_path, strict=True):
        _, slow, _ = served(cases, **hparams)
        for module in fast.modules:
            a, b = (server.method.effective(s.modules[module]).map(Tensor.double).delta() for s in (fast, slow))  # type: ignore[union-attr]
            assert apart(a, b, float(torch.linalg.matrix_norm(b))) < 2e-6
            mine, reference = (dict(server.method.diagnostics(s.modules[module])) for s in (fast, slow))
            for key in ("rank", "server_rank", "total_rank", "union_rank", "tied", "client_ranks"):
                assert mine[key] == reference[key], (key, hparams)
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


def test_terms_that_cancel_to_the_last_bit() -> None:
    """[b 3b] [3a; -a] = 0: the energy of the terms may come out below zero, which is no reason to stop."""
    for seed in range(10, 30):
        g = torch.Generator().manual_seed(seed)
        b, a = (torch.randint(-99, 100, shape, generator=g).float() / 7 for shape in ((64, 1), (1, 64)))
        server, state = alone(torch.cat([b, 3 * b], dim=1), torch.cat([3 * a, -a]))
        size = float(torch.linalg.matrix_norm(3 * b @ a))
        assert float(torch.linalg.matrix_norm(server.global_update(state)["m"].delta())) < 1e-5 * size


@pytest.mark.parametrize("shape", [(300, 24), (24, 300), (200, 200)], ids=str)
def test_a_decaying_spectrum_keeps_both_sides_orthonormal(shape: tuple[int, int]) -> None:
    """Down to components of 1e-7 of the largest: both sides to 1e-6, and the mean to what storing costs."""
    for top in (-2, -4, -7):
        g = torch.Generator().manual_seed(0)
        d_out, d_in = shape
        space = torch.linalg.qr(torch.randn(d_out, 24, generator=g))[0] * torch.logspace(0, top, 24)
        pairs = [(space @ torch.randn(24, 8, generator=g), torch.randn(8, d_in, generator=g)) for _ in range(5)]
        what = Contributions(pairs, [0.2] * 5, [U32] * 5, [U32] * 5)
        mean = sum(0.2 * (B.double() @ A.double()) for B, A in pairs)
        for c in (consensus_means([what], [Budget(40)])[0], consensus_mean(what, Budget(40))):
            assert orthonormality(c.spectrum.U) < 1e-6 and orthonormality(c.spectrum.Vh.mT) < 1e-6
            assert apart(dense(c), mean, float(torch.linalg.matrix_norm(mean))) < 2e-7  # type: ignore[arg-type]


def test_captured_is_a_share_also_where_clients_cancel() -> None:
    """Two clients that cancel up to 1e-5, some directions kept: the share of the dense mean, in [0, 1]."""
    g = torch.Generator().manual_seed(1)
    B, A = torch.randn(60, 4, generator=g), torch.randn(4, 50, generator=g)
    other = (B + 1e-5 * torch.randn(60, 4, generator=g), -A + 1e-5 * torch.randn(4, 50, generator=g))
    what = Contributions([(B, A), other], [0.5, 0.5], [U32] * 2, [U32] * 2)
    mean = 0.5 * (B.double() @ A.double() + other[0].double() @ other[1].double())
    for rank in (3, 5, 8):
        c = consensus_means([what], [Budget(rank)])[0]
        off = apart(dense(c), mean, float(torch.linalg.matrix_norm(mean)))
        assert c.captured == pytest.approx(1 - off**2, abs=3 * off * U32 + 1e-12)
        assert off <= c.error <= 2 * off


@pytest.mark.parametrize(("m", "S", "d", "slices"), [(5, 4, 64, 1), (3, PANEL, 300, 6), (7, 1, 10, 1)])
def test_panels_cover_all_once_and_are_as_few_as_fit(m: int, S: int, d: int, slices: int) -> None:
    """Small matrices go together; of one that is larger than a panel each goes alone, 256 columns at a time."""
    seen, found = torch.zeros(m, d), [*_panels(m, S, d)]
    for matrices, columns in found:
        seen[matrices, columns] += 1
    assert bool((seen == 1).all())
    assert len(found) == slices


def test_by_energy_the_gap_is_between_squared_singular_values_of_the_mean() -> None:
    """Diagonal by hand: sizes 1, 0.4, 0.3, of which two are kept. gap = 1 - (0.3 / 0.4)^2."""
    sizes = torch.diag(torch.tensor([1.0, 0.4, 0.3]))
    pair = (torch.eye(9, 3) @ sizes, torch.eye(3, 7))
    what = Contributions([pair], [1.0], [unit_roundoff(torch.float32)], [U32])
    found = consensus_mean(what, Budget(2, basis="energy"))
    assert (found.union_rank, found.tied) == (3, False)
    assert found.gap == pytest.approx(1 - 0.75**2, rel=1e-6)


def test_threads_to_come_have_as_many_as_before() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        served([families.family("generic", seed=k, d_out=96, d_in=80) for k in range(2)], workers=2)
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


@pytest.mark.parametrize("shape", [(96, 80), (32, 32), (24, 200), (200, 24)], ids=str)
def test_a_state_is_made_of_plain_tensors(shape: tuple[int, int]) -> None:
    """Row after row in memory, also those of one column: what is stored and sent is their bytes."""
    for ranks, rho in product([(1,), (1, 1, 1), (1, 4), (8, 8, 8, 8)], (1.0, 0.5, 0.1)):
        g = torch.Generator().manual_seed(0)
        d_out, d_in = shape
        pairs = [(torch.randn(d_out, r, generator=g), torch.randn(r, d_in, generator=g)) for r in ranks]
        server = Server(build("glora", rho=rho))
        start = Adapter({"m": LoRA(torch.zeros(d_out, max(ranks)), torch.ones(max(ranks), d_in))})
        uploads = [Upload(Client(f"c{k}", r), 1, Adapter({"m": LoRA(*pairs[k])})) for k, r in enumerate(ranks)]
        state = server.aggregate(server.init(start), uploads).modules["m"]
        bases = [trace.basis for traces in state.history.values() for trace in traces]
        for t in (state.spectrum.U, state.spectrum.s, state.spectrum.Vh, *bases, *state.alignment.values()):
            assert t.stride(-1) == 1
            assert t.is_contiguous()
