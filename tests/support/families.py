"""Hard input families for the server's numerics, as one literal table. Kind of evidence: none; inputs for oracle tests.

`family(name)` builds one round of uploads for a non-square module; `FAMILIES` lists the names. Everything is drawn in
float64 and then stored in the asked dtype, and the STORED numbers are the input: oracles start from them.
Ids are "c0", "c1", ...; ranks are mixed (2 to 8) and weights unequal unless a note says otherwise.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike

Uploads = dict[str, tuple[np.ndarray, np.ndarray]]  # client -> (B (d_out, r), A (r, d_in))
Weights = dict[str, float]

MIXED_RANKS = (2, 8, 5, 4)
NUM_EXAMPLES = (3, 5, 7, 2, 4)  # unequal on purpose; weights are these, normalised over the clients of a case
TWICE = (("c1", 0, 1), ("c2", 2, -1))  # client, a column (or row), and which other one becomes equal to it


@dataclass(frozen=True)
class Case:
    """One round of uploads for one module, with weights that sum to 1; note: the property that makes it hard."""

    name: str
    uploads: Uploads
    weights: Weights
    note: str = ""


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _weights(num_clients: int) -> Weights:
    counts = NUM_EXAMPLES[:num_clients]
    return {f"c{k}": count / sum(counts) for k, count in enumerate(counts)}


def _gaussian(ranks: tuple[int, ...], rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    """Independent standard normal factors: full rank, column spaces in general position."""
    return {f"c{k}": (rng.standard_normal((d_out, r)), rng.standard_normal((r, d_in))) for k, r in enumerate(ranks)}


def _random_orthogonal(n: int, rng: np.random.Generator) -> np.ndarray:
    Q, T = np.linalg.qr(rng.standard_normal((n, n)))
    return Q * np.sign(np.diag(T))  # with these signs the distribution is uniform (Haar)


def random_gauge(r: int, cond: float, rng: np.random.Generator) -> np.ndarray:
    """An invertible (r, r) matrix Q of that 2-norm condition number: orthogonal * geometric * orthogonal.

    The singular values run from sqrt(cond) to 1 / sqrt(cond). At r = 1 every Q has condition 1; Q is then +-sqrt(cond).
    """
    singular_values = np.geomspace(np.sqrt(cond), 1.0 / np.sqrt(cond), r)
    return (_random_orthogonal(r, rng) * singular_values) @ _random_orthogonal(r, rng)


def _in_gauge(uploads: Uploads, cond: float, rng: np.random.Generator) -> Uploads:
    """Every (B, A) as (B Q, Q^-1 A), one random Q per client, in float64."""
    moved = {}
    for client in sorted(uploads):
        B, A = (factor.astype(np.float64) for factor in uploads[client])
        Q = random_gauge(B.shape[1], cond, rng)
        moved[client] = (B @ Q, np.linalg.solve(Q, A))
    return moved


def _round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).float().bfloat16().double().numpy()


# ---- builders: (rng, d_out, d_in) -> float64 uploads -----------------------------------------------------------------


def _generic(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    return _gaussian(MIXED_RANKS, rng, d_out, d_in)


def _near_equal(eps: float) -> Callable[..., Uploads]:
    def build(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
        B0, A0 = _gaussian((8,), rng, d_out, d_in)["c0"]
        noise = _gaussian((8, 8, 8), rng, d_out, d_in)
        return {client: (B0 + eps * E, A0 + eps * F) for client, (E, F) in noise.items()}

    return build


def _with(defect: Callable[[Uploads], object]) -> Callable[..., Uploads]:
    """The generic case, changed in place."""

    def build(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
        uploads = _generic(rng, d_out, d_in)
        defect(uploads)
        return uploads

    return build


def _zero_b(uploads: Uploads) -> None:
    uploads["c2"][0][:] = 0.0


def _zero_column(uploads: Uploads) -> None:
    uploads["c1"][0][:, 0] = 0.0
    uploads["c2"][0][:, -1] = 0.0


def _duplicated_column(uploads: Uploads) -> None:
    for client, original, copy in TWICE:
        uploads[client][0][:, copy] = uploads[client][0][:, original]


def _deficient_a(uploads: Uploads) -> None:
    for client, original, copy in TWICE:
        uploads[client][1][copy] = uploads[client][1][original]


def _column_scales(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    scaled = {}
    for client, (B, A) in _generic(rng, d_out, d_in).items():
        scales = 10.0 ** rng.uniform(-6.0, 3.0, size=B.shape[1])
        scaled[client] = (B * scales, A / scales[:, None])
    return scaled


def _zero_padded(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    padded = {}
    for client, (B, A) in _generic(rng, d_out, d_in).items():
        missing = max(MIXED_RANKS) - B.shape[1]
        padded[client] = (np.pad(B, ((0, 0), (0, missing))), np.pad(A, ((0, missing), (0, 0))))
    return padded


def _gauge(cond: float) -> Callable[..., Uploads]:
    def build(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
        return _in_gauge(_generic(rng, d_out, d_in), cond, rng)

    return build


def _bf16(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    uploads = _generic(rng, d_out, d_in)
    return {client: (_round_to_bfloat16(B), _round_to_bfloat16(A)) for client, (B, A) in uploads.items()}


def _dominant_rank(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    return _gaussian((2, 3, 8), rng, d_out, d_in)  # c2 is the dominant one, and has the largest weight


def _orthogonal_equal(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    ranks = (4, 6, 3)
    uploads = _gaussian(ranks, rng, d_out, d_in)
    frame = _random_orthogonal(d_out, rng)
    blocks = np.split(frame[:, : sum(ranks)], np.cumsum(ranks)[:-1], axis=1)
    return {
        client: (block @ rng.standard_normal((block.shape[1], block.shape[1])), uploads[client][1])
        for client, block in zip(uploads, blocks, strict=True)
    }


def _wide(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    return _gaussian(tuple(d_out // 4 + extra for extra in (1, -1, 2, 0, 1)), rng, d_out, d_in)


def _one_client(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    return _gaussian((6,), rng, d_out, d_in)


def _cancelling(rng: np.random.Generator, d_out: int, d_in: int) -> Uploads:
    uploads = _gaussian((5, 5, 4), rng, d_out, d_in)
    B, A = uploads["c0"]
    # c1 is -c0 in other coordinates; a permutation and powers of two are exact in every floating dtype
    order, scales = rng.permutation(5), 2.0 ** rng.integers(-3, 4, size=5)
    return {**uploads, "c1": (B[:, order] * scales, -A[order] / scales[:, None])}


# ---- the table -------------------------------------------------------------------------------------------------------

_Builder = Callable[[np.random.Generator, int, int], Uploads]
_NEAR_EQUAL = "B_i = B0 + eps noise and A_i likewise, r = 8: K has 8 eigenvalues near 1, 16 of order eps^2"
_GAUGE = "generic in random coordinates of that condition number, in float64, then stored"

_TABLE: dict[str, tuple[_Builder, Weights, str]] = {
    # name: (builder, weights, note)
    "generic": (_generic, _weights(4), "independent normal factors, full rank"),
    **{f"near_equal_1e-{k}": (_near_equal(float(f"1e-{k}")), _weights(3), _NEAR_EQUAL) for k in range(1, 7)},
    "zero_B": (_with(_zero_b), _weights(4), "B = 0 at c2, the client of the largest weight"),
    "zero_column": (_with(_zero_column), _weights(4), "one zero column in B of c1 (the first) and of c2 (the last)"),
    "duplicated_column": (_with(_duplicated_column), _weights(4), "one column of B twice, at c1 and at c2"),
    "column_scales": (_column_scales, _weights(4), "columns of B times 1e-6..1e3, rows of A by the inverse"),
    "deficient_A": (_with(_deficient_a), _weights(4), "one row of A twice, at c1 and c2: rank(B A) < rank(B) = r"),
    "zero_padded": (_zero_padded, _weights(4), "B = [B0 0], A = [A0; 0]: nominal rank 8, true ranks 2, 8, 5, 4"),
    **{f"gauge_1e{k}": (_gauge(float(f"1e{k}")), _weights(4), _GAUGE) for k in (1, 3, 4, 6)},
    "bf16": (_bf16, _weights(4), "generic, every entry a bfloat16 value"),
    "dominant_rank": (_dominant_rank, _weights(3), "ranks 2, 3, 8: K has the eigenvalue p_c2 at least 3 times"),
    "orthogonal_equal": (
        _orthogonal_equal,
        dict.fromkeys(("c0", "c1", "c2"), 1 / 3),
        "orthogonal: all eigenvalues tie",
    ),
    "wide": (_wide, _weights(5), "the sum of ranks exceeds d_out: the union is everything"),
    "one_client": (_one_client, _weights(1), "K is one projector: every non-zero eigenvalue is 1"),
    "cancelling": (_cancelling, {"c0": 0.3, "c1": 0.3, "c2": 0.4}, "B0 A0 = -B1 A1 with equal weight: only c2 is left"),
}

FAMILIES: tuple[str, ...] = tuple(_TABLE)


def family(name: str, seed: int = 0, d_out: int = 48, d_in: int = 40, dtype: DTypeLike = np.float32) -> Case:
    """Build one case of the table, of at least 24 x 24. The gauge_* and single-defect families start from the same
    draws as generic."""
    build, weights, note = _TABLE[name]
    uploads = build(np.random.default_rng(seed), d_out, d_in)
    stored = {client: (B.astype(dtype), A.astype(dtype)) for client, (B, A) in uploads.items()}
    return Case(name, stored, dict(weights), note)


# ---- what oracles need -----------------------------------------------------------------------------------------------


def regauge(case: Case, cond: float, seed: int, dtype: DTypeLike = np.float64) -> Case:
    """The same updates in other coordinates: every (B Q, Q^-1 A) with cond(Q) = cond, from the stored factors.

    Storing the result in float32 moves the update itself by about 6e-8 * cond; in float64 by about 1e-16 * cond, except
    for column_scales, where sums of columns of sizes 1e-6 and 1e3 already cost 1e-8.
    """
    # The key separates these gauges from the draws that made the case (and from the gauge_* families) at equal seeds.
    rng = np.random.default_rng([zlib.crc32(b"regauge"), seed])
    moved = _in_gauge(case.uploads, cond, rng)
    stored = {client: (B.astype(dtype), A.astype(dtype)) for client, (B, A) in moved.items()}
    return Case(f"{case.name}, gauge {cond:g}", stored, dict(case.weights), case.note)


def mean_update(case: Case) -> np.ndarray:
    """sum_i p_i B_i A_i, dense, in float64, from the stored factors: the truth that an exact aggregate must meet."""
    return sum(
        case.weights[client] * (B.astype(np.float64) @ A.astype(np.float64))
        for client, (B, A) in sorted(case.uploads.items())
    )
