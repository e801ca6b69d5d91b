"""What really travels, what a client stores between rounds, and the rank that pruning leaves it.

Kinds of evidence: *oracle* (dense float64 sums; bytes as safetensors writes them; tail norms by hand) and *contract* (a
client that stores only `remember(download)` and its local parts has, bit for bit, what the plain download holds). A
test marked `bug` states what is promised and does not hold yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from federations import EQUAL, EXAMPLES, FULL, HEADS, MIXED, PARTIAL, SHAPES, noise, pushed, seed_adapter
from fedlora import METHODS, Adapter, Client, Download, LoRA, Server, Upload, build, checkpoint, keep, receive, send
from fedlora.base_change import BaseChange, compressed, moved
from fedlora.client import prune, tail_size
from fedlora.delivery import Cache, Parcel, held_after, pack, remember, unpack
from fedlora.errors import KeptStateError
from fedlora.evaluation import ModelEvaluator
from fedlora.lora import stack
from fedlora.method import TailPenalty
from fedlora.server import ServerState
from fedlora.simulation import RoundRecord, RunState, Traffic, Trained, as_pruned, simulate, start

Ranks = Mapping[str, int | Mapping[str, int]]
AWAY = (("a", "b"), ("a", "b", "c"), ("b", "c"), ("b", "c"), ("a", "b", "c", "d"), ("a", "b", "c", "d"))
"""`a` misses two rounds; `c` and `d` join late; `b` is always there."""
PARTLY: Ranks = {"a": {"attn.q": 4}, "b": 4, "c": {"attn.v": 4}, "d": 4}
ONE_RANK = {"fedex-lora", "fedit", "fedrot-lora", "fedsa-lora", "lora-fair"}
OPTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in METHODS} | {
    "flexlora-raflora": ("flexlora", {"preset": "raflora"}),
    "glora-paper": ("glora", {"preset": "paper"}),
    "hetlora-pruning": ("hetlora", {"pruning": True, "keep": 0.5}),
    "padded-subspace": ("padded-average", {"coordinates": "subspace"}),
}
every_play = pytest.mark.parametrize(
    ("label", "ranks", "who"),
    [
        pytest.param(label, ranks, who, id=f"{label}-{kind}-{who_id}")
        for label, (name, _) in OPTIONS.items()
        for kind, ranks in (("equal", EQUAL), ("mixed", MIXED), ("partly", PARTLY))
        for who_id, who in (("full", FULL), ("partial", PARTIAL), ("away", AWAY))
        if kind != "mixed" or name not in ONE_RANK
    ],
)


def bug(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason)


def every_method(broken: str = "", reason: str = "") -> pytest.MarkDecorator:
    labels = [pytest.param(label, marks=bug(reason) if label == broken else ()) for label in OPTIONS]
    return pytest.mark.parametrize("label", labels)


def server_of(label: str, **options: Any) -> Server:
    name, hparams = OPTIONS[label]
    return Server(build(name, **hparams), **options)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def named(adapter: Adapter) -> dict[str, Tensor]:
    return {f"{m}/{f}": t for m, lora in adapter.modules.items() for f, t in lora.tensors().items()}


def bits(adapter: Adapter) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    tensors = named(adapter) | adapter.heads
    return {name: (t.dtype, t.shape, t.contiguous().numpy().tobytes()) for name, t in tensors.items()}


# ---- the change of a base weight -------------------------------------------------------------------------------------

STEPS = (2, 1, 3, 1, 1, 2, 4, 1, 1, 1)  # ranks; from the fourth on they sum to the full rank 7 of (9, 7), and more


def drawn(rank: int, *seed: str | int, dtype: torch.dtype = torch.float64) -> LoRA:
    return LoRA(noise((9, rank), "B", *seed, dtype=dtype), noise((rank, 7), "A", *seed, dtype=dtype))


def dense(loras: Sequence[LoRA]) -> Tensor:
    return sum((lora.map(Tensor.double).delta() for lora in loras), torch.zeros(9, 7).double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_a_base_change_is_the_dense_sum_of_its_steps_from_any_version(dtype: torch.dtype, tolerance: float) -> None:
    """Expected: dense float64 sums, of that rank. What `since` no longer has would be larger than the total."""
    base: BaseChange | None = None
    steps: list[LoRA] = []
    for k, rank in enumerate(STEPS):
        steps.append(drawn(rank, k, dtype=dtype))
        base = moved(base, stack([steps[-1], steps[-1]], [1.0, 0.0]))  # with as many idle slots, to be dropped
        assert base is not None and base.version == k + 1
        B, A = base.total.factors
        assert len(A) == min(7, sum(STEPS[: k + 1])) and B.dtype == A.dtype == dtype
        assert relative(B.mT @ B, (A @ A.mT).double()) < tolerance, "balanced"
        assert relative(base.total.delta(), dense(steps)) < tolerance
        assert sum(step.rank for step in base.steps) <= base.total.rank, "the state stays under twice the total"
        for version in range(k + 2):
            missed, ranks = base.since(version), STEPS[version : k + 1]
            assert (missed is None) == (sum(ranks) > base.total.rank)
            if missed:
                assert [step.rank for step in missed] == list(ranks)
                assert relative(dense(missed), dense(steps[version:])) < tolerance
        assert base.since(k + 1) == () and base.since(k + 2) is None, "up to date, and of another run"


def test_a_step_of_zero_is_no_step() -> None:
    """x - x = 0 and 0 A = 0: no version, and the very same value. But x and then -x are two steps, to a total of 0."""
    x, y = drawn(2, "x"), drawn(1, "y")
    base = moved(None, x)
    for zero in (LoRA(torch.zeros(9, 3).double(), drawn(3, 0).A), stack([x, x], [1.0, -1.0])):
        assert compressed(zero).rank == 0
        assert moved(None, zero) is None and moved(base, zero) is base
    back = moved(base, stack([x], [-1.0]))
    assert back is not None and (back.version, back.total.rank) == (2, 0)
    after = moved(back, y)
    assert after is not None and (after.version, after.total.rank) == (3, 1)
    assert relative(after.total.delta(), y.delta()) < 1e-13


@bug("`moved` keeps the newest step where it is larger than the total, which `pack` would never send")
def test_steps_stay_no_larger_than_a_total_that_shrank() -> None:
    """Expected: the docstring's "under twice its size". Here the total is 0, and a step of rank 2 is kept."""
    base = moved(moved(None, drawn(2, "x")), stack([drawn(2, "x")], [-1.0]))
    assert base is not None and sum(step.rank for step in base.steps) <= base.total.rank


# ---- a federation with a real client side ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """One client in one round, which starts from `state`. last: its round before this one. kept: its local parts.

    steps: module -> the dense steps that its base weight has taken by then, one a round.
    """

    state: ServerState
    last: int | None
    plain: Download
    parcel: Parcel
    got: Download
    kept: Adapter | None
    steps: Mapping[str, list[Tensor]]

    def check(self, tolerance: float = 1e-12) -> None:
        """What was unpacked is what was packed: parts bit for bit, the base change to the dense sum of its steps."""
        got, plain, mine = self.got, self.plain, receive(self.got, self.kept)
        assert bits(got.adapter) == bits(plain.adapter) and bits(mine) == bits(receive(plain, self.kept))
        assert set(mine.heads) == set(HEADS) and mine.ranks == plain.client.ranks(SHAPES)
        assert (got.roles, got.round, dict(got.changed)) == (plain.roles, plain.round, dict(plain.changed))
        assert held_after(got) == held_after(plain)
        for module in mine.modules:
            version = sum(bool(step.norm() > 1e-9) for step in self.steps[module])
            assert [d.base[module].version if module in d.base else 0 for d in (got, plain)] == [version, version]
            if version:
                assert relative(got.base_delta[module].delta(), torch.stack(self.steps[module]).sum(0)) < tolerance


def groups(parcel: Parcel) -> set[str]:
    """What of the adapter travelled: "adapter/B", "start/B", "heads", ..."""
    names = (name.split("/") for name in parcel.tensors())
    return {p[0] if "heads" in p[0] else "/".join(p[:2]) for p in names if p[0] not in ("base", "steps")}


def play(server: Server, ranks: Ranks, who: Any, dtype: torch.dtype = torch.float64) -> Iterator[Visit]:
    """Play the rounds with clients that store only their cache and what they keep."""
    top = max(max(r.values()) if isinstance(r, Mapping) else r for r in ranks.values())
    state = server.init(seed_adapter(top, dtype))
    caches: dict[str, Cache] = {}
    kept: dict[str, Adapter | None] = {}
    steps: dict[str, list[Tensor]] = {module: [] for module in SHAPES}
    for t, names in enumerate(who):
        uploads = []
        for c in names:
            cache = caches.get(c)
            plain = server.download(state, Client(c, ranks[c]))
            parcel = pack(plain, cache.held if cache else None)
            got, last = unpack(parcel, cache), cache.held.round if cache else None
            yield Visit(state, last, plain, parcel, got, kept.get(c), {m: list(made) for m, made in steps.items()})
            trained = pushed(receive(got, kept.get(c)), c, t, got.roles)
            caches[c], kept[c] = remember(got), keep(trained, got.roles)
            uploads.append(Upload(Client(c, ranks[c]), EXAMPLES[c], send(trained, got.roles)))
        state = server.aggregate(state, uploads)
        for module, made in steps.items():
            made.append(base_step(server.method.name, uploads, module))


def base_step(name: str, uploads: list[Upload], module: str) -> Tensor:
    """FLoRA: sum p_i B_i A_i. FedEx: that less (sum p_i B_i)(sum p_i A_i). Zero for all others."""
    held = [u for u in uploads if module in u.adapter.modules]
    total = sum(u.num_examples for u in held)
    if name not in ("fedex-lora", "flora") or not held:
        return torch.zeros(SHAPES[module]).double()
    pairs = [(u.num_examples / total, *u.adapter.modules[module].map(Tensor.double).factors) for u in held]
    mean: Any = sum(p * B @ A for p, B, A in pairs)
    return mean if name == "flora" else mean - sum(p * B for p, B, _ in pairs) @ sum(p * A for p, _, A in pairs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["f64", "f32"])
@every_play
def test_a_client_that_stores_what_it_got_has_the_plain_download(
    label: str, ranks: Ranks, who: tuple, dtype: torch.dtype, tolerance: float
) -> None:
    """Expected: the plain download, bit for bit; and dense float64 sums of the steps of the base weight."""
    for visit in play(server_of(label), ranks, who, dtype):
        visit.check(tolerance)


@every_play
def test_what_a_client_holds_is_left_out(label: str, ranks: Ranks, who: tuple) -> None:
    """Expected: from the roles in the papers. A frozen factor comes once, and again once it was trained by others.

    RoLoRA trains B in rounds 0, 2, ... and A in 1, 3, ...: who was there in the last round lacks what it trained.
    """
    for visit in play(server_of(label), ranks, who):
        want, new = {"adapter/B", "adapter/A", "heads"}, visit.last is None
        if label == "ffa-lora" and not new:
            want = {"adapter/B", "heads"}
        elif label == "fedsa-lora":
            want = {"adapter/A", "start/B", "start-heads"} if new else {"adapter/A"}
        elif label == "rolora" and visit.last == visit.state.round - 1:
            want = {"adapter/B" if visit.state.round % 2 else "adapter/A", "heads"}
        assert groups(visit.parcel) == want


@pytest.mark.parametrize("label", ["fedex-lora", "flora"])
def test_of_the_base_change_the_missed_steps_travel_or_the_whole_if_smaller(label: str) -> None:
    """Expected: numerical ranks of the dense steps that were missed, and of their sum. A newcomer gets the whole."""
    sent = set()
    for ranks in (dict.fromkeys("abcd", 2), EQUAL, PARTLY):
        for visit in play(server_of(label), ranks, (*AWAY, ("b", "c"), ("b", "c"), ("a", "b", "c", "d"))):
            for module in visit.parcel.ranks if visit.state.round else ():
                steps = torch.stack(visit.steps[module])
                whole = int(torch.linalg.matrix_rank(steps.sum(0), rtol=1e-9))
                missed = int(torch.linalg.matrix_rank(steps[visit.last or 0 :], rtol=1e-9).sum())
                got = {k: m[module].rank for k in ("base", "steps") if module in (m := getattr(visit.parcel, k))}
                larger = visit.last is None or missed > whole
                assert got == ({} if missed == 0 else {"base": whole} if larger else {"steps": missed})
                sent |= {(kind, visit.last is None) for kind in got}
    assert sent == {("steps", False), ("base", True), ("base", False)}, "all three cases were seen"


@every_method()
def test_a_module_that_nobody_held_in_a_round_stays_as_it_was(label: str) -> None:
    """Only `a`, without attn.v, is there in round 1: a step of zero there, which `play` sums densely."""
    for visit in play(server_of(label), PARTLY, (("a", "b", "c"), ("a",), ("b", "c"), ("b",), ("a", "c", "d"))):
        visit.check()


@pytest.mark.parametrize("heads", ["frozen", "local", "average"])
@every_method()
def test_heads_travel_as_often_as_their_role_says(label: str, heads: Any) -> None:
    """Frozen: once, and they stay the seed's. Local: once, as a start. Averaged: always."""
    group = "start-heads" if heads == "local" else "heads"
    for visit in play(server_of(label, heads=heads), EQUAL, AWAY):
        visit.check()
        came = {g for g in groups(visit.parcel) if "heads" in g}
        assert came == ({group} if visit.last is None or heads == "average" else set())
        if heads == "frozen":
            assert bits(Adapter({}, visit.got.adapter.heads)) == bits(Adapter({}, seed_adapter(4).heads))


@pytest.mark.parametrize("label", ["ffa-lora", "rolora"])
def test_another_rank_brings_the_frozen_factors_again(label: str) -> None:
    """Expected: the plain download at each rank. Frozen heads have no rank, and never come again."""
    server, cache = server_of(label, heads="frozen"), None
    state = server.init(seed_adapter(6))
    for k, rank in enumerate((4, 4, 2, 6, 6, {"attn.q": 6}, {"attn.q": 6}, 6)):
        plain = server.download(state, Client("a", rank))
        parcel = pack(plain, cache.held if cache else None)
        same = k in (1, 4, 6)  # as many as before
        assert groups(parcel) == {"adapter/B"} | (set() if same else {"adapter/A"}) | (set() if k else {"heads"})
        got = unpack(parcel, cache)
        assert bits(got.adapter) == bits(plain.adapter)
        cache = remember(got)


@every_method("fedsa-lora", "`remember` does not store the start, but `pack` takes it as held: the first round is lost")
def test_a_round_can_be_tried_again_after_a_crash(label: str) -> None:
    """The client stored its cache, trained and crashed: the state is the same. Expected: the same complete adapter."""
    for visit in play(server_of(label), EQUAL, FULL):
        cache = remember(visit.got)
        again = pack(visit.plain, cache.held)
        assert not again.base and not again.steps
        replace(visit, got=unpack(again, cache)).check()


@bug("`pack` sends no start to a client that holds anything, even for a module that is new to it")
def test_a_client_with_local_factors_can_take_on_a_module() -> None:
    """Expected: the plain download, from which `receive` starts the new module (tests/test_client.py)."""
    (visit,) = play(server_of("fedsa-lora"), PARTLY, [["a"]])
    cache, kept = remember(visit.got), keep(receive(visit.got, None), visit.got.roles)
    plain = server_of("fedsa-lora").download(visit.state, Client("a", 4))
    assert bits(receive(unpack(pack(plain, cache.held), cache), kept)) == bits(receive(plain, kept))


@bug("RoLoRA.aggregate revives a row of A in a round that has A frozen; ServerState.changed does not see it")
def test_a_frozen_factor_that_the_server_changed_comes_again() -> None:
    """`d` (rank 4) misses round 1 and sends nothing in round 2: its slots 2, 3 die there, and get fresh rows of A."""
    server, who = server_of("rolora"), (("a", "b", "d"), ("a", "b"), ("a", "b", "d"))
    a, b, d = [visit for visit in play(server, {"a": 2, "b": 2, "d": 4}, who) if visit.state.round == 2]
    uploads = [Upload(v.got.client, 1, send(pushed(v.got.adapter, "x", 2, v.got.roles), v.got.roles)) for v in (a, b)]
    plain, cache = server.download(server.aggregate(d.state, uploads), Client("d", 4)), remember(d.got)
    assert bits(unpack(pack(plain, cache.held), cache).adapter) == bits(plain.adapter)


SILENT = "a parcel does not say what its omissions build on, so `unpack` goes on with what it finds"


@pytest.mark.parametrize(
    ("label", "heads", "cached", "what"),
    [
        pytest.param("ffa-lora", None, None, "factor A of module 'attn.q'", id="no factor"),
        pytest.param("rolora", None, None, "factor B of module 'attn.q'", id="no factor of two"),
        pytest.param("rolora", None, 2, "factor B of module 'attn.q'", id="the other factor"),
        pytest.param("rolora", None, 1, "factor B of module 'attn.q'", id="an old factor", marks=bug(SILENT)),
        pytest.param("fedit", "frozen", None, "head", id="no heads", marks=bug(SILENT)),
        pytest.param("flora", None, None, "base weight of 'attn.q'", id="no base", marks=bug(SILENT)),
        pytest.param("flora", None, 2, "base weight of 'attn.q'", id="an old base", marks=bug(SILENT)),
    ],
)
def test_a_cache_without_what_was_left_out_is_refused_by_name(
    label: str, heads: Any, cached: int | None, what: str
) -> None:
    """Expected: from `unpack`'s docstring. The client claims round 3's cache, and has that of `cached`."""
    visits = list(play(server_of(label, heads=heads), EQUAL, [("a",)] * 5))
    with pytest.raises(KeptStateError, match=rf"{what}.*Ask again without saying what is held"):
        unpack(visits[4].parcel, None if cached is None else remember(visits[cached].got))


def test_a_base_change_that_is_up_to_date_is_not_made_up() -> None:
    """The second parcel of a round leaves the whole change out: without a cache there is none at version 4."""
    *_, visit = play(server_of("flora"), EQUAL, [("a",)] * 5)
    with pytest.raises(KeptStateError, match=r"base weight of 'attn.q' was left out, and none is stored.*version 4"):
        unpack(pack(visit.plain, held_after(visit.plain)), None)


@bug("`unpack` pairs a stored factor of another rank with what came: ShapeError")
def test_a_cache_of_another_rank_is_refused_by_name() -> None:
    """Expected: from `unpack`'s docstring; factor A of rank 4 was left out, and one of rank 2 is stored."""
    four, two = (next(play(server_of("ffa-lora"), {"a": r}, [["a"]])).got for r in (4, 2))
    with pytest.raises(KeptStateError, match=r"factor A of module 'attn.q'"):
        unpack(pack(four, held_after(four)), remember(two))


# ---- bytes, and the rank that pruning leaves -------------------------------------------------------------------------


def on_the_wire(tensors: Mapping[str, Tensor]) -> int:
    """The bytes that safetensors writes, less its header: 8 bytes of length, and the header itself."""
    blob = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()})
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


class RealClients:
    """A trainer whose clients have disks of their own: caches and kept parts. Counts, by round, what parcels take.

    Where tails are penalised it halves that of the (client, round)s in `shrinks`, and doubles all others; `broken`
    gets NaN in its heads.
    """

    def __init__(self, *shrinks: tuple[str, int], broken: tuple[str, int] | None = None) -> None:
        self.shrinks, self.broken = shrinks, broken
        self.disks: dict[str, tuple[Cache, Adapter | None]] = {}
        self.down: dict[int, list[int]] = {}

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        client, t = at = download.client.id, download.round
        cache, kept = self.disks.get(client, (None, None))
        parcel = pack(download, cache.held if cache else None)
        got = unpack(parcel, cache)
        assert bits(receive(got, kept)) == bits(adapter), "the engine's client has what a real one has"
        kinds = (("adapter", "start"), ("heads", "start-heads"), ("base", "steps"))
        sizes = [on_the_wire({n: x for n, x in parcel.tensors().items() if n.split("/")[0] in kind}) for kind in kinds]
        self.down[t] = [sum(pair) for pair in zip(self.down.get(t, [0, 0, 0]), sizes, strict=True)]
        trained = pushed(adapter, client, t, got.roles)
        if got.roles.penalty and t:
            trained = tail_moved(adapter, trained, 0.5 if at in self.shrinks else 2.0)
        if at == self.broken:
            trained = Adapter(trained.modules, {n: h * math.nan for n, h in trained.heads.items()})
        self.disks[client] = remember(got), keep(trained, got.roles)
        return Trained(trained, EXAMPLES[client], 0.0, position)


def tail_moved(received: Adapter, trained: Adapter, by: float) -> Adapter:
    """`trained`, with the received tail times `by`: the slots from r // 2, as keep = 0.5 has it (rank 1 has none)."""
    modules = {}
    for name, lora in trained.modules.items():
        (B, A), (B0, A0), q = lora.factors, received.modules[name].factors, max(1, lora.rank // 2)
        modules[name] = LoRA(torch.cat([B[:, :q], by * B0[:, q:]], 1), torch.cat([A[:q], A0[q:]]))
    return Adapter(modules, trained.heads)


@pytest.mark.parametrize(("share", "heads"), [(1.0, None), (0.5, None), (0.5, "frozen"), (0.5, "local")])
@every_method()
def test_the_bytes_of_a_run_are_those_that_safetensors_writes(label: str, share: float, heads: Any) -> None:
    """Expected: the sizes of real files, of the parcels of clients that store things and of the accepted uploads."""
    ranks, trainer = EQUAL if label in ONE_RANK else MIXED, RealClients(("a", 1), ("d", 2), ("d", 3))
    server, form = server_of(label, heads=heads), "subspace" if label == "glora" and share == 1 else "factors"
    begun = start(server, seed_adapter(max(ranks.values()), torch.float32))
    options: Any = {"rounds": 5, "participation": share, "form": form}
    for t, record in enumerate(simulate(server, [Client(c, r) for c, r in ranks.items()], trainer, begun, **options)):
        sent = [u.adapter for u in record.uploads]
        up, up_heads = sum(on_the_wire(named(a)) for a in sent), sum(on_the_wire(a.heads) for a in sent)
        assert record.bytes == Traffic(up, up_heads, *trainer.down[t])


HALF = TailPenalty(strength=1.0, keep=0.5)


def flat(**tails: tuple[int, float]) -> Adapter:
    """Module -> rank and the value of all of B (4, r); A (r, 9) is ones."""
    return Adapter({m: LoRA(torch.full((4, r), value), torch.ones(r, 9)) for m, (r, value) in tails.items()})


def test_the_tail_and_its_size_by_hand() -> None:
    """q = floor(keep r), from 1 to r - 1 (0.29 * 100 is 28.999999999999996 in floating point).

    m: B's tail is (4, 2) of 3s, norm 3 sqrt 8; A's (2, 9) of ones, sqrt 18: 36. n of rank 1: none. o: 2 * 2 * 3 = 12.
    """
    starts = {(0.5, 5): 2, (0.5, 2): 1, (0.5, 1): 1, (0.99, 4): 3, (0.99, 200): 198, (0.1, 4): 1, (0.29, 100): 29}
    assert {(k, r): TailPenalty(1.0, k).tail_start(r) for k, r in starts} == starts
    assert tail_size(flat(n=(1, 7.0)), HALF) == 0
    assert tail_size(flat(m=(4, 3.0), n=(1, 7.0), o=(2, -2.0)), HALF) == pytest.approx(48, rel=1e-6)


def test_a_client_shrinks_only_where_its_whole_tail_got_smaller() -> None:
    """Sizes by hand: 12 m + 6 o, 48 before. Of the product B A the first q slots are left: q times the value.

    36 + 11.4 < 48; o grew, but 24 + 23.4 < 48; equal, as what n of rank 1 lost is no tail; m's is gone, but 48.6 > 48.
    """
    before = flat(m=(4, 3.0), n=(1, 7.0), o=(2, 2.0))
    for m, n, o, smaller in (
        (3.0, 9.0, 1.9, True),
        (2.0, 9.0, 3.9, True),
        (3.0, 0.0, 2.0, False),
        (0.0, 7.0, 8.1, False),
    ):
        trained = flat(m=(4, m), n=(1, n), o=(2, o))
        got = prune(before, trained, HALF)
        assert got.ranks == ({"m": 2, "n": 1, "o": 1} if smaller else trained.ranks)
        for module, value in {"m": (2 if smaller else 4) * m, "n": n, "o": (1 if smaller else 2) * o}.items():
            assert torch.equal(got.modules[module].delta(), torch.full((4, 9), value))


@bug("`prune` takes the largest of no ranks: ValueError")
def test_a_client_with_heads_alone_has_nothing_to_prune() -> None:
    """`Client(id, {})` holds no module; every other method runs with one. Neither has one whose ranks are all 1."""
    for before in (flat(m=(1, 3.0), n=(1, 3.0)), Adapter({}, {"h": torch.ones(3)})):
        after = before.map(lambda t: t * 0)
        assert prune(before, after, HALF) is after


class Looking(ModelEvaluator):
    """The real evaluator of clients; its model is this object, which notes the ranks that it is given."""

    tokenizer = None

    def __init__(self, clients: Sequence[Client]) -> None:
        super().__init__(self, [], clients, target="clients")  # type: ignore[arg-type]
        self.seen: list[dict[str, int]] = []

    def activate(self, adapter: Adapter, base: Mapping[str, LoRA]) -> None:
        self.seen.append(adapter.ranks)

    def _measure(self, data: Any) -> dict[str, float]:
        return {"accuracy": 0.0, "loss": 0.0}


CLIENTS = [Client("a", 2), Client("b", 3), Client("c", 5), Client("d", {"attn.q": 6, "attn.v": 1})]
PRUNING = server_of("hetlora-pruning", quorum=3)


def pruned(trainer: RealClients, state: RunState | None = None, **options: Any) -> list[RoundRecord]:
    return list(simulate(PRUNING, CLIENTS, trainer, state or start(PRUNING, seed_adapter(6)), rounds=5, **options))


def qv(q: int, v: int | None = None) -> dict[str, int]:
    return {"attn.q": q, "attn.v": q if v is None else v}


def test_a_pruned_rank_stays_in_later_rounds_checkpoints_and_evaluation(tmp_path: Path) -> None:
    """By hand: 2 -> 1; 5 -> 2 -> 1; q's 6 -> 3 beside v's 1; b's tail grows. A resumed run has the same digests."""
    shrinks, looking = (("a", 1), ("c", 1), ("d", 2), ("c", 3), ("a", 4)), Looking(CLIENTS)
    records = pruned(RealClients(*shrinks), evaluator=looking)
    first, then = [qv(2), qv(3), qv(5), qv(6, 1)], [qv(1), qv(3), qv(2), qv(6, 1)]
    last = [qv(1), qv(3), qv(1), qv(3, 1)]
    ranks = [first, then, [qv(1), qv(3), qv(2), qv(3, 1)], last, last]  # after each round
    assert looking.seen == [r for at in ranks for r in at]
    names = [checkpoint.save(tmp_path / "whole", r.round, r.state, keep=9).name for r in records]
    for k, record in enumerate(records):
        assert [u.adapter.ranks for u in record.uploads] == ranks[k]
        assert [as_pruned(c, record.state.clients[c.id]).ranks(SHAPES) for c in CLIENTS] == ranks[k]
        size = [8 * sum(r[m] * sum(SHAPES[m]) for r in at for m in r) for at in (ranks[k], ranks[max(0, k - 1)])]
        assert [record.bytes.up_adapter, record.bytes.down_adapter] == size
        folder = tmp_path / str(k)
        checkpoint.save(folder, record.round, record.state)
        loaded = checkpoint.load_newest(folder, RunState, PRUNING.method.State)
        assert loaded is not None and [loaded[1].clients[c].ranks for c in "ab"] == [qv(1) if k else None, None]
        again = pruned(RealClients(*shrinks), loaded[1])
        assert [checkpoint.save(folder, r.round, r.state).name for r in again] == names[k + 1 :]


def test_a_refused_upload_does_not_shrink_the_client() -> None:
    """By hand. c's tail got smaller in round 1, but its heads are NaN: it comes back at 5, and shrinks in round 2."""
    looking = Looking(CLIENTS)
    records = pruned(RealClients(("a", 1), ("c", 1), ("c", 2), broken=("c", 1)), evaluator=looking)
    assert list(records[1].refused) == ["c"] and records[1].state.clients["c"].ranks is None
    assert looking.seen[2::4] == [qv(5), qv(5), qv(2), qv(2), qv(2)]
    assert looking.seen[::4] == [qv(2), qv(1), qv(1), qv(1), qv(1)]
