"""The executable paper, an oracle, on examples worked by hand. Kind of evidence: by hand."""

import numpy as np
import pytest

from support import executable_paper as paper


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
