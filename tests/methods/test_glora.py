"""GLoRA against the executable paper and dense float64 sums, on every hard input family. Kind of evidence: oracle.

Expected values: `families.mean_update` (dense float64, from the stored factors) and `executable_paper` (algorithms 1-3
in numpy, no shared code). Where the paper is not unique (a tied cut) the expectation is what any answer must satisfy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedlora import LoRA, Method, Update, build
from fedlora.linalg import svd_of_product, unit_roundoff
from fedlora.methods.glora import GLoRAState, Trace
from support import families
from support.executable_paper import client_aware_readout, gauge_fix, glora_round, projected_aggregate

every_family = pytest.mark.parametrize("name", families.FAMILIES)


def updates(case: families.Case, stored: torch.dtype | None = None) -> list[Update]:
    """One round, as the server passes it. stored: the dtype in which the numbers arrived, if not that of the arrays."""
    made = []
    for client, (B, A) in sorted(case.uploads.items()):
        lora = LoRA(torch.from_numpy(B.copy()), torch.from_numpy(A.copy()))
        roundoff = unit_roundoff(stored or lora.factors[0].dtype)
        made.append(Update(client, case.weights[client], lora.rank, lora, roundoff))
    return made


def aggregated(
    case: families.Case, name: str = "glora", *, stored: torch.dtype | None = None, **hparams: object
) -> tuple[Any, Any]:
    """(the method, its state after one round from a fresh start)."""
    method, sent = build(name, **hparams), updates(case, stored)
    rank, (B, A) = max(u.rank for u in sent), sent[0].lora.factors
    return method, method.aggregate(method.init(LoRA(B.new_zeros(len(B), rank), A.new_ones(rank, A.shape[1]))), sent)


def dense(method: Method, state: Any) -> np.ndarray:
    update = method.effective(state)
    assert update is not None
    return update.delta().double().numpy()


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# ------------------------------------------------------------------------------------------------------ exactness


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
    method, a = aggregated(case, **hparams)
    _, b = aggregated(families.regauge(case, cond, seed=2), **hparams)
    gap, tied = (method.diagnostics(a)[k] for k in ("gap", "tied"))
    assert method.diagnostics(b)["tied"] == tied
    bound = 1e-9 if gap >= 1e-2 or tied else max(1e-9, 100 * unit_roundoff(torch.float64) * cond**2 / gap)
    assert relative(dense(method, b), dense(method, a)) <= bound
    assert a.history.keys() == b.history.keys()
    for client in a.history:
        P, Q = (s.history[client].basis for s in (a, b))
        assert torch.linalg.matrix_norm(P @ P.mT - Q @ Q.mT) <= 1e-9
    sigma = a.spectrum.s
    apart = bool(((sigma[:-1] - sigma[1:]) > 1e-6 * sigma[0]).all())  # repeated singular values: products only
    if bound > 1e-9 or not apart or a.spectrum.rank != b.spectrum.rank:
        return
    for client, (B, _) in case.uploads.items():
        rank = B.shape[1]
        assert torch.equal(method.selected(a, client, rank), method.selected(b, client, rank))
        x, y = (method.readout(s, client, rank).delta() for s in (a, b))
        assert torch.linalg.matrix_norm(x - y) <= 1e-7 * torch.linalg.matrix_norm(x)


@pytest.mark.parametrize(
    ("name", "R"), [("orthogonal_equal", 6), ("one_client", 3), ("dominant_rank", 6), ("dominant_rank", 7)]
)
def test_a_tied_cut_moves_with_the_gauge_only_to_the_papers_letter(name: str, R: int) -> None:
    """`glora-paper` takes what the eigensolver returns (the executable paper moves by 0.1 to 1); `glora` stays."""
    case = families.family(name, dtype=np.float64)
    other = families.regauge(case, 100.0, seed=3)
    method, here = aggregated(case, rank=R)
    assert method.diagnostics(here)["tied"]
    assert relative(dense(*aggregated(other, rank=R)), dense(method, here)) <= 1e-11
    rho = R / sum(B.shape[1] for B, _ in case.uploads.values())
    letter = [dense(*aggregated(c, "glora-paper", rho=rho)) for c in (case, other)]
    assert relative(*letter) > 1e-2


def test_tolerances_follow_the_stored_dtype() -> None:
    """bf16 uploads are computed in float32, but their rounding noise is bf16's: the cut's tie rule knows."""
    case = families.family("orthogonal_equal", dtype=np.float32)
    rounded = {c: tuple(torch.from_numpy(x).bfloat16().float().numpy() for x in X) for c, X in case.uploads.items()}
    case = replace(case, uploads=rounded)
    found = [aggregated(case, rank=6, stored=stored) for stored in (torch.bfloat16, torch.float64)]
    assert [method.diagnostics(state)["tied"] for method, state in found] == [True, False]


# --------------------------------------------------------------------------------------------------------- readout


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", ["generic", "zero_B", "wide", "deficient_A", "duplicated_column", "cancelling"])
def test_glora_paper_is_algorithms_1_to_3_over_two_rounds(name: str, gamma: float) -> None:
    """Against `executable_paper.glora_round`: state, selected components and readouts, with history.

    The second round leaves c0 out, whose readout then goes by its first upload.
    """
    first, second = families.family(name, dtype=np.float64), families.family(name, seed=5, dtype=np.float64)
    present = sorted(second.uploads)[1:]
    total = sum(second.weights[c] for c in present)
    second = replace(
        second, uploads={c: second.uploads[c] for c in present}, weights={c: second.weights[c] / total for c in present}
    )
    ranks = {c: max(B.shape[1] - 1, 1) for c, (B, _) in first.uploads.items()}
    paper1 = glora_round(first.uploads, first.weights, 0.6, gamma, {}, ranks=ranks)
    paper2 = glora_round(second.uploads, second.weights, 0.6, gamma, paper1.history, ranks=ranks)

    method, state1 = aggregated(first, "glora-paper", rho=0.6, gamma=gamma)
    state2 = method.aggregate(state1, updates(second))
    for paper, state in ((paper1, state1), (paper2, state2)):
        assert relative(dense(method, state), paper.U_ref @ paper.Z_g) <= 1e-10
        for client, rank in ranks.items():
            B, A, selected = paper.readouts[client]
            got_B, got_A = (t.numpy() for t in method.readout(state, client, rank).factors)
            assert got_B.shape[1] == len(selected)
            np.testing.assert_allclose(got_B @ got_A, B @ A, atol=1e-9 * np.linalg.norm(B @ A))
            np.testing.assert_allclose(np.linalg.norm(got_B, axis=0), np.linalg.norm(B, axis=0), rtol=1e-9)
            np.testing.assert_allclose(np.linalg.norm(got_A, axis=1), np.linalg.norm(A, axis=1), rtol=1e-9)


def test_glora_reads_out_by_the_round_just_aggregated() -> None:
    """The text's "latest available": the executable readout, given this round's own U_i as history."""
    case = families.family("generic", dtype=np.float64)
    method, state = aggregated(case, gamma=0.25)
    fixed = {c: gauge_fix(B, A) for c, (B, A) in case.uploads.items()}
    U_ref, Z_g, _ = projected_aggregate([(*fixed[c], case.weights[c]) for c in sorted(fixed)], 19)
    ranks = {c: B.shape[1] for c, (B, _) in case.uploads.items()}
    paper = client_aware_readout(U_ref, Z_g, ranks, 0.25, {c: U for c, (U, _) in fixed.items()})
    chosen = {c: method.selected(state, c, r).tolist() for c, r in ranks.items()}
    assert chosen == {c: paper[c][2] for c in ranks}
    assert any(picked != list(range(len(picked))) for picked in chosen.values())  # history did decide something
    # The scores that the aggregation kept are those that a later round computes anew from the basis.
    without = replace(state, history={c: replace(trace, alignment=None) for c, trace in state.history.items()})
    assert chosen == {c: method.selected(without, c, r).tolist() for c, r in ranks.items()}


def test_equal_alignment_scores_go_in_spectral_order() -> None:
    """One client that reads out at half its rank: every score is 1 up to round-off, so the strongest must be chosen."""
    for seed in range(5):
        case = families.family("one_client", seed=seed, dtype=np.float64)
        other = families.regauge(case, 10.0, seed=seed)
        method, state = aggregated(other, gamma=0.0)
        assert method.selected(state, "c0", 3).tolist() == [0, 1, 2]
        letter, state = aggregated(other, "glora-paper", gamma=0.0)
        state = letter.aggregate(state, updates(other))  # its readouts go by the round before
        U, s, Vt = np.linalg.svd(families.mean_update(other))
        assert relative(letter.readout(state, "c0", 3).delta().numpy(), (U[:, :3] * s[:3]) @ Vt[:3]) < 1e-9


def test_the_core_is_the_floor_of_the_exact_product() -> None:
    """0.29 * 100 is 28.999999999999996 in floats; the core has 29. Of 120 components the history holds the last 72, all
    with score 1, for 71 places."""
    history, want = torch.eye(120).double()[:, 48:], [*range(29), *range(48, 119)]
    spectrum = svd_of_product(torch.diag(torch.arange(120.0, 0, -1)).double(), torch.eye(120).double())
    state = GLoRAState(spectrum, {"a": Trace(history, 2.0**-53, None)})
    assert build("glora", gamma=0.29).selected(state, "a", 100).tolist() == want
    assert build("glora-paper", gamma=0.29).selected(torch.eye(120).double(), history, 100).tolist() == want


@pytest.mark.parametrize("limit", [None, 0, 2, 3])
def test_a_limited_history_forgets_the_longest_absent(limit: int | None) -> None:
    """Clients take part in turns, c0 alone, then c1, ...: the newest `limit` are kept; the others go by energy."""
    case = families.family("generic", dtype=np.float32)
    method, names = build("glora", history=limit, gamma=0.0), sorted(case.uploads)
    sent = updates(case)
    state = method.init(sent[0].lora.first(0))
    for update in sent:
        state = method.aggregate(state, [replace(update, weight=1.0)])
    kept = names if limit is None else names[len(names) - limit :]
    assert list(state.history) == kept
    assert [c for c, trace in state.history.items() if trace.alignment is not None] == kept[-1:]
    for name in set(names) - set(kept):
        assert method.selected(state, name, 2).tolist() == [0, 1]


def test_a_zero_update_leaves_the_older_history() -> None:
    """An empty subspace suits nothing: the client reads out as before it."""
    case = families.family("generic", dtype=np.float64)
    method, state = aggregated(case, gamma=0.0)
    sent = [replace(u, lora=u.lora.map(torch.zeros_like)) if u.client == "c0" else u for u in updates(case)]
    after = method.aggregate(state, sent)
    assert torch.equal(after.history["c0"].basis, state.history["c0"].basis)
    assert after.history["c0"].alignment is None  # not of this mean
    assert next(iter(after.history)) == "c0"  # the longest absent


# ------------------------------------------------------------------------------------------------- budget, options


def test_the_rank_budget_is_a_share_of_the_ranks_or_absolute() -> None:
    """ceil(rho sum r_i): 0.56 x 25 is 14, and a little more in floats; `glora-paper` counts rank(B_i)."""
    case = families.family("zero_B", dtype=np.float64)  # nominal 2 + 8 + 5 + 4 = 19, of which 5 are B = 0
    for name, hparams, R in (
        ("glora", {"rho": 0.5}, 10), ("glora-paper", {"rho": 0.5}, 7), ("glora", {"rank": 7}, 7),
        ("glora", {"rho": 0.001}, 1), ("glora-paper", {"rho": 0.001}, 1),
    ):  # fmt: skip
        method, state = aggregated(case, name, **hparams)
        assert method.diagnostics(state)["server_rank"] == R
    rng = np.random.default_rng(7)
    fives = {c: (rng.standard_normal((40, 5)), rng.standard_normal((5, 40))) for c in "abcde"}
    for name in ("glora", "glora-paper"):
        case = families.Case("fives", fives, dict.fromkeys("abcde", 0.2), "")
        method, state = aggregated(case, name, rho=0.56)
        assert method.diagnostics(state)["server_rank"] == 14


@pytest.mark.parametrize("name", ["glora", "glora-paper"])
def test_all_clients_zero_is_a_zero_update_of_no_slots(name: str) -> None:
    zero = families.Case("zero", {c: (np.zeros((30, 4)), np.ones((4, 25))) for c in "ab"}, {"a": 0.5, "b": 0.5}, "")
    method, state = aggregated(zero, name)
    assert method.effective(state).rank == method.readout(state, "a", 4).rank == 0
