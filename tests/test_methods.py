"""Every baseline against its formula, dense in float64 numpy. Kind of evidence: oracle.

No oracle here shares code with the library. Formulas are those of the module docstrings of `fedlora.methods`, written
with dense products, full SVDs, least squares, plain gradient descent and, for rotations, the closed angles of rank 2.
GLoRA has a file of its own. A test marked xfail is a known defect: its reason says what is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray

from fedlora import Adapter, Client, LoRA, Server, ServerState, Update, Upload, build, keep, read_adapter, receive, send
from fedlora.errors import HyperparameterError, RankMismatch
from fedlora.method import TailPenalty
from fedlora.peft_io import CONFIG_FILE, PREFIX, WEIGHTS_FILE

Matrix = NDArray[np.float64]
Pairs = Sequence[tuple[float, Matrix, Matrix]]  # (p_i, B_i, A_i), in the order of client ids
EXAMPLES = {"a": 10, "b": 25, "c": 40, "d": 15, "idle": 0}
PARTIAL = (("a", "b", "c", "idle"), ("b", "c"), ("idle", "a", "c", "d"))  # d joins late, idle abstains
MIXED = {"a": 1, "b": 2, "c": 4, "d": 3, "idle": 2}
HALF_TURN = 0.4  # a rotate_lambda under 1


# ---------------------------------------------------------------------------------------------------- dense oracles


@dataclass(frozen=True)
class Expected:
    """What a state must mean. update: the server's whole one. base: the part of it that is in the base weight.

    pair: the factors that are handed out, cut to the first r slots. Where it is None, `split` says how the best
    approximation of rank r is handed out: s on B ("left"), its root on both ("balanced"), or not at all ("fresh").
    """

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
    """FedRot at rank 2, where argmax tr(R^T C) over rotations and reflections is a closed angle; C = A_i A_ref^T in
    even rounds, B_i^T B_ref in odd ones. A part of a rotation has the angle of (1 - l) I + l R."""
    B_ref, A_ref = past.pair
    turned = []
    for p, B, A in pairs:
        C = A @ A_ref.T if t % 2 == 0 else B.T @ B_ref
        cos, sin = C[0, 0] + C[1, 1], C[1, 0] - C[0, 1]
        flip_cos, flip_sin = C[0, 0] - C[1, 1], C[0, 1] + C[1, 0]
        if part > 1 and math.hypot(flip_cos, flip_sin) > math.hypot(cos, sin):
            R = np.array([[flip_cos, flip_sin], [flip_sin, -flip_cos]]) / math.hypot(flip_cos, flip_sin)
        else:
            a = math.atan2(sin, cos)
            a = a if part > 1 else math.atan2(part * math.sin(a), 1 - part + part * math.cos(a))
            R = np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        turned.append((p, B @ R, R.T @ A))
    return turned if B_ref.any() else pairs


def fedex(t: int, pairs: Pairs, past: Expected) -> Expected:
    B, A = averaged(pairs)
    base = past.base + mean(pairs) - B @ A
    return Expected(base + B @ A, (B, A), base=base)


def flora(t: int, pairs: Pairs, past: Expected) -> Expected:
    return Expected(past.base + mean(pairs), base=past.base + mean(pairs))


def fedsa(t: int, pairs: Pairs, past: Expected) -> Expected:
    return Expected(None, (None, averaged(pairs)[1]))


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
            reach = sum(q for (q, _, _), r in zip(pairs, ranks, strict=True) if r >= r_k)
            X = X + p / reach * s[k] * np.outer(U[:, k], Vh[k])
    return Expected(X, split="left")


def fair_l2(t: int, pairs: Pairs, past: Expected, strength: float = 0.01) -> Expected:
    """The least-squares solution of [A^T; sqrt(lambda) I] (B + dB)^T = [X^T; sqrt(lambda) B^T]."""
    (B, A), root = averaged(pairs), math.sqrt(strength)
    rows = np.vstack([A.T, root * np.eye(len(A))])
    B = np.linalg.lstsq(rows, np.vstack([mean(pairs).T, root * B.T]), rcond=None)[0].T
    return Expected(B @ A, (B, A))


def fair_loss(B: Matrix, dB: Matrix, A: Matrix, X: Matrix, strength: float = 0.01) -> float:
    Y = (B + dB) @ A
    return 1 - np.sum(X * Y) / np.linalg.norm(X) / np.linalg.norm(Y) + strength * np.sum(dB**2)


def fair_cosine(t: int, pairs: Pairs, past: Expected, strength: float = 0.01) -> Expected:
    """Gradient descent on the dense loss from dB = 0, each step halved until it gains a tenth of what it promises."""
    (B, A), X, step = averaged(pairs), mean(pairs), 1.0
    dB = np.zeros_like(B)
    for _ in range(20_000 if X.any() else 0):  # zero has no direction to turn to
        Y = (B + dB) @ A
        n, cos = np.linalg.norm(Y), np.sum(X * Y) / np.linalg.norm(X) / np.linalg.norm(Y)
        slope = (cos * Y / n**2 - X / np.linalg.norm(X) / n) @ A.T + 2 * strength * dB
        if np.linalg.norm(slope) < 1e-8:
            break
        enough = fair_loss(B, dB, A, X, strength) + 1e-15
        while fair_loss(B, dB - step * slope, A, X, strength) > enough - 0.1 * step * np.sum(slope**2):
            step /= 2
        dB, step = dB - step * slope, 1.5 * step
    return Expected((B + dB) @ A, (B + dB, A))


# label -> the method, its oracle, whether it takes different ranks
ROWS: dict[str, tuple[Any, Oracle, bool]] = {
    "fedit": (build("fedit"), factors, False),
    "ffa": (build("ffa-lora"), partial(in_turn, alternate=False), True),
    "fedsa": (build("fedsa-lora"), fedsa, False),
    "fedex": (build("fedex-lora"), fedex, False),
    "hetlora": (build("hetlora", pruning=True), partial(factors, made=by_size), True),
    "hetlora dense": (build("hetlora", solver="dense"), partial(factors, made=by_size), True),
    "hetlora examples": (build("hetlora", weights="examples"), factors, True),
    "flexlora": (build("flexlora"), product, True),
    "flexlora dense": (build("flexlora", solver="dense"), product, True),
    "raflora": (build("flexlora", preset="raflora"), raflora, True),
    "flora": (build("flora"), flora, True),
    "fair": (build("lora-fair"), fair_cosine, False),
    "fair strong": (build("lora-fair", lambda_=0.5), partial(fair_cosine, strength=0.5), False),
    "fair l2": (build("lora-fair", metric="l2"), fair_l2, False),
    "fair l2 strong": (build("lora-fair", metric="l2", lambda_=3.0), partial(fair_l2, strength=3.0), False),
    "svd": (build("svd", energy=1.0), partial(product, split="balanced"), True),
    "svd 0.9": (build("svd", energy=0.9), partial(product, split="balanced", energy=0.9), True),
    "fedrot": (build("fedrot-lora"), partial(factors, made=rotated), False),
    "fedrot soft": (
        build("fedrot-lora", rotate_lambda=HALF_TURN),
        partial(factors, made=partial(rotated, part=HALF_TURN)),
        False,
    ),
    "rolora": (build("rolora"), in_turn, True),
    "padded": (build("padded-average"), factors, True),
    "padded subspace": (build("padded-average", coordinates="subspace"), partial(factors, made=canonical), True),
}
# The common start is what one client that sends the seed would make of the server, but for two: it is not cut or turned.
STARTS: dict[str, Oracle] = {"svd 0.9": partial(product, split="balanced"), "padded subspace": factors}


# ------------------------------------------------------------------------------------------------------ federations


def np64(t: torch.Tensor) -> Matrix:
    return t.detach().double().numpy()


def seed_adapter(rank: int, shape: tuple[int, int] = (9, 7), warm: bool = False, dtype: Any = torch.float64) -> Adapter:
    rng = np.random.default_rng(1)
    A = torch.from_numpy(rng.standard_normal((rank, shape[1])) / math.sqrt(shape[1]))
    B = torch.from_numpy(0.5 * rng.standard_normal((shape[0], rank)) * warm)
    return Adapter({"m": LoRA(B.to(dtype), A.to(dtype))})


@dataclass(frozen=True)
class Played:
    """One round. pairs: what the accepted clients trained, as stored, with their p_i."""

    before: ServerState
    after: ServerState
    uploads: list[Upload]
    pairs: Pairs


def play(
    server: Server,
    ranks: Mapping[str, int],
    *,
    who: Sequence[Sequence[str]] = PARTIAL,
    lazy: str = "",
    stored: torch.dtype = torch.float64,
    **seed: Any,
) -> Iterator[Played]:
    """Rounds in which all but the lazy clients move what is not frozen by a draw, and store it as `stored`."""
    rng = np.random.default_rng(2)
    state = server.init(seed_adapter(max(ranks.values()), **{"dtype": stored, **seed}))
    kept: dict[str, Adapter | None] = {}
    for names in who:
        pairs, uploads, total = [], [], sum(EXAMPLES[name] for name in names)
        for name in sorted(names):
            client = Client(name, ranks[name])
            download = server.download(state, client)
            roles, step = download.roles, 0.0 if name in lazy else 0.4
            B, A = receive(download, kept.get(name)).modules["m"].factors
            moved = [(t + step * torch.from_numpy(rng.standard_normal(t.shape)).to(t)).to(stored) for t in (B, A)]
            mine = LoRA(B if roles.B == "frozen" else moved[0], A if roles.A == "frozen" else moved[1])
            kept[name] = keep(Adapter({"m": mine}), roles)
            uploads.append(Upload(client, EXAMPLES[name], send(Adapter({"m": mine}), roles)))
            if EXAMPLES[name]:
                pairs.append((EXAMPLES[name] / total, *map(np64, mine.factors)))
        after = server.aggregate(state, uploads)
        yield Played(state, after, uploads, pairs)
        state = after


def state_of(method: Any, pairs: Pairs, stored: torch.dtype = torch.float64) -> Any:
    """The method's own state after one round of these pairs, from a fresh start of the largest rank."""
    loras = [LoRA(torch.as_tensor(B).to(stored), torch.as_tensor(A).to(stored)) for _, B, A in pairs]
    largest = max(loras, key=lambda lora: lora.rank)
    updates = [Update(f"{k}", p, x.rank, x, stored) for k, ((p, _, _), x) in enumerate(zip(pairs, loras, strict=True))]
    updates = [replace(u, lora=u.lora.map(lambda t: t.to(torch.promote_types(stored, torch.float32)))) for u in updates]
    return method.aggregate(method.init(LoRA(torch.zeros_like(largest.B), torch.ones_like(largest.A)), 0), updates)


def drawn(*ranks: int, weights: Sequence[float] = (), shape: tuple[int, int] = (9, 7)) -> Pairs:
    rng = np.random.default_rng(3)
    weights = weights or [1 / len(ranks)] * len(ranks)
    shapes = [((shape[0], r), (r, shape[1])) for r in ranks]
    return [(p, rng.standard_normal(b), rng.standard_normal(a)) for p, (b, a) in zip(weights, shapes, strict=True)]


def assert_close(got: torch.Tensor, want: Matrix | float, accuracy: float = 1e-10) -> None:
    assert np.linalg.norm(np64(got) - want) <= accuracy * (1 + np.linalg.norm(want))


def assert_means(server: Server, state: ServerState, want: Expected, ranks: Mapping[str, int], accuracy: float) -> None:
    """The state's whole update, and what a client of each rank gets, are as expected."""
    if want.update is not None:
        assert_close(server.global_update(state)["m"].delta(), want.update, accuracy)
    for name, r in ranks.items():
        download = server.download(state, Client(name, r))
        B, A = (download.adapter.modules["m"].tensors().get(factor) for factor in "BA")
        base = download.base_delta["m"].delta() if download.base_delta else torch.zeros(())
        assert_close(base, want.base, accuracy)
        if want.pair is not None:
            assert_close(A, want.pair[1][:r], accuracy)
            assert (B is None) == (want.pair[0] is None)
            if B is not None:
                assert_close(B, want.pair[0][:, :r], accuracy)
        elif want.split == "fresh":
            assert B.shape[1] == len(A) == r and not bool(B.any()) and bool(A.any(dim=1).all())
        else:
            assert_close(B @ A, best(want.update, r), accuracy)
            filled = A[B.any(dim=0)]
            gram = np.eye(len(filled)) if want.split == "left" else np64(B.T @ B)[: len(filled), : len(filled)]
            assert_close(filled @ filled.T, gram, accuracy)


SCENES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "warm wide": {"warm": True, "shape": (6, 11)},
    "float32": {"stored": torch.float32, "shape": (6, 11)},
    "bf16 warm": {"stored": torch.bfloat16, "warm": True},
    "one client": {"who": (("c",), ("c", "idle"), ("c",))},
    "a zero update": {"lazy": "b"},
    "all zero": {"lazy": "abcd"},
}
CASES = [
    pytest.param(label, ranks, scene, id=f"{label}-{'mixed' if ranks is MIXED else 'equal'}-{scene}")
    for label, (method, _, mixed) in ROWS.items()
    for ranks in (dict.fromkeys(MIXED, 2 if method.name == "fedrot-lora" else 3), MIXED)  # 2: the angles are closed
    for scene in SCENES
    if mixed or ranks is not MIXED
]


@pytest.mark.parametrize(("label", "ranks", "scene"), CASES)
def test_three_rounds_are_those_of_the_formula(label: str, ranks: dict[str, int], scene: str) -> None:
    """Start, updates, base and all readouts against the row's dense oracle, which carries its own state along."""
    (method, oracle, _), options = ROWS[label], SCENES[scene]
    server, accuracy = Server(method), 1e-5 if label in ("fair", "fair strong") else 1e-10
    accuracy = 2e-5 if options.get("stored", torch.float64) != torch.float64 else accuracy
    want = None
    for t, played in enumerate(play(server, ranks, **options)):
        if want is None:
            pair = tuple(map(np64, played.before.start.modules["m"].factors))
            want = STARTS.get(label, oracle)(0, [(1.0, *pair)], Expected(None, pair))
        assert_means(server, played.before, want, ranks, accuracy)
        want = oracle(t, played.pairs, want)
        assert_means(server, played.after, want, ranks, accuracy)
        if scene == "one client" and label not in ("fedsa", "svd 0.9"):  # nothing to average: everything is exact
            start = server.download(played.before, Client("c", ranks["c"])).base_delta
            base = np64(start["m"].delta()) if start else 0.0
            assert_close(server.global_update(played.after)["m"].delta(), base + mean(played.pairs), accuracy)
