"""What really travels, and what a client stores between rounds.

Kinds of evidence: *oracle* (dense float64 sums; bytes as safetensors writes them; tail norms by hand) and *contract* (a
client that stores only `remember(download)` and its local parts has, bit for bit, what the plain download holds). A
test of a parcel says what travels and what does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, Download, LoRA, Server, Upload, build, keep, receive
from fedlora.core.base_change import BaseChange, moved
from fedlora.core.lora import stack
from fedlora.core.parcels import Cache, Parcel, held_after, pack, remember, unpack
from fedlora.core.trainer import Trained
from fedlora.errors import KeptStateError
from fedlora.linalg import svd_of_product
from fedlora.server.server import start
from fedlora.simulation import Traffic, simulate
from support.federations import EQUAL, EXAMPLES, FULL, HEADS, MIXED, PARTIAL, SHAPES, noise, pushed, seed_adapter

AWAY = (("a", "b"), ("a", "b", "c"), ("b", "c"), ("b", "c"), ("a", "b", "c", "d"), ("a", "b", "c", "d"))
WHO = {"full": FULL, "partial": PARTIAL, "away": AWAY}  # away: `a` misses two rounds; `c` and `d` join late
PARTLY: dict[str, Any] = {"a": {"attn.q": 4}, "b": 4, "c": {"attn.v": 4}, "d": 4}
RANKS: dict[str, dict[str, Any]] = {"equal": EQUAL, "mixed": MIXED, "partly": PARTLY}
ONE_RANK = {name for name, method in METHODS.items() if method.one_rank}
OPTIONS = {name: build(name) for name in METHODS} | {
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


def stepped(base: BaseChange | None, step: LoRA) -> BaseChange | None:
    return moved(base, svd_of_product(*step.map(Tensor.double).factors), step.factors[0].dtype)


def dense(loras: Sequence[LoRA]) -> Tensor:
    return sum((lora.map(Tensor.double).delta() for lora in loras), torch.zeros(9, 7).double())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_a_base_change_is_the_dense_sum_of_its_steps_from_any_version(dtype: torch.dtype, tolerance: float) -> None:
    """Expected: dense float64 sums, of at most that rank. What `since` no longer has would be larger than the total."""
    base: BaseChange | None = None
    steps: list[LoRA] = []
    for k, rank in enumerate(STEPS):
        steps.append(drawn(rank, k, dtype=dtype))
        base = stepped(base, stack([steps[-1], steps[-1]], [1.0, 0.0]))  # with as many idle slots, to be dropped
        assert base is not None and base.version == k + 1
        B, A = base.total.factors
        assert len(A) == min(7, sum(STEPS[: k + 1])) and B.dtype == A.dtype == torch.float64  # whatever the steps are
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
    x, base = drawn(2, "x"), stepped(None, drawn(2, "x"))
    for zero in (LoRA(torch.zeros(9, 3).double(), drawn(3, 0).A), stack([x, x], [1.0, -1.0])):
        assert stepped(None, zero) is None and stepped(base, zero) is base
    back = stepped(base, stack([x], [-1.0]))
    assert back is not None and (back.version, back.total.rank) == (2, 0)


def test_a_total_of_steps_that_cancel_keeps_its_digits_in_a_narrow_dtype() -> None:
    """x, then -x + s of a thousandth: clients get the total in float32, whose rounding is of columns as small as s."""
    x, small = drawn(1, "x"), stack([drawn(1, "s")], [1e-3])
    base = stepped(stepped(None, x), stack([x, small], [-1.0, 1.0]))
    assert base is not None and relative(base.total.map(Tensor.float).delta(), small.delta()) < 1e-6


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
    """A trainer whose clients live on parcels and own disks."""

    def __init__(self) -> None:
        self.disks: dict[str, tuple[Cache, Adapter | None]] = {}
        self.visits: list[Visit] = []

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        client = download.client.id
        cache, kept = self.disks.get(client, (None, None))
        parcel = pack(download, cache.held if cache else None)
        got = unpack(parcel, cache)
        self.visits.append(Visit(cache.held.round if cache else None, download, parcel, got, kept, adapter))
        trained = pushed(receive(got, kept), client, download.round, got.roles)
        kept = keep(trained, got.roles)
        self.disks[client] = remember(got, kept), kept
        return Trained(trained, EXAMPLES[client], 0.0, position)


def play(server: Server, ranks: Any, who: Any, dtype: Any = torch.float64) -> Iterator[Visit]:
    """Play the rounds in the engine, each with some of the clients, and count what travels as files."""
    top = max(max(r.values()) if isinstance(r, Mapping) else r for r in ranks.values())
    trainer = RealClients()
    state = start(server, seed_adapter(top, dtype))
    steps: dict[str, list[Tensor]] = {module: [] for module in SHAPES}
    for names in who:
        clients = [Client(c, ranks[c]) for c in names]
        record = next(simulate(server, clients, trainer, state, rounds=len(who)))
        assert record.bytes == traffic([v.parcel for v in trainer.visits], record.uploads)
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
    for visit in play(server_of(label), RANKS[ranks], WHO[who], getattr(torch, dtype)):
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
