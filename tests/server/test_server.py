"""The server's door and its arithmetic: refusals, quorum, weights, heads, dtypes. Kind of evidence: contract, oracle.

Refusals are contracts: by client id, with the reason, and with not one bit of the state changed. Expected models are
hand-computed on 1 x 1 matrices, or dense float64 sums over the uploaded factors; where a test compares two runs of the
server itself (order, quorum) it says so, and the other run is the expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import permutations
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, LoRA, Method, Readout, Roles, Server, ServerState, Update, Upload, build
from fedlora.client import receive, send
from fedlora.core.base_change import BaseChange
from fedlora.errors import (
    FedLoRAError,
    HyperparameterError,
    NoGlobalModel,
    QuorumNotMet,
    RankMismatch,
    ShapeError,
    UploadRefused,
)
from fedlora.methods.svd import SVD
from fedlora.server.closing import warn_of_losses
from support.federations import EQUAL, EXAMPLES, HEADS, MIXED, SHAPES, pushed, seed_adapter

F64 = torch.float64
ANY_RANK = ("fedsvd", "ffa-lora", "flexlora", "flora", "glora", "hetlora", "padded-average", "rolora", "svd")
RANKS = {name: MIXED if name in ANY_RANK else EQUAL for name in METHODS}
SPECTRAL = ("flexlora", "glora", "svd")
EXACT = ("fedex-lora", "flora", *SPECTRAL)
FROZEN_A = ("fedsvd", "ffa-lora", "rolora")  # in the first round
WITH_MODEL = tuple(name for name in METHODS if name != "fedsa-lora")
every_method = pytest.mark.parametrize("name", METHODS)
every_kind = pytest.mark.parametrize("name", ["fedex-lora", "fedit", "fedsa-lora", "ffa-lora", "glora"])
every_formula = pytest.mark.parametrize("name", [name for name in WITH_MODEL if name != "lora-fair"])


def method(name: str) -> Method:
    """With the p_i of the server and nothing cut, so that one formula serves. Their own weights: test_baselines.py."""
    options = {"hetlora": {"weights": "examples"}, "svd": {"energy": 1.0}}
    return build(name, **options.get(name, {}))  # type: ignore[arg-type]


def content(value: object) -> object:
    """All of a value as plain data, tensors as their bytes: equal exactly if the values are bitwise equal."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    if is_dataclass(value):
        return type(value).__name__, {f.name: content(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [content(item) for item in value]
    return repr(value)


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


def opened(name: str, dtype: torch.dtype = F64, **options: object) -> tuple[Server, ServerState, list[Upload]]:
    """A server of the method, its start, and a round of uploads to it."""
    server, ranks = Server(method(name), **options), RANKS[name]  # type: ignore[arg-type]
    state = server.init(seed_adapter(max(ranks.values()), dtype))
    return server, state, uploads_of(server, state, ranks)


def scalar_upload(client: str, n: float, B: float, A: float = 1.0, *, head: float | None = None) -> Upload:
    """A 1 x 1 update of rank 1, so that expected means fit in one's head."""
    lora = LoRA(torch.full((1, 1), B, dtype=F64), torch.full((1, 1), A, dtype=F64))
    heads = {} if head is None else {"h": torch.full((1,), head, dtype=F64)}
    return Upload(Client(client, 1), n, Adapter({"m": lora}, heads))


def scalar_server(name: str, **options: object) -> tuple[Server, ServerState]:
    server = Server(method(name), **options)  # type: ignore[arg-type]
    return server, server.init(scalar_upload("seed", 1, 0.0).adapter)


def scalar_round(name: str, sent: Sequence[Upload], **options: object) -> float:
    """The server's update after one round of scalar uploads; FedSA-LoRA, which has none, by its mean A."""
    server, state = scalar_server(name, **options)
    if name in FROZEN_A:
        sent = [replace(u, adapter=send(u.adapter, server.roles(state))) for u in sent]
    if name == "fedsa-lora":  # B stays home, and the number under test travels as A
        swapped = [(u, u.adapter.modules["m"].factors[0]) for u in sent]
        sent = [replace(u, adapter=Adapter({"m": LoRA(None, B)}, {})) for u, B in swapped]
        return float(server.download(server.aggregate(state, sent), Client("x", 1)).adapter.modules["m"].A)  # type: ignore[arg-type]
    return float(server.global_update(server.aggregate(state, sent))["m"].delta())


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def dense(upload: Upload, module: str) -> Tensor:
    return upload.adapter.modules[module].map(Tensor.double).delta()


# -------------------------------------------------------------------------------------------------------- refusals


def swapped(upload: Upload, change: Callable[[LoRA], LoRA | None], module: str = "attn.q") -> Upload:
    """`upload` with one module changed; None removes it."""
    modules = dict(upload.adapter.modules)
    changed = change(modules.pop(module))
    if changed is not None:
        modules[module] = changed
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def factor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Upload], Upload]:
    def change_one(lora: LoRA) -> LoRA:
        return LoRA(**{**lora.tensors(), name: change(lora.tensors()[name])})

    return lambda upload: swapped(upload, change_one)


def both(change_B: Callable[[Tensor], Tensor], change_A: Callable[[Tensor], Tensor]) -> Callable[[Upload], Upload]:
    return lambda upload: swapped(upload, lambda lora: LoRA(change_B(lora.factors[0]), change_A(lora.factors[1])))


def head(change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Callable[[Upload], Upload]:
    return lambda u: replace(u, adapter=Adapter(u.adapter.modules, change(u.adapter.heads)))


def poked(value: float) -> Callable[[Tensor], Tensor]:
    """A copy with one entry replaced."""

    def poke(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[3] = value
        return t

    return poke


def examples(n: object) -> Callable[[Upload], Upload]:
    return lambda upload: replace(upload, num_examples=n)  # type: ignore[arg-type]


def added(upload: Upload) -> Upload:
    modules = {**upload.adapter.modules, "attn.k": upload.adapter.modules["attn.q"]}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def declared(rank: int | Mapping[str, int]) -> Callable[[Upload], Upload]:
    return lambda upload: replace(upload, client=Client(upload.client.id, rank))


def same(t: Tensor) -> Tensor:
    return t


# attn.q is (30, 22), the client's rank is 4: B (30, 4), A (4, 22). Reasons are parts of what the server must say.
BAD: dict[str, tuple[Callable[[Upload], Upload], str]] = {
    "NaN in B": (factor("B", poked(math.nan)), r"factor B .*'attn.q' .*NaN or Inf in 1 of 120 "),
    "NaN in A": (factor("A", poked(math.nan)), r"factor A .*'attn.q' .*NaN or Inf in 1 of 88 "),
    "Inf in B": (factor("B", poked(math.inf)), r"factor B .*'attn.q' .*NaN or Inf in 1 of 120"),
    "-Inf in A": (factor("A", poked(-math.inf)), r"factor A .*'attn.q' .*NaN or Inf in 1 of 88"),
    "NaN in all of the last module": (
        lambda u: swapped(u, lambda x: x.map(lambda t: t * math.nan), "attn.v"),
        r"module 'attn.v' holds NaN or Inf",
    ),
    "B too short": (factor("B", lambda t: t[:-1]), r"factor B .*'attn.q' has shape \(29, 4\); it must be \(30, 4\)"),
    "B of one row (would broadcast)": (factor("B", lambda t: t[:1]), r"factor B .* has shape \(1, 4\)"),
    "A too wide": (factor("A", lambda t: torch.cat([t, t], 1)), r"factor A .* \(4, 44\); it must be \(4, 22\)"),
    "A of one column (would broadcast)": (factor("A", lambda t: t[:, :1]), r"factor A .* has shape \(4, 1\)"),
    "the other module's shape": (
        lambda u: swapped(u, lambda _: u.adapter.modules["attn.v"]),
        r"factor B .*'attn.q' .*\(18, 4\)",
    ),
    "rank 1 (would broadcast)": (
        both(lambda B: B[:, :1], lambda A: A[:1]),
        r"module 'attn.q' has rank 1; the client's rank is 4",
    ),
    "rank below": (both(lambda B: B[:, :3], lambda A: A[:3]), r"has rank 3; the client's rank is 4"),
    "rank above": (
        both(lambda B: torch.cat([B, B], 1), lambda A: torch.cat([A, A])),
        r"has rank 8; the client's rank is 4",
    ),
    "rank 0": (both(lambda B: B[:, :0], lambda A: A[:0]), r"has rank 0; the client's rank is 4"),
    "another rank declared than sent": (declared(2), r"has rank 4; the client's rank is 2"),
    "another rank declared for one module": (declared({"attn.q": 4, "attn.v": 3}), r"'attn.v' has rank 4; .* is 3"),
    "a rank for a module that is not there": (
        declared({"attn.q": 4, "attn.v": 4, "attn.k": 4}),
        r"a rank for 'attn.k', .*not an adapted module",
    ),
    "a module not declared": (declared({"attn.q": 4}), r"0 are missing \[\], 1 are unexpected \['attn.v'\]"),
    "module missing": (lambda u: swapped(u, lambda _: None), r"1 are missing \['attn.q'\], 0 are unexpected"),
    "module extra": (added, r"0 are missing \[\], 1 are unexpected \['attn.k'\]"),
    "module renamed": (
        lambda u: swapped(added(u), lambda _: None),
        r"1 are missing \['attn.q'\], 1 are unexpected \['attn.k'\]",
    ),
    "no modules": (lambda u: replace(u, adapter=Adapter({}, u.adapter.heads)), r"2 are missing"),
    "B absent": (
        lambda u: swapped(u, lambda x: LoRA(None, x.A)),
        r"module 'attn.q' carries factors \['A'\]; this round's roles share \['A', 'B'\]",
    ),
    "A absent": (
        lambda u: swapped(u, lambda x: LoRA(x.B, None)),
        r"carries factors \['B'\]; this round's roles share \['A', 'B'\]",
    ),
    "heads missing": (head(lambda h: {}), r"heads \[\] were sent; this round shares \['classifier.bias', 'class"),
    "one head missing": (
        head(lambda h: {k: v for k, v in h.items() if k != "classifier.bias"}),
        r"heads \['classifier.weight'\] were sent",
    ),
    "head extra": (head(lambda h: {**h, "pooler": h["classifier.bias"]}), r"heads \[.*'pooler'\] were sent"),
    "head of one row (would broadcast)": (
        head(lambda h: {**h, "classifier.weight": h["classifier.weight"][:1]}),
        r"head 'classifier.weight' has shape \(1, 30\); it must be \(3, 30\)",
    ),
    "head a scalar (would broadcast)": (
        head(lambda h: {**h, "classifier.bias": h["classifier.bias"][0]}),
        r"head 'classifier.bias' has shape \(\); it must be \(3,\)",
    ),
    "head transposed": (
        head(lambda h: {**h, "classifier.weight": h["classifier.weight"].T}),
        r"head 'classifier.weight' has shape \(30, 3\)",
    ),
    "head NaN": (
        head(lambda h: {**h, "classifier.weight": poked(math.nan)(h["classifier.weight"])}),
        r"head 'classifier.weight' .*NaN or Inf in 1 of 90 ",
    ),
    "head Inf": (
        head(lambda h: {**h, "classifier.bias": h["classifier.bias"] / 0}),
        r"head 'classifier.bias' .*NaN or Inf in 3 of 3 ",
    ),
    "B of integers": (factor("B", lambda t: t.long()), r"factor B of module 'attn.q' is torch.int64; adapters are"),
    "A of int8": (factor("A", lambda t: t.to(torch.int8)), r"factor A of module 'attn.q' is torch.int8"),
    "B of booleans": (factor("B", lambda t: t > 0), r"factor B of module 'attn.q' is torch.bool"),
    "A complex": (factor("A", lambda t: t.to(torch.complex64)), r"factor A of module 'attn.q' is torch.complex64"),
    "head of integers": (
        head(lambda h: {**h, "classifier.bias": h["classifier.bias"].int()}),
        r"head 'classifier.bias' is torch.int32",
    ),
    "num_examples negative": (examples(-1), r"num_examples must be a finite number >= 0; got -1\."),
    "num_examples slightly negative": (examples(-1e-9), r"num_examples .* got -1e-09"),
    "num_examples NaN": (examples(math.nan), r"num_examples .* got nan"),
    "num_examples Inf": (examples(math.inf), r"num_examples .* got inf"),
    "num_examples -Inf": (examples(-math.inf), r"num_examples .* got -inf"),
    "num_examples True": (examples(True), r"num_examples .* got True"),
    "num_examples False": (examples(False), r"num_examples .* got False"),
    "num_examples a string": (examples("12"), r"num_examples .* got '12'"),
    "num_examples None": (examples(None), r"num_examples .* got None"),
}
BOTH_SHARED = pytest.mark.parametrize("name", ["fedit", "glora"])


@BOTH_SHARED
def test_a_bad_upload_is_refused_by_client_and_reason_and_the_state_stays(name: str) -> None:
    """Strict: raised at once. With a quorum: named in the tally, and the rest is as if it had never come."""
    strict = Server(method(name))
    state = strict.init(seed_adapter(4))
    a, b, *rest = uploads_of(strict, state)
    before, without = content(state), strict.aggregate(state, [a, *rest])
    for label, (spoil, reason) in BAD.items():
        bad = spoil(b)
        with pytest.raises(UploadRefused, match=reason) as caught:
            strict.aggregate(state, [a, bad, *rest])
        assert caught.value.client == "b", label
        assert caught.value.reason in str(caught.value), label

        after = replace(strict, quorum=3).aggregate(state, [bad, a, *rest])
        assert after.tally is not None
        assert dict(after.tally.refused) == {"b": caught.value.reason}, label
        assert content(replace(after, tally=replace(after.tally, refused={}))) == content(without), label
        assert content(state) == before, label


@pytest.mark.parametrize("name", ["fedit", "glora", "flexlora", "fedex-lora", "padded-average"])
def test_an_update_of_size_1e30_is_refused_in_float32(name: str) -> None:
    """Its energy is 1e60, and float32 ends at 3.4e38."""
    server, state, (a, b, *rest) = opened(name, torch.float32, quorum=3)
    for which in ("B", "A"):
        after = server.aggregate(state, [a, factor(which, lambda t: t * 1e30)(b), *rest])
        assert after.tally is not None
        assert list(after.tally.refused) == ["b"]
        assert "module 'attn.q' has size" in after.tally.refused["b"]


@pytest.mark.parametrize("name", ["fedit", "glora"])
def test_a_head_of_size_1e30_is_refused_in_float32_as_an_update_is(name: str) -> None:
    """Its energy is 1e60, too. In float64 it is an ordinary one."""
    big = head(lambda h: {**h, "classifier.bias": h["classifier.bias"] * 0 + 1e30})
    server, state, (a, b, *rest) = opened(name, torch.float32, quorum=3)
    after = server.aggregate(state, [a, big(b), *rest])
    assert after.tally is not None and list(after.tally.refused) == ["b"]
    assert "head 'classifier.bias' has size" in after.tally.refused["b"]
    server, state, (a, b, *rest) = opened(name)
    tally = server.aggregate(state, [a, big(b), *rest]).tally
    assert tally is not None and not tally.refused


@pytest.mark.parametrize("name", EXACT)
def test_an_update_of_size_1e30_is_an_ordinary_one_in_float64(name: str) -> None:
    """Energy 1e60 is far from 1e308: accepted, and the mean is the dense one."""
    server, state, (a, b, *rest) = opened(name)
    sent = [a, factor("B", lambda t: t * 1e30)(b), *rest]
    after = server.aggregate(state, sent)
    want = sum(u.num_examples / 90 * dense(u, "attn.q") for u in sent)  # 10 + 25 + 40 + 15 examples
    assert relative(server.global_update(after)["attn.q"].delta(), want) < 1e-11


@pytest.mark.parametrize("name", ["fedit", "flexlora"])
def test_a_factor_of_1e200_is_refused_even_beside_a_zero_factor(name: str) -> None:
    """Squares of 1e200 overflow float64. With A = 0 the size is inf * 0 = NaN, which is not "small enough"."""
    server, state = scalar_server(name, quorum=1)
    after = server.aggregate(state, [scalar_upload("a", 1, 2.0), scalar_upload("b", 1, 1e200, 0.0)])
    assert after.tally is not None
    assert list(after.tally.refused) == ["b"]
    assert float(server.global_update(after)["m"].delta()) == pytest.approx(2.0)


def test_a_factor_that_the_roles_keep_local_is_refused() -> None:
    """FedSA-LoRA: B never travels, so an upload that carries it does not follow the round's roles."""
    server = Server(build("fedsa-lora"))
    state = server.init(seed_adapter(4))
    a, b, *rest = uploads_of(server, state)
    leaky = replace(
        b, adapter=Adapter({m: LoRA(torch.ones(d, 4), b.adapter.modules[m].A) for m, (d, _) in SHAPES.items()})
    )
    before = content(state)
    with pytest.raises(UploadRefused, match=r"carries .*\['A', 'B'\]; .*share \['A'\]"):
        server.aggregate(state, [a, leaky, *rest])
    assert content(state) == before
    headed = replace(b, adapter=Adapter(b.adapter.modules, seed_adapter(4).heads))
    with pytest.raises(UploadRefused, match=r"heads \['classifier.bias', 'classifier.weight'\] were sent; .* \[\]"):
        server.aggregate(state, [a, headed, *rest])


@BOTH_SHARED
def test_the_same_id_twice_in_a_round_the_first_one_stands(name: str) -> None:
    server = Server(method(name))
    state = server.init(seed_adapter(4))
    a, b, c, d = uploads_of(server, state)
    again = replace(d, client=a.client)
    with pytest.raises(UploadRefused, match="a second upload") as caught:
        server.aggregate(state, [a, b, again])
    assert caught.value.client == "a"
    after = replace(server, quorum=1).aggregate(state, [a, b, again, c])
    assert after.tally is not None
    assert list(after.tally.refused) == ["a"]
    assert content(replace(after, tally=None)) == content(replace(server.aggregate(state, [a, b, c]), tally=None))


def test_an_upload_after_an_abstention_of_the_same_id_is_refused() -> None:
    server = Server(build("fedit"), quorum=1)
    state = server.init(seed_adapter(4))
    a, b, *_ = uploads_of(server, state)
    after = server.aggregate(state, [replace(a, num_examples=0), a, b])
    assert after.tally is not None
    assert (dict(after.tally.weights), after.tally.abstained) == ({"b": 1.0}, ("a",))
    assert "second upload" in after.tally.refused["a"]


def test_a_good_upload_after_a_refused_one_of_the_same_id_counts() -> None:
    """A client may correct itself; the refusal stays on record."""
    server = Server(build("fedit"), quorum=1)
    state = server.init(seed_adapter(4))
    a, b, *_ = uploads_of(server, state)
    after = server.aggregate(state, [replace(a, num_examples=-1), a, b])
    assert after.tally is not None
    assert dict(after.tally.weights) == pytest.approx({"a": 10 / 35, "b": 25 / 35})  # EXAMPLES: a 10, b 25
    assert list(after.tally.refused) == ["a"]


@pytest.mark.parametrize("n", [10**400, -(10**400)], ids=["10**400", "-10**400"])
def test_an_integer_beyond_every_float_is_refused_not_a_crash(n: int) -> None:
    """Python's int has no Inf; such a number can come from a wire format or a bug, and must cost one client only."""
    server = Server(build("fedit"), quorum=1)
    state = server.init(seed_adapter(4))
    a, b, *_ = uploads_of(server, state)
    after = server.aggregate(state, [a, replace(b, num_examples=n)])
    assert after.tally is not None
    assert list(after.tally.refused) == ["b"]


def test_finite_example_counts_whose_sum_overflows_do_not_stop_the_round() -> None:
    """1.7e308 twice is beyond float64. Refusing and weighing are both right; the remaining weights must add up to 1."""
    server = Server(build("fedit"), quorum=1)
    state = server.init(seed_adapter(4))
    a, b, c, _ = uploads_of(server, state)
    after = server.aggregate(state, [a, replace(b, num_examples=1.7e308), replace(c, num_examples=1.7e308)])
    assert after.tally is not None
    assert math.fsum(after.tally.weights.values()) == pytest.approx(1.0)


def test_a_module_whose_only_holder_weighs_next_to_nothing_does_not_stop_the_round() -> None:
    """1e-300 examples beside 1e308: the weight is 0 in float64, and 0 / 0 must not end the round for everybody."""
    server = Server(build("fedit"), quorum=1)
    state = server.init(seed_adapter(4))
    a, b = uploads_of(server, state, {"a": {"attn.q": 4}, "b": {"attn.v": 4}})
    after = server.aggregate(state, [replace(a, num_examples=1e308), replace(b, num_examples=1e-300)])
    assert all(bool(t.isfinite().all()) for t in tensors_in(after.modules))


@pytest.mark.parametrize(("state_dtype", "value"), [(torch.float32, 1e300), (torch.float16, 1e6)])
def test_a_head_too_large_for_the_state_leaves_no_inf_in_it(state_dtype: torch.dtype, value: float) -> None:
    """The upload is finite in its own dtype, and would be Inf in the state's: refused or kept wide, never Inf."""
    server = Server(build("fedit"), quorum=1)
    start = seed_adapter(4)
    state = server.init(Adapter(start.modules, {k: h.to(state_dtype) for k, h in start.heads.items()}))
    a, b, *_ = uploads_of(server, state)
    after = server.aggregate(
        state, [a, head(lambda h: {k: torch.full_like(t, value, dtype=F64) for k, t in h.items()})(b)]
    )
    assert all(bool(h.isfinite().all()) for h in after.heads.values())


def test_a_client_of_a_rank_that_the_method_cannot_average_is_named() -> None:
    """Alone, as any bad upload: in the method's own words, and the others count."""
    server = Server(build("fedit"), quorum=3)
    state = server.init(seed_adapter(4))
    a, *rest = uploads_of(server, state)
    one = both(lambda B: B[:, :1], lambda A: A[:1])
    narrow = swapped(one(a), lambda x: LoRA(x.factors[0][:, :1], x.factors[1][:1]), "attn.v")
    before = content(state)
    after = server.aggregate(state, [declared(1)(narrow), *rest])
    assert content(after.modules) == content(server.aggregate(state, rest).modules)
    assert list(after.tally.refused) == ["a"]
    with pytest.raises(UploadRefused, match=r"'a' .*rank 4, .* 1\."):
        server.open(state).add(declared(1)(narrow))
    with pytest.raises(RankMismatch, match=r"rank 4, .*client 'n' .* 1"):
        server.download(state, Client("n", 1))
    assert content(state) == before


def test_a_download_for_an_unknown_module_is_refused() -> None:
    server, state, _ = opened("glora")
    with pytest.raises(HyperparameterError, match=r"client 'x' .*'attn.k'"):
        server.download(state, Client("x", {"attn.q": 2, "attn.k": 2}))


# ---------------------------------------------------------------------------------------------------------- quorum


@BOTH_SHARED
def test_a_missed_quorum_says_who_and_why_and_leaves_state_and_round_usable(name: str) -> None:
    server, state, (a, b, c, d) = opened(name, quorum=3)
    before = content(state)
    sent = [a, replace(b, num_examples=-2), replace(c, num_examples=0), d]
    with pytest.raises(QuorumNotMet, match=r"round 1: 2 usable uploads, .*quorum .*3 \(1 abstained; refused: b: num"):
        server.aggregate(state, sent)
    assert content(state) == before

    opened_round = server.open(state)
    for upload in (a, d):
        opened_round.add(upload)
    with pytest.raises(QuorumNotMet, match=r"2 usable uploads, .*quorum .*3 \(0 abstained; refused: none\)"):
        opened_round.close()
    opened_round.add(b)  # the third one comes late: the same round, and the same bits as if in time
    assert content(opened_round.close()) == content(server.aggregate(state, [a, b, d]))


@BOTH_SHARED
def test_a_round_without_uploads_does_not_count(name: str) -> None:
    server, state, sent = opened(name)
    for nothing in ([], [replace(u, num_examples=0) for u in sent]):
        with pytest.raises(QuorumNotMet, match=r"0 usable uploads, .*quorum .*1"):
            server.aggregate(state, nothing)


def test_strict_mode_stops_at_the_first_bad_upload() -> None:
    """The second bad one is never looked at: the error names the first in the order of arrival."""
    server = Server(build("fedit"))
    state = server.init(seed_adapter(4))
    a, b, c, d = uploads_of(server, state)
    with pytest.raises(UploadRefused) as caught:
        server.aggregate(state, [d, replace(c, num_examples=-1), replace(a, num_examples=-1), b])
    assert caught.value.client == "c"


@every_kind
def test_zero_examples_abstain_outside_weights_total_rank_and_quorum(name: str) -> None:
    """What an abstainer sends is not even looked at: here its factors are NaN."""
    server, state, (a, b, *rest) = opened(name, quorum=3)
    silent = replace(b, num_examples=0, adapter=b.adapter.map(lambda t: t * math.nan))
    without = server.aggregate(state, [a, *rest])
    for n in (0, 0.0, -0.0):
        after = server.aggregate(state, [a, replace(silent, num_examples=n), *rest])
        assert after.tally is not None
        assert after.tally.abstained == ("b",)
        assert not after.tally.refused
        assert dict(after.tally.weights) == pytest.approx({"a": 10 / 65, "c": 40 / 65, "d": 15 / 65})  # EXAMPLES
        assert content(replace(after, tally=None)) == content(replace(without, tally=None))
    if name == "glora":  # MIXED: a 2, c 5, d 6
        assert [facts["total_rank"] for facts in server.diagnostics(after).values()] == [13, 13]
    with pytest.raises(QuorumNotMet):
        replace(server, quorum=4).aggregate(state, [a, silent, *rest])


# --------------------------------------------------------------------------------------------------------- weights


@every_method
def test_weights_are_examples_or_uniform(name: str) -> None:
    """By hand, all A = 1: (1 * 2 + 3 * 6) / 4 = 5, (2 + 6) / 2 = 4. A zero update keeps its weight, for it says "my
    whole update is zero" (silence is 0 examples): (1 * 2 + 3 * 0) / 4 = 0.5."""
    sent = [scalar_upload("a", 1, 2.0), scalar_upload("b", 3, 6.0)]
    assert scalar_round(name, sent, weighting="examples") == pytest.approx(5.0, abs=1e-13)
    assert scalar_round(name, sent, weighting="uniform") == pytest.approx(4.0, abs=1e-13)
    assert scalar_round(name, [sent[0], scalar_upload("b", 3, 0.0)]) == pytest.approx(0.5, abs=1e-14)


def test_uniform_weighting_still_lets_zero_examples_abstain() -> None:
    sent = [scalar_upload("a", 1, 2.0), scalar_upload("b", 3, 6.0), scalar_upload("c", 0, 100.0)]
    assert scalar_round("glora", sent, weighting="uniform") == pytest.approx(4.0)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_heads_are_averaged_with_the_same_weights(weighting: str) -> None:
    """By hand: (1 * 2 + 3 * 6) / 4 = 5 and (2 + 6) / 2 = 4."""
    server = Server(build("glora"), weighting=weighting)  # type: ignore[arg-type]
    state = server.init(scalar_upload("seed", 1, 0.0, head=0.0).adapter)
    after = server.aggregate(state, [scalar_upload("a", 1, 1.0, head=2.0), scalar_upload("b", 3, 1.0, head=6.0)])
    assert float(after.heads["h"]) == pytest.approx({"examples": 5.0, "uniform": 4.0}[weighting])


def test_fractions_of_an_example_count() -> None:
    """By hand: p = (0.5, 1.5) / 2, so 0.25 * 2 + 0.75 * 6 = 5."""
    sent = [scalar_upload("a", 0.5, 2.0), scalar_upload("b", 1.5, 6.0)]
    assert scalar_round("fedit", sent) == pytest.approx(5.0)


@BOTH_SHARED
def test_the_tally_and_the_round_number(name: str) -> None:
    server, state, sent = opened(name)
    after = server.aggregate(state, sent)
    assert after.tally is not None
    assert dict(after.tally.weights) == pytest.approx({c: n / 90 for c, n in EXAMPLES.items()})  # 10 + 25 + 40 + 15
    assert (state.round, after.round, server.download(after, sent[0].client).round) == (0, 1, 1)


# ----------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("name", ["glora", "fedsa-lora"])
@pytest.mark.parametrize("heads", ["average", "local", "frozen", None])
def test_heads_average_stay_local_or_frozen(name: str, heads: str | None) -> None:
    """average: the dense weighted sum, back to all. local: never here, the seed as a start. frozen: the seed, always.

    None is the method's own choice: local for FedSA-LoRA, average for all others (docs of each method).
    """
    server, ranks = Server(method(name), heads=heads), RANKS[name]  # type: ignore[arg-type]
    seed = seed_adapter(max(ranks.values()))
    state = server.init(seed)
    sent = uploads_of(server, state, ranks)
    after = server.aggregate(state, sent)
    mode = heads or ("local" if name == "fedsa-lora" else "average")
    first, second = (server.download(s, sent[0].client) for s in (state, after))
    assert first.roles.heads == {"average": "shared", "local": "local", "frozen": "frozen"}[mode]
    assert [sorted(u.adapter.heads) for u in sent] == [sorted(HEADS) if mode == "average" else []] * 4

    if mode == "average":
        assert content(first.adapter.heads) == content(seed.heads)
        for key in HEADS:
            want = sum(u.num_examples / 90 * u.adapter.heads[key] for u in sent)
            torch.testing.assert_close(second.adapter.heads[key], want, rtol=0, atol=1e-14)
    else:
        assert content(after.heads) == content(seed.heads)
        for download in (first, second):
            travels = download.adapter.heads if mode == "frozen" else download.start.heads
            absent = download.start.heads if mode == "frozen" else download.adapter.heads
            assert content(travels) == content(seed.heads)
            assert not absent


def test_an_adapter_without_heads_is_served() -> None:
    for name in METHODS:
        server = Server(method(name))
        state = server.init(Adapter(seed_adapter(4).modules))
        assert not server.aggregate(state, uploads_of(server, state)).heads


# ------------------------------------------------------------------------------------------------- missing modules

HOLDERS = {"attn.q": ("a", "c"), "attn.v": ("b", "c")}  # d and its 15 examples hold neither


def partial_ranks(name: str) -> dict[str, dict[str, int]]:
    q, v, both_of_c = (2, 3, {"attn.q": 5, "attn.v": 4}) if name in ANY_RANK else (4, 4, {"attn.q": 4, "attn.v": 4})
    return {"a": {"attn.q": q}, "b": {"attn.v": v}, "c": both_of_c, "d": {}}


def padded(upload: Upload, module: str, rank: int) -> tuple[Tensor, Tensor]:
    """The factors with zero columns and rows up to `rank`."""
    lora = upload.adapter.modules[module]
    assert lora.B is not None
    B, A = lora.B, torch.zeros(lora.rank, SHAPES[module][1], dtype=F64) if lora.A is None else lora.A
    wide_B, wide_A = torch.zeros(B.shape[0], rank, dtype=F64), torch.zeros(rank, A.shape[1], dtype=F64)
    wide_B[:, : B.shape[1]], wide_A[: A.shape[0]] = B, A
    return wide_B, wide_A


@every_method
def test_a_module_that_some_clients_lack(name: str) -> None:
    """Dense float64: sum over its holders of p_i X_i, p_i over their examples or over all 90 (others are zero)."""
    for missing in ("renormalise", "zero"):
        check_missing(name, missing)


def check_missing(name: str, missing: str) -> None:
    server = Server(method(name), missing=missing)  # type: ignore[arg-type]
    seed = seed_adapter(5 if name in ANY_RANK else 4)
    state = server.init(seed)
    sent = uploads_of(server, state, partial_ranks(name))
    after = server.aggregate(state, sent)
    assert after.tally is not None
    assert dict(after.tally.weights) == pytest.approx({c: n / 90 for c, n in EXAMPLES.items()})
    for module, names in HOLDERS.items():
        held = [u for u in sent if u.client.id in names]
        total = sum(EXAMPLES[c] for c in names) if missing == "renormalise" else 90
        p = [u.num_examples / total for u in held]
        if name == "fedsa-lora":
            got = server.download(after, Client("x", 4)).adapter.modules[module].A
            want = sum(w * u.adapter.modules[module].A for w, u in zip(p, held, strict=True))  # type: ignore[operator]
            assert got is not None and relative(got, want) < 1e-14  # type: ignore[arg-type]
            continue
        if name in EXACT:
            want = sum(w * dense(u, module) for w, u in zip(p, held, strict=True))
        elif name == "lora-fair":
            continue  # its formula: test_baselines.py
        else:  # factor averages: the product of the means
            pairs = [padded(u, module, seed.modules[module].rank) for u in held]
            mean_B, mean_A = (sum(w * pair[k] for w, pair in zip(p, pairs, strict=True)) for k in (0, 1))
            want = mean_B @ (seed.modules[module].A if name in FROZEN_A else mean_A)  # type: ignore[operator]
        assert relative(server.global_update(after)[module].delta(), want) < 1e-12  # type: ignore[arg-type]
    for key in HEADS:  # everybody has the heads, d too
        want_head = sum(u.num_examples / 90 * u.adapter.heads[key] for u in sent) if name != "fedsa-lora" else None
        if want_head is not None:
            torch.testing.assert_close(after.heads[key], want_head, rtol=0, atol=1e-14)


@every_kind
def test_a_module_that_nobody_holds_this_round_stays_as_it_was(name: str) -> None:
    server, state, sent = opened(name)
    state = server.aggregate(state, sent)
    only_v = uploads_of(server, state, {c: {"attn.v": r} for c, r in RANKS[name].items()}, round=1)
    after = server.aggregate(state, only_v)
    assert content(after.modules["attn.q"]) == content(state.modules["attn.q"])
    assert content(after.modules["attn.v"]) != content(state.modules["attn.v"])
    for rank in set(RANKS[name].values()):
        assert set(server.download(after, Client("x", rank)).adapter.modules) == set(SHAPES)


@every_kind
def test_a_download_holds_the_declared_modules_at_their_ranks(name: str) -> None:
    server, state, _ = opened(name)
    for rank in partial_ranks(name).values():
        assert server.download(state, Client("x", rank)).adapter.ranks == rank


def test_base_version_follows_every_module_not_only_the_first() -> None:
    """FedEx-LoRA where only attn.v is trained: its residual is new, and a client fetching by version must see it."""
    server = Server(build("fedex-lora"))
    state = server.init(seed_adapter(4))
    after = server.aggregate(state, uploads_of(server, state, {"a": {"attn.v": 4}, "b": {"attn.v": 4}}))
    download = server.download(after, Client("c", 4))
    assert {name: change.version for name, change in download.base.items()} == {"attn.v": 1}


@pytest.mark.parametrize("name", ["fedex-lora", "flora", "glora"])
def test_base_version_counts_rounds_that_changed_the_base(name: str) -> None:
    server, state, sent = opened(name)
    versions = []
    for t in range(3):
        download = server.download(state, sent[0].client)
        versions.append([change.version for change in download.base.values()])
        state = server.aggregate(state, uploads_of(server, state, RANKS[name], round=t))
    moving = name in ("fedex-lora", "flora")
    assert versions == ([[], [1] * len(SHAPES), [2] * len(SHAPES)] if moving else [[]] * 3)


# ---------------------------------------------------------------------------------------------- order and purity


@pytest.mark.quick(7)
@every_method
def test_no_order_of_uploads_changes_a_bit_of_the_state(name: str) -> None:
    """All 24 orders, the whole state compared; the first one is the expectation. Also through `open`."""
    server, state, sent = opened(name)
    expected = content(server.aggregate(state, sent))
    for order in permutations(sent):
        assert content(server.aggregate(state, order)) == expected
    stream = server.open(state)
    for upload in sent[::-1]:
        stream.add(upload)
    assert content(stream.close()) == expected


@pytest.mark.quick(7)
@every_method
def test_no_order_changes_a_bit_with_mixed_dtypes_modules_abstentions_and_refusals(name: str) -> None:
    server, state, sent = opened(name, quorum=1)
    a, b, _, d = sent
    narrow = replace(b, adapter=b.adapter.map(Tensor.bfloat16))
    only_v = uploads_of(server, state, {"c": {"attn.v": RANKS[name]["c"]}})[0]
    silent = replace(a, client=Client("e", a.client.rank), num_examples=0)
    bad = replace(d, client=Client("f", d.client.rank), num_examples=-1)
    sent = [a, narrow, only_v, silent, bad]
    expected = content(server.aggregate(state, sent))
    for order in list(permutations(sent))[::7]:
        assert content(server.aggregate(state, order)) == expected


@every_kind
def test_aggregate_and_download_leave_their_inputs_alone_and_repeat_bitwise(name: str) -> None:
    server, state, sent = opened(name)
    state = server.aggregate(state, sent)
    sent = uploads_of(server, state, RANKS[name], round=1)
    before, uploaded = content(state), content(sent)
    after = content(server.aggregate(state, sent))
    downloads = [content(server.download(state, u.client)) for u in sent]
    assert content(server.aggregate(state, sent)) == after
    assert [content(server.download(state, u.client)) for u in sent] == downloads
    assert (content(state), content(sent)) == (before, uploaded)


@every_method
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's, once a process; see below
def test_a_state_neither_follows_the_uploads_nor_carries_their_autograd_graph(name: str) -> None:
    """Clients train in place: an upload's tensors may be overwritten in the next round. One client: no sum hides it. A
    state that required grad would hold every client's graph for ever."""
    server, state, sent = opened(name)
    one = [replace(sent[0], adapter=sent[0].adapter.map(Tensor.clone))]
    after = server.aggregate(state, one)
    before = content(after)
    one[0].adapter.map(lambda t: t.zero_())
    assert content(after) == before
    after = server.aggregate(state, [replace(u, adapter=live(u.adapter)) for u in sent])
    assert not any(t.requires_grad for t in tensors_in(after))


@pytest.mark.parametrize("part", ["modules", "heads"])
def test_a_state_does_not_follow_later_changes_of_the_seed_adapter(part: str) -> None:
    """The seed may be a live model's parameters: training them in place must not change the server's start."""
    seed = seed_adapter(4)
    state = Server(build("fedit")).init(seed)
    before = content(state)
    tensors = (
        seed.heads.values() if part == "heads" else [t for x in seed.modules.values() for t in x.tensors().values()]
    )
    for t in tensors:
        t.add_(1.0)
    assert content(state) == before


def live(adapter: Adapter) -> Adapter:
    """As a model's own parameters: part of an autograd graph."""
    return adapter.map(lambda t: t.clone().requires_grad_(True))


def test_uploads_of_live_parameters_cause_no_warning() -> None:
    """Warnings are errors. torch gives this one once a process, hence `set_warn_always`."""
    server, state, sent = opened("fedit")
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        server.aggregate(state, [replace(u, adapter=live(u.adapter)) for u in sent])
    finally:
        torch.set_warn_always(before)


@pytest.mark.parametrize("heads", ["average", "frozen"])
def test_a_state_carries_no_autograd_graph_of_the_seed(heads: str) -> None:
    """Neither in a module's state nor in the heads, which `frozen` hands out as they are in every round."""
    state = Server(build("fedit"), heads=heads).init(live(seed_adapter(4)))  # type: ignore[arg-type]
    assert not any(t.requires_grad for t in tensors_in((state.modules, state.start.modules)))
    assert not any(t.requires_grad for t in tensors_in(state.heads))


def tensors_in(value: object) -> list[Tensor]:
    """All but the running sum of base changes, which is float64 whatever the adapters are."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, BaseChange):
        return [t for step in value.steps for t in step.tensors().values()]
    if is_dataclass(value):
        return [t for f in fields(value) for t in tensors_in(getattr(value, f.name))]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []


# ---------------------------------------------------------------------------------------------------------- dtypes


@every_method
def test_float32_and_float64_stay_themselves_all_the_way(name: str) -> None:
    for dtype in (torch.float32, F64):
        server, state, sent = opened(name, dtype)
        for t in range(2):
            state = server.aggregate(state, uploads_of(server, state, RANKS[name], round=t))
            assert {x.dtype for x in tensors_in(state)} == {dtype}
            for upload in sent:
                assert {x.dtype for x in tensors_in(server.download(state, upload.client))} == {dtype}
            if server.has_global_model(state):
                assert {x.dtype for x in tensors_in(server.global_update(state))} == {dtype}


def expected_model(name: str, sent: Sequence[Upload], module: str, rank: int, start: Adapter) -> Tensor:
    """The method's own formula on the stored factors, dense in float64."""
    total = sum(u.num_examples for u in sent)
    if name in EXACT:
        return sum(u.num_examples / total * dense(u, module) for u in sent)  # type: ignore[return-value]
    wide = [replace(u, adapter=u.adapter.map(Tensor.double)) for u in sent]
    pairs = [(u.num_examples / total, *padded(u, module, rank)) for u in wide]
    mean_B, mean_A = sum(p * B for p, B, _ in pairs), sum(p * A for p, _, A in pairs)
    if name in FROZEN_A:
        mean_A = start.modules[module].A.double()  # type: ignore[union-attr]
    return mean_B @ mean_A  # type: ignore[operator, no-any-return]


@every_formula
def test_narrow_uploads_are_averaged_in_float32(name: str) -> None:
    """Expected from the rounded factors that were sent: the server adds float32 round-off only."""
    server, state, sent = opened(name, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [replace(u, adapter=u.adapter.map(lambda t, d=dtype: t.to(d))) for u in sent]  # type: ignore[misc]
        after = server.aggregate(state, narrow)
        for module in SHAPES:
            got = server.global_update(after)[module]
            assert {t.dtype for t in got.tensors().values()} == {torch.float32}
            want = expected_model(name, narrow, module, max(RANKS[name].values()), state.start)
            assert relative(got.map(Tensor.double).delta(), want) < 3e-6
        for key, value in after.heads.items():
            want_head = sum(u.num_examples / 90 * u.adapter.heads[key].double() for u in narrow)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), want_head, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fedex-lora", "fedit", "ffa-lora", "glora"])
def test_one_float64_upload_makes_the_round_float64(name: str) -> None:
    """bfloat16, float16, float32 and float64 together: computed in float64, on what each of them stored."""
    server, state, sent = opened(name)
    mixed = [
        replace(u, adapter=u.adapter.map(lambda t, d=d: t.to(d)))  # type: ignore[misc]
        for u, d in zip(sent, (torch.bfloat16, torch.float16, torch.float32, F64), strict=True)
    ]
    after = server.aggregate(state, mixed)
    for module in SHAPES:
        got = server.global_update(after)[module]
        assert {t.dtype for t in got.tensors().values()} == {F64}
        assert (
            relative(got.delta(), expected_model(name, mixed, module, max(RANKS[name].values()), state.start)) < 1e-10
        )


@every_method
def test_clients_of_another_dtype_in_the_next_round_are_served(name: str) -> None:
    """a and b send one precision in round 1, c and d the other in round 2: then everybody still gets a readout."""
    for first, other in ((torch.float32, F64), (F64, torch.float32)):
        server, state, _ = opened(name, torch.float32)
        for t, (names, dtype) in enumerate(((("a", "b"), first), (("c", "d"), other))):
            sent = uploads_of(server, state, {c: RANKS[name][c] for c in names}, round=t)
            cast = [replace(u, adapter=u.adapter.map(lambda x, d=dtype: x.to(d))) for u in sent]  # type: ignore[misc]
            state = server.aggregate(state, cast)
        for client, rank in RANKS[name].items():
            download = server.download(state, Client(client, rank))
            assert all(bool(t.isfinite().all()) for t in tensors_in(download.adapter))
        assert uploads_of(server, state, RANKS[name], round=2)


def test_two_dtypes_in_one_pair_are_promoted_together() -> None:
    """B in bfloat16 and A in float64: exact in float64, as 1.5 and 0.25 are exact in both."""
    lora = LoRA(torch.full((1, 1), 1.5, dtype=torch.bfloat16), torch.full((1, 1), 0.25, dtype=F64))
    assert scalar_round("glora", [Upload(Client("a", 1), 1, Adapter({"m": lora}))]) == pytest.approx(0.375, abs=1e-15)


# ------------------------------------------------------------------------------------------------ start and readout


def trained_seed(rank: int) -> Adapter:
    return pushed(seed_adapter(rank), "before", 0)


@every_method
def test_a_warm_start_hands_out_the_trained_seed(name: str) -> None:
    """At the seed's own rank every client starts from its product, dense; FedSA-LoRA's B comes as the local start, and
    FLoRA's product as a change of the base."""
    server, seed = Server(method(name)), trained_seed(4)
    state = server.init(seed)
    for client in ("a", "stranger"):
        download = server.download(state, Client(client, 4))
        mine = receive(download, None)
        for module in SHAPES:
            base = download.base_delta[module].delta() if name == "flora" else 0.0
            assert relative(base + mine.modules[module].delta(), seed.modules[module].delta()) < 1e-13
            if server.has_global_model(state):
                got = server.global_update(state)[module].delta()
                assert relative(got, seed.modules[module].delta()) < 1e-13


@pytest.mark.parametrize("name", [*SPECTRAL, "padded-average", "hetlora"])
def test_a_warm_start_at_another_rank(name: str) -> None:
    """FlexLoRA, GLoRA: the best approximation (Eckart-Young, dense SVD). Padded average: the first slots."""
    server, seed = Server(method(name)), trained_seed(4)
    state = server.init(seed)
    for rank in (1, 3, 7):
        download = server.download(state, Client("a", rank))
        for module, lora in seed.modules.items():
            B, A = lora.factors
            U, s, Vh = torch.linalg.svd(B @ A, full_matrices=False)
            k = min(rank, 4)
            want = B[:, :rank] @ A[:rank] if name in ("padded-average", "hetlora") else U[:, :k] * s[:k] @ Vh[:k]
            assert relative(download.adapter.modules[module].delta(), want) < 1e-13


@pytest.mark.parametrize("name", ["fedex-lora", *SPECTRAL])
def test_uploads_replace_a_warm_start_they_are_not_added_to_it(name: str) -> None:
    """An upload is the whole adapter: the model after the round is the dense mean of the uploads alone."""
    server, ranks = Server(method(name)), RANKS[name]
    state = server.init(trained_seed(max(ranks.values())))
    sent = uploads_of(server, state, ranks)
    after = server.aggregate(state, sent)
    for module in SHAPES:
        want = sum(u.num_examples / 90 * dense(u, module) for u in sent)
        assert relative(server.global_update(after)[module].delta(), want) < 1e-12  # type: ignore[arg-type]


@every_method
def test_an_unknown_client_is_served_and_leaves_no_trace(name: str) -> None:
    """FlexLoRA, GLoRA without history: the strongest components (dense SVD of the model). Others: what all get."""
    server, state, sent = opened(name)
    state = server.aggregate(state, sent)
    before = content(state)
    rank = max(RANKS[name].values())
    got = server.download(state, Client("stranger", rank))
    assert content(server.download(state, Client("stranger", rank))) == content(got)
    assert content(state) == before
    known = server.download(state, Client("d", rank))
    for module in SHAPES:
        if name == "flora":  # a fresh start for each; what both share is the base
            assert content(got.base) == content(known.base)
        elif name in SPECTRAL:
            U, s, Vh = torch.linalg.svd(server.global_update(state)[module].delta(), full_matrices=False)
            assert relative(got.adapter.modules[module].delta(), U[:, :rank] * s[:rank] @ Vh[:rank]) < 1e-12
        else:
            assert content(got.adapter.modules[module]) == content(known.adapter.modules[module])


@pytest.mark.parametrize("name", ["flexlora", "glora"])
def test_fresh_rows_are_a_function_of_seed_round_client_and_module(name: str) -> None:
    """After a round of zeros every slot is fresh: B = 0, and rows of A that repeat exactly, others for each client."""
    start = seed_adapter(4)
    zeros = Adapter({m: x.map(torch.zeros_like) for m, x in start.modules.items()}, start.heads)

    def rows(seed: int, rounds: int, client: str, module: str) -> Tensor:
        server = Server(method(name), seed=seed)
        state = server.init(start)
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


# --------------------------------------------------------------------------------------------------- own methods


@dataclass(frozen=True, eq=False)
class PairState:
    round: int
    pair: LoRA


@dataclass(frozen=True)
class FrozenA:
    """FFA-LoRA in a few lines: A is received once and never trained; B is averaged."""

    name: ClassVar[str] = "frozen-a"
    paper: ClassVar[str] = "none"
    State: ClassVar[type] = PairState

    def init(self, seed: LoRA, key: int) -> PairState:
        return PairState(0, seed)

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen")

    def aggregate(self, state: PairState, updates: Sequence[Update]) -> PairState:
        B = torch.stack([u.weight * u.B for u in updates]).sum(0)
        return PairState(state.round + 1, LoRA(B, state.pair.A))

    def readout(self, state: PairState, client: str | None, rank: int) -> Readout:
        return Readout(state.pair)

    def effective(self, state: PairState) -> LoRA | None:
        return state.pair

    def diagnostics(self, state: PairState) -> Mapping[str, object]:
        return {}


@dataclass(frozen=True)
class Alternating(FrozenA):
    """B in even rounds, A in odd ones: roles are a function of the round."""

    name: ClassVar[str] = "alternating"

    def roles(self, round: int) -> Roles:
        return Roles(A="frozen") if round % 2 == 0 else Roles(B="frozen")

    def aggregate(self, state: PairState, updates: Sequence[Update]) -> PairState:
        B, A = state.pair.factors
        if state.round % 2 == 0:
            B = torch.stack([u.weight * u.B for u in updates]).sum(0)
        else:
            A = torch.stack([u.weight * u.A for u in updates]).sum(0)
        return PairState(state.round + 1, LoRA(B, A))


class Greedy(FrozenA):
    """Asks for a factor that its own roles do not share."""

    def aggregate(self, state: PairState, updates: Sequence[Update]) -> PairState:
        return PairState(state.round + 1, LoRA(updates[0].B, updates[0].A))


def test_a_method_of_ones_own_needs_the_protocol_only() -> None:
    """sum p_i B_i A exactly, dense; A never moves and never travels up."""
    server, seed = Server(FrozenA()), seed_adapter(4)
    state = server.init(seed)
    for t in range(2):
        sent = uploads_of(server, state, round=t)
        assert all(x.A is None and x.B is not None for u in sent for x in u.adapter.modules.values())
        state = server.aggregate(state, sent)
        for module in SHAPES:
            A = seed.modules[module].factors[1]
            want = sum(u.num_examples / 90 * u.adapter.modules[module].B for u in sent) @ A  # type: ignore[operator]
            assert relative(server.global_update(state)[module].delta(), want) < 1e-13
            assert content(server.download(state, Client("a", 4)).adapter.modules[module].A) == content(A)
    assert (state.round, server.has_global_model(state)) == (2, True)


def test_roles_may_change_from_round_to_round() -> None:
    """What travels follows the state: B first, then A; the upload of the other half-round is refused."""
    server = Server(Alternating())
    state = server.init(seed_adapter(4))
    travelled, old = [], None
    for t in range(4):
        sent = uploads_of(server, state, round=t)
        if old is not None:
            with pytest.raises(UploadRefused, match="this round's roles share"):
                server.aggregate(state, old)
        travelled.append({factor for u in sent for x in u.adapter.modules.values() for factor in x.tensors()})
        state, old = server.aggregate(state, sent), sent
    assert travelled == [{"B"}, {"A"}, {"B"}, {"A"}]


def test_a_method_that_asks_for_a_factor_it_does_not_share_is_told() -> None:
    server = Server(Greedy())
    state = server.init(seed_adapter(4))
    with pytest.raises(FedLoRAError, match=r"factor A of client 'a'.*did not travel"):
        server.aggregate(state, uploads_of(server, state))


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "size"}, r"weighting .*\('examples', 'uniform'\); got 'size'"),
        ({"heads": "shared"}, r"heads is one of .*got 'shared'"),
        ({"missing": "drop"}, r"missing .*\('renormalise', 'zero'\); got 'drop'"),
        ({"quorum": 0}, r"quorum is at least 1 .*; got 0"),
        ({"quorum": -1}, r"quorum is at least 1 .*; got -1"),
    ],
)
def test_impossible_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        Server(build("fedit"), **options)  # type: ignore[arg-type]


def test_a_seed_without_modules_or_with_values_that_are_not_finite_is_refused() -> None:
    seed = seed_adapter(2)
    server = Server(build("fedit"))
    with pytest.raises(ShapeError, match="no modules: "):
        server.init(Adapter({}, seed.heads))
    bad = LoRA(*(poked(math.nan)(t) for t in seed.modules["attn.v"].factors))
    with pytest.raises(ShapeError, match=r"NaN or Inf .*factor B of module 'attn\.v'"):
        server.init(Adapter({**seed.modules, "attn.v": bad}, seed.heads))
    with pytest.raises(ShapeError, match=r"NaN or Inf in head 'classifier\.bias'"):
        server.init(Adapter(seed.modules, {**seed.heads, "classifier.bias": torch.full((3,), math.inf)}))


@BOTH_SHARED
@pytest.mark.parametrize("absent", ["B", "A"])
def test_a_seed_with_a_missing_factor_is_refused_whatever_the_method(name: str, absent: str) -> None:
    """As `Server.init` says: ShapeError. Without the check a half seed becomes the state."""
    half = {m: LoRA(**{**x.tensors(), absent: None}) for m, x in seed_adapter(4).modules.items()}  # type: ignore[arg-type]
    with pytest.raises(ShapeError):
        Server(method(name)).init(Adapter(half))


def test_a_method_without_global_model_says_so() -> None:
    server, state, _ = opened("fedsa-lora")
    assert not server.has_global_model(state)
    with pytest.raises(NoGlobalModel, match="fedsa-lora keeps no global model"):
        server.global_update(state)


@dataclass(frozen=True)
class Losing(SVD):
    """Says of a state, a number here, that this share of the mean's energy is lost."""

    def diagnostics(self, state: object) -> Mapping[str, object]:
        return {"dropped": state}


def test_what_is_lost_is_told_with_the_share_that_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """By hand: 1.2 % in one of three modules, where more than a thousandth is said; a thousandth itself is not."""
    warn_of_losses(Losing(), 3, {"q": 0.012, "k": 0.001, "v": 0.0})
    (said,) = caplog.messages
    assert {"3:", "1.2%", "q,", "0.1%", "1", "3"} <= set(said.split())
    caplog.clear()
    warn_of_losses(Losing(), 3, {"k": 0.001})
    assert not caplog.messages
