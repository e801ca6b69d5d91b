"""The server's arithmetic: quorum, weights, heads, modules that some lack, order, purity, dtypes, starts.

Kind of evidence: oracle (1 x 1 matrices by hand, dense float64 sums) and contract. Where a test compares two runs of
the server itself (order, quorum) it says so, and the other run is the expectation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, Kept, LoRA, Roles, Server, ServerState, Update, Upload, build
from fedlora.client import receive, send
from fedlora.core.base_change import BaseChange
from fedlora.errors import (
    FactorNotShared,
    HyperparameterError,
    NoGlobalModel,
    QuorumNotMet,
    ShapeError,
)
from fedlora.methods.fedit import FedIT
from support.federations import EQUAL, EXAMPLES, MIXED, SHAPES, pushed, seed_adapter
from support.states import content, tensors_in

F64 = torch.float64
RANKS = {name: EQUAL if method.one_rank else MIXED for name, method in METHODS.items()}
EXACT = [name for name in METHODS if "exact" in build(name).claims and build(name).roles(0).both_shared]
every_method = pytest.mark.parametrize("name", METHODS)
every_kind = pytest.mark.parametrize("name", ["fedex-lora", "fedit", "fedsa-lora", "ffa-lora", "glora"])


def uploads_of(
    server: Server,
    state: ServerState,
    ranks: Mapping[str, int | Mapping[str, int]] = EQUAL,
    *,
    round: int = 0,
) -> list[Upload]:
    """What the clients send after one round of the stand-in for training, from what they downloaded."""
    sent = []
    for name, rank in ranks.items():
        client = Client(name, rank)
        download = server.download(state, client)
        mine = pushed(receive(download, None), name, round, download.roles)
        sent.append(Upload(client, EXAMPLES[name], send(mine, download.roles)))
    return sent


def opened(name: str, dtype: torch.dtype = F64, **options: Any) -> tuple[Server, ServerState, list[Upload]]:
    """A server of the method, its start, and a round of uploads to it."""
    server, ranks = Server(build(name), **options), RANKS[name]
    state = server.init(seed_adapter(max(ranks.values()), dtype))
    return server, state, uploads_of(server, state, ranks)


@pytest.mark.parametrize("name", ["glora", "fedex-lora"])
def test_a_subclass_is_asked_by_its_own_aggregate(name: str) -> None:
    """Also below a method that aggregates all matrices at once. The expected bits are that method's own."""
    asked: list[int] = []
    kind: Any = METHODS[name]

    class Counting(kind):  # type: ignore[misc] # of any method
        def aggregate(self, state: Any, updates: Sequence[Update]) -> Any:
            asked.append(len(updates))
            return super().aggregate(state, updates)

    server, state, uploads = opened(name)
    got = replace(server, method=Counting()).aggregate(state, uploads)
    assert len(asked) == len(state.modules)
    assert content(got.modules) == content(server.aggregate(state, uploads).modules)


def scalar_upload(client: str, n: float, B: float, A: float = 1.0, *, head: float | None = None) -> Upload:
    """A 1 x 1 update of rank 1, so that expected means fit in one's head."""
    lora = LoRA(torch.full((1, 1), B, dtype=F64), torch.full((1, 1), A, dtype=F64))
    heads = {} if head is None else {"h": torch.full((1,), head, dtype=F64)}
    return Upload(Client(client, 1), n, Adapter({"m": lora}, heads))


def scalar_round(sent: Sequence[Upload], name: str = "glora", **options: Any) -> float:
    """The server's update after one round of scalar uploads."""
    server = Server(build(name), **options)
    state = server.init(scalar_upload("seed", 1, 0.0).adapter)
    return float(server.global_update(server.aggregate(state, sent))["m"].delta())


def relative(got: Tensor, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def dense_mean(uploads: Sequence[Upload], module: str) -> Any:
    """sum_i p_i B_i A_i over those that hold the module, float64."""
    held = [u for u in uploads if module in u.adapter.modules]
    total = sum(u.num_examples for u in held)
    return sum(u.num_examples / total * u.adapter.modules[module].map(Tensor.double).delta() for u in held)


# ---------------------------------------------------------------------------------------------------- who counts


def test_the_same_id_twice_in_a_round_the_first_one_stands() -> None:
    server, state, (a, b, c, d) = opened("fedit", round=Kept(quorum=1))
    silent = replace(c, num_examples=0)
    after = server.aggregate(state, [a, b, replace(d, client=a.client), silent, c])
    assert after.tally is not None
    assert sorted(after.tally.refused) == ["a", "c"] and "second upload" in after.tally.refused["a"]
    assert after.tally.abstained == ("c",)
    assert dict(after.tally.weights) == pytest.approx({"a": 10 / 35, "b": 25 / 35})  # EXAMPLES: a 10, b 25
    assert content(after.modules) == content(server.aggregate(state, [a, b]).modules)
    corrected = server.aggregate(state, [replace(a, num_examples=-1), replace(a, num_examples=-2), a, b])
    assert content(corrected.modules) == content(after.modules), "a client may correct itself"
    assert corrected.tally is not None and "-1" in corrected.tally.refused["a"], "the first reason"


def test_a_missed_quorum_says_who_and_why_and_leaves_state_and_round_usable() -> None:
    server, state, (a, b, c, d) = opened("glora", round=Kept(quorum=3))
    before = content(state)
    with pytest.raises(QuorumNotMet, match=r"round 1: 2 usable uploads, .*quorum .*3 \(1 abstained; refused: b: num"):
        server.aggregate(state, [a, replace(b, num_examples=-2), replace(c, num_examples=0), d])
    for nothing in ([], [replace(u, num_examples=0) for u in (a, b)]):
        with pytest.raises(QuorumNotMet, match=r"0 usable uploads, .*quorum .*1"):
            replace(server, round=Kept()).aggregate(state, nothing)
    assert content(state) == before
    round = server.open(state)
    for upload in (a, d):
        round.add(upload)
    with pytest.raises(QuorumNotMet):
        round.close()
    round.add(b)  # the third one comes late: the same round, and the same bits as if in time
    assert content(round.close()) == content(server.aggregate(state, [a, b, d]))
    with pytest.raises(HyperparameterError, match="closed"):
        round.add(c)


@every_kind
def test_zero_examples_abstain_outside_weights_history_and_quorum(name: str) -> None:
    """What an abstainer sends is not even looked at: here its factors are NaN."""
    server, state, (a, b, *rest) = opened(name, round=Kept(quorum=3))
    silent = replace(b, num_examples=0, adapter=b.adapter.map(lambda t: t * math.nan))
    without, after = server.aggregate(state, [a, *rest]), server.aggregate(state, [a, silent, *rest])
    assert after.tally is not None and after.tally.abstained == ("b",) and not after.tally.refused
    assert dict(after.tally.weights) == pytest.approx({"a": 10 / 65, "c": 40 / 65, "d": 15 / 65})  # EXAMPLES
    assert content(replace(after, tally=None)) == content(replace(without, tally=None))
    with pytest.raises(QuorumNotMet):
        replace(server, round=Kept(quorum=4)).aggregate(state, [a, silent, *rest])


# --------------------------------------------------------------------------------------------------------- weights


def test_weights_are_examples_or_uniform() -> None:
    """By hand: (1 * 2 + 3 * 6) / 4 = 5, (2 + 6) / 2 = 4, heads alike. A zero update keeps its weight, for it says "my
    whole update is zero" (silence is 0 examples): (1 * 2 + 3 * 0) / 4 = 0.5. Fractions count: (0.5 * 2 + 1.5 * 6) / 2.
    """
    sent = [scalar_upload("a", 1, 2.0), scalar_upload("b", 3, 6.0)]
    silent = scalar_upload("c", 0, 100.0)
    assert scalar_round(sent) == pytest.approx(5.0, abs=1e-13)
    assert scalar_round([*sent, silent], round=Kept(weighting="uniform")) == pytest.approx(4.0, abs=1e-13)
    assert scalar_round([sent[0], scalar_upload("b", 3, 0.0)]) == pytest.approx(0.5, abs=1e-14)
    assert scalar_round([scalar_upload("a", 0.5, 2.0), scalar_upload("b", 1.5, 6.0)], "fedit") == pytest.approx(5.0)
    for weighting, want in (("examples", 5.0), ("uniform", 4.0)):
        server = Server(build("glora"), round=Kept(weighting=weighting))  # type: ignore[arg-type]
        state = server.init(scalar_upload("seed", 1, 0.0, head=0.0).adapter)
        after = server.aggregate(state, [scalar_upload("a", 1, 1.0, head=2.0), scalar_upload("b", 3, 1.0, head=6.0)])
        assert float(after.heads["h"]) == pytest.approx(want)


# ------------------------------------------------------------------------------------------------- missing modules


@pytest.mark.parametrize("name", EXACT)
def test_a_module_that_some_clients_lack(name: str) -> None:
    """Dense float64: sum over its holders of p_i X_i. One that nobody holds stays as it was."""
    r, s = (4, 4) if METHODS[name].one_rank else (2, 3)
    server = Server(build(name))
    state = server.init(seed_adapter(4))
    ranks = {"a": {"attn.q": r}, "b": {"attn.v": s}, "c": {"attn.q": 4, "attn.v": 4}, "d": {}}
    for client, rank in ranks.items():
        assert server.download(state, Client(client, rank)).adapter.ranks == rank
    sent = uploads_of(server, state, ranks)
    after = server.aggregate(state, sent)
    assert after.tally is not None
    assert dict(after.tally.weights) == pytest.approx({c: n / 90 for c, n in EXAMPLES.items()})
    for module, names in (("attn.q", ("a", "c")), ("attn.v", ("b", "c"))):
        held = [u for u in sent if u.client.id in names]
        assert relative(server.global_update(after)[module].delta(), dense_mean(held, module)) < 1e-12
    only_v = uploads_of(server, after, {"a": {"attn.v": 4}}, round=1)
    last = server.aggregate(after, only_v)
    assert content(last.modules["attn.q"]) == content(after.modules["attn.q"])
    assert content(last.modules["attn.v"]) != content(after.modules["attn.v"])


# ---------------------------------------------------------------------------------------------- order and purity


@every_method
def test_no_order_changes_a_bit_with_mixed_dtypes_modules_abstentions_and_refusals(name: str) -> None:
    """The whole state compared; the first order is the expectation."""
    server, state, sent = opened(name, round=Kept(quorum=1))
    a, b, _, d = sent
    narrow = replace(b, adapter=b.adapter.map(Tensor.bfloat16))
    only_v = uploads_of(server, state, {"c": {"attn.v": RANKS[name]["c"]}})[0]
    silent = replace(a, client=Client("e", a.client.rank), num_examples=0)
    bad = replace(d, client=Client("f", d.client.rank), num_examples=-1)
    sent = [a, narrow, only_v, silent, bad]
    expected = content(server.aggregate(state, sent))
    for order in list(permutations(sent))[::17]:
        assert content(server.aggregate(state, order)) == expected


@every_method
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's, once a process
def test_states_follow_neither_inputs_nor_outputs_and_repeat_bitwise(name: str) -> None:
    """Uploads may be overwritten in the next round, and the seed may be a live model's parameters. Whoever writes into
    a download or a global update writes into copies. A state that required grad would hold graphs for ever."""
    server, seed = Server(build(name)), seed_adapter(max(RANKS[name].values()))
    live = seed.map(lambda t: t.clone().requires_grad_(True))
    state = server.init(live)
    begun = content(state)
    for t in tensors_in((dict(live.modules), dict(live.heads))):
        t.detach().add_(1.0)
    assert content(state) == begun
    sent = [
        replace(u, adapter=u.adapter.map(lambda t: t.clone().requires_grad_(True)))
        for u in uploads_of(server, state, RANKS[name])
    ]
    uploaded = content([u.adapter for u in sent])
    after = server.aggregate(state, sent)
    assert (content(state), content([u.adapter for u in sent])) == (begun, uploaded)
    assert content(server.aggregate(state, sent)) == content(after)
    kept = content(after)
    assert not any(t.requires_grad for t in tensors_in(after))
    handed = [server.download(after, u.client) for u in sent]
    assert content([server.download(after, u.client) for u in sent]) == content(handed)
    updates = server.global_update(after) if server.has_global_model(after) else {}
    for t in tensors_in(([u.adapter for u in sent], [(d.adapter, d.start, receive(d, None)) for d in handed], updates)):
        t.detach().fill_(7.0)
    assert content(after) == kept


# ---------------------------------------------------------------------------------------------------------- dtypes


def stored(state: object) -> list[Tensor]:
    """All but the running sum of base changes, which is float64 whatever the adapters are."""
    if isinstance(state, BaseChange):
        return tensors_in(state.steps)
    if isinstance(state, Mapping):
        return [t for one in state.values() for t in stored(one)]
    parts = vars(state).values() if hasattr(state, "__dataclass_fields__") else []
    return [state] if isinstance(state, Tensor) else [t for one in parts for t in stored(one)]


def cast_to(dtype: torch.dtype) -> Any:
    return lambda t: t.to(dtype)


@every_method
def test_each_dtype_stays_itself_and_the_widest_of_a_round_wins(name: str) -> None:
    """float32 and float64 stay; narrower ones become float32; one float64 upload makes the next state float64."""
    for dtypes, want in (
        ([torch.float32], torch.float32), ([F64], F64), ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.bfloat16, torch.float32, F64], F64),
    ):  # fmt: skip
        server, state, sent = opened(name, torch.float32 if want != F64 else F64)
        in_turn = (dtypes[k % len(dtypes)] for k in range(len(sent)))
        cast = [replace(u, adapter=u.adapter.map(cast_to(d))) for u, d in zip(sent, in_turn, strict=True)]
        after = server.aggregate(state, cast)
        assert {x.dtype for x in stored(after.modules)} == {want}
        for upload in sent:
            assert {x.dtype for x in tensors_in(server.download(after, upload.client).adapter)} == {want}
        if name in EXACT:
            for module in SHAPES:
                got = server.global_update(after)[module].map(Tensor.double).delta()
                assert relative(got, dense_mean(cast, module)) < (1e-10 if want == F64 else 3e-6)


@dataclass(frozen=True)
class Watching(FedIT):
    """Tells what it gets."""

    name: ClassVar[str] = "watching"
    seen: ClassVar[list[Update]] = []

    def aggregate(self, state: LoRA, updates: Sequence[Update]) -> LoRA:
        self.seen[:] = updates
        return super().aggregate(state, updates)


def test_two_dtypes_in_one_pair_are_promoted_together() -> None:
    """B in bfloat16 and A in float64: exact in float64, as 1.5 and 0.25 are exact in both; the method hears of the
    coarser one's unit roundoff, 2^-8."""
    lora = LoRA(torch.full((1, 1), 1.5, dtype=torch.bfloat16), torch.full((1, 1), 0.25, dtype=F64))
    sent = [Upload(Client("a", 1), 1, Adapter({"m": lora}))]
    assert scalar_round(sent) == pytest.approx(0.375, abs=1e-15)
    server = Server(Watching())
    server.aggregate(server.init(scalar_upload("seed", 1, 0.0).adapter), sent)
    assert [(u.client, u.weight, u.rank, u.roundoff) for u in Watching.seen] == [("a", 1.0, 1, 2.0**-8)]


# ------------------------------------------------------------------------------------------------ start and readout


@pytest.mark.parametrize("name", ["flexlora", "glora"])
def test_fresh_rows_are_a_function_of_seed_round_client_and_module(name: str) -> None:
    """After a round of zeros every slot is fresh: B = 0, and rows of A that repeat exactly, others for each client. In
    the first round all get those of the common start, and a dead slot of the seed is alive."""
    start = seed_adapter(4)
    zeros = Adapter({m: x.map(torch.zeros_like) for m, x in start.modules.items()}, start.heads)

    def rows(seed: int, rounds: int, client: str, module: str, begun: Adapter = start) -> Tensor:
        server = Server(build(name), seed=seed)
        state = server.init(begun)
        for _ in range(rounds):
            state = server.aggregate(state, [Upload(Client("z", 4), 5, zeros)])
        B, A = server.download(state, Client(client, 4)).adapter.modules[module].factors
        assert not bool(B.any())
        return A

    first = rows(0, 1, "a", "attn.q")
    assert torch.equal(rows(0, 1, "a", "attn.q"), first)
    assert float(first.abs().max()) <= 1 / math.sqrt(22)  # uniform on +-1/sqrt(d_in), as PEFT starts A
    for other in ((1, 1, "a", "attn.q"), (0, 2, "a", "attn.q"), (0, 1, "b", "attn.q"), (0, 1, "a", "attn.v")):
        assert not bool((rows(*other) == first).any())
    assert torch.equal(rows(0, 0, "a", "attn.q"), start.modules["attn.q"].factors[1])
    assert bool((rows(0, 0, "a", "attn.q", zeros) != 0).all())


# --------------------------------------------------------------------------------------------------- own methods


class HandsOutAll(FedIT):
    """B stays with its client, and the readout has it all the same."""

    def roles(self, round: int) -> Roles:
        return Roles(B="local")


def test_what_roles_leave_to_a_client_is_not_sent() -> None:
    server = Server(HandsOutAll())
    download = server.download(server.init(seed_adapter(4)), Client("a", 4))
    assert {f for x in download.adapter.modules.values() for f in x.tensors()} == {"A"}
    assert {f for x in download.start.modules.values() for f in x.tensors()} == {"B"}


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Server("glora"), r"method is a Method, .*got 'glora'"),  # type: ignore[arg-type]
        (lambda: Server(build("fedit"), heads="shared"), r"heads is one of .*got 'shared'"),  # type: ignore[arg-type]
        (lambda: Kept(weighting="size"), r"weighting .*\('examples', 'uniform'\); got 'size'"),  # type: ignore[arg-type]
        (lambda: Kept(quorum=0), r"quorum is at least 1 .*; got 0"),
        (lambda: Kept(quorum=1.5), r"quorum is at least 1 .*; got 1.5"),  # type: ignore[arg-type]
        (lambda: Kept("krum"), r"rule is a robust rule, as Krum\(f=1\), or None; got 'krum'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_options_are_named(make: Any, message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        make()


def test_a_seed_that_is_no_start_is_refused() -> None:
    seed, server = seed_adapter(2), Server(build("fedit"))
    with pytest.raises(ShapeError, match="no modules: "):
        server.init(Adapter({}, seed.heads))
    with pytest.raises(FactorNotShared, match="factor B"):
        server.init(Adapter({m: LoRA(None, x.A) for m, x in seed.modules.items()}))
    with pytest.raises(ShapeError, match=r"NaN or Inf .*factor B of module 'attn\.v'"):
        bad = seed.modules["attn.v"].map(lambda t: t + math.nan)
        server.init(Adapter({**seed.modules, "attn.v": bad}, seed.heads))
    with pytest.raises(ShapeError, match="changed base weights"):
        server.init(replace(seed, base=seed.modules))


def test_a_method_without_global_model_says_so() -> None:
    server, state, _ = opened("fedsa-lora")
    assert not server.has_global_model(state)
    with pytest.raises(NoGlobalModel, match="fedsa-lora keeps no global model"):
        server.global_update(state)
