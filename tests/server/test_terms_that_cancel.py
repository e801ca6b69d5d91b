"""Uploads whose columns are huge beside what they add up to: liars that hide in rounding, and honest bad coordinates.

Kinds of evidence: *attack* (found by a stranger: one client of seven whose terms of 1e15 cancel was logged as "no
change", kept, and its columns wiped out everybody), *oracle* (dense float64 sums of what was sent).
"""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Server, ServerState, Upload, build
from fedlora.core.method import Update
from fedlora.core.multiplied import How, multiplied, plain_pair
from fedlora.errors import QuorumNotMet, UploadRefused
from fedlora.linalg import shortest
from fedlora.linalg.cancelling import may_cancel, terms_and_size
from fedlora.linalg.parallel import one_by_one
from fedlora.server.cancelling import cancelling
from fedlora.server.changes import Changes, Sent, changes
from fedlora.server.robust_rules import CentredClipping, Clip, GeometricMedian, Krum, MultiKrum, Rule
from support.federations import noise

SHAPE, RANK = (32, 24), 4
EXACT = {"glora": {}, "flexlora": {}, "svd": {"energy": 1.0}, "flora": {}, "fedex-lora": {}}
RULES: list[Rule] = [MultiKrum(liars=1), Krum(liars=1), Clip(), GeometricMedian(), CentredClipping()]


def dense(lora: LoRA) -> Tensor:
    return lora.map(Tensor.double).delta()


def honest(server: Server, count: int = 6, rounds: int = 0) -> tuple[ServerState, list[Upload]]:
    """float32 clients that agree up to a fifth, after some rounds, so that readouts are no zeros."""
    start = LoRA(torch.zeros(SHAPE[0], RANK), noise((RANK, SHAPE[1]), "A", dtype=torch.float32) / 5)
    plain = Server(server.method)
    state = plain.init(Adapter({"q": start}))
    uploads: list[Upload] = []
    for t in range(rounds + 1):
        uploads = []
        for k in range(count):
            client = Client(f"site-{k}", RANK)
            B, A = plain.download(state, client).adapter.modules["q"].factors
            step = 0.1 * noise(B.shape, "step", dtype=torch.float32) + 0.02 * noise(B.shape, t, k, dtype=torch.float32)
            uploads.append(Upload(client, 100, Adapter({"q": LoRA(B + step, A)})))
        state = plain.aggregate(state, uploads) if t < rounds else state
    return state, uploads


def liar(power: int, amount: float) -> Upload:
    """A change of norm `amount` beside two terms of some 1e3 x 4^power that cancel exactly, in float32."""
    u, v, w = (noise((n,), name, dtype=torch.float32) for n, name in ((32, "u"), (24, "v"), (24, "w")))
    big_u, big_v = (torch.round(64 * x) * 2.0**power for x in (u, v))
    B = torch.stack([big_u, -big_u, u / u.norm(), 0 * u], dim=1)
    A = torch.stack([big_v, big_v, amount * w / w.norm(), 0 * w])
    return Upload(Client("site-6", RANK), 100, Adapter({"q": LoRA(B, A)}))


@pytest.mark.quick(12)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@pytest.mark.parametrize("name", EXACT)
def test_one_liar_whose_terms_cancel_is_measured_or_refused_and_never_no_change(name: str, rule: Rule) -> None:
    """For terms of any size: its norm is its true one, or it is refused by name and the round is the others'."""
    server = Server(build(name, **EXACT[name]), rule=rule, quorum=1)
    state, uploads = honest(server)
    alone = server.global_update(server.aggregate(state, uploads))["q"]
    fates = set()
    for power in (-3, 6, 10, 12, 13, 14, 15, 16, 20):
        bad = liar(power, 10.0)
        after = server.aggregate(state, [*uploads, bad])
        assert after.tally is not None and after.tally.judged is not None
        got = dense(server.global_update(after)["q"])
        if "site-6" in after.tally.refused:
            assert "cannot be measured" in after.tally.refused["site-6"]
            assert "site-6" not in after.tally.weights and torch.equal(got, dense(alone))
            fates.add("refused")
            continue
        fates.add("measured")
        told = after.tally.judged.clients
        true = dense(bad.adapter.modules["q"])
        assert told["site-6"].norm == pytest.approx(float(true.norm()), rel=1e-3)
        sent = {u.client.id: dense(u.adapter.modules["q"]) for u in [*uploads, bad]}
        want = sum(told[k].after * X for k, X in sent.items())  # readouts are zero: B = 0
        assert float((got - want).norm() / want.norm()) < 5e-6, power
        assert told["site-6"].after < told["site-6"].before, "it is five times as large as everybody"
    assert fates == {"measured", "refused"}


@pytest.mark.parametrize("name", EXACT)
def test_without_a_rule_columns_that_cancel_move_nobodys_mean(name: str) -> None:
    """Attack: of 3, 5, 6 or 7 clients one has two columns of 2^k that add up to zero exactly. 1 / n is no float32, and
    the sum of p_i B_i, rounded in it, was 380 times the true one at 2^30. Oracle: the dense mean without the two."""
    server = Server(build(name, **EXACT[name]))
    for n in (3, 5, 6, 7):
        start, uploads = honest(server, count=n)
        u, v = (
            torch.round(2**21 * noise((d,), k, dtype=torch.float32).clamp(-1, 1)) / 2**21
            for d, k in ((32, "u"), (24, "v"))
        )
        B, A = (t.clone() for t in uploads[0].adapter.modules["q"].factors)
        for power in (0, 8, 14, 20, 24, 28):
            B[:, 0], A[0], B[:, 1], A[1] = u * 2.0**power, -3 * v, 3 * u * 2.0**power, v
            sent = [Upload(uploads[0].client, 100, Adapter({"q": LoRA(B.clone(), A.clone())})), *uploads[1:]]
            want = dense(LoRA(B[:, 2:], A[2:])) + sum(dense(each.adapter.modules["q"]) for each in uploads[1:])
            after = server.aggregate(start, sent)
            assert after.tally is not None and not after.tally.refused
            got = dense(server.global_update(after)["q"])
            assert float((got - want / n).norm() / (want / n).norm()) < 1e-6, (n, power)


@pytest.mark.quick(5)
@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("name", EXACT)
def test_the_sum_is_that_of_what_was_sent_in_coordinates_of_any_condition(name: str, rounds: int) -> None:
    """sum p_i (R_i + m_i X_i), dense in float64, of float32 uploads: to 1e-6, for conditions up to 1e12. Before, a rule
    cost glora seven digits at 1e8 (0.12 instead of 1e-7)."""
    plain = Server(build(name, **EXACT[name]))
    state, uploads = honest(plain, rounds=rounds)
    B, A = uploads[0].adapter.modules["q"].map(Tensor.double).factors
    for condition in (1.0, 1e3, 1e6, 1e9, 1e12):
        O, P = (torch.linalg.qr(noise((RANK, RANK), side)).Q for side in "OP")
        s = torch.logspace(0, 1, RANK, dtype=torch.float64) ** torch.tensor(condition).log10() / condition**0.5
        moved = LoRA((B @ O * s @ P).float(), (P.T / s @ O.T @ A).float())
        sent = [Upload(uploads[0].client, 100, Adapter({"q": moved})), *uploads[1:]]
        for rule in (MultiKrum(liars=1), Clip(), Clip(threshold=0.1)):
            after = Server(plain.method, rule=rule).aggregate(state, sent)
            assert after.tally is not None and after.tally.judged is not None and not after.tally.refused
            want = torch.zeros(SHAPE, dtype=torch.float64)
            base = torch.zeros(SHAPE, dtype=torch.float64)
            for u in sent:
                told = after.tally.judged.clients[u.client.id]
                down = plain.download(state, u.client)
                R, D = dense(down.adapter.modules["q"]), dense(u.adapter.modules["q"])
                want += told.before * R + told.after * (D - R)
                if "q" in down.base_delta:
                    base = dense(down.base_delta["q"])
            got = dense(plain.global_update(after)["q"]) - base
            assert float((got - want).norm() / want.norm()) < 2e-6, (condition, rule.said)


def test_with_a_multiplier_of_one_an_update_is_itself_and_its_plain_pair_the_same_update() -> None:
    """Bit for bit; and, for methods that average factors, with columns no larger than what they add up to."""
    one = LoRA(noise((32, 4), "B", dtype=torch.float32), noise((4, 24), "A", dtype=torch.float32))
    bad = liar(6, 10.0).adapter.modules["q"]
    for how in get_args(How):
        for lora in (one, bad):
            (got,) = multiplied(how, [Update("a", 0.5, 4, lora, torch.float32)], [one], [1.0])
            assert got.weight == 0.5 and got.lora is lora
    got = plain_pair(bad)
    B, A = got.factors
    assert got.rank == bad.rank and B.dtype == torch.float32
    torch.testing.assert_close(dense(got), dense(bad), rtol=0, atol=1e-5)
    assert float(B.norm() * A.norm()) < 100 and float(bad.factors[0].norm()) > 1e4


def test_who_cannot_be_measured_counts_for_no_quorum_and_for_no_rule() -> None:
    state, uploads = honest(Server(build("glora")), count=5)
    bad = liar(18, 10.0)
    with pytest.raises(QuorumNotMet, match=r"site-6: .*cannot be measured"):
        Server(build("glora"), rule=Clip(), quorum=6).aggregate(state, [*uploads, bad])
    tally = Server(build("glora"), rule=MultiKrum(liars=1), quorum=4).aggregate(state, [*uploads[:4], bad]).tally
    assert tally is not None and tally.judged is not None and list(tally.refused) == ["site-6"]
    assert tally.judged.rule == "multi-krum (liars = 0)"  # it was the one
    with pytest.raises(QuorumNotMet, match=r"multi-krum with 1 liar .* 5"):
        Server(build("glora"), rule=MultiKrum(liars=1)).aggregate(state, uploads[:4])


def test_what_may_hide_is_compared_with_the_round_and_not_with_the_client_itself() -> None:
    """noise against 1e-3 of the larger of its own norm and the lower median; of a round in which nobody moved, against
    a million times the usual noise."""

    def measured(norms: list[float], noises: list[float]) -> list[bool]:
        n = torch.tensor(norms, dtype=torch.float64)
        return Changes(n, torch.eye(len(n)).double(), torch.tensor(noises, dtype=torch.float64)).measured().tolist()

    assert measured([1, 1, 1, 0], [1e-9, 1e-9, 0, 0.9e-3]) == [True] * 4
    assert measured([1, 1, 1, 0], [1e-9, 1e-9, 0, 1.1e-3]) == [True, True, True, False]
    assert measured([1, 1, 1, 1e9], [1e-9, 1e-9, 0, 1e5]) == [True] * 4, "far away, wherever exactly"
    assert measured([0, 0, 0, 0], [1e-15, 1e-15, 1e-15, 1e-10]) == [True] * 4, "nobody moved; coordinates of 1e5"
    assert measured([0, 0, 0, 0], [1e-15, 1e-15, 1e-15, 1e-3]) == [True, True, True, False]
    assert measured([0, 0, 1], [0, 0, float("nan")]) == [True, True, False]
    assert measured([0, 0, float("inf")], [0, 0, float("inf")]) == [True, True, False]
    assert measured([5], [1.0]) == [False]
    assert measured([1, 1, 1], [0.1, 0.1, 0.1]) == [False] * 3
    assert changes([], [], {}).measured().tolist() == []


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e150])
def test_the_shortest_pair_is_the_sum_and_no_longer(scale: float) -> None:
    """Dense float64; orthogonal columns of equal sizes on both sides; terms that cancel leave no column."""
    B, A, C, D = noise((9, 3), "B"), noise((3, 7), "A"), noise((9, 2), "C"), noise((2, 7), "D")
    left, right = shortest([(0.5, B * scale, A), (-2.0, C * scale, D), (1e9, B * scale, A), (-1e9, B * scale, A)])
    want = 0.5 * B @ A - 2 * C @ D
    assert left.shape == (9, 5) or left.shape[1] <= 7
    assert float((left / scale**0.5 @ (right / scale**0.5) - want).norm() / want.norm()) < 1e-6  # 1e9 of float64
    gram = left.T @ left / scale
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-7)
    torch.testing.assert_close(gram, right @ right.T / scale, rtol=0, atol=1e-6)
    zero = shortest([(1.0, B, A), (-1.0, B, A)])
    assert zero[0].shape == (9, 1) and not zero[0].any() and not zero[1].any()
    assert not shortest([(0.0, B, A)])[0].any()


def test_columns_of_zeros_and_of_any_size_change_no_sum() -> None:
    """A zero column beside a row of 1e300, with terms of 1e-400: alone, by hand, they are one outer product. Where all
    columns of B are zero, one column says so."""
    b, a = noise((9,), "b"), noise((7,), "a")
    B, A = torch.stack([0 * b, 1e-200 * b], dim=1), torch.stack([1e300 * a, 1e-200 * a])
    left, right = shortest([(1.0, B, A)])
    torch.testing.assert_close(1e200 * left @ (1e200 * right), torch.outer(b, a), rtol=1e-12, atol=1e-12)
    assert [t.tolist() for t in shortest([(1.0, 0 * B, A)])] == [[[0.0]] * 9, [[0.0] * 7]]


def test_changes_of_terms_that_cancel_in_one_module_only() -> None:
    """The noise is over all modules: a quiet one does not hide a loud one."""
    bad = liar(30, 10.0).adapter.modules["q"]
    zero = LoRA(torch.zeros(32, 4), torch.zeros(4, 24))
    good = [LoRA(noise((32, 4), k), noise((4, 24), k)) for k in range(4)]
    modules = [[Sent(x, zero) for x in (*good[:3], x)] for x in (bad, good[3])]
    uploads = [Upload(Client(f"c{k}", 4), 1, Adapter({})) for k in range(4)]
    assert changes(modules, uploads, {}).measured().tolist() == [True, True, True, False]


# ------------------------------------------------------------------------------- every round, with a rule or without

AVERAGED = sorted(name for name in METHODS if build(name).roles(0).both_shared)
ONE_FACTOR = sorted(set(METHODS) - set(AVERAGED))
POWERS = (-3, -2, 0, 4, 10, 11, 12, 17, 20)


@pytest.mark.parametrize("name", AVERAGED)
def test_no_round_is_wiped_out_by_terms_that_cancel(name: str) -> None:
    """Contract of every method, without any rule. Before, columns of 2^20 made the next state 0 (glora, flexlora, svd,
    flora) or 1e7 to 1e9 (all others). Oracle: for products the dense mean in float64 of what was sent by those who
    count; for averages of factors no more than a hundred times the largest of what was sent. Refused is who is named,
    and then the state is that of the others bit for bit."""
    server = Server(build(name, **EXACT.get(name, {})), quorum=2)
    state, uploads = honest(server, rounds=1)
    alone = server.global_update(server.aggregate(state, uploads))["q"]
    down = server.download(state, uploads[0].client)
    base = dense(down.base_delta["q"]) if "q" in down.base_delta else torch.zeros(SHAPE, dtype=torch.float64)
    fates = set()
    for power in POWERS:
        for amount in (0.0, 10.0):
            bad = liar(power, amount)
            after = server.aggregate(state, [*uploads, bad])
            assert after.tally is not None
            got = dense(server.global_update(after)["q"])
            if "site-6" in after.tally.refused:
                assert "cannot be measured" in after.tally.refused["site-6"]
                assert torch.equal(got, dense(alone)) and "site-6" not in after.tally.weights
                fates.add("refused")
                continue
            fates.add("counted")
            sent = [dense(u.adapter.modules["q"]) for u in [*uploads, bad]]
            if name in EXACT:
                want = sum(sent) / 7 + base
                assert float((got - want).norm() / want.norm()) < 5e-4, (power, amount)
            else:
                assert float((got - base).norm()) < 100 * max(float(x.norm()) for x in sent), (power, amount)
    assert fates == {"counted", "refused"}


@pytest.mark.parametrize("name", ONE_FACTOR)
def test_where_one_factor_travels_its_columns_have_nothing_to_cancel_with(name: str) -> None:
    """Such a method averages the factor itself, entry by entry. Expected: the dense float64 mean of the uploads."""
    server = Server(build(name))
    state = server.init(Adapter({"q": LoRA(torch.zeros(32, 4), noise((4, 24), "A", dtype=torch.float32) / 5)}))
    uploads = []
    for k in range(6):
        client = Client(f"site-{k}", 4)
        down = server.download(state, client).adapter.modules["q"]
        travels = "B" if server.roles(state).B == "shared" else "A"
        tensor = down.tensors()[travels]
        scale = torch.tensor([2.0**20, -(2.0**20), 1.0, 0.0]) if k == 5 else torch.ones(4)
        moved = tensor + noise(tensor.shape, k, dtype=torch.float32) * (scale if travels == "B" else scale[:, None])
        uploads.append(Upload(client, 100, Adapter({"q": LoRA(moved, None) if travels == "B" else LoRA(None, moved)})))
    after = server.aggregate(state, uploads)
    assert after.tally is not None and not after.tally.refused
    if server.has_global_model(after):
        A = server.download(state, uploads[0].client).adapter.modules["q"].factors[1].double()
        want = sum(u.adapter.modules["q"].tensors()["B"].double() for u in uploads) / 6 @ A
        assert float((dense(server.global_update(after)["q"]) - want).norm() / want.norm()) < 1e-5


def test_where_little_cancels_uploads_are_handed_on_as_they_came() -> None:
    """The same tensors, not equal ones: of clients of drawn factors, in their own coordinates and in bad ones (a
    condition of 30), in a diagonal gauge of 1e12, with slots of zeros, and that did not move at all."""
    for name in AVERAGED:
        server = Server(build(name))
        state, uploads = honest(server)
        B, A = uploads[0].adapter.modules["q"].factors
        turned = torch.linalg.qr(noise((RANK, RANK), "turn", dtype=torch.float32)).Q * torch.logspace(0, 1.5, RANK)
        sizes = torch.tensor([1e6, 1.0, 1e-6, 1e3])
        kinds = {
            "turned": LoRA(B @ turned, torch.linalg.inv(turned) @ A),
            "diagonal": LoRA(B * sizes, A / sizes[:, None]),
            "zeros": LoRA(B * torch.tensor([1.0, 0.0, 1.0, 0.0]), A),
            "unmoved": LoRA(torch.zeros_like(B), A),
            "double": LoRA(B.double() * 1e-25, A.double()),
        }
        more = [Upload(Client(kind, RANK), 100, Adapter({"q": pair})) for kind, pair in kinds.items()]
        found = cancelling(server.terms(state), [*uploads, *more], one_by_one)
        assert not found.refused and not found.plain, name
        for upload in [*uploads, *more]:
            pair = upload.adapter.modules["q"]
            assert found.handed_on("q", upload.client.id, pair) is pair


def test_who_is_handed_on_in_other_columns_is_named(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(build("padded-average"))
    state, uploads = honest(server)
    with caplog.at_level("WARNING", "fedlora.server"):
        server.aggregate(state, uploads)
        assert not caplog.records
        server.aggregate(state, [*uploads, liar(6, 10.0)])
    assert re.search(r"round 1: .*site-6 \(8\.7e\+07", caplog.text) and "times in q)" in caplog.text


def test_who_is_refused_when_a_round_is_closed_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(build("glora"), quorum=6)
    state, uploads = honest(server)
    with caplog.at_level("WARNING", "fedlora.server"):
        server.aggregate(state, [*uploads, liar(18, 10.0)])
    assert re.search("'site-6' refused: .*cannot be measured", caplog.text)
    with pytest.raises(QuorumNotMet, match=r"site-6: .*cannot be measured"):
        Server(build("glora"), quorum=7).aggregate(state, [*uploads, liar(18, 10.0)])


@pytest.mark.parametrize("options", [{}, {"memory": 0.005}, {"rule": Clip()}], ids=str)
def test_without_a_quorum_who_is_refused_when_a_round_is_closed_stops_it(options: dict[str, Any]) -> None:
    """As the first bad upload does (`Server`, quorum). Attack: it was left out, with one line in the log."""
    server = Server(build("glora", history_limit=0), **options)
    state, uploads = honest(server, count=12)
    with pytest.raises(UploadRefused, match=r"'site-6' refused: .*cannot be measured"):
        server.aggregate(state, [*uploads[:6], *uploads[7:], liar(18, 10.0)])


def test_they_are_refused_before_uploads_are_added_up() -> None:
    """The mean of the others; the liar is named. Unseen, it was 1e-1 off and more."""
    server = Server(build("glora", history_limit=0), memory=0.005, quorum=2)
    state, uploads = honest(Server(build("glora")), count=12)
    bad = Upload(Client("aa", RANK), 100, liar(18, 10.0).adapter)
    after = server.aggregate(state, [bad, *uploads])
    assert after.tally is not None and "cannot be measured" in after.tally.refused["aa"]
    got, want = dense(server.global_update(after)["q"]), sum(dense(u.adapter.modules["q"]) for u in uploads) / 12
    assert float((got - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_quick_look_never_misses_what_cancels(dtype: torch.dtype) -> None:
    """`may_cancel` in the factors' own dtype against `terms_and_size` in float64, from one to a million times."""
    for power in torch.linspace(0, 6, 25).tolist():
        u, v, w, x = (noise((n,), name) for n, name in ((40, "u"), (30, "v"), (30, "w"), (40, "x")))
        B = torch.stack([u, -u, x * 10**-power], dim=1).to(dtype)
        A = torch.stack([v, v, w]).to(dtype)
        ((said, size),) = may_cancel([(B, A)])
        terms, true = terms_and_size(B, A)
        assert true == pytest.approx(float((B.double() @ A.double()).norm()), rel=1e-6)
        assert said or (terms < 101 * true and size == pytest.approx(true, rel=1e-2)), power
    assert may_cancel([(torch.zeros(4, 2), torch.ones(2, 4))]) == [(False, 0.0)]
    ((said, _),) = may_cancel([(torch.full((4, 2), 1e-30), torch.ones(2, 4))])
    assert said, "float32 cannot tell: looked at in float64"
