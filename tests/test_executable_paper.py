"""Tests of the oracle itself: the executable paper and the input families. Kind of evidence: oracle.

Expected values come from (a) examples worked by hand, written out in the test; (b) the paper's propositions, against
dense float64 matrices built from the stored factors with code that executable_paper does not use; (c) the construction
of a family. Tolerances: u = 1.1e-16; "rel" is the relative Frobenius error.
"""

import numpy as np
import pytest

from support import executable_paper as paper
from support.families import FAMILIES, Case, column_basis, family, mean_update, union_rank

# The gauge_* families store factors whose product cancels: any route through them, the truth included, loses u * cond.
EXACTNESS = {"gauge_1e4": 1e-11, "gauge_1e6": 1e-9}  # 10 * u * cond


def rel(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def case64(name: str, seed: int = 0) -> Case:
    return family(name, seed, dtype=np.float64)


def aggregate(case: Case, R: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    clients = sorted(case.uploads)
    updates = [(*paper.gauge_fix(*case.uploads[i]), case.weights[i]) for i in clients]
    return paper.projected_aggregate(updates, R)


# ---- worked by hand --------------------------------------------------------------------------------------------------


def test_gauge_fix_by_hand():
    # B = (6, 8)^T has norm 10, so U = +-(0.6, 0.8)^T, T = +-10 and Ahat = +-10 (0, 0.5) = +-(0, 5).
    U, Ahat = paper.gauge_fix([[6.0], [8.0]], [[0.0, 0.5]])
    sign = np.sign(U[0, 0])
    np.testing.assert_allclose(sign * U, [[0.6], [0.8]], atol=1e-15)
    np.testing.assert_allclose(sign * Ahat, [[0.0, 5.0]], atol=1e-14)


def test_gauge_fix_footnote_by_hand():
    # B = [b b], b = (3, 4)^T, has rank 1: U = +-(0.6, 0.8)^T; B A = b (a1 + a2), so Ahat = +-5 (a1 + a2) = +-(5, 10).
    U, Ahat = paper.gauge_fix([[3.0, 3.0], [4.0, 4.0]], [[1.0, 0.0], [0.0, 2.0]])
    assert U.shape == (2, 1)
    np.testing.assert_allclose(U @ U.T, [[0.36, 0.48], [0.48, 0.64]], atol=1e-15)
    np.testing.assert_allclose(np.sign(U[0, 0]) * Ahat, [[5.0, 10.0]], atol=1e-14)


# Two lines in the plane, p = 1/2 each: dW_a = e1 (1, 0), dW_b = (0.6, 0.8)^T (0, 5). cos(angle) = 0.6, so K has the
# eigenvalues (1 +- 0.6) / 2 = 0.8, 0.2, and its first eigenvector is the bisector (2, 1) / sqrt 5.
# mean = [[0.5, 1.5], [0, 2]]; (2, 1) / sqrt 5 times the mean is (1, 5) / sqrt 5: at R = 1, dW_g = (2, 1)^T (1, 5) / 5.
TWO_LINES = {"a": ([[1.0], [0.0]], [[1.0, 0.0]]), "b": ([[6.0], [8.0]], [[0.0, 0.5]])}
HALF = {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("rho", "expected"), [(0.5, [[0.4, 2.0], [0.2, 1.0]]), (1.0, [[0.5, 1.5], [0.0, 2.0]])], ids=["R=1", "R=2, exact"]
)
def test_aggregate_of_two_lines_by_hand(rho, expected):
    result = paper.glora_round(TWO_LINES, HALF, rho, 0.5, {})
    assert result.U_ref.shape == (2, int(2 * rho))
    np.testing.assert_allclose(result.eigenvalues, [0.8, 0.2], atol=1e-15)
    np.testing.assert_allclose(result.U_ref @ result.Z_g, expected, atol=1e-14)


# Server update diag(3, 2, 1) in the frame U_ref = I: component j is sigma_j e_j e_j^T, so every choice can be read off.
DIAGONAL = (np.eye(3), np.diag([3.0, 2.0, 1.0]))
E = np.eye(3)


@pytest.mark.parametrize(
    ("rank", "gamma", "history", "expected"),
    [
        (1, 1.0, {"a": E[:, 2:]}, [0]),  # the core is everything: history does not matter
        (1, 0.0, {"a": E[:, 2:]}, [2]),  # no core: scores (0, 0, 1)
        (2, 0.5, {"a": E[:, 2:]}, [0, 2]),  # core {1}, then scores (0, 1) for components 2 and 3
        (2, 0.4, {"a": E[:, 2:]}, [0, 2]),  # floor(0.8) = 0: no core, scores (0, 0, 1), then a tie at 0: lowest index
        (2, 0.0, {"a": E[:, [0]] * 0.6 + E[:, [1]] * 0.8}, [0, 1]),  # scores (0.36, 0.64, 0): sorted by component
        (1, 0.0, {"a": E[:, [0]] * 0.6 + E[:, [1]] * 0.8}, [1]),
        (2, 0.0, {"a": E}, [0, 1]),  # all scores 1: a full tie goes by spectral order
        (2, 0.0, {"a": np.zeros((3, 0))}, [0, 1]),  # a history of rank 0 says nothing: spectral order
        (2, 0.0, {"b": E[:, 2:]}, [0, 1]),  # another client's history: Alg. 3, l. 9
        (5, 0.5, {}, [0, 1, 2]),  # more rank than components
    ],
)
def test_readout_selection_by_hand(rank, gamma, history, expected):
    B, A, selected = paper.client_aware_readout(*DIAGONAL, {"a": rank}, gamma, history)["a"]
    assert selected == expected
    kept = [3.0 - j if j in expected else 0.0 for j in range(3)]
    np.testing.assert_allclose(B @ A, np.diag(kept), atol=1e-14)
    # Balanced: both factors carry sqrt(sigma_j).
    roots = np.sqrt([3.0 - j for j in expected])
    np.testing.assert_allclose(np.linalg.norm(B, axis=0), roots, rtol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(A, axis=1), roots, rtol=1e-14)


def test_server_rank_is_the_ceiling_of_the_exact_product():
    # 0.56 * 25 is 14.000000000000002 in floats; R is 14.
    rng = np.random.default_rng(0)
    uploads = {f"c{r}": (rng.standard_normal((40, r)), rng.standard_normal((r, 30))) for r in (7, 8, 10)}
    result = paper.glora_round(uploads, dict.fromkeys(uploads, 1 / 3), 0.56, 0.5, {})
    assert result.U_ref.shape == (40, 14)


def test_server_rank_counts_true_ranks_and_is_at_least_one():
    # zero_padded: nominal ranks sum to 32, true ranks to 19: R = ceil(0.5 * 19) = 10. rho = 0.01: ceil(0.19) = 1.
    case = case64("zero_padded")
    assert paper.glora_round(case.uploads, case.weights, 0.5, 0.5, {}).U_ref.shape[1] == 10
    assert paper.glora_round(case.uploads, case.weights, 0.01, 0.5, {}).U_ref.shape[1] == 1


def test_readout_uses_the_history_of_before_the_round():
    # dW = diag(1.5, -1) for p = (3/4, 1/4): a sends 2 e1 e1^T, b sends -4 e2 e2^T. sigma = (1.5, 1), so component 0 is
    # e1. With gamma = 0 and rank 1, b takes component 1 only if its history is e2. Algorithm 1 reads out (line 12)
    # before it stores (line 13): b's own upload of this round must not count, its upload of the round before must.
    uploads = {"a": ([[2.0], [0.0]], [[1.0, 0.0]]), "b": ([[0.0], [-4.0]], [[0.0, 1.0]])}
    weights = {"a": 0.75, "b": 0.25}
    before = {"absent": np.array([[0.0], [1.0]])}
    first = paper.glora_round(uploads, weights, 1.0, 0.0, before, ranks={"a": 1, "b": 1, "absent": 1})
    assert {client: readout[2] for client, readout in first.readouts.items()} == {"a": [0], "b": [0], "absent": [1]}
    assert list(before) == ["absent"]  # the input is left alone
    assert sorted(first.history) == ["a", "absent", "b"]
    np.testing.assert_allclose(np.abs(first.history["b"]), [[0.0], [1.0]])
    second = paper.glora_round(uploads, weights, 1.0, 0.0, first.history)
    assert second.readouts["b"][2] == [1]
    np.testing.assert_allclose(second.readouts["b"][0] @ second.readouts["b"][1], [[0.0, 0.0], [0.0, -1.0]], atol=1e-15)


# ---- the paper's propositions ----------------------------------------------------------------------------------------


@pytest.mark.quick(23)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FAMILIES)
def test_exact_when_the_server_rank_covers_the_union(name, dtype):
    # Proposition 1; the truth is the dense mean of the stored factors. R = r_union, the sum of ranks, and above d_out.
    case = family(name, dtype=dtype)
    truth = mean_update(case)
    for R in (union_rank(case), sum(B.shape[1] for B, _ in case.uploads.values()), 60):
        U_ref, Z_g, _ = aggregate(case, R)
        assert U_ref.shape == (48, min(R, 48))
        assert rel(U_ref @ Z_g, truth) < EXACTNESS.get(name, 1e-12)


# ---- readout ---------------------------------------------------------------------------------------------------------


# ---- the input families ----------------------------------------------------------------------------------------------


def test_mean_update_and_union_rank_by_hand():
    # TWO_LINES again: the mean is written out above it; two different lines span the plane. With b moved onto a's line
    # the union is one line; a float32 dependence (column 2 = 3 * column 1, exactly) is found as well.
    uploads = {client: (np.array(B), np.array(A)) for client, (B, A) in TWO_LINES.items()}
    case = Case("two lines", uploads, HALF, "by hand")
    np.testing.assert_allclose(mean_update(case), [[0.5, 1.5], [0.0, 2.0]], atol=1e-15)
    assert union_rank(case) == 2
    one_line = {**uploads, "b": (np.array([[-7.0], [0.0]]), uploads["b"][1])}
    assert union_rank(Case("one line", one_line, HALF, "by hand")) == 1
    dependent = np.array([[1.0, 3.0], [0.5, 1.5], [0.25, 0.75]], dtype=np.float32)
    assert column_basis(dependent).shape == (3, 1)
    zero = {"a": (np.zeros((3, 2)), np.ones((2, 2)))}
    assert union_rank(Case("zero", zero, {"a": 1.0}, "by hand")) == 0
