"""What each method means, dense in float64 numpy: the oracles of tests/methods.

No oracle here shares code with the library. Formulas are those of the module docstrings of `fedlora.methods`, written
with dense products, full SVDs, least squares, plain gradient descent and, for rotations, the closed angles of rank 2.
"""

from __future__ import annotations

import math
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
    even rounds, B_i^T B_ref in odd ones. A part of a rotation is the direction of (1 - l) + l z."""
    B_ref, A_ref = past.pair
    turned = []
    for p, B, A in pairs if B_ref.any() else ():
        (a, b), (c, d) = A @ A_ref.T if t % 2 == 0 else B.T @ B_ref
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


def product(t: int, pairs: Pairs, past: Expected, split: str = "left", energy: float = 1.0) -> Expected:
    """FlexLoRA, and SVD: the mean update, cut to the least rank whose squares make up `energy` of all."""
    X = mean(pairs)
    squares = np.linalg.svd(X, compute_uv=False) ** 2
    enough = [R for R in range(len(squares) + 1) if squares[:R].sum() >= energy * squares.sum()]
    return Expected(X if energy == 1 else best(X, enough[0]), split=split)


def raflora(t: int, pairs: Pairs, past: Expected) -> Expected:
    """Component k of each SVD with p_i / sum_{j: r_j >= r(k)} p_j, r(k) the smallest rank that is at least k."""
    ranks, X = [len(A) for _, _, A in pairs], 0.0
    for p, B, A in pairs:
        U, s, Vh = np.linalg.svd(B @ A)
        for k in range(len(A)):
            r_k = min(r for r in ranks if r >= k + 1)
            X = X + p / sum(q for q, _, a in pairs if len(a) >= r_k) * s[k] * np.outer(U[:, k], Vh[k])
    return Expected(X, split="left")


def fair_l2(t: int, pairs: Pairs, past: Expected, strength: float = 0.01) -> Expected:
    """The least-squares solution of [A^T; sqrt(lambda) I] (B + dB)^T = [X^T; sqrt(lambda) B^T]."""
    (B, A), root = averaged(pairs), math.sqrt(strength)
    rows = np.vstack([A.T, root * np.eye(len(A))])
    B = np.linalg.lstsq(rows, np.vstack([mean(pairs).T, root * B.T]), rcond=None)[0].T
    return Expected(B @ A, (B, A))


def fair_loss(B: Matrix, dB: Matrix, A: Matrix, X: Matrix, strength: float = 0.01) -> tuple[float, Matrix]:
    """1 - cos(X, (B + dB) A) + strength ||dB||^2, and its gradient in dB."""
    Y = (B + dB) @ A
    x, y = np.linalg.norm(X), np.linalg.norm(Y)
    cos = np.sum(X * Y) / x / y
    return 1 - cos + strength * np.sum(dB**2), (cos * Y / y**2 - X / x / y) @ A.T + 2 * strength * dB


def fair_cosine(t: int, pairs: Pairs, past: Expected, strength: float = 0.01) -> Expected:
    """Gradient descent on the dense loss from dB = 0, each step halved until it gains a tenth of what it promises."""
    (B, A), X, step = averaged(pairs), mean(pairs), 1.0
    dB = np.zeros_like(B)
    for _ in range(20_000 if X.any() else 0):  # zero has no direction to turn to
        here, slope = fair_loss(B, dB, A, X, strength)
        if np.linalg.norm(slope) < 1e-8:
            break
        while fair_loss(B, dB - step * slope, A, X, strength)[0] > here - 0.1 * step * np.sum(slope**2) + 1e-15:
            step /= 2
        dB, step = dB - step * slope, 1.5 * step
    return Expected((B + dB) @ A, (B + dB, A))


# label -> the method, its oracle, whether it takes different ranks
ROWS: dict[str, tuple[Any, Oracle, bool]] = {
    "fedit": (build("fedit"), factors, False),
    "ffa": (build("ffa-lora"), partial(in_turn, alternate=False), True),
    "fedsa": (build("fedsa-lora"), lambda t, pairs, past: Expected(None, (None, averaged(pairs)[1])), False),
    "fedex": (build("fedex-lora"), moved_base, False),
    "hetlora": (build("hetlora"), partial(factors, made=by_size), True),
    "hetlora examples": (build("hetlora", weights="examples"), factors, True),
    "flexlora": (build("flexlora"), product, True),
    "raflora": (build("flexlora", preset="raflora"), raflora, True),
    "flora": (build("flora"), partial(moved_base, fresh=True), True),
    "fair": (build("lora-fair"), fair_cosine, False),
    "fair strong": (build("lora-fair", lambda_=0.5), partial(fair_cosine, strength=0.5), False),
    "fair l2": (build("lora-fair", metric="l2"), fair_l2, False),
    "fair l2 strong": (build("lora-fair", metric="l2", lambda_=3.0), partial(fair_l2, strength=3.0), False),
    "svd": (build("svd", energy=1.0), partial(product, split="balanced"), True),
    "svd 0.9": (build("svd", energy=0.9), partial(product, split="balanced", energy=0.9), True),
    "fedrot": (build("fedrot-lora"), partial(factors, made=rotated), False),
    "fedrot soft": (build("fedrot-lora", rotate_lambda=0.4), partial(factors, made=partial(rotated, part=0.4)), False),
    "rolora": (build("rolora"), in_turn, True),
    "padded": (build("padded-average"), factors, True),
    "padded subspace": (build("padded-average", coordinates="subspace"), partial(factors, made=canonical), True),
}
# A start is what one client that sends the seed would make of the server; but in these it is neither cut nor turned.
STARTS: dict[str, Oracle] = {"svd 0.9": partial(product, split="balanced"), "padded subspace": factors}


def np64(t: torch.Tensor) -> Matrix:
    return t.detach().double().numpy()
