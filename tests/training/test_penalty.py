"""HetLoRA's penalty in a real gradient, and the ranks that it really takes away. Tiny transformers, no network.

Kinds of evidence: *oracle* (one SGD step against the penalty's gradient written out by hand; tail norms and ranks of
whole runs by dense float64 norms) and *end-to-end* (from a config, killed and resumed).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Roles, Server, build, read_adapter
from fedlora.client import tail_size
from fedlora.core.method import TailPenalty
from fedlora.runs.folder import RunFolder
from fedlora.server.server import start
from fedlora.simulation import simulate
from fedlora.training.local import LocalTrainer
from fedlora.training.settings import TrainSettings
from support.command_line import invoke
from support.known_warnings import FUTURE_NAMES
from support.local_training import Loader, download, drawn, loader
from support.projects import configured, ran, same_run
from support.recorded import Call, recording
from support.tiny_models import bert
from support.training_data import classification, save_model

pytestmark = FUTURE_NAMES

F64 = torch.float64
STRENGTH, LR = 3.0, 0.1


# ---- one step --------------------------------------------------------------------------------------------------------


def stepped(load: Loader, adapter: Adapter, penalty: TailPenalty | None, **settings: Any) -> Any:
    """What `LocalTrainer` makes of `adapter` in one SGD step on eight examples; unclipped unless asked for."""
    chosen = {"lr": LR, "optimizer": "sgd", "steps": 1, "batch_size": 8, "clip": 0.0} | settings
    trainer = LocalTrainer(load(), {"a": classification(8, 1)}, TrainSettings(**chosen), seed=3)
    return trainer.train(download(adapter, roles=Roles(penalty=penalty)), adapter, 0)


def slope(lora: LoRA, q: int) -> LoRA:
    """The gradient of ||B[:, q:]|| ||A[q:]|| by hand, float64: ||A_t|| B_t / ||B_t|| and ||B_t|| A_t / ||A_t||."""
    B, A = (t.double() for t in lora.factors)
    by_B, by_A = torch.zeros_like(B), torch.zeros_like(A)
    if q < lora.rank:
        b, a = B[:, q:].square().sum().sqrt(), A[q:].square().sum().sqrt()
        by_B[:, q:], by_A[q:] = a * B[:, q:] / b, b * A[q:] / a
    return LoRA(by_B, by_A)


def seeded(load: Loader, ranks: int | Mapping[str, int] = 4) -> Adapter:
    """A random adapter, B and A alike, of the model's four modules."""
    return drawn(load().seed_adapter(4, seed=0)[0], ranks, seed=5)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Of two layers: four modules, each with a rank of its own."""
    return loader(save_model(tmp_path_factory.mktemp("classifier"), bert(2), classifies=True))


MIXED = {f"bert.encoder.layer.{k}.attention.self.{m}": r for k, m, r in
         ((0, "query", 4), (0, "value", 2), (1, "query", 1), (1, "value", 6))}  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "keep", "starts"),
    [
        (4, 0.5, dict.fromkeys(MIXED, 2)),
        (5, 0.99, dict.fromkeys(MIXED, 4)),  # floor(4.95)
        (MIXED, 0.5, dict(zip(MIXED, (2, 1, 1, 3), strict=True))),  # of rank 1, slot 1 on: there is none
    ],
    ids=["half", "default keep", "a rank for each module"],
)
def test_one_step_differs_by_the_penaltys_own_gradient(
    load: Loader, ranks: int | dict[str, int], keep: float, starts: dict[str, int]
) -> None:
    """SGD is linear in the gradient: with minus without is -lr * strength * slope, written out above. First slots and
    heads stay the same bits. Where each tail starts is by hand."""
    adapter = seeded(load, ranks)
    without = stepped(load, adapter, None).adapter
    with_it = stepped(load, adapter, TailPenalty(STRENGTH, keep)).adapter
    for name, lora in adapter.modules.items():
        for factor, by_hand in slope(lora, starts[name]).tensors().items():
            one, other = with_it.modules[name].tensors()[factor], without.modules[name].tensors()[factor]
            torch.testing.assert_close(one.double() - other.double(), -LR * STRENGTH * by_hand, rtol=0, atol=1e-6)
            assert torch.equal(one[by_hand == 0], other[by_hand == 0])
            if starts[name] < lora.rank:
                assert float(by_hand.norm()) * LR * STRENGTH > 0.1, "it is a hundred thousand times the tolerance"
    assert all(torch.equal(with_it.heads[name], head) for name, head in without.heads.items())


def test_the_reported_loss_is_without_the_penalty(load: Loader) -> None:
    """methods.md: "`LocalTrainer` reports the loss without it". One step, so both losses are of the same weights."""
    adapter = seeded(load)
    with_it, without = (stepped(load, adapter, p) for p in (TailPenalty(1e3, 0.5), None))
    assert with_it.loss == without.loss and math.isfinite(with_it.loss)


def test_it_counts_once_a_step_however_many_micro_batches(load: Loader) -> None:
    """accumulation = 4 is the same gradient from less memory: added with each micro-batch it would count four times."""
    adapter, penalty = seeded(load), TailPenalty(STRENGTH, 0.5)
    whole, parts = (stepped(load, adapter, penalty, accumulation=k).adapter for k in (1, 4))
    for name, lora in whole.modules.items():
        for factor, t in lora.tensors().items():
            torch.testing.assert_close(parts.modules[name].tensors()[factor], t, rtol=0, atol=1e-6)


def vector(before: Adapter, after: Adapter) -> Tensor:
    """All that moved, as one float64 vector."""
    moved = [
        after.modules[n].tensors()[f].double() - t.double()
        for n, x in before.modules.items()
        for f, t in x.tensors().items()
    ] + [after.heads[n].double() - head.double() for n, head in before.heads.items()]
    return torch.cat([t.flatten() for t in moved])


def test_clipping_is_of_loss_and_penalty_together(load: Loader) -> None:
    """A gradient g of norm n > c becomes g c / n: the clipped step is the free one, shortened to lr * c. The penalty is
    most of it here, so a loss clipped by itself would leave a longer step in another direction."""
    adapter, penalty, clip = seeded(load), TailPenalty(STRENGTH, 0.5), 0.5
    free = vector(adapter, stepped(load, adapter, penalty).adapter)
    short = vector(adapter, stepped(load, adapter, penalty, clip=clip).adapter)
    plain = vector(adapter, stepped(load, adapter, None).adapter)
    assert float(free.norm()) / LR > 2 * clip and float((free - plain).norm()) > float(plain.norm())
    torch.testing.assert_close(short, free * (clip / (float(free.norm()) / LR)), rtol=0, atol=1e-6)
    assert float(short.norm()) == pytest.approx(LR * clip, rel=1e-4)


def test_a_start_with_b_zero_trains_as_without_it_at_first(load: Loader) -> None:
    """At B = 0 the penalty is at its least, and x / sqrt(x^2 + tiny) is 0 there: the first step is the plain one, where
    the norm's own derivative would be 0 / 0. Five more steps stay finite and move B."""
    fresh, penalty = load().seed_adapter(4, seed=0)[0], TailPenalty(STRENGTH, 0.5)
    assert all(not lora.factors[0].any() for lora in fresh.modules.values())
    one, plain = (stepped(load, fresh, p).adapter for p in (penalty, None))
    assert float(vector(plain, one).abs().max()) < 1e-9
    five = stepped(load, fresh, penalty, steps=5).adapter
    assert bool(vector(fresh, five).isfinite().all())
    assert all(lora.factors[0].any() for lora in five.modules.values())


def test_tails_that_are_zero_in_both_factors_stay_zero_and_finite(load: Loader) -> None:
    """Such a slot has no gradient of the loss, as each factor's is times the other; the penalty must not add 0 / 0."""
    modules = {}
    for name, lora in seeded(load).modules.items():
        B, A = (t.clone() for t in lora.factors)
        B[:, 2:], A[2:] = 0, 0
        modules[name] = LoRA(B, A)
    adapter = Adapter(modules, seeded(load).heads)
    after = stepped(load, adapter, TailPenalty(STRENGTH, 0.5), steps=3).adapter
    assert bool(vector(adapter, after).isfinite().all())
    assert all(not x.factors[0][:, 2:].any() and not x.factors[1][2:].any() for x in after.modules.values())


def test_rank_one_has_no_tail_and_no_penalty(load: Loader) -> None:
    """`TailPenalty`: a rank of 1 has no tail. Three steps with it and without are the same bits."""
    adapter = seeded(load, 1)
    with_it, without = (stepped(load, adapter, p, steps=3).adapter for p in (TailPenalty(1e6, 0.5), None))
    assert not vector(without, with_it).any()


def test_the_penalty_is_the_active_adapters_alone_and_what_the_pruning_compares(load: Loader) -> None:
    """strength * sum ||B_t|| ||A_t|| in dense float64, whichever adapters the model has held before; the pruning's
    `tail_size` is the same sum without strength."""
    model, penalty = load(), TailPenalty(STRENGTH, 0.5)
    for ranks in (4, 2, MIXED, 1, 4):
        adapter = seeded(load, ranks)
        model.activate(adapter)
        sizes = []
        for name, (B, A) in {name: lora.factors for name, lora in adapter.modules.items()}.items():
            r = ranks if isinstance(ranks, int) else ranks[name]
            q = max(1, r // 2)
            sizes.append(float(B[:, q:].double().norm()) * float(A[q:].double().norm()))
        assert tail_size(adapter, penalty) == pytest.approx(sum(sizes), rel=1e-6, abs=1e-12)
        got = model.tail_penalty(penalty)
        assert float(got.detach()) == pytest.approx(STRENGTH * sum(sizes), rel=1e-6, abs=1e-9)


# ---- whole runs ------------------------------------------------------------------------------------------------------

SHRINKING = (
    "method.name=hetlora", "method.pruning=true", "method.keep=0.5", "method.strength=1.0", "clients.ranks=[1, 4, 6]",
    "train.steps=4", "train.batch_size=8", "run.rounds=4", "run.readouts=true", "run.keep_uploads=all",
    "evaluate.clients_at_end=true",
)  # fmt: skip
RANKS = {"site-1": 1, "site-2": 4, "site-3": 6}
WIDE = 32 + 32  # of tiny_models.bert: query and value, 32 x 32


def tail(adapter: Adapter) -> float:
    """sum ||B[:, q:]|| ||A[q:]||, q = r // 2 but at least 1, in dense float64."""
    pairs = [tuple(t.double() for t in lora.factors) for lora in adapter.modules.values()]
    return math.fsum(
        float(B[:, max(1, len(A) // 2) :].norm()) * float(A[max(1, len(A) // 2) :].norm()) for B, A in pairs
    )


def one_rank(adapter: Adapter) -> int:
    (rank,) = set(adapter.ranks.values())
    return rank


def after_the_round(call: Call) -> int:
    """The rank that the rule leaves: r // 2 where the tail got smaller in the round, else r; 1 stays."""
    r = one_rank(call.trained.adapter)
    return r // 2 if r > 1 and tail(call.trained.adapter) < tail(call.received) else r


@dataclass(frozen=True, eq=False)
class Shrunk:
    folder: RunFolder
    calls: list[Call]

    def of(self, client: str) -> list[Call]:
        return [call for call in self.calls if call.client == client]


@pytest.fixture(scope="module")
def shrunk(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Shrunk:
    """`fedlora run` with a strong penalty. Tests read it and change nothing."""
    out = tmp_path_factory.mktemp("shrunk") / "run"
    with recording() as calls:
        invoke("run", project / "config.toml", "--out", out, *(a for s in SHRINKING for a in ("--set", s)))
    return Shrunk(RunFolder(out), calls)


def test_ranks_shrink_where_the_tail_does_and_the_next_round_starts_there(shrunk: Shrunk) -> None:
    """The rule by dense norms of what was received and trained. Round 1 starts from B = 0, a tail of size 0 that cannot
    get smaller; after it the penalty wins: a rank of 4 ends at 1, and every cut is halving."""
    for client, rank in RANKS.items():
        calls = shrunk.of(client)
        assert [call.round for call in calls] == [1, 2, 3, 4]
        assert one_rank(calls[0].received) == after_the_round(calls[0]) == rank
        for call, following in itertools.pairwise(calls):
            assert one_rank(call.trained.adapter) == one_rank(call.received), "training itself changes no rank"
            assert one_rank(following.received) == after_the_round(call)
    last = {client: after_the_round(shrunk.of(client)[-1]) for client in RANKS}
    assert last == {"site-1": 1, "site-2": 1, "site-3": 1}, "6 -> 3 -> 1 and 4 -> 2 -> 1 fit into four rounds"


def test_what_is_uploaded_is_the_trained_adapter_cut(shrunk: Shrunk) -> None:
    """The first slots of what was trained, bit for bit; the weights stay those of the data."""
    examples = {c: p["examples"] for c, p in shrunk.folder.read_json("manifest.json")["data"]["train"].items()}
    for call in shrunk.calls:
        sent, _ = read_adapter(shrunk.folder.uploads(call.round) / call.client, scaling=2.0)
        r = after_the_round(call)
        for name, (B, A) in {n: x.factors for n, x in call.trained.adapter.modules.items()}.items():
            got = sent.modules[name].factors
            assert torch.equal(got[0], B[:, :r]) and torch.equal(got[1], A[:r])
        assert all(torch.equal(sent.heads[n], h) for n, h in call.trained.adapter.heads.items())
        assert call.trained.num_examples == examples[call.client]


def test_the_server_averages_the_cut_adapters(shrunk: Shrunk) -> None:
    """The final adapter/ is sum_i w_i [B_i 0] times sum_i w_i [A_i; 0] of the last uploads, w_i by ||B_i A_i||, dense
    in float64."""
    sent = [read_adapter(shrunk.folder.uploads(4) / client, scaling=2.0)[0] for client in RANKS]
    got, _ = read_adapter(shrunk.folder.path / "adapter", scaling=2.0)
    for name, lora in got.modules.items():
        sizes = [float(a.modules[name].delta().double().norm()) for a in sent]
        B, A = torch.zeros(32, 6, dtype=F64), torch.zeros(6, 32, dtype=F64)
        for adapter, size in zip(sent, sizes, strict=True):
            b, a = adapter.modules[name].factors
            B[:, : b.shape[1]] += size / sum(sizes) * b.double()
            A[: len(a)] += size / sum(sizes) * a.double()
        torch.testing.assert_close(lora.delta().double(), B @ A, rtol=0, atol=1e-6)


def test_bytes_are_of_the_rank_of_the_day(shrunk: Shrunk) -> None:
    """Down at the rank that the round starts with, up at the one that it ends with: r * 2 modules * 64 * 4 bytes."""
    for line in shrunk.folder.metrics():
        calls = [call for call in shrunk.calls if call.round == line["round"]]
        assert line["bytes"]["down_adapter"] == sum(one_rank(c.received) for c in calls) * 2 * WIDE * 4
        assert line["bytes"]["up_adapter"] == sum(after_the_round(c) for c in calls) * 2 * WIDE * 4


def test_what_clients_are_left_with_has_their_own_rank(shrunk: Shrunk) -> None:
    """clients/ID of `run.readouts`, at the rank that the rule left; measured by `evaluate.clients_at_end`."""
    for client in RANKS:
        adapter, _ = read_adapter(shrunk.folder.path / "clients" / client)
        assert one_rank(adapter) == after_the_round(shrunk.of(client)[-1])
    assert set(shrunk.folder.read_json("summary.json")["clients_at_end"]) == set(RANKS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stop", [2, 1, 3])
def test_a_resumed_run_goes_on_at_the_smaller_ranks(shrunk: Shrunk, project: Path, tmp_path: Path, stop: int) -> None:
    """Killed after each round: the same bits as the whole run, uploads included, and the same ranks to start from."""
    config = configured(project, *SHRINKING)
    stopped = ran(config, tmp_path / "run", stop)
    with recording() as calls:
        ran(config, stopped.path, resume=True)
    assert {call.round for call in calls} == set(range(stop + 1, 5))
    for call in calls:
        (same,) = [c for c in shrunk.of(call.client) if c.round == call.round]
        assert call.received.ranks == same.received.ranks
    same_run(stopped, shrunk.folder)
    for path in sorted((shrunk.folder.path / "uploads").rglob("*.safetensors")):
        again = stopped.path / path.relative_to(shrunk.folder.path)
        assert again.read_bytes() == path.read_bytes()


def test_without_pruning_no_rank_changes(project: Path, tmp_path: Path) -> None:
    """pruning = false, the default: no penalty and no cut. Nor does any tail get smaller by itself in these rounds:
    what shrinks above is the penalty's work."""
    off = tuple("method.pruning=false" if s == "method.pruning=true" else s for s in SHRINKING)
    with recording() as calls:
        ran(configured(project, *off), tmp_path / "run")
    assert {(c.client, one_rank(c.received)) for c in calls} == set(RANKS.items())
    assert {(c.client, one_rank(c.trained.adapter)) for c in calls} == set(RANKS.items())
    assert all(after_the_round(c) == RANKS[c.client] for c in calls)
    left, _ = read_adapter(tmp_path / "run" / "clients" / "site-3")
    assert one_rank(left) == 6


def test_the_engine_prunes_ranks_that_differ_by_module(load: Loader) -> None:
    """`simulate` with the real trainer and a client whose modules have ranks 4, 2, 1, 6: one decision for all of them,
    each cut to its own q: 2, 1, 1, 3, then 1, 1, 1, 1 (6 -> 3 -> 1)."""
    server = Server(build("hetlora", pruning=True, keep=0.5, strength=STRENGTH))
    model = load()
    settings = TrainSettings(lr=2e-2, steps=6, batch_size=8)
    trainer = LocalTrainer(model, {c: classification(16, k) for k, c in enumerate("ab")}, settings, seed=0)
    clients = [Client("a", MIXED), Client("b", 6)]
    state = start(server, model.seed_adapter(6, seed=0)[0])
    records = list(simulate(server, clients, trainer, state, rounds=4))
    (a, *_), sizes = zip(*(r.uploads for r in records), strict=True), [4, 2, 1, 6]
    seen = [[u.adapter.ranks[name] for name in MIXED] for u in a]
    assert seen[0] == sizes and seen[-1] == [1, 1, 1, 1]
    halves = [sizes, [2, 1, 1, 3], [1, 1, 1, 1]]
    assert [x for k, x in enumerate(seen) if k == 0 or x != seen[k - 1]] == halves
    assert [dict(r.state.clients["a"].ranks or MIXED) for r in records] == [dict(u.adapter.ranks) for u in a]
