"""Robust rules against ByzFL on dense changes, in any coordinates, ranks and order; and on hostile input.

Kinds of evidence: *oracle* (vectors and results of ByzFL 0.0.11, stored by tests/golden/make_robust_rules.py, and that
library itself where it is installed), *property* (gauge, padding, order, cancellation), *attack*.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.errors import HyperparameterError, QuorumNotMet
from fedlora.runs.defence import _RULES, DefenceSection
from fedlora.server.changes import Changes, Sent, changes
from fedlora.server.judging import weigh
from fedlora.server.robust_rules import CentredClipping, Clip, GeometricMedian, Geometry, Krum, Mixing, MultiKrum, Rule
from support.federations import noise
from support.gauges import in_other_coordinates, padded

GOLDEN_FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN: dict[str, Any] = json.loads((GOLDEN_FOLDER / "robust_rules.json").read_text())
D_OUT, D_IN = 3, 4
ALL: list[Rule] = [
    Clip(), Clip(threshold=0.7), GeometricMedian(), Krum(liars=1), MultiKrum(liars=1), CentredClipping(),
    Mixing(GeometricMedian(), liars=1), Mixing(MultiKrum(liars=1), liars=1), Mixing(Clip(), liars=1),
]  # fmt: skip


def test_every_rule_of_a_configuration_is_held_to_all_that_follows() -> None:
    assert {type(rule) for rule in ALL} == {*_RULES.values(), Mixing}


def rule_of(keys: dict[str, Any]) -> Rule:
    rule = DefenceSection.model_validate(keys).build()
    assert rule is not None
    return rule


def played(server: Server, wanted: list[Tensor]) -> tuple[ServerState, list[Upload], Tensor]:
    """A state whose readouts are no zeros, uploads whose changes are `wanted`, and what everybody was sent (dense)."""
    start = Adapter({"m": LoRA(torch.zeros(D_OUT, 3, dtype=torch.float64), noise((3, D_IN), "start"))})
    first = LoRA(noise((D_OUT, 3), "first", "B"), noise((3, D_IN), "first", "A"))
    plain = Server(server.method)
    state = plain.aggregate(plain.init(start), [Upload(Client("c00", 3), 1, Adapter({"m": first}))])
    uploads, sent = [], torch.zeros(D_OUT, D_IN, dtype=torch.float64)
    for k, change in enumerate(wanted):
        client = Client(f"c{k:02}", 3)
        sent = server.download(state, client).adapter.modules["m"].delta()
        B, s, A = torch.linalg.svd(sent + change.reshape(D_OUT, D_IN), full_matrices=False)
        uploads.append(Upload(client, 1, Adapter({"m": LoRA(B * s, A)})))
    return state, uploads, sent


# ---- ByzFL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GOLDEN))
def test_rounds_of_the_server_are_those_of_byzfl_on_dense_changes(name: str) -> None:
    """Stored aggregates of the plain vectors. Ours: changes of clients in coordinates of condition 1 and 1e6, with the
    mean of what they were sent beneath."""
    case = GOLDEN[name]
    wanted = [torch.tensor(x, dtype=torch.float64) for x in case["changes"]]
    for one in case["rules"]:
        server = Server(build("svd", energy=1.0), rule=rule_of(one["keys"]))
        state, uploads, sent = played(server, wanted)
        want = torch.tensor(one["aggregate"], dtype=torch.float64).reshape(D_OUT, D_IN)
        weights = []
        for condition in (1.0, 1e6):
            after = server.aggregate(state, in_other_coordinates(uploads, condition, seed=3))
            got = server.global_update(after)["m"].delta() - sent
            assert float((got - want).norm() / want.norm()) < 1e-6, (one["keys"], condition)
            assert after.tally is not None and after.tally.judged is not None
            weights.append([s.after for s in after.tally.judged.clients.values()])
        combined = sum(w * x for w, x in zip(weights[0], wanted, strict=True))
        assert float((combined - want.flatten()).norm() / want.norm()) < 1e-6, one["keys"]
        assert weights[0] == pytest.approx(weights[1], abs=1e-6), one["keys"]


def test_byzfl_itself_where_it_is_installed() -> None:
    """On draws that are not stored: clients of different ranks in coordinates of condition 1e6, liars among them."""
    sys.path.insert(0, str(GOLDEN_FOLDER))
    try:
        import make_robust_rules
    finally:
        sys.path.remove(str(GOLDEN_FOLDER))
    try:
        make_robust_rules.byzfl_rules()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    for seed in range(4):
        n, liars = 7 + 2 * seed, 1 + seed // 2
        wanted = [noise((12,), "live", seed, k) + noise((12,), "live", seed) for k in range(n)]
        wanted[:liars] = [-4 * x for x in wanted[:liars]]
        X = torch.stack(wanted).numpy()
        for keys, theirs in make_robust_rules.rules(liars, 2.0).items():
            server = Server(build("svd", energy=1.0), rule=rule_of(json.loads(keys)))
            state, uploads, sent = played(server, wanted)
            after = server.aggregate(state, in_other_coordinates(uploads, 1e6, seed))
            got = (server.global_update(after)["m"].delta() - sent).flatten()
            want = torch.from_numpy(theirs(X.copy()))
            assert float((got - want).norm() / want.norm()) < 1e-6, (keys, seed)


# ---- properties ------------------------------------------------------------------------------------------------------


def a_round(server: Server, rounds: int = 2, clients: int = 6) -> tuple[ServerState, list[Upload]]:
    """A state after some rounds and the next uploads: mixed ranks, heads, one client without a module, float64."""
    from fedlora.testing.federations import SHAPES, pushed, seed_adapter

    ranks: list[Any] = [2, 3, 5, {"attn.q": 4}, 6, 1, 2, 3]
    plain = Server(server.method)
    state = plain.init(seed_adapter(6))
    uploads: list[Upload] = []
    for t in range(rounds + 1):
        uploads = []
        for k in range(clients):
            client = Client(f"c{k}", ranks[k])
            mine = pushed(plain.download(state, client).adapter, client.id, t)
            mine = Adapter({m: mine.modules[m] for m in client.ranks(SHAPES)}, mine.heads)
            uploads.append(Upload(client, 10 + 3 * k, mine))
        state = plain.aggregate(state, uploads) if t < rounds else state
    return state, uploads


def weights(server: Server, state: ServerState, uploads: list[Upload]) -> dict[str, float]:
    tally = server.aggregate(state, uploads).tally
    assert tally is not None and tally.judged is not None
    return {name: one.after / one.before for name, one in tally.judged.clients.items()}


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.said)
def test_no_coordinates_no_columns_and_no_order_change_a_weight(rule: Rule) -> None:
    server = Server(build("glora"), rule=rule)
    state, uploads = a_round(server)
    was = weights(server, state, uploads)
    for condition in (10.0, 1e6):
        moved = weights(server, state, in_other_coordinates(uploads, condition, seed=1))
        assert moved == pytest.approx(was, rel=1e-6, abs=1e-6)
    assert weights(server, state, uploads[::-1]) == was


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.said)
def test_zero_columns_change_no_weight(rule: Rule) -> None:
    """Of changes alone: a client of another rank is also sent another readout."""
    from fedlora.testing.federations import SHAPES

    _, uploads = a_round(Server(build("glora")))
    begun = {m: LoRA(noise((d, 2), "begun", m), noise((2, e), "begun", m)) for m, (d, e) in SHAPES.items()}
    p, names = torch.full((6,), 1 / 6, dtype=torch.float64), [u.client.id for u in uploads]
    found = []
    for sent in (uploads, [padded(u, 1 + k) for k, u in enumerate(uploads)]):
        held = [
            [Sent(u.adapter.modules[m], begun[m]) if m in u.adapter.modules else None for u in sent] for m in SHAPES
        ]
        found.append(weigh(rule, changes(held, sent, {}), p, names)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_renamed_clients_keep_their_weights() -> None:
    """Another order of ids is another order of rows: every rule gives each client the same weight."""
    found = changes([[Sent(lora, lora.map(torch.zeros_like)) for lora in drawn(7)]], [upload() for _ in range(7)], {})
    turn = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    turned = type(found)(found.norms[turn], found.cosines[turn][:, turn], found.noise[turn])
    p = torch.arange(1, 8, dtype=torch.float64) / 28
    for rule in ALL:
        here, _ = weigh(rule, found, p, [str(k) for k in range(7)])
        there, _ = weigh(rule, turned, p[turn], [str(int(k)) for k in turn])
        assert here == pytest.approx(there, rel=1e-9), rule


def drawn(count: int, rank: int = 2) -> list[LoRA]:
    return [LoRA(noise((6, rank), "drawn", k, "B"), noise((rank, 5), "drawn", k, "A")) for k in range(count)]


def upload(name: str = "x") -> Upload:
    return Upload(Client(name, 2), 1, Adapter({}))


def test_a_small_change_in_bad_coordinates_is_measured() -> None:
    """trust.md: a change of 1e-3 at condition 1e6, where a Gram product of the factors has no digit left."""
    from fedlora.analysis.audit import random_gauge

    B, A = noise((40, 8), "B"), noise((8, 30), "A")
    dB = 1e-3 * noise((40, 8), "dB")
    Q = random_gauge(8, 1e6, 0)
    sent, begun = LoRA((B + dB) @ Q, torch.linalg.solve(Q, A)), LoRA(B, A)
    want = float((dB @ A).norm())
    found = changes([[Sent(sent, begun)]], [upload()], {})
    assert float(found.norms[0]) == pytest.approx(want, rel=1e-6)
    C, R = torch.cat([sent.factors[0], B], 1), torch.cat([sent.factors[1], -A], 0)
    naive = float(torch.trace((C.T @ C) @ (R @ R.T)))
    assert abs(naive - want**2) / want**2 > 0.1  # the way that does not work


# ---- the table of rules ----------------------------------------------------------------------------------------------


def test_what_each_rule_needs() -> None:
    """Krum's bound is its paper's n >= 2 f + 3; mixing and the others need an honest majority."""
    table = {Krum(2): 7, MultiKrum(0.2): 7, Clip(): 1, GeometricMedian(liars=0.25): 7, Mixing(Clip(), 3): 7}
    assert {rule: rule.least(10) for rule in table} == table
    said = GeometricMedian().too_few(0)
    assert said is not None and "needs 1" in said and "liar" not in said, "nobody said that somebody may lie"
    state, uploads = a_round(Server(build("glora")), clients=4)
    with pytest.raises(QuorumNotMet, match=r"krum with 1 liar among 4 .*needs 5 .*unchanged"):
        Server(build("glora"), rule=Krum(liars=1)).aggregate(state, uploads)


WRONG: tuple[Any, ...] = (
    lambda: Krum(liars=-1), lambda: Krum(liars=0.5), lambda: Krum(liars=True), lambda: Krum(liars=math.nan),
    lambda: Clip(threshold=0.0), lambda: Clip(threshold=math.inf), lambda: Clip(threshold="mean"),  # type: ignore[arg-type]
    lambda: CentredClipping(iterations=0), lambda: GeometricMedian(tolerance=0.0),
    lambda: Mixing(Mixing(Clip(), 1), 1), lambda: GeometricMedian(iterations=True), lambda: Clip(liars=0.6),
)  # fmt: skip


def test_impossible_keys_are_refused() -> None:
    for wrong in WRONG:
        with pytest.raises(HyperparameterError, match="got"):
            wrong()


def test_the_geometric_median_says_what_it_left() -> None:
    """One iteration is not enough for 1e-10: the slope that is left is told, and is what a dense gradient is."""
    points = [noise((30,), "gm", k) for k in range(6)]
    loras = [LoRA(x.reshape(6, 5), torch.eye(5, dtype=torch.float64)) for x in points]
    found = changes([[Sent(lora, lora.map(torch.zeros_like)) for lora in loras]], [upload() for _ in loras], {})
    p, names = torch.full((6,), 1 / 6, dtype=torch.float64), list("abcdef")
    _, rough = weigh(GeometricMedian(iterations=1), found, p, names)
    m, fine = weigh(GeometricMedian(), found, p, names)
    assert rough.facts["left"] > 1e-6 > 1e-10 >= fine.facts["left"]
    z = sum(float(w) * x / 6 for w, x in zip(m.values(), points, strict=True))
    slope = sum(((z - x) / (z - x).norm() for x in points), torch.zeros(30, dtype=torch.float64)) / 6
    assert float(slope.norm()) < 1e-9


@pytest.mark.parametrize(("angle", "weights"), [(60.0, (1.0, 1.0, 1.0)), (119.0, None), (130.0, (3.0, 0.0, 0.0))])
def test_the_geometric_median_of_a_triangle(angle: float, weights: tuple[float, ...] | None) -> None:
    """Fermat: from 120 degrees on it is the corner; below it is inside, where all sides are seen under 120 degrees."""
    half = math.radians(angle) / 2
    corners = [torch.zeros(12), torch.zeros(12), torch.zeros(12)]
    corners[1][:2] = torch.tensor([math.cos(half), math.sin(half)])
    corners[2][:2] = torch.tensor([math.cos(half), -math.sin(half)])
    points = [0.1 + x.double() for x in corners]
    loras = [LoRA(x.reshape(3, 4), torch.eye(4, dtype=torch.float64)) for x in points]
    found = changes([[Sent(lora, lora.map(torch.zeros_like)) for lora in loras]], [upload() for _ in loras], {})
    m, _ = weigh(GeometricMedian(), found, torch.full((3,), 1 / 3, dtype=torch.float64), list("abc"))
    if weights is not None:
        assert tuple(m.values()) == pytest.approx(weights, abs=1e-6)
        return
    z = sum(w * x / 3 for w, x in zip(m.values(), points, strict=True))
    sides = [(x - z) / (x - z).norm() for x in points]
    for a, b in ((0, 1), (1, 2), (2, 0)):
        assert math.degrees(math.acos(float(sides[a] @ sides[b]))) == pytest.approx(120, abs=1e-3)


def of_points(rule: Rule, X: Tensor, p: Tensor | None = None) -> tuple[Tensor, float]:
    """The robust change of the points X (n, d) of weights p, or which count alike, and what the rule says that it
    left."""
    top = X.abs().amax(dim=1)
    size = torch.linalg.vector_norm(X / top[:, None], dim=1)
    U = X / top[:, None] / size[:, None]
    cosines = (U @ U.mT).fill_diagonal_(1.0).clamp(-1, 1)
    p = torch.full((len(X),), 1 / len(X), dtype=torch.float64) if p is None else p
    names = [str(k) for k in range(len(X))]
    m, judged = weigh(rule, Changes(size * top, cosines, 1e-15 * size * top), p, names)
    c = p * torch.tensor([m[name] for name in names], dtype=torch.float64)
    return c @ X, judged.facts["left"]


@pytest.mark.parametrize("sizes", [(4e4, 3e84), (1e-2, 2e17), (1e60, 1e130)])
def test_far_liars_behind_mixing_carry_nothing_away(sizes: tuple[float, float]) -> None:
    """*attack*: two of seven clients lie. In float64 all sums of distances to the far one are equal. After mixing, the
    honest changes are one point, the median; the rule once went 1e83 away, or reported an error of 1e141."""
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        X = 1 + 0.4 * torch.randn(7, 8, generator=g, dtype=torch.float64)
        for k, size in enumerate(sizes):
            X[k] = torch.nn.functional.normalize(torch.randn(8, generator=g, dtype=torch.float64), dim=0) * size
        centre = X[2:].mean(dim=0)
        radius = float((X[2:] - centre).norm(dim=1).max())
        median, left = of_points(Mixing(GeometricMedian(), liars=2), X)
        assert float((median - centre).norm()) < 2 * radius and left <= 1e-6, seed


def test_twins_at_the_median_share_its_weight() -> None:
    """Four of seven at one point, each in bad coordinates of its own: the median is theirs, and each counts alike."""
    server = Server(build("svd", energy=1.0), rule=GeometricMedian())
    wanted = [noise((12,), "t")] * 4 + [noise((12,), "t", k) for k in range(3)]
    state, uploads, _ = played(server, wanted)
    found = weights(server, state, in_other_coordinates(uploads, 1e6, seed=5))
    assert list(found.values()) == pytest.approx([7 / 4] * 4 + [0.0] * 3, abs=1e-6)


def test_who_is_not_at_the_median_is_told_why() -> None:
    X, p = torch.tensor([[0.0], [0.0], [0.0], [5.0]], dtype=torch.float64), torch.full((4,), 0.25, dtype=torch.float64)
    judged = GeometricMedian().weigh(Geometry(X @ X.T, torch.zeros(4, dtype=torch.float64), 2.0), p)
    assert set(judged.why) == {3} and "10 away" in judged.why[3], "5 in units of 2"


def test_a_bound_of_the_configuration_s_own_bears_any_number_of_liars() -> None:
    """One of three may lie and has half of the weight: it could set the median of the round's norms."""
    assert CentredClipping(tau=1.0, liars=1).liars_hold([0.2, 0.3, 0.5]) == 0.0
    assert CentredClipping(liars=1).liars_hold([0.2, 0.3, 0.5]) > 0.0


def test_the_median_on_a_line_where_the_sums_of_distances_are_alike() -> None:
    """By hand: sorted, the weights 0.2, 0.01, 0.22, 0.24, 0.33 pass a half at 1.4. Beside what far ones add to each sum
    of distances rounding hides which one is the least, and the search begins elsewhere."""
    X = torch.tensor([[1e76], [-1e46], [1.0], [1.4], [1.1]], dtype=torch.float64)
    median, left = of_points(GeometricMedian(), X, torch.tensor([0.33, 0.2, 0.01, 0.24, 0.22], dtype=torch.float64))
    assert float(median) == pytest.approx(1.4, rel=1e-12) and left == 0.0


# ---- hostile input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.said)
def test_one_upload_of_any_size_carries_nothing_away(rule: Rule) -> None:
    """Six honest changes near each other and one of any size: the server moves by what honest ones do."""
    for dtype, size in itertools.product((torch.float32, torch.float64), (1e150, 1e38, 1e18, 1e-45, 1e-300, 0.0)):
        server = Server(build("glora"), rule=rule, quorum=1)
        state = server.init(Adapter({"m": LoRA(torch.zeros(12, 3, dtype=dtype), noise((3, 10), "A", dtype=dtype))}))
        uploads = []
        for k in range(6):
            B = noise((12, 3), "common") + 0.1 * noise((12, 3), "own", k)
            uploads.append(
                Upload(Client(f"c{k}", 3), 10, Adapter({"m": LoRA(B.to(dtype), noise((3, 10), "A", dtype=dtype))}))
            )
        honest = Server(build("glora")).aggregate(state, uploads)
        want = server.global_update(honest)["m"].delta().double()
        B = (size * noise((12, 3), "liar")).to(dtype)
        liar = Upload(Client("liar", 3), 10, Adapter({"m": LoRA(B, noise((3, 10), "A", dtype=dtype))}))
        after = server.aggregate(state, [*uploads, liar])
        got = server.global_update(after)["m"].delta().double()
        if rule == Clip(threshold=0.7):  # which the honest ones are cut to as well
            assert float(got.norm()) <= 0.7 * (1 + 1e-5)
        else:
            assert torch.isfinite(got).all() and float((got - want).norm()) < 0.45 * float(want.norm())
        assert after.tally is not None and after.tally.judged is not None
        for one in after.tally.judged.clients.values():
            assert all(math.isfinite(x) for x in (one.norm, one.distance, one.after))


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.said)
def test_uploads_that_are_all_equal_or_all_unchanged(rule: Rule) -> None:
    """Alike in different coordinates: the mean is theirs. Unchanged: so is the server."""
    server = Server(build("svd", energy=1.0), rule=rule)
    for change in (0.1 * torch.ones(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)):
        state, uploads, sent = played(server, [change] * 7)
        after = server.aggregate(state, in_other_coordinates(uploads, 1e3, seed=0))
        got = server.global_update(after)["m"].delta() - sent
        assert float((got.flatten() - change).norm()) < 1e-8


@pytest.mark.parametrize(
    "rule",
    [Clip(liars=0), GeometricMedian(liars=0), CentredClipping(liars=0), Mixing(Clip(), liars=0)],
    ids=lambda r: r.said,
)
def test_one_client_or_two(rule: Rule) -> None:
    """One client is its own median. Of two alike in weight no rule can tell the liar: both norms stay below the lesser
    one, or both count as they came."""
    for count in (1, 2):
        server = Server(build("svd", energy=1.0), rule=rule)
        wanted = [noise((12,), "few", k) for k in range(count)]
        state, uploads, sent = played(server, wanted)
        after = server.aggregate(state, uploads)
        assert after.tally is not None and after.tally.judged is not None
        ratios = [one.after / one.before for one in after.tally.judged.clients.values()]
        assert all(0 < m <= 1 + 1e-9 for m in ratios)
        if count == 1:
            got = server.global_update(after)["m"].delta() - sent
            torch.testing.assert_close(got.flatten(), wanted[0])
        elif isinstance(rule, GeometricMedian):
            assert ratios == [1.0, 1.0]


def test_a_twin_in_other_coordinates_is_the_same_point() -> None:
    """Krum takes the first of two equal changes, whatever rounding does to them."""
    server = Server(build("svd", energy=1.0), rule=Krum(liars=1))
    common = noise((12,), "twin")
    wanted = [common, common, *(common + noise((12,), "twin", k) for k in range(5))]
    state, uploads, _ = played(server, wanted)
    for seed in range(5):
        found = weights(server, state, in_other_coordinates(uploads, 1e4, seed))
        assert found["c00"] > 0 and math.fsum(found.values()) == found["c00"]


def test_a_count_of_examples_that_no_rule_could_weigh_is_refused_and_named() -> None:
    """A multiplier divides by p_i: a claim of 1e30 examples would leave all others with none."""
    state, uploads = a_round(Server(build("glora")))
    server = Server(build("glora"), rule=MultiKrum(liars=1), quorum=5, weighting="examples")
    claims = [Upload(uploads[0].client, 1e30, uploads[0].adapter), *uploads[1:]]
    after = server.aggregate(state, claims)
    assert after.tally is not None and list(after.tally.refused) == ["c0"]
    assert "1e+30 examples" in after.tally.refused["c0"]
    with pytest.raises(QuorumNotMet, match=r"5 usable uploads, .*quorum .*6"):
        replace(server, quorum=6).aggregate(state, claims)


def test_a_rule_of_ones_own_that_gives_no_coefficients_is_named() -> None:
    class Mean(Clip):
        def weigh(self, geometry: Any, p: Tensor) -> Any:
            return p

    state, uploads = a_round(Server(build("glora")))
    with pytest.raises(HyperparameterError, match="a Weighed is needed"):
        Server(build("glora"), rule=Mean()).aggregate(state, uploads)


def test_what_rounding_can_tell_apart_and_what_not() -> None:
    """Squared distances under u times the squared norms, or under the noise of the points' own
    coordinates, are zero."""
    near = torch.tensor([[1.0, 1 - 4e-16], [1 - 4e-16, 1.0]], dtype=torch.float64)
    apart = torch.tensor([[1.0, 1 - 5e-11], [1 - 5e-11, 1.0]], dtype=torch.float64)
    none, some = torch.zeros(2, dtype=torch.float64), torch.full((2,), 1e-5, dtype=torch.float64)
    assert not Geometry(near, none, 1.0).squares().any()
    assert float(Geometry(apart, none, 1.0).squares()[0, 1]) == pytest.approx(1e-10, rel=1e-4)
    assert not Geometry(apart, some, 1.0).squares().any()
