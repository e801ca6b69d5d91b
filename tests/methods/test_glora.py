"""GLoRA against the executable paper and dense float64 sums, on every hard input family. Kind of evidence: oracle.

Expected values: `families.mean_update` (dense float64, from the stored factors) and `executable_paper` (algorithms 1-3
in numpy, no shared code). Where the paper is not unique (a tied cut) the expectation is what any answer must satisfy.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.errors import HyperparameterError, RankTie
from fedlora.linalg import rank_tolerance, unit_roundoff
from fedlora.methods.glora import GLoRA, GLoRAState
from support import families
from support.executable_paper import client_aware_readout, gauge_fix, glora_round, projected_aggregate

DTYPES = {"float32": np.float32, "float64": np.float64}
EXACT = {"float32": 1e-6, "float64": 1e-10}  # the promised relative errors
every_family = pytest.mark.parametrize("name", families.FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def pair(B: np.ndarray, A: np.ndarray) -> Adapter:
    return Adapter({"m": LoRA(torch.from_numpy(B.copy()), torch.from_numpy(A.copy()))})


def uploads(case: families.Case) -> list[Upload]:
    return [Upload(Client(c, B.shape[1]), case.weights[c], pair(B, A)) for c, (B, A) in case.uploads.items()]


def aggregated(case: families.Case, **hparams: object) -> tuple[Server, ServerState]:
    server, sent = Server(build("glora", **hparams)), uploads(case)  # type: ignore[arg-type]
    rank = max(u.client.rank for u in sent)  # type: ignore[type-var]
    B, A = sent[0].adapter.modules["m"].factors
    seed = LoRA(torch.zeros(B.shape[0], rank, dtype=B.dtype), torch.ones(rank, A.shape[1], dtype=B.dtype))  # type: ignore[arg-type]
    return server, server.aggregate(server.init(Adapter({"m": seed})), sent)


def glora_state(state: ServerState) -> GLoRAState:
    inner = state.modules["m"]
    assert isinstance(inner, GLoRAState)
    return inner


def dense(server: Server, state: ServerState) -> np.ndarray:
    return server.global_update(state)["m"].delta().double().numpy()


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def projector_error(case: families.Case, R: int, state: ServerState) -> float:
    """Distance of the library's result from the projection of the true mean on the span that it chose itself."""
    s = glora_state(state).spectrum
    U = np.linalg.qr(s.U.double().numpy())[0]
    mean = families.mean_update(case)
    return relative((s.U * s.s @ s.Vh).double().numpy(), U @ (U.T @ mean))


# ------------------------------------------------------------------------------------------------------ exactness


@every_family
def test_the_mean_is_exact_at_full_rank_and_r_equal_to_the_union_rank_is_enough(name: str) -> None:
    """Proposition 1: R >= r_union gives sum p_i B_i A_i. rho = 1 is always enough; at the edge a plain QR of a
    deficient B_i fails by 10 to 25 %."""
    for dtype, bound in EXACT.items():
        case = families.family(name, dtype=DTYPES[dtype])
        for hparams in ({}, {"rank": max(families.union_rank(case), 1)}):
            server, state = aggregated(case, **hparams)
            assert relative(dense(server, state), families.mean_update(case)) <= bound, (dtype, hparams)


@every_family
def test_a_cut_gives_the_papers_projection(name: str) -> None:
    """Eq. (key identity) below r_union, in float64: the paper's own result where the gap makes it unique.

    Elsewhere (a tie, or a gap under 1e-2) the result must still be an exact projection of the mean on R directions.
    """
    for R in (1, 3, 5, 12):
        case = families.family(name, dtype=np.float64)
        server, state = aggregated(case, rank=R, canonical="B")
        facts = server.diagnostics(state)["m"]
        fixed = [(*gauge_fix(B, A), case.weights[c]) for c, (B, A) in sorted(case.uploads.items())]
        U_ref, Z_g, _ = projected_aggregate([f for f in fixed if f[0].shape[1]], R)
        if facts["gap"] >= 1e-2:  # type: ignore[operator]
            # The stored factors of gauge_1e6 cancel in their product: any route, the oracle's too, loses u cond / gap.
            assert relative(dense(server, state), U_ref @ Z_g) <= (1e-8 if name == "gauge_1e6" else 1e-9)
        assert glora_state(state).spectrum.rank <= R
        assert projector_error(case, R, state) <= 1e-9


@every_family
def test_the_result_in_float32_is_that_of_float64_where_the_gap_allows(name: str) -> None:
    """<= 1e-6 at a gap >= 1e-2; under it c u cond / gap, which these bounds state with c = 100 and cond = 1."""
    for R in (3, 5, 12):
        case = families.family(name, dtype=np.float32)
        widened = {c: (B.astype(float), A.astype(float)) for c, (B, A) in case.uploads.items()}
        wide = families.Case(case.name, widened, case.weights, case.note)
        server, narrow = aggregated(case, rank=R)
        _, exact = aggregated(wide, rank=R, rank_tol=rank_tolerance(torch.float32))
        gap, tied = (server.diagnostics(narrow)["m"][k] for k in ("gap", "tied"))
        if not tied:  # a tied block has its own test: the two dtypes may draw its border differently
            bound = 1e-6 if gap >= 1e-2 else 100 * unit_roundoff(torch.float32) / gap  # type: ignore[operator]
            assert relative(dense(server, narrow), dense(server, exact)) <= bound


def test_wrong_rank_rules_would_be_seen() -> None:
    """The families catch what they were made for: a plain QR misses the mean at R = r_union."""
    case = families.family("zero_padded", dtype=np.float64)
    naive = [(*gauge_fix(B, A, naive=True), case.weights[c]) for c, (B, A) in sorted(case.uploads.items())]
    U_ref, Z_g, _ = projected_aggregate(naive, families.union_rank(case))
    assert relative(U_ref @ Z_g, families.mean_update(case)) > 0.05


# ------------------------------------------------------------------------------------------------ gauge invariance

WELL_SCALED = [name for name in families.FAMILIES if name not in ("column_scales", "gauge_1e4", "gauge_1e6")]


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", WELL_SCALED)
@pytest.mark.parametrize("cond", [10.0, 1e3])
@pytest.mark.parametrize("hparams", [{}, {"rho": 0.5}, {"rho": 0.3}, {"rank": 1}], ids=str)
def test_the_state_does_not_depend_on_the_gauge(name: str, cond: float, hparams: dict) -> None:
    """Proposition 2 and Definition 2, float64: update, history spans, selected components and readouts, to 1e-9.

    At a gap g in (sqrt(u), 1e-2) the bound is c u cond / g instead (numerics): no rule can do better.
    """
    case = families.family(name, dtype=np.float64)
    server, here = aggregated(case, **hparams)
    _, there = aggregated(families.regauge(case, cond, seed=2), **hparams)
    gap, tied = (server.diagnostics(here)["m"][k] for k in ("gap", "tied"))
    assert server.diagnostics(there)["m"]["tied"] == tied
    bound = 1e-9 if gap >= 1e-2 or tied else max(1e-9, 100 * unit_roundoff(torch.float64) * cond**2 / gap)
    assert relative(dense(server, there), dense(server, here)) <= bound
    a, b = glora_state(here), glora_state(there)
    assert a.history.keys() == b.history.keys()
    for client in a.history:
        P, Q = (t.history[client][-1].basis for t in (a, b))
        assert torch.linalg.matrix_norm(P @ P.mT - Q @ Q.mT) <= 1e-9
    if bound > 1e-9:
        return
    sigma = a.spectrum.s
    apart = bool(((sigma[:-1] - sigma[1:]) > 1e-6 * sigma[0]).all())  # repeated singular values: products only
    method = server.method
    assert isinstance(method, GLoRA)
    for client in case.uploads:
        rank = case.uploads[client][0].shape[1]
        if apart and a.spectrum.rank == b.spectrum.rank:
            assert torch.equal(method.select(a, client, rank), method.select(b, client, rank))
            x, y = (method.readout(s, client, rank).lora.delta() for s in (a, b))
            assert torch.linalg.matrix_norm(x - y) <= 1e-7 * torch.linalg.matrix_norm(x)


@pytest.mark.parametrize(
    ("name", "R"), [("orthogonal_equal", 6), ("one_client", 3), ("dominant_rank", 6), ("dominant_rank", 7)]
)
def test_a_tied_cut_moves_with_the_gauge_only_under_the_papers_rule(name: str, R: int) -> None:
    """tie="paper" takes what the eigensolver returns (the executable paper moves by 0.1 to 1); "energy" stays."""
    case = families.family(name, dtype=np.float64)
    drift = {}
    for tie in ("energy", "paper"):
        server, here = aggregated(case, rank=R, tie=tie)
        _, there = aggregated(families.regauge(case, 100.0, seed=3), rank=R, tie=tie)
        assert server.diagnostics(here)["m"]["tied"]
        drift[tie] = relative(dense(server, there), dense(server, here))
    assert drift["energy"] <= 1e-11
    assert drift["paper"] > 1e-2


def test_the_tie_rule_keeps_the_directions_of_most_energy() -> None:
    """One client, R = 3 < r = 6: all eigenvalues are 1, so the kept three are the mean's three strongest components.

    Expected: the truncated dense SVD (Eckart-Young).
    """
    case = families.family("one_client", dtype=np.float64)
    server, state = aggregated(case, rank=3)
    U, s, Vt = np.linalg.svd(families.mean_update(case))
    assert relative(dense(server, state), (U[:, :3] * s[:3]) @ Vt[:3]) <= 1e-12


def test_tie_error_raises_with_the_way_out() -> None:
    case = families.family("orthogonal_equal", dtype=np.float64)
    with pytest.raises(RankTie, match="tie='energy'"):
        aggregated(case, rank=6, tie="error")
    server, state = aggregated(families.family("generic", dtype=np.float64), rank=6, tie="error")
    assert server.diagnostics(state)["m"]["tied"] is False


# --------------------------------------------------------------------------------------------------------- readout


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", ["generic", "zero_B", "wide", "deficient_A"])
def test_the_paper_preset_is_algorithms_1_to_3_over_two_rounds(name: str, gamma: float) -> None:
    """preset="paper" against `executable_paper.glora_round`: state, selected components and readouts, with history.

    The second round leaves c0 out, whose readout then goes by its first upload.
    """
    first, second = families.family(name, dtype=np.float64), families.family(name, seed=5, dtype=np.float64)
    present = sorted(second.uploads)[1:]
    total = sum(second.weights[c] for c in present)
    weights = {c: second.weights[c] / total for c in present}
    ranks = {c: max(B.shape[1] - 1, 1) for c, (B, _) in first.uploads.items()}

    paper1 = glora_round(first.uploads, first.weights, 0.6, gamma, {}, ranks=ranks)
    known = {c: H for c, H in paper1.history.items() if H.shape[1]}
    paper2 = glora_round({c: second.uploads[c] for c in present}, weights, 0.6, gamma, known, ranks=ranks)

    server, state1 = aggregated(first, preset="paper", rho=0.6, gamma=gamma)
    state2 = server.aggregate(state1, [u for u in uploads(second) if u.client.id in present])
    method = server.method
    assert isinstance(method, GLoRA)
    assert method.deviations == ()
    for paper, state in ((paper1, state1), (paper2, state2)):
        assert relative(dense(server, state), paper.U_ref @ paper.Z_g) <= 1e-10
        for client, rank in ranks.items():
            B, A, selected = paper.readouts[client]
            assert method.select(glora_state(state), client, rank).tolist() == selected
            lora = server.download(state, Client(client, rank)).adapter.modules["m"]
            full_B, full_A = lora.factors
            got_B, got_A = full_B.numpy()[:, : len(selected)], full_A.numpy()[: len(selected)]
            np.testing.assert_allclose(got_B @ got_A, B @ A, atol=1e-9 * np.linalg.norm(B @ A))
            sizes = np.linalg.norm(got_B, axis=0), np.linalg.norm(got_A, axis=1)
            np.testing.assert_allclose(*sizes, rtol=1e-9)  # balanced


def test_history_lag_0_reads_out_by_the_round_just_aggregated() -> None:
    """The text's "latest available": the executable readout, given this round's own U_i as history."""
    case = families.family("generic", dtype=np.float64)
    server, state = aggregated(case, gamma=0.25, rho=1.0)
    fixed = {c: gauge_fix(B, A) for c, (B, A) in case.uploads.items()}
    U_ref, Z_g, _ = projected_aggregate([(*fixed[c], case.weights[c]) for c in sorted(fixed)], 19)
    ranks = {c: B.shape[1] for c, (B, _) in case.uploads.items()}
    paper = client_aware_readout(U_ref, Z_g, ranks, 0.25, {c: U for c, (U, _) in fixed.items()})
    method = server.method
    assert isinstance(method, GLoRA)
    chosen = {c: method.select(glora_state(state), c, r).tolist() for c, r in ranks.items()}
    assert chosen == {c: paper[c][2] for c in ranks}
    assert any(picked != list(range(len(picked))) for picked in chosen.values())  # history did decide something


def test_equal_alignment_scores_go_in_spectral_order() -> None:
    """One client that reads out at half its rank: every score is 1 up to round-off, so the strongest must be chosen."""
    for seed in range(5):
        case = families.family("one_client", seed=seed, dtype=np.float64)
        server, state = aggregated(families.regauge(case, 10.0, seed=seed), gamma=0.0)
        method = server.method
        assert isinstance(method, GLoRA)
        assert method.select(glora_state(state), "c0", 3).tolist() == [0, 1, 2]


def test_score_energy_prefers_strong_components_and_split_left_puts_all_on_b() -> None:
    case = families.family("generic", dtype=np.float64)
    server, state = aggregated(case, score="energy", gamma=0.0)
    inner, method = glora_state(state), server.method
    assert isinstance(method, GLoRA)
    H, spectrum = inner.history["c0"][-1].basis, inner.spectrum
    energy = (H.mT @ spectrum.U).square().sum(0) * spectrum.s.square()  # the formula, by hand
    assert set(method.select(inner, "c0", 2).tolist()) == set(energy.argsort(descending=True)[:2].tolist())

    server, state = aggregated(case, factor_split="left")
    lora = server.download(state, Client("new", 4)).adapter.modules["m"]
    torch.testing.assert_close(torch.linalg.vector_norm(lora.factors[1], dim=1), torch.ones(4, dtype=torch.float64))


def test_slots_that_no_component_fills_start_as_lora_starts_and_stay_put() -> None:
    """r_i above the server's rank: B = 0 with fresh rows, the same on every call, others in another round or client."""
    case = families.family("one_client", dtype=np.float64)  # rank 6
    server, state = aggregated(case)
    first, again, other = (server.download(state, Client(c, 10)).adapter.modules["m"] for c in ("x", "x", "y"))
    assert torch.equal(first.factors[1], again.factors[1])
    assert not torch.equal(first.factors[1][6:], other.factors[1][6:])
    assert bool((first.factors[0][:, 6:] == 0).all())
    assert bool((first.factors[1][6:] != 0).any(dim=1).all())
    assert float(first.factors[1][6:].abs().max()) <= 1 / math.sqrt(40)


def test_the_first_readout_shares_the_rows_of_the_seed() -> None:
    """Before any aggregation every client gets the first r_i rows of one A, and B = 0."""
    server = Server(build("glora"))
    A = torch.arange(24.0).reshape(4, 6) + 1
    state = server.init(Adapter({"m": LoRA(torch.zeros(5, 4), A)}))
    for rank in (1, 3, 4):
        lora = server.download(state, Client("c", rank)).adapter.modules["m"]
        assert torch.equal(lora.factors[1], A[:rank])
        assert not bool(lora.factors[0].any())


# ------------------------------------------------------------------------------------------------- budget, options


def test_the_rank_budget_is_a_share_of_the_nominal_ranks_or_absolute() -> None:
    """ceil(rho sum r_i): 0.1 x 30 is 3 and not 4 in floats; the revealed budget counts rank(B_i)."""
    case = families.family("zero_B", dtype=np.float64)  # nominal 2 + 8 + 5 + 4 = 19, of which 5 are B = 0
    nominal = sum(B.shape[1] for B, _ in case.uploads.values())
    for hparams, R in (
        ({"rho": 0.5}, math.ceil(nominal / 2)),
        ({"rho": 0.5, "budget": "revealed"}, math.ceil((nominal - 5) / 2)),
        ({"rank": 7}, 7),
        ({"rho": 0.001}, 1),
    ):
        server, state = aggregated(case, **hparams)
        assert server.diagnostics(state)["m"]["server_rank"] == R
    tens = dict.fromkeys(("a", "b", "c"), (np.ones((40, 10)), np.ones((10, 40))))
    server, state = aggregated(families.Case("tens", tens, dict.fromkeys("abc", 1 / 3), ""), rho=0.1)
    assert server.diagnostics(state)["m"]["server_rank"] == 3


def test_all_clients_zero_is_a_zero_update_that_can_train_on() -> None:
    zero = families.Case("zero", {c: (np.zeros((30, 4)), np.ones((4, 25))) for c in "ab"}, {"a": 0.5, "b": 0.5}, "")
    server, state = aggregated(zero)
    assert server.global_update(state)["m"].rank == 0
    lora = server.download(state, Client("a", 4)).adapter.modules["m"]
    assert lora.rank == 4
    assert not bool(lora.factors[0].any())
    assert bool(lora.factors[1].any(dim=1).all())


def test_basis_energy_is_eckart_young_and_beats_the_projector_basis() -> None:
    case = families.family("generic", dtype=np.float64)
    mean = families.mean_update(case)
    U, s, Vt = np.linalg.svd(mean)
    server, state = aggregated(case, rank=6, basis="energy")
    assert relative(dense(server, state), (U[:, :6] * s[:6]) @ Vt[:6]) <= 1e-12
    assert server.diagnostics(state)["m"]["captured"] == pytest.approx((s[:6] ** 2).sum() / (s**2).sum())
    projector, cut = aggregated(case, rank=6)
    assert relative(dense(projector, cut), mean) > relative(dense(server, state), mean)


def test_weighting_uniform_is_the_servers() -> None:
    """The value that glora once had said nothing of clients who lack a module (`missing`): the server's one does."""
    with pytest.raises(HyperparameterError, match=r"rank-partition.*server\.weighting = 'uniform'.*got 'uniform'"):
        build("glora", weighting="uniform")


def test_captured_energy_and_diagnostics() -> None:
    case = families.family("generic", dtype=np.float64)
    server, state = aggregated(case, rank=6)
    facts = server.diagnostics(state)["m"]
    got, mean = dense(server, state), families.mean_update(case)
    assert facts["captured"] == pytest.approx(np.linalg.norm(got) ** 2 / np.linalg.norm(mean) ** 2, rel=1e-9)
    assert facts["union_rank"] == 19
    assert facts["singular_values"] == pytest.approx(np.linalg.svd(got, compute_uv=False)[:6].tolist())
    assert set(facts["deviations"]) == {"tie=energy", "canonical=product", "budget=nominal", "history_lag=0"}  # type: ignore[call-overload]
    full = aggregated(case)[0].diagnostics(aggregated(case)[1])["m"]
    assert full["gap"] == math.inf
    assert full["captured"] == 1.0


@pytest.mark.parametrize(
    "bad",
    [{"rho": 0}, {"rho": 1.5}, {"gamma": -0.1}, {"rank": 0}, {"tie": "coin"}, {"history_lag": 2}, {"rank_tol": 0.0},
     {"basis": "x"}, {"preset": "papr"}, {"rhoo": 0.5}],
)  # fmt: skip
def test_impossible_hyperparameters_are_refused_by_name(bad: dict) -> None:
    with pytest.raises(HyperparameterError, match=next(iter(bad)) if "rhoo" not in bad else "did you mean 'rho'"):
        build("glora", **bad)


def test_tolerances_follow_the_stored_dtype() -> None:
    """bf16 uploads are computed in float32, but their rounding noise is bf16's: the cut's tie rule knows."""
    case = families.family("orthogonal_equal", dtype=np.float64)
    sent = [Upload(u.client, u.num_examples, u.adapter.map(lambda t: t.to(torch.bfloat16))) for u in uploads(case)]
    server = Server(build("glora", rank=6))
    seed = Adapter({"m": LoRA(torch.zeros(48, 8), torch.ones(8, 40))})
    state = server.aggregate(server.init(seed), sent)
    assert server.diagnostics(state)["m"]["tied"]
    assert glora_state(state).spectrum.U.dtype == torch.float32


# ------------------------------------------------------------------------------------------------ limited history


@pytest.mark.parametrize("limit", [None, 0, 2, 3])
def test_a_limited_history_forgets_the_longest_absent(limit: int | None) -> None:
    """Clients take part in turns, c0 alone, then c1, ...: the newest `limit` are kept."""
    case = families.family("generic", dtype=np.float32)
    server = Server(build("glora", history_limit=limit, gamma=0.0))
    names = sorted(case.uploads)
    rank = max(B.shape[1] for B, _ in case.uploads.values())
    d_out, d_in = case.uploads["c0"][0].shape[0], case.uploads["c0"][1].shape[1]
    state = server.init(Adapter({"m": LoRA(torch.zeros(d_out, rank), torch.ones(rank, d_in))}))
    for name in names:
        B, A = (torch.from_numpy(x) for x in case.uploads[name])
        state = server.aggregate(state, [Upload(Client(name, B.shape[1]), 1, Adapter({"m": LoRA(B, A)}))])
    kept = names if limit is None else names[len(names) - limit :]
    assert list(glora_state(state).history) == kept
    assert set(glora_state(state).alignment) <= set(kept)
    for name in names:  # whoever is forgotten reads out by energy
        rank = 2
        chosen = server.method.select(glora_state(state), name, rank)  # type: ignore[attr-defined]
        assert len(chosen) == 2
        if name not in kept:
            assert chosen.tolist() == [0, 1]


def test_impossible_history_limits() -> None:
    for limit in (-1, 1.5):
        with pytest.raises(HyperparameterError, match="history_limit"):
            build("glora", history_limit=limit)


@pytest.mark.parametrize("hparams", [{}, {"score": "energy", "gamma": 0.25}, {"history_lag": 1}], ids=str)
def test_readouts_of_several_matrices_are_those_of_each(hparams: dict[str, object]) -> None:
    """Bit for bit, of clients that took part in the last round, in the one before, and never; of ranks that differ."""
    g = torch.Generator().manual_seed(2)
    shapes = {"m0": (12, 9), "m1": (12, 9), "m2": (7, 11)}
    ranks = {"a": 3, "b": {"m0": 2, "m1": 4, "m2": 3}, "c": 2, "new": 3}

    def adapter(client: str, zero: bool = False) -> Adapter:
        r = {m: ranks[client] if isinstance(ranks[client], int) else ranks[client][m] for m in shapes}  # type: ignore[index]
        return Adapter({m: LoRA(torch.randn(d, r[m], generator=g) * (not zero), torch.randn(r[m], k, generator=g))
                        for m, (d, k) in shapes.items()})  # type: ignore[arg-type] # fmt: skip

    server = Server(build("glora", **hparams))
    state = server.init(
        Adapter({m: LoRA(torch.zeros(d, 4), torch.randn(4, k, generator=g)) for m, (d, k) in shapes.items()})
    )
    for present in ("abc", "ab"):
        state = server.aggregate(state, [Upload(Client(c, ranks[c]), 1, adapter(c)) for c in present])  # type: ignore[arg-type]
    for client, rank in ranks.items():
        got = server.download(state, Client(client, rank)).adapter.modules  # type: ignore[arg-type]
        for module, lora in got.items():
            alone = server.method.readout(state.modules[module], client, lora.rank).lora
            assert all(torch.equal(x, y) for x, y in zip(lora.factors, alone.factors, strict=True))
