"""What each method means, dense in float64 numpy: the oracles of tests/methods.

No oracle here shares code with the library. Formulas are those of the module docstrings of `fedlora.methods`, written
with dense products, full SVDs, least squares, plain gradient descent and, for rotations, the closed angles of rank 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fedlora import build

Matrix = np.ndarray
Pairs = Sequence[tuple[float, Matrix, Matrix]]  # (p_i, B_i, A_i), in the order of client ids


@dataclass(frozen=True)
class Expected:
    """What a state must mean: the server's whole update, the part of it in the base weight, and what is handed out: the
    first r slots of `pair`, or the best approximation of rank r with s on B ("left") or its root on both ("balanced"),
    or nothing ("fresh")."""

    update: Matrix | None
    pair: tuple[Matrix | None, Matrix] | None = None
    split: str = "fresh"
    base: Matrix | float = 0.0


Oracle = Callable[[int, Pairs, Expected], Expected]  # the round, what was uploaded, the state before


def mean(pairs: Pairs) -> Matrix:
    return sum(p * B @ A for p, B, A in pairs)


def averaged(pairs: Pairs, rank: int = 0) -> tuple[Matrix, Matrix]:
    """Both factors, zero-padded to one rank and averaged."""
    rank = max(rank, *(B.shape[1] for _, B, _ in pairs), 0)
    B = sum(p * np.pad(B, ((0, 0), (0, rank - B.shape[1]))) for p, B, _ in pairs)
    return B, sum(p * np.pad(A, ((0, rank - len(A)), (0, 0))) for p, _, A in pairs)


def best(X: Matrix, rank: int) -> Matrix:
    """The best approximation of rank r, by a full dense SVD (Eckart-Young)."""
    U, s, Vh = np.linalg.svd(X, full_matrices=False)
    return U[:, :rank] * s[:rank] @ Vh[:rank]


def factors(t: int, pairs: Pairs, past: Expected, made: Any = lambda t, pairs, past: pairs) -> Expected:
    """The zero-padded averages of what `made` makes of the clients' pairs."""
    pair = averaged(made(t, pairs, past), len(past.pair[1]))
    return Expected(pair[0] @ pair[1], pair)


def by_size(t: int, pairs: Pairs, past: Expected) -> Pairs:
    """HetLoRA: w_i = ||B_i A_i|| / sum_j ||B_j A_j|| in place of p_i, which serves where all are zero."""
    sizes = [np.linalg.norm(B @ A) for _, B, A in pairs]
    return [(w / sum(sizes), B, A) for w, (_, B, A) in zip(sizes, pairs, strict=True)] if any(sizes) else pairs


def canonical(t: int, pairs: Pairs, past: Expected) -> Pairs:
    """Padded average in subspace coordinates: (U_i, diag(s_i) V_i^T), each u_j's largest entry positive."""
    turned = []
    for p, B, A in pairs:
        U, s, Vh = (x[:, : len(A)] if k == 0 else x[: len(A)] for k, x in enumerate(np.linalg.svd(B @ A)))
        sign = np.sign(U[np.abs(U).argmax(axis=0), np.arange(len(A))]) * (s > 0)
        turned.append((p, U * sign, (s * sign)[:, None] * Vh))
    return turned


def rotated(t: int, pairs: Pairs, past: Expected, part: float = 1.5) -> Pairs:
    """FedRot at rank 2, where argmax tr(R^T C) over rotations z and reflections is a closed angle; C = A_i A_ref^T in
    odd rounds (t from 0), B_i^T B_ref in even ones. A part of a rotation is the direction of (1 - l) + l z."""
    B_ref, A_ref = past.pair
    turned = []
    for p, B, A in pairs if B_ref.any() else ():
        (a, b), (c, d) = A @ A_ref.T if t % 2 else B.T @ B_ref
        turn, flip = complex(a + d, c - b), complex(a - d, b + c)
        flips = part > 1 and abs(flip) > abs(turn)
        z = flip if flips else turn if part > 1 else 1 - part + part * turn / abs(turn)
        cos, sin = z.real / abs(z), z.imag / abs(z)
        R = np.array([[cos, sin], [sin, -cos]] if flips else [[cos, -sin], [sin, cos]])
        turned.append((p, B @ R, R.T @ A))
    return turned or pairs


def moved_base(t: int, pairs: Pairs, past: Expected, fresh: bool = False) -> Expected:
    """FedEx: the averages, and what they miss of the mean in the base. FLoRA: all of it in the base, a fresh start."""
    pair = None if fresh else averaged(pairs)
    BA = 0.0 if fresh else pair[0] @ pair[1]
    return Expected(past.base + mean(pairs), pair, base=past.base + mean(pairs) - BA)


def in_turn(t: int, pairs: Pairs, past: Expected, alternate: bool = True) -> Expected:
    """RoLoRA (FFA-LoRA does not alternate): one factor averaged, the other as it was, so the update is the mean."""
    (B, A), mine = past.pair, averaged(pairs, len(past.pair[1]))
    return Expected(mean(pairs), (B, mine[1]) if alternate and t % 2 else (mine[0], A))


def product(
    t: int, pairs: Pairs, past: Expected, split: str = "left", energy: float = 1.0, rank: int | None = None
) -> Expected:
    """FlexLoRA, and SVD: the mean update, cut to the least rank whose squares make up `energy` of all, or to `rank`."""
    X = mean(pairs)
    squares = np.linalg.svd(X, compute_uv=False) ** 2
    enough = [R for R in range(len(squares) + 1) if squares[:R].sum() >= energy * squares.sum()]
    if rank is None and energy < 1:
        rank = enough[0]
    return Expected(X if rank is None else best(X, rank), split=split)


def raflora(t: int, pairs: Pairs, past: Expected) -> Expected:
    """Eq. 8, slot by slot: b_k a_k of each client that has it, with p_i / sum_{j: r_j >= k} p_j."""
    X = 0.0 * mean(pairs)
    for k in range(max((len(A) for _, _, A in pairs), default=0)):
        holders = [(p, B[:, k], A[k]) for p, B, A in pairs if len(A) > k]
        X = X + sum(p / sum(q for q, _, _ in holders) * np.outer(b, a) for p, b, a in holders)
    return Expected(X, split="balanced")


def fair_loss(B: Matrix, dB: Matrix, A: Matrix, X: Matrix, strength: float, columns: bool) -> tuple[float, Matrix]:
    """1 - cos(X, (B + dB) A) + strength ||dB||^2, and its gradient in dB; the mean of the columns' cosines, or that of
    the whole matrices."""
    Y, axis = (B + dB) @ A, 0 if columns else None
    x, y = np.linalg.norm(X, axis=axis), np.linalg.norm(Y, axis=axis)
    cos = np.sum(X * Y, axis=axis) / x / y
    slope = (cos * Y / y**2 - X / x / y) / np.size(cos)
    return 1 - np.mean(cos) + strength * np.sum(dB**2), slope @ A.T + 2 * strength * dB


def fair(t: int, pairs: Pairs, past: Expected, strength: float = 0.01, columns: bool = True) -> Expected:
    """Gradient descent on the dense loss from dB = 0, each step halved until it gains a tenth of what it promises;
    then, where a step gains less than floats show, the equation that the gradient is zero, solved for B + dB again and
    again: Z (mean_j cos_j a_j a_j^T / |y_j|^2 + 2 s I) = mean_j x_j a_j^T / (|x_j| |y_j|) + 2 s B."""
    (B, A), X, step = averaged(pairs), mean(pairs), 1.0
    dB = np.zeros_like(B)
    if not X.any():  # zero has no direction to turn to
        return Expected(B @ A, (B, A))
    for _ in range(3000):
        here, slope = fair_loss(B, dB, A, X, strength, columns)
        if np.linalg.norm(slope) < 1e-7 * np.linalg.norm(B):
            break
        while (
            fair_loss(B, dB - step * slope, A, X, strength, columns)[0] > here - 0.1 * step * np.sum(slope**2) + 1e-15
        ):
            step /= 2
        dB, step = dB - step * slope, 1.5 * step
    Z = B + dB
    for _ in range(200):
        Y, axis = Z @ A, 0 if columns else None
        x, y = np.linalg.norm(X, axis=axis), np.linalg.norm(Y, axis=axis)
        cos, n = np.sum(X * Y, axis=axis) / x / y, X.shape[1] if columns else 1
        left = (A * (cos / y**2)) @ A.T / n + 2 * strength * np.eye(len(A))
        Z = np.linalg.solve(left.T, ((X / x / y) @ A.T / n + 2 * strength * B).T).T
        Z = Z * (np.sum(B * Z) / np.sum(Z * Z))  # a cosine ignores length
    return Expected(Z @ A, (Z, A))


# label -> the method, its oracle, whether it takes different ranks
ROWS: dict[str, tuple[Any, Oracle, bool]] = {
    "fedit": (build("fedit"), factors, False),
    "ffa": (build("ffa-lora"), partial(in_turn, alternate=False), True),
    "fedsa": (build("fedsa-lora"), lambda t, pairs, past: Expected(None, (None, averaged(pairs)[1])), False),
    "fedex": (build("fedex-lora"), moved_base, False),
    "hetlora": (build("hetlora"), partial(factors, made=by_size), True),
    "flexlora": (build("flexlora"), product, True),
    "raflora": (build("raflora"), raflora, True),
    "flora": (build("flora"), partial(moved_base, fresh=True), True),
    "fair": (build("lora-fair", lambda_=0.5), partial(fair, strength=0.5), False),
    "fair flat": (build("lora-fair", metric="cosine"), partial(fair, columns=False), False),
    "svd": (build("svd"), partial(product, energy=0.9), True),
    "svd whole": (build("svd", energy=1.0), product, True),
    "svd rank": (build("svd", rank=2), partial(product, rank=2), True),
    "fedrot": (build("fedrot-lora"), partial(factors, made=rotated), False),
    "fedrot soft": (build("fedrot-lora", rotate_lambda=0.4), partial(factors, made=partial(rotated, part=0.4)), False),
    "rolora": (build("rolora"), in_turn, True),
    "padded": (build("padded-average"), factors, True),
    "padded subspace": (build("padded-average", coordinates="subspace"), partial(factors, made=canonical), True),
}
# A start is what one client that sends the seed would make of the server; but in these it is neither cut nor turned.
STARTS: dict[str, Oracle] = {"svd": product, "svd rank": product, "padded subspace": factors}


def np64(t: torch.Tensor) -> Matrix:
    return t.detach().double().numpy()
