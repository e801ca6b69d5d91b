"""The executable paper: Algorithms 1-3 of GLoRA, line by line, in float64 numpy. Kind of evidence: oracle.

It shares no code with fedlora and follows the text, not speed: K is formed as a dense d_out x d_out matrix and every
client has its own Z_i. Names are the paper's; "Alg. 2, l. 4" is line 4 of Algorithm 2. Shapes: B (d_out, r_i),
A (r_i, d_in), U (d_out, rank(B_i)), Ahat (rank(B_i), d_in), U_ref (d_out, R), Z_g (R, d_in).

Where the paper leaves a choice, the one made here is in a comment that starts with "Reading:". The paper fixes no
signs and no basis inside a repeated eigen- or singular value: compare products and projectors, not single vectors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Matrix = NDArray[np.float64]

RANK_TOL = 1e-10  # footnote 1: rank(B_i) counts singular values of B_i above RANK_TOL * s_1
REAL_TOL = 1e-12  # Alg. 3: a spectral component is real when sigma_j > REAL_TOL * sigma_1
TIE_DECIMALS = 12  # Alg. 3, l. 7: alignment scores (all in [0, 1]) equal to so many decimals are tied
FLOOR_SLACK = 1e-9  # 0.56 * 25 is 14.000000000000002 in floats; the slack keeps ceil and floor of the exact products


def gauge_fix(B: ArrayLike, A: ArrayLike) -> tuple[Matrix, Matrix]:
    """(U_i, Ahat_i) with U_i orthonormal and U_i Ahat_i = B_i A_i: Eq. qr_decomposition; Alg. 1, l. 7-8."""
    B, A = np.asarray(B, dtype=np.float64), np.asarray(A, dtype=np.float64)
    left, singular_values, _ = np.linalg.svd(B, full_matrices=False)
    rank = int(np.sum(singular_values > RANK_TOL * singular_values[0]))  # 0 for B_i = 0
    if rank == B.shape[1]:
        U, T = np.linalg.qr(B)  # Alg. 1, l. 7: B_i = U_i T_i
    else:
        U = left[:, :rank]  # footnote 1: r_i becomes rank(B_i); plain QR would add directions that it never had
        T = U.T @ B
    return U, T @ A  # Alg. 1, l. 8: Ahat_i = T_i A_i


def projected_aggregate(updates: Sequence[tuple[Matrix, Matrix, float]], R: int) -> tuple[Matrix, Matrix, Matrix]:
    """(U_ref, Z_g, all d_out eigenvalues of K, descending) from a list of (U_i, Ahat_i, p_i): Algorithm 2."""
    # Alg. 2, l. 1: M = [sqrt(p_i) U_i]
    M = np.concatenate([math.sqrt(p) * U for U, _, p in updates], axis=1)
    # Alg. 2, l. 2: U_ref = TopEig_R(M M^T); K = M M^T is Eq. subspace_covariance, TopEig is Eq. consensus_basis.
    # Reading: R is capped at d_out. At a tie lambda_R = lambda_{R+1} the answer is whatever eigh returns.
    ascending_values, ascending_vectors = np.linalg.eigh(M @ M.T)
    eigenvalues, eigenvectors = ascending_values[::-1], ascending_vectors[:, ::-1]
    U_ref = eigenvectors[:, : min(R, M.shape[0])]
    # Alg. 2, l. 3-5: Z_i = U_ref^T U_i Ahat_i
    Z = [U_ref.T @ U @ Ahat for U, Ahat, _ in updates]
    # Alg. 2, l. 6: Z_g = sum_i p_i Z_i
    Z_g = sum(p * Z_i for (_, _, p), Z_i in zip(updates, Z, strict=True))
    return U_ref, Z_g, eigenvalues  # Alg. 2, l. 7


def client_aware_readout(
    U_ref: Matrix, Z_g: Matrix, ranks: Mapping[str, int], gamma: float, history: Mapping[str, Matrix]
) -> dict[str, tuple[Matrix, Matrix, list[int]]]:
    """client -> (B_init, A_init, selected components, ascending and zero-based): Algorithm 3, Eq. balanced_readout."""
    # Alg. 3, l. 1: Z_g = O Sigma V^T, thin (Eq. spectral_readout)
    O, sigma, Vt = np.linalg.svd(Z_g, full_matrices=False)
    # Reading: the paper's ell = min(R, d_in) counts components with sigma_j = 0, whose u_j is arbitrary. Only the real
    # ones are candidates, so fewer than r_i may come back (and no empty slot is refilled here).
    ell = int(np.sum(sigma > REAL_TOL * sigma[0]))
    # Alg. 3, l. 2: U_s = U_ref O
    U_s = U_ref @ O
    readouts = {}
    for client in sorted(ranks):  # Alg. 3, l. 3
        r = ranks[client]
        # Alg. 3, l. 4: core set {1, ..., floor(gamma r_i)}, here zero-based
        core_size = min(math.floor(gamma * r + FLOOR_SLACK), ell)
        core, non_core = list(range(core_size)), list(range(core_size, ell))
        if client in history:  # Alg. 3, l. 5
            # Alg. 3, l. 6: a_ij = || H_i^T u_j ||_2^2 for j outside the core
            H = history[client]
            scores = np.array([np.sum((H.T @ U_s[:, j]) ** 2) for j in non_core])
            # Alg. 3, l. 7: core + TopK_{r_i - |core|}. Reading: tied scores go by spectral order (stable sort), which
            # is also what a history of rank 0 then gives: all its scores are zero.
            by_score = np.argsort(-np.round(scores, TIE_DECIMALS), kind="stable")
            selected = sorted(core + [non_core[k] for k in by_score[: r - core_size]])
        else:  # Alg. 3, l. 8-9: global spectral order
            selected = list(range(min(r, ell)))
        # Alg. 3, l. 11: balanced factors
        root = np.sqrt(sigma[selected])
        readouts[client] = (U_s[:, selected] * root, root[:, None] * Vt[selected], selected)
    return readouts  # Alg. 3, l. 13


@dataclass(frozen=True)
class Round:
    """One server round: the state (U_ref, Z_g), K's eigenvalues, what each client starts from, history afterwards."""

    U_ref: Matrix
    Z_g: Matrix
    eigenvalues: Matrix
    readouts: dict[str, tuple[Matrix, Matrix, list[int]]]
    history: dict[str, Matrix]


def glora_round(
    uploads: Mapping[str, tuple[ArrayLike, ArrayLike]],
    p: Mapping[str, float],
    rho: float,
    gamma: float,
    state_history: Mapping[str, Matrix],
    *,
    ranks: Mapping[str, int] | None = None,
) -> Round:
    """Algorithm 1, l. 5-13, from raw (B_i, A_i): R = ceil(rho * sum_i rank(B_i)), at least 1.

    ranks: the clients D_t that are read out, and their r_i. Reading: by default the participants, at the nominal rank
    of their upload. Footnote 1 enters R, because the paper counts r_i there as columns of U_i; a capacity stays r_i.
    """
    clients = sorted(uploads)
    fixed = {i: gauge_fix(*uploads[i]) for i in clients}  # Alg. 1, l. 7-9
    total_rank = sum(U.shape[1] for U, _ in fixed.values())
    R = max(1, math.ceil(rho * total_rank - FLOOR_SLACK))
    # Alg. 1, l. 11
    U_ref, Z_g, eigenvalues = projected_aggregate([(*fixed[i], p[i]) for i in clients], R)
    # Alg. 1, l. 12: with the history of before this round
    if ranks is None:
        ranks = {i: np.shape(uploads[i][0])[1] for i in clients}
    readouts = client_aware_readout(U_ref, Z_g, ranks, gamma, state_history)
    # Alg. 1, l. 13: H_i <- U_i for the participants, the others keep theirs
    history = {**state_history, **{i: fixed[i][0] for i in clients}}
    return Round(U_ref, Z_g, eigenvalues, readouts, history)
