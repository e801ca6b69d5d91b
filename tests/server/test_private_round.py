"""Private rounds: one clipped, noised sum of changes, whoever came.

Kinds of evidence: *oracle* (dense float64 sums of changes), *property* (neighbours in exact integers, order), *hostile
input*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Adapter, Client, Download, Server, Upload, build
from fedlora.analysis.audit import regauge
from fedlora.attacks import Adversary, Attack
from fedlora.core.trainer import Trained
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.server.private_round import PrivateRound
from fedlora.server.state import ServerState
from fedlora.simulation import simulate, start
from fedlora.testing.federations import SHAPES, pushed, seed_adapter, trained
from support.federations import EQUAL, MIXED
from support.private_servers import FINE, SUMMED, InMemory, private
from support.toy_trainer import Toy, diverging

PRODUCTS = [name for name in SUMMED if build(name).linear_in == "products"]


def whole(server: Server, state: ServerState, name: str) -> Tensor:
    return server.global_update(state)[name].map(Tensor.double).delta()


def dense_changes(server: Server, state: ServerState, uploads: list[Upload], name: str) -> Tensor:
    """sum_i (D_i - R_i) of one module."""
    total = torch.zeros(SHAPES[name], dtype=torch.float64)
    for upload in uploads:
        got = server.download(state, upload.client).adapter.modules[name]
        total += upload.adapter.modules[name].map(Tensor.double).delta() - got.map(Tensor.double).delta()
    return total


def ranks_of(name: str) -> Mapping[str, int]:
    return EQUAL if METHODS[name].one_rank else MIXED


def played(server: Server, rounds: int) -> tuple[ServerState, list[Upload]]:
    """The state after some rounds, and the uploads of the next one."""
    ranks = ranks_of(server.method.name)
    state, kept = server.init(seed_adapter(max(ranks.values()))), dict[str, Any]()
    for _ in range(rounds):
        state = server.aggregate(state, trained(server, state, ranks, list(ranks), kept)[1])
    return state, trained(server, state, ranks, list(ranks), kept)[1]


# ---- what the state becomes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("rounds", [0, 2])
def test_without_noise_and_clip_products_are_the_dense_oracle(name: str, rounds: int) -> None:
    """M + sum_i (D_i - R_i) / n, with n public; heads likewise. Ranks differ; readouts are less than M later."""
    server = private(name)
    if name == "svd":
        server = replace(server, method=build("svd", energy=1.0))
    state, uploads = played(server, rounds)
    after = server.aggregate(state, uploads)
    for module in SHAPES:
        wanted = whole(server, state, module) + dense_changes(server, state, uploads, module) / 4
        assert float(wanted.norm()) > 0.1
        torch.testing.assert_close(whole(server, after, module), wanted, rtol=0, atol=1e-8)
    for head, before in state.heads.items():
        moved = torch.stack([u.adapter.heads[head].double() - before.double() for u in uploads]).sum(0) / 4
        torch.testing.assert_close(after.heads[head].double(), before.double() + moved, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in SUMMED if name not in PRODUCTS])
def test_without_noise_and_clip_factors_are_the_dense_oracle(name: str) -> None:
    """What a client of the start's rank gets of a factor that travels is what it got, and the mean of all changes,
    with zeros in the slots that a client lacks."""
    server = private(name)
    state, uploads = played(server, 1)
    after = server.aggregate(state, uploads)
    rank = max(ranks_of(name).values())
    for module in SHAPES:
        was, now = (server.download(s, Client("x", rank)).adapter.modules[module] for s in (state, after))
        if name == "fedsvd":  # which turns the sum into its own coordinates
            B = was.factors[0] + sum_of("B", server, state, uploads, module, was.factors[0]) / 4
            torch.testing.assert_close(now.delta(), B @ was.factors[1], rtol=0, atol=1e-8)
            continue
        for factor in server.roles(state).shared:
            t = was.tensors()[factor]
            want = t + sum_of(factor, server, state, uploads, module, t) / 4
            torch.testing.assert_close(now.tensors()[factor], want, rtol=0, atol=1e-8)


def sum_of(factor: str, server: Server, state: ServerState, uploads: list[Upload], module: str, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for upload in uploads:
        got = server.download(state, upload.client).adapter.modules[module].tensors()[factor]
        moved = upload.adapter.modules[module].tensors()[factor] - got
        if factor == "B":
            total[:, : moved.shape[1]] += moved
        else:
            total[: len(moved)] += moved
    return total


@pytest.mark.parametrize("name", ["glora", "flexlora"])
def test_the_state_is_cut_to_its_public_rank(name: str) -> None:
    """Oracle: the best approximation of rank R of the dense sum."""
    server = private(name, rank=3)
    state, uploads = played(server, 1)
    after = server.aggregate(state, uploads)
    for module in SHAPES:
        U, s, Vh = torch.linalg.svd(whole(server, state, module) + dense_changes(server, state, uploads, module) / 4)
        torch.testing.assert_close(whole(server, after, module), (U[:, :3] * s[:3]) @ Vh[:3], rtol=0, atol=1e-8)


def test_in_a_subspace_the_state_moves_by_the_projected_mean() -> None:
    server = private("flexlora", dims=5)
    state, uploads = played(server, 1)
    opened = server.open(state)
    assert isinstance(opened, PrivateRound)
    after = server.aggregate(state, uploads)
    for module, bases in opened.layout.modules.items():
        change = dense_changes(server, state, uploads, module) / 4
        for basis, side in ((bases.Q, 0), (bases.P, 1)):
            if basis is not None:
                change = basis @ (basis.T @ change) if side == 0 else change @ basis @ basis.T
        wanted = whole(server, state, module) + change
        torch.testing.assert_close(whole(server, after, module), wanted, rtol=0, atol=1e-8)


def test_the_denominator_is_public_and_examples_are_capped() -> None:
    """Two of four came, with 10 and 1000 examples, n_max = 40: weights 0.25 and 1, and n = 4 all the same."""
    server = private(most_examples=40)
    state, uploads = played(server, 0)
    few = [replace(uploads[0], num_examples=10), replace(uploads[1], num_examples=1000)]
    after = server.aggregate(state, few)
    for module in SHAPES:
        one, other = (dense_changes(server, state, [u], module) for u in few)
        torch.testing.assert_close(whole(server, after, module), (0.25 * one + other) / 4, rtol=0, atol=1e-8)
    assert private(sampling=0.5).privacy.denominator == 2.0  # type: ignore[union-attr]


def test_an_empty_round_changes_nothing_but_the_round_and_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    server = private()
    state, _ = played(server, 1)
    after = server.aggregate(state, [])
    assert after.round == state.round + 1 and after.tally is not None and not after.tally.weights
    assert "none of the 4 clients" in caplog.text
    for module in SHAPES:
        torch.testing.assert_close(whole(server, after, module), whole(server, state, module), rtol=0, atol=1e-12)


def test_with_noise_every_module_and_head_gets_it_also_in_an_empty_round() -> None:
    """z = 1, C = 1, n = 4: each entry's deviation is 1/4 in theory; over 792 entries of a module its estimate is off
    by 10 % (4 standard errors) once in 16,000 runs."""
    pytest.importorskip("opendp")
    server = private("flexlora", noise_multiplier=1.0, clipping_norm=1.0, grid=None, rank=64)
    state = server.init(seed_adapter(4))
    after = server.aggregate(state, [])
    for module in SHAPES:
        assert float(whole(server, after, module).std()) == pytest.approx(0.25, rel=0.15)
    moved = torch.cat([(after.heads[h] - state.heads[h]).reshape(-1) for h in state.heads])
    assert float(moved.std()) == pytest.approx(0.25, rel=0.35) and bool((moved != 0).all())


# ---- what one client can do ------------------------------------------------------------------------------------------


def integers(server: Server, state: ServerState, uploads: list[Upload]) -> Tensor:
    """The very integers that are released without noise, of a server with other releases."""
    assert server.privacy is not None
    return released(replace(server, round=replace(server.privacy, releases=InMemory())), state, uploads)


def released(server: Server, state: ServerState, uploads: list[Upload]) -> Tensor:
    """The same, of this very server."""
    assert server.privacy is not None
    server.aggregate(state, uploads)
    return server.privacy.releases.kept[state.round + 1]  # type: ignore[attr-defined, no-any-return]


def test_a_gauge_moves_nothing() -> None:
    server = private(clipping_norm=0.5)
    state, uploads = played(server, 1)
    one = integers(server, state, uploads)
    other = integers(server, state, [regauge(u, 1e4) for u in uploads])
    assert float((one - other).double().norm() * FINE) < 1e-7
    assert torch.equal(one, integers(server, state, uploads[::-1])), "in any order"


def spoiled(upload: Upload, value: float) -> Upload:
    return replace(upload, adapter=upload.adapter.map(lambda t: torch.full_like(t, value)))


def test_a_client_counts_once_whatever_it_sends() -> None:
    """Also after a refusal: no second chance, for a retry would depend on what was sent."""
    server = private(clipping_norm=0.5)
    state, uploads = played(server, 1)
    assert torch.equal(
        integers(server, state, [*uploads[:3], spoiled(uploads[3], math.nan)]), integers(server, state, uploads[:3])
    )
    round = server.open(state)
    round.add(uploads[0])
    with pytest.raises(UploadRefused, match="second upload"):
        round.add(uploads[0])
    with pytest.raises(UploadRefused, match="NaN"):
        round.add(spoiled(uploads[1], math.nan))
    with pytest.raises(UploadRefused, match="second upload"):
        round.add(uploads[1])


def test_strangers_and_who_was_not_drawn_count_as_zero() -> None:
    """The ledger counts on the draw; the oracle is the sum of those drawn, in a round that asks everybody."""
    everybody = private(clipping_norm=0.5)
    state, uploads = played(everybody, 1)
    crowd = [replace(uploads[k % 2], client=Client(f"x{k}", uploads[k % 2].client.rank)) for k in range(9)]
    assert torch.equal(integers(everybody, state, [*crowd, *uploads, *crowd]), integers(everybody, state, uploads))
    with pytest.raises(UploadRefused, match="it was not asked"):
        everybody.open(state).add(crowd[0])
    server = private(clipping_norm=0.5, sampling=0.5)
    round = server.open(state)
    theirs = [upload for upload in uploads if upload.client.id in (round.asked or ())]
    for upload in uploads:
        if upload in theirs:
            round.add(upload)
        else:
            with pytest.raises(UploadRefused, match="it was not asked"):
                round.add(upload)
    round.close()
    assert server.privacy is not None
    releases: Any = server.privacy.releases
    assert torch.equal(integers(everybody, state, theirs), releases.kept[2]) and releases.charged == [0.5]


def test_the_round_draws_by_itself() -> None:
    """q = 0.5 of 60, in 30 rounds of one state: 900 coins show heads (six deviations: 90 apart), never twice alike."""
    names = tuple(f"c{k:02d}" for k in range(60))
    server = private(clients=names, sampling=0.5, rank=6)
    state = server.init(seed_adapter(6))
    seen = [server.open(state).asked for _ in range(30)]
    assert len(set(seen)) == 30 and 800 < sum(len(s or ()) for s in seen) < 1000
    assert private(clients=names[::-1]).open(state).asked == names


def test_the_engine_asks_those_that_the_round_drew() -> None:
    """Of 4 in 10 rounds: that all or none of 40 coins show heads has probability 2^-39."""
    toy, server = Toy(), private(sampling=0.5, rank=6)
    list(simulate(server, people(), toy, start(server, seed_adapter(6)), rounds=10))
    assert 0 < len(toy.calls) < 40


def test_impossible_options_are_named() -> None:
    for clients in ((), "abc", ("a", "a")):
        with pytest.raises(HyperparameterError, match="Private: clients"):
            private(clients=clients)
    for key, value in (("most_examples", 0), ("clipping_norm", math.inf), ("noise_multiplier", -1.0), ("rank", 0),
                       ("sampling", 1.5), ("most_examples", math.nan)):  # fmt: skip
        with pytest.raises(HyperparameterError, match=f": {key}"):
            private(**{key: value})


# ---- once ------------------------------------------------------------------------------------------------------------


def test_a_round_that_was_released_gives_the_same_state_and_asks_nobody() -> None:
    pytest.importorskip("opendp")
    server = private(noise_multiplier=1.0, clipping_norm=0.5, grid=None, rank=6)
    state, uploads = played(server, 1)
    first = server.aggregate(state, uploads)
    assert server.open(state).stored and server.open(state).asked == ()
    again = server.aggregate(state, uploads[:1])  # whoever comes now: the sum already exists
    assert server.privacy is not None and server.privacy.releases.settled == [1, 2]  # type: ignore[attr-defined]
    for module in SHAPES:
        assert torch.equal(whole(server, first, module), whole(server, again, module))


def test_the_context_knows_state_and_constants() -> None:
    """A journal refuses a sum of another context, so the context must contain everything that a sum depends on."""
    server = private()
    state, uploads = played(server, 1)
    later = server.aggregate(state, uploads)
    seen = []

    class Watch(InMemory):
        def stored(self, round: int, context: str) -> Tensor | None:
            seen.append(context)
            return None

    assert server.privacy is not None
    same = replace(server.privacy, releases=Watch())
    for privacy, at in (
        (same, state), (same, state), (same, replace(later, round=state.round)),
        (replace(same, clipping_norm=2.0), state),
        (replace(same, noise_multiplier=1.0), state), (replace(same, dims=5), state),
        (replace(same, rank=3), state), (replace(same, sampling=0.5), state),
        (replace(same, clients=("a", "b")), state), (replace(same, clients=("a", "b", "c", "e")), state),
        (replace(same, seed=1), state), (same, replace(state, heads={k: h + 1 for k, h in state.heads.items()})),
    ):  # fmt: skip
        replace(server, round=privacy).open(at)
    assert seen[0] == seen[1] and len(set(seen)) == len(seen) - 1


# ---- what the server refuses -----------------------------------------------------------------------------------------


def test_what_a_private_round_cannot_sum_is_refused_with_the_way_out() -> None:
    """All methods: test_streamed.py, by the same function."""
    with pytest.raises(HyperparameterError, match=r"Private rounds have only a sum .*svd with that rank"):
        replace(private("glora"), method=build("glora", rank=4))
    with pytest.raises(HyperparameterError, match="leave dims"):
        private("ffa-lora", dims=5)


def test_a_trained_start_needs_a_word() -> None:
    warm = pushed(seed_adapter(4), "somebody", 0)
    with pytest.raises(HyperparameterError, match="warm_start"):
        private().init(warm)
    state = private(warm_start=True).init(warm)
    torch.testing.assert_close(whole(private(), state, "attn.q"), warm.modules["attn.q"].delta())


# ---- the engine ------------------------------------------------------------------------------------------------------


def people(ranks: Mapping[str, int] = MIXED) -> list[Client]:
    return [Client(name, rank) for name, rank in ranks.items()]


class FailsOrDiverges(Toy):
    """c fails, and b diverges."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        if download.client.id == "c":
            raise RuntimeError("its disk is full")
        return diverging("b", 0).train(download, adapter, position)


def test_a_record_tells_nothing_of_single_clients_and_the_log_does(caplog: pytest.LogCaptureFixture) -> None:
    """The record does not say that one of them diverged or failed; the log, which is the operator's, does."""
    caplog.set_level("WARNING", "fedlora")
    server, begun = private(rank=6), start(private(rank=6), seed_adapter(6))
    told: list[str] = []
    (record,) = simulate(server, people(), FailsOrDiverges(), begun, rounds=1, on_client=told.append)
    assert not told, "who was asked is a secret"
    assert not (record.losses or record.weights or record.refused or record.uploads or record.bytes.total)
    assert not record.seconds and not record.examples
    tally = record.state.server.tally
    assert tally is not None and not (tally.weights or tally.abstained or tally.refused)
    for name, said, line in zip("bc", ("NaN", "its disk is full"), caplog.messages, strict=True):
        assert f": {name} does not count" in line and said in line


def test_the_engine_refuses_other_rounds_than_the_ledger_charges() -> None:
    server = private(rank=6)
    state = start(server, seed_adapter(6))
    with pytest.raises(HyperparameterError, match=r"sampling=0\.5"):
        next(simulate(server, people(), Toy(), state, rounds=1, participation=0.5))
    with pytest.raises(HyperparameterError, match=r"'d' is not among .*given"):
        next(simulate(server, people()[:3], Toy(), state, rounds=1))
    with pytest.raises(HyperparameterError, match="an adversary's acts"):
        next(simulate(server, people(), Toy(), state, rounds=1, adversary=Adversary(Attack("scale"), ("b",))))
