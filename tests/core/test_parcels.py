"""What really travels, what a client stores between rounds, and the rank that pruning leaves it.

Kinds of evidence: *oracle* (dense float64 sums; bytes as safetensors writes them; tail norms by hand) and *contract* (a
client that stores only `remember(download)` and its local parts has, bit for bit, what the plain download holds). A
test of a parcel says what travels and what does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, Download, LoRA, Server, Upload, build, keep, receive
from fedlora.client import prune, tail_size
from fedlora.core import checkpoint
from fedlora.core.base_change import BaseChange, compressed, moved
from fedlora.core.lora import stack
from fedlora.core.messages import as_pruned
from fedlora.core.method import TailPenalty
from fedlora.core.parcels import Cache, Parcel, held_after, pack, remember, unpack
from fedlora.core.trainer import Trained
from fedlora.data import TextData
from fedlora.errors import KeptStateError
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord, Traffic, simulate
from fedlora.training.evaluation import Batch, ModelEvaluator, _HeldOut
from support.federations import EQUAL, EXAMPLES, FULL, HEADS, MIXED, PARTIAL, SHAPES, noise, pushed, seed_adapter

AWAY = (("a", "b"), ("a", "b", "c"), ("b", "c"), ("b", "c"), ("a", "b", "c", "d"), ("a", "b", "c", "d"))
WHO = {"full": FULL, "partial": PARTIAL, "away": AWAY}  # away: `a` misses two rounds; `c` and `d` join late
PARTLY: dict[str, Any] = {"a": {"attn.q": 4}, "b": 4, "c": {"attn.v": 4}, "d": 4}
RANKS: dict[str, dict[str, Any]] = {"equal": EQUAL, "mixed": MIXED, "partly": PARTLY}
ONE_RANK = {"fedex-lora", "fedit", "fedrot-lora", "fedsa-lora", "lora-fair"}
OPTIONS = {name: build(name) for name in METHODS} | {
    "flexlora-raflora": build("flexlora", preset="raflora"),
    "glora-paper": build("glora", preset="paper"),
    "hetlora-pruning": build("hetlora", pruning=True, keep=0.5),
    "padded-subspace": build("padded-average", coordinates="subspace"),
}
every_method = pytest.mark.parametrize("label", OPTIONS)
EVERY_KIND = ("fedex-lora", "fedsa-lora", "fedsvd", "ffa-lora", "flora", "glora", "rolora")  # of what stays or moves
every_kind = pytest.mark.parametrize("label", EVERY_KIND)
PLAYS = [
    (label, ranks, who, dtype)
    for label, ranks, who, dtype in product(OPTIONS, RANKS, WHO, ("float64", "float32"))
    if (ranks != "mixed" or label not in ONE_RANK) and (who == "away" or dtype == "float64")
]


def server_of(label: str, **options: Any) -> Server:
    return Server(OPTIONS[label], **options)


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
        assert len(A) == min(7, sum(STEPS[: k + 1])) and B.dtype == A.dtype == torch.float64  # whatever the steps are
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
    x, base = drawn(2, "x"), moved(None, drawn(2, "x"))
    for zero in (LoRA(torch.zeros(9, 3).double(), drawn(3, 0).A), stack([x, x], [1.0, -1.0])):
        assert compressed(zero).rank == 0
        assert moved(None, zero) is None and moved(base, zero) is base
    back = moved(base, stack([x], [-1.0]))
    assert back is not None and (back.version, back.total.rank) == (2, 0)


def test_steps_stay_no_larger_than_a_total_that_shrank() -> None:
    """Expected: the docstring's "under twice its size". Here the total is 0, and a step of rank 2 is kept."""
    base = moved(moved(None, drawn(2, "x")), stack([drawn(2, "x")], [-1.0]))
    assert base is not None and sum(step.rank for step in base.steps) <= base.total.rank


# ---- a federation with a real client side ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """One client in one round. last: its round before. mine: what the engine gave it. steps: of the bases, dense."""

    last: int | None
    plain: Download
    parcel: Parcel
    got: Download
    kept: Adapter | None
    mine: Adapter
    steps: Mapping[str, list[Tensor]] = field(default_factory=dict)

    def check(self, tolerance: float = 1e-12) -> None:
        """What was unpacked is what was packed: parts bit for bit, the base change to the dense sum of its steps."""
        got, plain, mine = self.got, self.plain, receive(self.got, self.kept)
        assert bits(got.adapter) == bits(plain.adapter)
        assert bits(replace(mine, base=None)) == bits(replace(self.mine, base=None))
        assert set(mine.heads) == set(HEADS) and mine.ranks == plain.client.ranks(SHAPES)
        assert (got.roles, held_after(got)) == (plain.roles, held_after(plain))
        for module in mine.modules:
            version = sum(bool(step.norm() > 1e-9) for step in self.steps[module])
            assert [d.base[module].version if module in d.base else 0 for d in (got, plain)] == [version, version]
            if version:
                assert relative(got.base_delta[module].delta(), torch.stack(self.steps[module]).sum(0)) < tolerance


class RealClients:
    """A trainer whose clients live on parcels and own disks. Penalised tails halve at `shrinks`, and double else."""

    def __init__(self, *shrinks: tuple[str, int], broken: tuple[str, int] | None = None) -> None:
        self.shrinks, self.broken = shrinks, broken
        self.disks: dict[str, tuple[Cache, Adapter | None]] = {}
        self.visits: list[Visit] = []

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        client, t = at = download.client.id, download.round
        cache, kept = self.disks.get(client, (None, None))
        parcel = pack(download, cache.held if cache else None)
        got = unpack(parcel, cache)
        self.visits.append(Visit(cache.held.round if cache else None, download, parcel, got, kept, adapter))
        trained = pushed(receive(got, kept), client, t, got.roles)
        if got.roles.penalty and t:
            trained = tail_moved(adapter, trained, 0.5 if at in self.shrinks else 2.0)
        if at == self.broken:
            trained = replace(trained, heads={n: h * math.nan for n, h in trained.heads.items()})
        kept = keep(trained, got.roles)
        self.disks[client] = remember(got, kept), kept
        return Trained(trained, EXAMPLES[client], 0.0, position)


def tail_moved(received: Adapter, trained: Adapter, by: float) -> Adapter:
    """`trained`, with the received tail times `by`: the slots from r // 2, as keep = 0.5 has it (rank 1 has none)."""
    modules = {}
    for name, lora in trained.modules.items():
        (B, A), (B0, A0), q = lora.factors, received.modules[name].factors, max(1, lora.rank // 2)
        modules[name] = LoRA(torch.cat([B[:, :q], by * B0[:, q:]], 1), torch.cat([A[:q], A0[q:]]))
    return replace(trained, modules=modules)


def play(server: Server, ranks: Any, who: Any, dtype: Any = torch.float64, **options: Any) -> Iterator[Visit]:
    """Play the rounds in the engine, each with some of the clients, and count what travels as files."""
    top = max(max(r.values()) if isinstance(r, Mapping) else r for r in ranks.values())
    trainer = RealClients(("a", 1), ("b", 2), broken=options.pop("broken", None))
    state = start(server, seed_adapter(top, dtype))
    steps: dict[str, list[Tensor]] = {module: [] for module in SHAPES}
    for names in who:
        clients = [Client(c, ranks[c]) for c in names]
        record = next(simulate(server, clients, trainer, state, rounds=len(who), **options))
        assert record.refused or record.bytes == traffic([v.parcel for v in trainer.visits], record.uploads)
        yield from (replace(visit, steps=dict(steps)) for visit in trainer.visits)
        trainer.visits, state = [], record.state
        steps = {m: [*made, base_step(server.method.name, record.uploads, m)] for m, made in steps.items()}


def size(tensors: Mapping[str, Tensor]) -> int:
    """The bytes that safetensors writes, less its header: 8 bytes of length, and the header itself."""
    blob = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


def tensors_of(parcel: Parcel) -> dict[str, Tensor]:
    """Everything of a parcel that has a size."""
    loras = {
        "adapter": parcel.adapter.modules,
        "start": parcel.start.modules,
        "base": parcel.base,
        "steps": parcel.steps,
    }
    heads = {"heads": parcel.adapter.heads, "start-heads": parcel.start.heads}
    found = {
        f"{group}/{factor}/{module}": tensor
        for group, modules in loras.items() for module, lora in modules.items()
        for factor, tensor in lora.tensors().items()
    }  # fmt: skip
    return found | {f"{group}/{name}": head for group, tensors in heads.items() for name, head in tensors.items()}


def traffic(parcels: Sequence[Parcel], uploads: Sequence[Upload]) -> Traffic:
    down = [
        sum(size({n: t for n, t in tensors_of(parcel).items() if n.split("/")[0] in kind}) for parcel in parcels)
        for kind in (("adapter", "start"), ("heads", "start-heads"), ("base", "steps"))
    ]
    return Traffic(sum(size(named(u.adapter)) for u in uploads), sum(size(u.adapter.heads) for u in uploads), *down)


def groups(parcel: Parcel) -> set[str]:
    """What of the adapter travelled: "adapter/B", "start/B", "heads", ..."""
    names = (name.split("/") for name in tensors_of(parcel))
    return {p[0] if "heads" in p[0] else "/".join(p[:2]) for p in names if p[0] not in ("base", "steps")}


def base_step(name: str, uploads: Sequence[Upload], module: str) -> Tensor:
    """FLoRA: sum p_i B_i A_i. FedEx: that less (sum p_i B_i)(sum p_i A_i). Zero for all others."""
    held = [u for u in uploads if module in u.adapter.modules and name in ("fedex-lora", "flora")]
    if not held:
        return torch.zeros(SHAPES[module]).double()
    total = sum(u.num_examples for u in held)
    pairs = [(u.num_examples / total, *u.adapter.modules[module].map(Tensor.double).factors) for u in held]
    mean: Any = sum(p * B @ A for p, B, A in pairs)
    return mean if name == "flora" else mean - sum(p * B for p, B, _ in pairs) @ sum(p * A for p, _, A in pairs)


@pytest.mark.quick(18)
@pytest.mark.parametrize(("label", "ranks", "who", "dtype"), PLAYS)
def test_what_a_client_holds_is_left_out_and_it_lacks_nothing(label: str, ranks: str, who: str, dtype: str) -> None:
    """Expected: the engine's download, bit for bit; dense float64 sums of the base's steps; bytes as safetensors writes
    them (`play`); and by the papers' roles, that a frozen factor comes once, and again once it was trained by others.

    RoLoRA trains B in rounds 0, 2, ... and A in 1, 3, ...: who was there in the last round lacks what it trained.
    """
    form = "subspace" if label == "glora-paper" else "factors"
    for visit in play(server_of(label), RANKS[ranks], WHO[who], getattr(torch, dtype), form=form):
        visit.check(1e-12 if dtype == "float64" else 2e-6)
        want, new, t = {"adapter/B", "adapter/A", "heads"}, visit.last is None, visit.plain.round
        if label == "ffa-lora" and not new:
            want = {"adapter/B", "heads"}
        elif label == "fedsa-lora":
            want = {"adapter/A", "start/B", "start-heads"} if new else {"adapter/A"}
        elif label == "rolora" and visit.last == t - 1:
            want = {"adapter/B" if t % 2 else "adapter/A", "heads"}
        assert groups(visit.parcel) == want


@pytest.mark.parametrize("label", ["fedex-lora", "flora"])
def test_of_the_base_change_the_missed_steps_travel_or_the_whole_if_smaller(label: str) -> None:
    """Expected: numerical ranks of the dense steps that were missed, and of their sum. A newcomer gets the whole."""
    sent = set()
    for ranks in (dict.fromkeys("abcd", 2), EQUAL, PARTLY):
        for visit in play(server_of(label), ranks, (*AWAY, ("b", "c"), ("b", "c"), ("a", "b", "c", "d"))):
            for module in visit.parcel.ranks if visit.plain.round else ():
                steps = torch.stack(visit.steps[module])
                whole = int(torch.linalg.matrix_rank(steps.sum(0), rtol=1e-9))
                missed = int(torch.linalg.matrix_rank(steps[visit.last or 0 :], rtol=1e-9).sum())
                got = {k: m[module].rank for k in ("base", "steps") if module in (m := getattr(visit.parcel, k))}
                larger = visit.last is None or missed > whole
                assert got == ({} if missed == 0 else {"base": whole} if larger else {"steps": missed})
                sent |= {(kind, visit.last is None) for kind in got}
    assert sent == {("steps", False), ("base", True), ("base", False)}, "all three cases were seen"


@every_kind
def test_a_module_that_nobody_held_in_a_round_stays_as_it_was(label: str) -> None:
    """Only `a`, without attn.v, is there in round 1: a step of zero there, which `play` sums densely."""
    for visit in play(server_of(label), PARTLY, (("a", "b", "c"), ("a",), ("b", "c"), ("b",), ("a", "c", "d"))):
        visit.check()


@pytest.mark.quick(7)
@pytest.mark.parametrize("heads", ["frozen", "local", "average"])
@every_method
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


@every_kind
def test_a_round_can_be_tried_again_after_a_crash(label: str) -> None:
    """The client stored its cache and crashed. Expected: the same adapter; the base that it has does not come again."""
    for visit in play(server_of(label), EQUAL, FULL):
        cache = remember(visit.got, visit.kept)
        again = pack(visit.plain, cache.held)
        assert not again.base and not again.steps
        replace(visit, got=unpack(again, cache)).check()
        if visit.got.base:
            with pytest.raises(KeptStateError, match=r"base weight of 'attn.[qv]'.*left out"):
                unpack(again, None)


def test_a_client_with_local_factors_can_take_on_a_module() -> None:
    """Expected: the plain download, from which `receive` starts the new module (test_client.py)."""
    server = server_of("fedsa-lora")
    (visit,) = play(server, PARTLY, [["a"]])
    kept = keep(visit.mine, visit.got.roles)
    cache = remember(visit.got, kept)
    plain = server.download(server.init(seed_adapter(4)), Client("a", 4))
    assert bits(receive(unpack(pack(plain, cache.held), cache), kept)) == bits(receive(plain, kept))


def test_a_frozen_factor_that_the_server_changed_comes_again() -> None:
    """`d` (rank 4) misses round 1 and is refused in round 2: its slots 2, 3 die there, and get fresh rows of A."""
    who = (("a", "b", "d"), ("a", "b"), ("a", "b", "d"), ("d",))
    *_, visit = play(server_of("rolora", quorum=1), {"a": 2, "b": 2, "d": 4}, who, broken=("d", 2))
    visit.check()


@pytest.mark.parametrize(
    ("label", "heads", "cached", "what"),
    [
        pytest.param("ffa-lora", None, None, "factor A of module 'attn.q'", id="no factor"),
        pytest.param("rolora", None, 2, "factor B of module 'attn.q'", id="the other factor"),
        pytest.param("rolora", None, 1, "factor B of module 'attn.q'", id="an old factor"),
        pytest.param("fedit", "frozen", None, "head", id="no heads"),
        pytest.param("flora", None, None, "base weight of 'attn.q'", id="no base"),
        pytest.param("flora", None, 2, "base weight of 'attn.q'", id="an old base"),
    ],
)
def test_a_cache_without_what_was_left_out_is_refused(label: str, heads: Any, cached: int | None, what: str) -> None:
    """Expected: from `unpack`'s docstring. The client claims round 3's cache, and has that of `cached`."""
    visits = list(play(server_of(label, heads=heads), EQUAL, [("a",)] * 5))
    with pytest.raises(KeptStateError, match=rf"{what}.*Ask again"):
        unpack(visits[4].parcel, None if cached is None else remember(visits[cached].got))


def test_a_cache_of_another_rank_is_refused_by_name() -> None:
    """Expected: from `unpack`'s docstring; factor A of rank 4 was left out, and one of rank 2 is stored."""
    four, two = (next(play(server_of("ffa-lora"), {"a": r}, [["a"]])).got for r in (4, 2))
    with pytest.raises(KeptStateError, match=r"factor A of module 'attn.q'"):
        unpack(pack(four, held_after(four)), remember(two))


# ---- the rank that pruning leaves ------------------------------------------------------------------------------------

HALF = TailPenalty(strength=1.0, keep=0.5)
CLIENTS = [Client("a", 2), Client("b", 3), Client("c", 5), Client("d", {"attn.q": 6, "attn.v": 1})]
PRUNING = server_of("hetlora-pruning", quorum=3)


def flat(**tails: tuple[int, float]) -> Adapter:
    """Module -> rank and the value of all of B (4, r); A (r, 9) is ones."""
    return Adapter({m: LoRA(torch.full((4, r), float(value)), torch.ones(r, 9)) for m, (r, value) in tails.items()})


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
    for m, n, o, smaller in ((3, 9, 1.9, True), (2, 9, 3.9, True), (3, 0, 2, False), (0, 7, 8.1, False)):
        trained = flat(m=(4, m), n=(1, n), o=(2, o))
        got = prune(before, trained, HALF)
        assert got.ranks == ({"m": 2, "n": 1, "o": 1} if smaller else trained.ranks)
        for module, value in {"m": (2 if smaller else 4) * m, "n": n, "o": (1 if smaller else 2) * o}.items():
            assert torch.equal(got.modules[module].delta(), torch.full((4, 9), float(value)))
    assert prune(flat(m=(1, 3), n=(1, 3)), least := flat(m=(1, 0), n=(1, 0)), HALF) is least, "rank 1 stays"


def test_a_client_with_heads_alone_has_nothing_to_prune() -> None:
    """`Client(id, {})` holds no module; every other method runs with one."""
    heads = Adapter({}, {"h": torch.ones(3)})
    assert prune(heads, heads, HALF) is heads


def pruned(trainer: RealClients, state: RunState | None = None, **options: Any) -> list[RoundRecord]:
    return list(simulate(PRUNING, CLIENTS, trainer, state or start(PRUNING, seed_adapter(6)), rounds=5, **options))


def looking(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, ...]]) -> ModelEvaluator:
    """The real evaluator of clients, with a model that only notes the ranks of q and v that it is given."""
    monkeypatch.setattr(ModelEvaluator, "_prepared", lambda *_: _HeldOut([{}], None, [], [0], [0]))
    monkeypatch.setattr(ModelEvaluator, "_predictions", lambda *_: Batch([0], [0], 0.0))
    model: Any = SimpleNamespace(tokenizer=None, activate=lambda a: seen.append(tuple(a.ranks.values())))
    return ModelEvaluator(model, {"": TextData("instruction", ("p",), responses=("r",))}, CLIENTS, target="clients")


def test_a_pruned_rank_stays_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, (q, v): 2 -> 1; 5 -> 2 -> 1; q's 6 -> 3 beside v's 1. Resumed runs: the digests of the whole one."""
    shrinks, seen = (("a", 1), ("c", 1), ("d", 2), ("c", 3), ("a", 4)), []  # type: ignore[var-annotated]
    records = pruned(RealClients(*shrinks), evaluator=looking(monkeypatch, seen))
    first, second = [(2, 2), (3, 3), (5, 5), (6, 1)], [(1, 1), (3, 3), (2, 2), (6, 1)]  # after each round
    ranks = [first, second, [(1, 1), (3, 3), (2, 2), (3, 1)], *[[(1, 1), (3, 3), (1, 1), (3, 1)]] * 2]
    assert seen == [r for at in ranks for r in at]
    names = [checkpoint.save(tmp_path / "whole", r.round, r.state, keep=9).name for r in records]
    for k, record in enumerate(records):
        assert [tuple(u.adapter.ranks.values()) for u in record.uploads] == ranks[k]
        sizes = [8 * sum(q * (30 + 22) + v * (18 + 22) for q, v in at) for at in (ranks[k], ranks[max(0, k - 1)])]
        assert [record.bytes.up_adapter, record.bytes.down_adapter] == sizes
        checkpoint.save(tmp_path, record.round, record.state)
        loaded = checkpoint.load_newest(tmp_path, RunState, PRUNING.method.State)
        assert loaded is not None
        for client, want in zip(CLIENTS, ranks[k], strict=True):
            assert tuple(as_pruned(client, loaded[1].clients[client.id]).ranks(SHAPES).values()) == want
        again = pruned(RealClients(*shrinks), loaded[1])
        assert [checkpoint.save(tmp_path / str(k), r.round, r.state).name for r in again] == names[k + 1 :]


def test_a_refused_upload_does_not_shrink_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand. c's tail got smaller in round 1, but its heads are NaN: it comes back at 5, and shrinks in round 2."""
    trainer, seen = RealClients(("a", 1), ("c", 1), ("c", 2), broken=("c", 1)), []  # type: ignore[var-annotated]
    records = pruned(trainer, evaluator=looking(monkeypatch, seen))
    assert list(records[1].refused) == ["c"] and records[1].state.clients["c"].ranks is None
    assert (seen[2::4], seen[::4]) == ([(5, 5)] * 2 + [(2, 2)] * 3, [(2, 2)] + [(1, 1)] * 4)
