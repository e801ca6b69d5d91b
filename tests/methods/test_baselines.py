"""Every baseline against its formula, dense in float64 numpy (`support.formulas`). Kind of evidence: oracle.

GLoRA: test_glora.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fedlora import Adapter, Client, LoRA, Server, ServerState, Update, Upload, build, keep, receive, send
from fedlora.errors import HyperparameterError, LostUpdate
from fedlora.linalg import unit_roundoff
from fedlora.methods.fedsvd import reparameterised
from fedlora.methods.rolora import _alive
from support.formulas import (
    ROWS,
    STARTS,
    Expected,
    Matrix,
    Pairs,
    averaged,
    best,
    factors,
    fair_loss,
    mean,
    np64,
    rotated,
)

EXAMPLES = {"a": 10, "b": 25, "c": 40, "d": 15, "idle": 0}
PARTIAL = (("a", "b", "c", "idle"), ("b", "c"), ("idle", "a", "c", "d"))  # d joins late, idle abstains
MIXED = {"a": 1, "b": 2, "c": 4, "d": 3, "idle": 2}
Played = tuple[ServerState, ServerState, list[Upload], Pairs]  # the state before and after, and what came between


def play(server: Server, ranks: Mapping[str, int], **changes: Any) -> Iterator[Played]:
    """Rounds in which all but the lazy clients move what is not frozen by a draw, and store it as `stored`."""
    scene = {"who": PARTIAL, "lazy": "", "stored": torch.float64, "shape": (9, 7), "warm": False, **changes}
    who, lazy, stored, shape, warm = (scene[key] for key in ("who", "lazy", "stored", "shape", "warm"))
    rng, rank = np.random.default_rng(2), max(ranks.values())
    B0, A0 = (torch.from_numpy(rng.standard_normal(s)) / 2 for s in ((shape[0], rank), (rank, shape[1])))
    state = server.init(Adapter({"m": LoRA(B0 * warm, A0).map(lambda t: t.to(scene.get("seed", stored)))}))
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
            uploads.append(Upload(client, EXAMPLES[name], send(Adapter({"m": mine}, base={}), roles)))
            if EXAMPLES[name]:
                pairs.append((EXAMPLES[name] / total, *map(np64, mine.factors)))
        before, state = state, server.aggregate(state, uploads)
        yield before, state, uploads, pairs


def drawn(*ranks: int) -> Pairs:
    rng = np.random.default_rng(3)
    return [(1 / len(ranks), rng.standard_normal((9, r)), rng.standard_normal((r, 7))) for r in ranks]


def state_of(method: Any, pairs: Pairs, stored: torch.dtype = torch.float64) -> Any:
    """The method's own state after one round of these pairs, from a fresh start of the largest rank."""
    dtype, rank = torch.promote_types(stored, torch.float32), max(len(A) for _, _, A in pairs)
    updates = []
    for k, (p, *pair) in enumerate(pairs):
        B, A = (torch.from_numpy(np.asarray(f, dtype=np.float64)).to(stored).to(dtype) for f in pair)
        updates.append(Update(f"{k}", p, len(A), LoRA(B, A), unit_roundoff(stored)))
    seed = LoRA(torch.zeros(len(B), rank, dtype=dtype), torch.ones(rank, A.shape[1], dtype=dtype))
    return method.aggregate(method.init(seed), updates)


def assert_close(got: torch.Tensor, want: Matrix | float, accuracy: float = 1e-10) -> None:
    assert np.linalg.norm(np64(got) - want) <= accuracy * (1 + np.linalg.norm(want))


def assert_means(server: Server, state: ServerState, want: Expected, ranks: Mapping[str, int], accuracy: float) -> None:
    """The state's whole update, and what a client of each rank gets, are as expected."""
    if want.update is not None:
        assert_close(server.global_update(state)["m"].delta(), want.update, accuracy)
    for name, r in ranks.items():
        download = server.download(state, Client(name, r))
        B, A = (download.adapter.modules["m"].tensors().get(factor) for factor in "BA")
        assert_close(download.base_delta["m"].delta() if download.base_delta else torch.zeros(()), want.base, accuracy)
        if want.pair is not None:
            want_B, want_A = None if want.pair[0] is None else want.pair[0][:, :r], want.pair[1][:r]
            live = (want_A if want_B is None else np.vstack([want_B, want_A.T]).T).any(axis=1)
            assert_close(A[live], want_A[live], accuracy)
            assert (B is None) == (want_B is None) and bool(A.any(dim=1).all())  # dead slots were given fresh rows
            if B is not None:
                assert_close(B, want_B, accuracy)
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
    "float32 seed": {"stored": torch.float64, "seed": torch.float32},
    "one client": {"who": (("c",), ("c", "idle"), ("c",))},
    "a zero update": {"lazy": "b"},
    "all zero": {"lazy": "abcd"},
}
CASES = [
    pytest.param(label, ranks, scene, id=f"{label}-{'mixed' if ranks is MIXED else 'equal'}-{scene}")
    for label, (method, _, mixed) in ROWS.items()
    for ranks in (dict.fromkeys(MIXED, 2 if method.name == "fedrot-lora" else 3), MIXED)
    for scene in SCENES
    if mixed or ranks is not MIXED
]


@pytest.mark.quick(40)
@pytest.mark.parametrize(("label", "ranks", "scene"), CASES)
def test_three_rounds_are_those_of_the_formula(label: str, ranks: dict[str, int], scene: str) -> None:
    """Start, updates, base and all readouts against the row's dense oracle, which carries its own state along."""
    (method, oracle, _), options = ROWS[label], SCENES[scene]
    server, accuracy = Server(method), 2e-5 if "stored" in options else 1e-7 if "fair" in label else 1e-10
    want = None
    for t, (before, after, _, pairs) in enumerate(play(server, ranks, **options)):
        if want is None:
            pair = tuple(map(np64, before.start.modules["m"].factors))
            want = STARTS.get(label, oracle)(0, [(1.0, *pair)], Expected(None, pair))
        assert_means(server, before, want, ranks, accuracy)
        want = oracle(t, pairs, want)
        assert_means(server, after, want, ranks, accuracy)


CUT = ("svd", "svd rank", "fair", "fair flat")  # these leave out more than digits
WHOLE = [label for label, (method, *_) in ROWS.items() if method.roles(0).both_shared and label not in CUT]


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", WHOLE)
def test_of_uploads_that_nearly_cancel_no_digit_is_lost(label: str, stored: torch.dtype) -> None:
    """b sends minus what a sends, also in other coordinates, and c a ten-thousandth of it: the oracle's result to eight
    roundoffs of its dtype. In 16 bits the other coordinates are other numbers."""
    method, oracle, _ = ROWS[label]
    (p, B, A), _, (_, C, D) = drawn(2, 2, 2)
    for Q in (np.eye(2), np.array([[0.6, 0.8], [-0.8, 0.6]])):
        given = [(p, B, A), (p, -B @ Q, Q.T @ A), (p, 1e-2 * C, 1e-2 * D)]
        pairs = [(p, *(np64(torch.from_numpy(f).to(stored)) for f in pair)) for p, *pair in given]
        want = oracle(0, pairs, Expected(None, (np.zeros((9, 2)), np.ones((2, 7))))).update
        update = method.effective(state_of(method, pairs, stored))
        off = np.linalg.norm(np64(update.map(torch.Tensor.double).delta()) - want) / np.linalg.norm(want)
        assert off < 8 * unit_roundoff(update.factors[0].dtype) + 1e-10


NAN, INF, BELOW_ONE = math.nan, math.inf, math.nextafter(1.0, 0.0)
BAD: dict[tuple[str, str], tuple[object, ...]] = {
    ("svd", "energy"): (0.0, -0.1, 1.001, NAN, "0.9"),
    ("svd", "rank"): (0, 1.5, "x"),
    ("lora-fair", "lambda_"): (0.0, -1.0, INF, NAN, "x"),
    ("lora-fair", "metric"): ("l1", None),
    ("fedrot-lora", "rotate_lambda"): (0.0, -1.0, NAN, "x"),
    ("padded-average", "coordinates"): ("product", None),
    ("glora", "rho"): (0.0, 1.5),
    ("glora", "gamma"): (-0.1,),
    ("glora", "rank"): (0,),
    ("glora", "history"): (-1, 1.5),
    ("glora-paper", "rho"): (0.0, 1.5),
    ("glora-paper", "gamma"): (-0.1,),
    **{(name, "no_such_field"): (1,) for name in ("fedit", "ffa-lora", "flexlora", "hetlora", "raflora", "rolora")},
}


def test_an_impossible_hyper_parameter_is_refused_by_name() -> None:
    """The ranges are those of the methods' docstrings; the message names the method and the field."""
    for (name, field), values in BAD.items():
        for value in values:
            with pytest.raises(HyperparameterError, match=f"^{name}(: | has no ).*{field}"):
                build(name, **{field: value})


@pytest.mark.parametrize("part", [0.4, 1.0, 1.5])
def test_fedrot_goes_part_of_the_way_to_a_rotation_and_the_whole_way_to_a_reflection(part: float) -> None:
    """A client in mirrored coordinates, from a trained start, by B and by A. Expected: the closed angles of rank 2."""
    rng, method = np.random.default_rng(6), build("fedrot-lora", rotate_lambda=part)
    past = Expected(None, (rng.standard_normal((9, 2)), rng.standard_normal((2, 7))))
    state = method.init(LoRA(*(torch.from_numpy(x) for x in past.pair)))
    for t in range(3):
        flip = np.array([[np.cos(t), np.sin(t)], [np.sin(t), -np.cos(t)]])
        pair = (past.pair[0] @ flip + 0.1, flip @ past.pair[1] + 0.1)
        update = Update("a", 1.0, 2, LoRA(*(torch.from_numpy(x) for x in pair)), 0.0)
        state, past = method.aggregate(state, [update]), factors(t, [(1.0, *pair)], past, partial(rotated, part=part))
        assert_close(state.mean.factors[0], past.pair[0])
        assert_close(state.mean.factors[1], past.pair[1])


def test_a_slot_that_nobody_held_stays_as_it_was_and_no_other_does() -> None:
    """Slots of which both factors are zero, the mean alone is, or the frozen factor alone: only the first can be given
    back without a change of the product."""
    mean, frozen, before = (torch.tensor(x)[:, None] for x in ([0.0, 0.0, 1.0], [0.0, 2.0, 0.0], [7.0, 8.0, 9.0]))
    assert _alive(mean, before, frozen)[:, 0].tolist() == [7.0, 0.0, 1.0]


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_raflora_by_hand_and_as_the_mean(stored: torch.dtype) -> None:
    """Weights 1/4, 1/4, 1/2 of ranks 1, 2, 8: slot 1 gets p_i, 2 gets p_i / (3/4), 3 to 8 p_i / (1/2). In which slot a
    direction sits counts: the second client has its strong one last. With equal ranks: the mean of the stored
    factors, small components and all."""
    method, small = build("raflora"), np.array([[1.0], [0.1], [0.005]])
    given = ((0.25, 1, [8]), (0.25, 2, [3, 6]), (0.5, 8, [4, 3, 2, 1, 0.5, 0.25, 0.125, 0.0625]))
    pairs = [(p, np.diag(d + [0] * (8 - r))[:, :r], np.eye(8)[:r]) for p, r, d in given]
    want = np.diag([2 + 0.75 + 2, 2 + 2, 2, 1, 0.5, 0.25, 0.125, 0.0625])
    assert_close(method.effective(state_of(method, pairs, stored)).delta(), want, 1e-5)
    pairs = [(p, *(np64(torch.from_numpy(f).to(stored)) for f in (B, small * A))) for p, B, A in drawn(3, 3, 3)]
    assert_close(method.effective(state_of(method, pairs, stored)).delta(), mean(pairs), 1e-5)


@pytest.mark.parametrize("method", [build("flexlora"), build("glora"), build("raflora"), build("svd", energy=1.0)])
def test_no_rounding_is_handed_out(method: Any) -> None:
    """Of an update of rank 2 in float32, at 200 x 150: LAPACK's own noise, 5 roundoffs large, is no component; and a
    mean that float32 cannot hold is an error."""
    g = np.random.default_rng(4)
    B, A = (
        g.standard_normal((200, 2)) @ g.standard_normal((2, 8)),
        g.standard_normal((8, 2)) @ g.standard_normal((2, 150)),
    )
    state = state_of(method, [(1.0, B, A)], torch.float32)
    assert method.diagnostics(state)["rank"] == method.readout(state, "0", 8).rank == 2
    with pytest.raises(LostUpdate):
        state_of(method, [(1.0, 1e-30 * B, 1e-30 * A)], torch.float32)
    weak = state_of(method, [(1.0, np.eye(9, 2) * [1, 1e-4], np.eye(2, 7))], torch.bfloat16)  # may be bf16's rounding
    assert (method.readout(weak, "0", 2).rank, method.effective(weak).rank) == (1, 2)


KEPT: tuple[tuple[list[float], float, int], ...] = (  # singular values, energy, rank
    ([5, 4, 3, 2, 1], 1.0, 5), ([5, 4, 3, 2, 1], 0.98, 4), ([5, 4, 3, 2, 1], 0.45, 1), ([1, 1e-9], 1.0, 2),
    ([1, 1e-7], BELOW_ONE, 2), ([1, 1e-9], BELOW_ONE, 1), ([1, 1, 1, 1], 0.75, 3), ([1, 1, 1, 1], 0.7501, 4),
    ([0, 0], 0.5, 0), ([1] * 5, 0.8, 4), ([3, 1], 0.9, 1),
)  # fmt: skip


def test_svd_keeps_the_least_rank_of_its_energy() -> None:
    """By hand: the squares of 5 4 3 2 1 are 25 16 9 4 1 of 55, so 0.4545 at rank 1 and 0.9818 at rank 4."""
    for values, energy, rank in KEPT:
        method = build("svd", energy=energy)
        state = state_of(method, [(1.0, np.diag(values), np.eye(len(values)))])
        assert state.rank == rank
        assert_close(method.effective(state).delta(), np.diag(sorted(values)[::-1][:rank] + [0] * (len(values) - rank)))
    assert state_of(build("svd", rank=1), [(1.0, np.diag([3, 1]), np.eye(2))]).rank == 1


@pytest.mark.parametrize("size", [1.0, 0.001])
@pytest.mark.parametrize("metric", ["columns", "cosine"])
def test_lora_fair_is_at_a_minimum(size: float, metric: str) -> None:
    """The dense loss, of clients as alike as training from one start leaves them: finite differences vanish, all steps
    lead up; the cosine ignores length, so dB is _|_ B + dB. Where the mean of B is zero, and that of B A is not, the
    cosine is 0 / 0 and dB = 0."""
    (_, B_0, A_0), *others = drawn(2, 2, 2, 2, 2)
    pairs = [(1 / 4, size * (B_0 + 0.5 * B), A_0 + 0.5 * A) for _, B, A in others]
    (B, A), X, rng = averaged(pairs), mean(pairs), np.random.default_rng(5)
    method, columns = build("lora-fair", metric=metric), metric == "columns"
    best_B = np64(state_of(method, pairs).B)
    for step in size * rng.standard_normal((20, *B.shape)):
        down, here, up = (fair_loss(B, best_B - B + h * step, A, X, 0.01, columns)[0] for h in (-1e-3, 0, 1e-3))
        assert here < min(down, up) and abs(up - down) < 0.01 * (up + down - 2 * here)
    assert abs(np.sum((best_B - B) * best_B)) < 1e-3 * np.linalg.norm(best_B - B) * np.linalg.norm(best_B)
    assert not bool(state_of(method, [(0.5, B, A), (0.5, -B, -A)]).B.any())


def test_lora_fair_counts_a_column_without_direction_as_zero() -> None:
    """The clients' first columns of A cancel in the mean of A, not in that of B A: 1 / 7 of the cosines is a constant,
    so B is as without that column, beside 7 / 6 of lambda."""
    (_, B, A), (_, C, D), (_, B_0, A_0) = drawn(2, 2, 2)
    A, D = A_0 + 0.3 * A, A_0 + 0.3 * D
    D[:, 0] = -A[:, 0]
    pairs = [(0.5, B_0 + 0.3 * B, A), (0.5, B_0 + 0.3 * C, D)]
    found = state_of(build("lora-fair", lambda_=0.6), pairs).B
    want = state_of(build("lora-fair", lambda_=0.7), [(p, B, A[:, 1:]) for p, B, A in pairs]).B
    assert_close(found, np64(want), 1e-6)
    idle = [(p, np.pad(B, ((0, 0), (0, 1))), np.pad(A, ((0, 1), (0, 0)))) for p, B, A in pairs]  # an empty slot
    assert_close(state_of(build("lora-fair", lambda_=0.6), idle).B, np.pad(np64(found), ((0, 0), (0, 1))), 1e-6)


@pytest.mark.parametrize("shape", [(5, 9, 7), (4, 3, 6), (30, 22, 4)])
def test_fedsvd_keeps_the_update_in_any_shape(shape: tuple[int, int, int]) -> None:
    """Also where the rank exceeds d_out or d_in, and where B is zero; and no row of A is zero, so that each slot
    trains."""
    d_out, d_in, rank = shape
    generator = torch.Generator().manual_seed(0)
    B, A = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((d_out, rank), (rank, d_in)))
    for left in (B, torch.zeros_like(B)):
        made = reparameterised(LoRA(left, A))
        assert made.rank == rank and bool(made.factors[1].any(dim=1).all())
        torch.testing.assert_close(made.delta(), left @ A, rtol=0, atol=1e-11)
        rows = made.factors[1][:d_in]
        torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows)).double(), rtol=0, atol=1e-12)
