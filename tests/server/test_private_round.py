"""Private rounds: one clipped, noised sum of changes, whoever came.

Kinds of evidence: *oracle* (dense float64 sums of changes), *property* (neighbours in exact integers, order), *hostile
input*. Which method may take part is asked of the method, so that the tables here follow `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.analysis.audit import regauge
from fedlora.core.accumulating import Accumulating
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.methods import METHODS
from fedlora.privacy import Geometry
from fedlora.server.private_round import PrivateRound
from fedlora.server.state import ServerState
from fedlora.simulation import simulate, start
from fedlora.testing.federations import MIXED, SHAPES, noise, pushed, seed_adapter, trained
from support.private_servers import ACCUMULATING, FINE, InMemory, private
from support.toy_trainer import Toy, diverging

RANKS = {"a": 2, "b": 3, "c": 5, "d": 6}
GEOMETRIES = {"full": Geometry(), "two-sided": Geometry("two-sided", 5)}


def whole(server: Server, state: ServerState, name: str) -> Tensor:
    return server.global_update(state)[name].map(Tensor.double).delta()


def dense_changes(server: Server, state: ServerState, uploads: list[Upload], name: str) -> Tensor:
    """sum_i (D_i - readout_i) of one module, from what travelled, completed by what was received."""
    total = torch.zeros(SHAPES[name], dtype=torch.float64)
    for upload in uploads:
        came = server.download(state, upload.client).adapter.modules[name]
        sent = LoRA(**(came.tensors() | upload.adapter.modules[name].tensors()))
        total += sent.map(Tensor.double).delta() - came.map(Tensor.double).delta()
    return total


def played(server: Server, rounds: int, ranks: Mapping[str, int] = RANKS) -> tuple[ServerState, list[Upload]]:
    """The state after some rounds, and the uploads of the next one."""
    state = server.init(seed_adapter(max(ranks.values())))
    for _ in range(rounds):
        state = server.aggregate(state, trained(server, state, ranks, list(ranks), {}).uploads)
    return state, trained(server, state, ranks, list(ranks), {}).uploads


# ---- what the state becomes ------------------------------------------------------------------------------------------


def test_some_methods_can_and_the_others_are_refused_with_the_reason() -> None:
    assert {"glora", "svd", "flexlora", "ffa-lora"} <= set(ACCUMULATING)
    for name in METHODS:
        if name not in ACCUMULATING:
            with pytest.raises(HyperparameterError, match=rf"{name} has no such rule"):
                private(name)


@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("rounds", [0, 2])
def test_without_noise_and_clip_the_state_is_the_dense_oracle(name: str, rounds: int) -> None:
    """M + sum_i (D_i - readout_i) / n, with n public; heads likewise. Ranks differ; readouts are less than M later."""
    server = private(name, **({} if name != "svd" else {"rank": 64}))
    if name == "svd":
        server = replace(server, method=build("svd", energy=1.0))
    state, uploads = played(server, rounds)
    after = server.aggregate(state, uploads)
    assert {module.round for module in after.modules.values()} == {rounds + 1}
    for module in SHAPES:
        wanted = whole(server, state, module) + dense_changes(server, state, uploads, module) / 4
        assert float(wanted.norm()) > 0.1
        torch.testing.assert_close(whole(server, after, module), wanted, rtol=0, atol=1e-8)
    for head, before in state.heads.items():
        moved = torch.stack([u.adapter.heads[head].double() - before.double() for u in uploads]).sum(0) / 4
        torch.testing.assert_close(after.heads[head].double(), before.double() + moved, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", [n for n in ACCUMULATING if n != "ffa-lora"])
def test_the_state_is_cut_to_its_public_rank(name: str) -> None:
    """Oracle: the best approximation of rank R of the dense sum (numpy-free: torch.linalg.svd of the dense matrix)."""
    server = private(name, rank=3)
    state, uploads = played(server, 1)
    after = server.aggregate(state, uploads)
    for module in SHAPES:
        U, s, Vh = torch.linalg.svd(whole(server, state, module) + dense_changes(server, state, uploads, module) / 4)
        wanted = (U[:, :3] * s[:3]) @ Vh[:3]
        if name == "glora":
            assert after.modules[module].cut.error == pytest.approx(float(s[3:].norm() / s.norm()), abs=1e-6)
        got = whole(server, after, module)
        if name == "svd":  # which keeps 99 % of the energy of these by its own default
            assert torch.linalg.matrix_rank(got) <= 3
            continue
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-8)


def test_in_a_subspace_the_state_moves_by_the_projected_mean() -> None:
    server = private("flexlora", geometry=GEOMETRIES["two-sided"])
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
    """Two of four came, with 10 and 1000 examples, n_max = 40: weights 0.25 and 1, and q n = 0.5 * 4 all the same."""
    server = private(sampling=0.5, most_examples=40, releases=InMemory(draws=["a", "b"]))
    state, uploads = played(private(most_examples=40), 0)
    few = [replace(uploads[0], num_examples=10), replace(uploads[1], num_examples=1000)]
    after = server.aggregate(state, few)
    for module in SHAPES:
        one, other = (dense_changes(server, state, [u], module) for u in few)
        torch.testing.assert_close(whole(server, after, module), (0.25 * one + other) / 2, rtol=0, atol=1e-8)


def test_an_empty_round_takes_place_and_changes_nothing_but_the_round() -> None:
    server = private()
    state, _ = played(server, 1)
    after = server.aggregate(state, [])
    assert after.round == state.round + 1 and after.tally is not None and not after.tally.weights
    for module in SHAPES:
        torch.testing.assert_close(whole(server, after, module), whole(server, state, module), rtol=0, atol=1e-12)


def test_with_noise_every_module_and_head_gets_it_also_in_an_empty_round() -> None:
    """z = 1, C = 1, n = 4: each entry's deviation is 1/4 in theory; over 792 entries of a module its estimate is off
    by 10 % (4 standard errors) once in 16,000 runs."""
    pytest.importorskip("opendp")
    server = private("flexlora", noise_multiplier=1.0, clip=1.0, grid=None, rank=64)
    state = server.init(seed_adapter(4))
    after = server.aggregate(state, [])
    for module in SHAPES:
        assert float(whole(server, after, module).std()) == pytest.approx(0.25, rel=0.15)
    moved = torch.cat([(after.heads[h] - state.heads[h]).reshape(-1) for h in state.heads])
    assert float(moved.std()) == pytest.approx(0.25, rel=0.35) and bool((moved != 0).all())


def test_readouts_do_not_depend_on_who_did_what_before() -> None:
    """glora's readouts follow a client's history elsewhere; here two clients of one rank get the same components."""
    server = private(rank=8)
    state, _ = played(server, 2)
    one, other = (server.download(state, Client(name, 4)).adapter.modules["attn.q"] for name in ("a", "stranger"))
    torch.testing.assert_close(one.delta(), other.delta())


# ---- what one client can do ------------------------------------------------------------------------------------------


def integers(server: Server, state: ServerState, uploads: list[Upload]) -> Tensor:
    """The very integers that are released without noise, of a server with other releases."""
    assert server.privacy is not None
    return released(replace(server, privacy=replace(server.privacy, releases=InMemory())), state, uploads)


def released(server: Server, state: ServerState, uploads: list[Upload]) -> Tensor:
    """The same, of this very server."""
    assert server.privacy is not None
    server.aggregate(state, uploads)
    return server.privacy.releases.kept[state.round + 1]  # type: ignore[attr-defined, no-any-return]


def scaled(factor: float) -> Callable[[Upload], Upload]:
    return lambda u: replace(u, adapter=u.adapter.map(lambda t: t * factor))


def without(module: str) -> Callable[[Upload], Upload]:
    def less(upload: Upload) -> Upload:
        modules = {name: lora for name, lora in upload.adapter.modules.items() if name != module}
        ranks = {name: lora.rank for name, lora in modules.items()}
        return replace(upload, client=Client(upload.client.id, ranks), adapter=Adapter(modules, upload.adapter.heads))

    return less


HARD: dict[str, Callable[[Upload], Upload]] = {
    "as it is": lambda u: u,
    "huge": scaled(1e9),
    "1e38": lambda u: spoiled(u, 1e38),
    "tiny": scaled(1e-12),
    "condition 1e6": lambda u: regauge(u, 1e6) if all(len(x.tensors()) == 2 for x in u.adapter.modules.values()) else u,
    "huge and ill-conditioned": lambda u: scaled(1e6)(HARD["condition 1e6"](u)),
    "lacks a module": without("attn.q"),
    "many examples": lambda u: replace(u, num_examples=1e12),
}


@pytest.mark.quick(23)
@pytest.mark.parametrize("name", ["glora", "ffa-lora"])
@pytest.mark.parametrize("shape", GEOMETRIES)
@pytest.mark.parametrize("hard", HARD)
def test_neighbours_differ_by_no_more_than_the_ledger_says(name: str, shape: str, hard: str) -> None:
    """The sum with a client and with zero in its place, exact integers; K gamma is what an event is charged for."""
    if name == "ffa-lora" and shape != "full":
        pytest.skip("its frozen factor is its geometry")
    server = private(name, clip=0.5, geometry=GEOMETRIES[shape], most_examples=40)
    state, uploads = played(server, 1)
    moved = HARD[hard](uploads[3])
    opened = server.open(state)
    assert isinstance(opened, PrivateRound)
    apart = integers(server, state, [*uploads[:3], moved]) - integers(server, state, uploads[:3])
    squares = sum(int(x) ** 2 for x in apart.tolist())  # Python's integers: exact
    bound = opened.mechanism.bound(opened.layout.size)
    assert 0 < squares <= bound**2
    assert bound * opened.mechanism.grid == opened.mechanism.sensitivity(opened.layout.size)
    if hard in ("huge", "1e38", "huge and ill-conditioned", "as it is"):  # else the clip would be loose
        assert squares >= (0.99 * bound) ** 2


def test_a_gauge_moves_nothing() -> None:
    server = private(clip=0.5)
    state, uploads = played(server, 1)
    one = integers(server, state, uploads) * FINE
    other = integers(server, state, [regauge(u, 1e4) for u in uploads]) * FINE
    assert float((one - other).norm()) < 1e-7


def test_the_order_of_uploads_changes_no_bit() -> None:
    server = private(clip=0.5)
    state, uploads = played(server, 1)
    assert torch.equal(integers(server, state, uploads), integers(server, state, uploads[::-1]))


def spoiled(upload: Upload, value: float) -> Upload:
    return replace(upload, adapter=upload.adapter.map(lambda t: torch.full_like(t, value)))


HOSTILE: dict[str, Callable[[Upload], Upload]] = {
    "NaN": lambda u: spoiled(u, math.nan),
    "Inf": lambda u: spoiled(u, -math.inf),
    "overflow": lambda u: spoiled(u, 1e200),
    "1e38 in float32": lambda u: replace(u, adapter=spoiled(u, 1e38).adapter.map(Tensor.float)),
    "another rank": lambda u: replace(u, client=Client(u.client.id, 9)),
    "no such module": lambda u: replace(u, client=Client(u.client.id, {"elsewhere": 2})),
    "a negative count": lambda u: replace(u, num_examples=-1),
    "NaN examples": lambda u: replace(u, num_examples=math.nan),
    "no heads": lambda u: replace(u, adapter=Adapter(u.adapter.modules)),
    "a wrong head": lambda u: replace(
        u, adapter=Adapter(u.adapter.modules, {**u.adapter.heads, "more": torch.ones(2)})
    ),
    "integers": lambda u: replace(u, adapter=u.adapter.map(lambda t: t.long())),
    "complex": lambda u: replace(u, adapter=u.adapter.map(lambda t: t.to(torch.complex64))),
    "sparse": lambda u: replace(u, adapter=u.adapter.map(lambda t: t.to_sparse())),
    "no numbers at all": lambda u: replace(u, adapter=u.adapter.map(lambda t: t.to("meta"))),
    "a sparse head": lambda u: replace(
        u, adapter=Adapter(u.adapter.modules, {k: h.to_sparse() for k, h in u.adapter.heads.items()})
    ),
    "8 bits": lambda u: replace(u, adapter=u.adapter.map(lambda t: t.to(torch.float8_e4m3fn))),
}


def test_a_bad_upload_counts_as_zero_and_stops_nothing() -> None:
    server = private(clip=0.5)
    state, uploads = played(server, 1)
    others = integers(server, state, uploads[:3])
    for hostile, spoil in HOSTILE.items():
        bad = spoil(uploads[3])
        assert torch.equal(integers(server, state, [*uploads[:3], bad]), others), hostile
        with pytest.raises(UploadRefused):
            server.open(state).add(bad)


def test_a_client_counts_once_whatever_it_sends() -> None:
    """Also after a refusal: no second chance, for a retry would depend on what was sent."""
    server = private(clip=0.5)
    state, uploads = played(server, 1)
    round = server.open(state)
    round.add(uploads[0])
    with pytest.raises(UploadRefused, match="second upload"):
        round.add(uploads[0])
    with pytest.raises(UploadRefused, match="NaN"):
        round.add(spoiled(uploads[1], math.nan))
    with pytest.raises(UploadRefused, match="second upload"):
        round.add(uploads[1])


@pytest.mark.parametrize("many", [1, 9])
def test_strangers_count_as_zero_and_push_nobody_out(many: int) -> None:
    """Ids beside the four of Privacy(clients=...), before and after theirs: the sum is that of the four alone."""
    server = private(clip=0.5)
    state, uploads = played(server, 1)
    crowd = [replace(uploads[k % 2], client=Client(f"x{k}", uploads[k % 2].client.rank)) for k in range(many)]
    assert torch.equal(integers(server, state, [*crowd, *uploads, *crowd]), integers(server, state, uploads))
    with pytest.raises(UploadRefused, match="not among the clients"):
        server.open(state).add(crowd[0])


@pytest.mark.parametrize("drawn", [[], ["b"], ["a", "d"], ["stranger", "c"]])
def test_who_was_not_drawn_counts_as_zero_whoever_hands_it_in(drawn: list[str]) -> None:
    """The ledger counts on the draw; the oracle is the sum of those drawn, in a round that asks everybody."""
    server = private(clip=0.5, sampling=0.5, releases=InMemory(draws=drawn))
    everybody = private(clip=0.5)
    state, uploads = played(everybody, 1)
    theirs = [upload for upload in uploads if upload.client.id in drawn]
    assert torch.equal(integers(everybody, state, theirs), released(server, state, uploads))
    assert server.privacy is not None and server.privacy.releases.charged == [0.5]  # type: ignore[attr-defined]
    fresh = replace(server.privacy, releases=InMemory(draws=drawn))
    round = replace(server, privacy=fresh).open(state)
    assert list(round.asked or ()) == [upload.client.id for upload in theirs]
    for upload in uploads:
        if upload not in theirs:
            with pytest.raises(UploadRefused, match="not drawn"):
                round.add(upload)


def test_the_round_draws_by_itself_and_once() -> None:
    """q = 0.5 of 60, in 30 rounds of one state: 900 coins show heads (six deviations: 90 apart), never twice alike; the
    same round, opened again, asks the same ones, and so a kill between asking and summing draws nobody twice."""
    names = tuple(f"c{k:02d}" for k in range(60))
    seen = []
    for _ in range(30):
        server = private(clients=names, sampling=0.5, rank=6)
        state = server.init(seed_adapter(6))
        seen.append(server.open(state).asked)
        assert server.open(state).asked == seen[-1] == tuple(sorted(seen[-1] or ()))
    assert len(set(seen)) == 30 and 800 < sum(len(s or ()) for s in seen) < 1000
    assert private(clients=names[::-1]).open(state).asked == names


def test_nothing_is_added_once_the_sum_is_made() -> None:
    server = private(clip=0.5)
    state, uploads = played(server, 1)
    round = server.open(state)
    round.add(uploads[0])
    round.close()
    for opened in (round, server.open(state)):
        with pytest.raises(UploadRefused, match="sum already exists"):
            opened.add(uploads[1])


def test_the_population_is_named() -> None:
    wrong: tuple[Any, ...] = (4, (), "abc", ("a", "a"), ("a", 1), ("a", ""), None, {"a": 1})
    for clients in wrong:
        with pytest.raises(HyperparameterError, match="Privacy: "):
            private(clients=clients)


def test_the_most_that_a_client_counts_is_a_number() -> None:
    for most in (0, -1.0, math.nan, math.inf):
        with pytest.raises(HyperparameterError, match="most_examples"):
            private(most_examples=most)


# ---- once ------------------------------------------------------------------------------------------------------------


def test_a_round_that_was_released_gives_the_same_state_and_asks_nobody() -> None:
    pytest.importorskip("opendp")
    server = private(noise_multiplier=1.0, clip=0.5, grid=None, rank=6)
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
        (same, state), (same, state), (same, replace(later, round=state.round)), (replace(same, clip=2.0), state),
        (replace(same, noise_multiplier=1.0), state), (replace(same, geometry=GEOMETRIES["two-sided"]), state),
        (replace(same, rank=3), state), (replace(same, sampling=0.5), state),
        (replace(same, clients=("a", "b")), state), (replace(same, clients=("a", "b", "c", "e")), state),
        (replace(same, seed=1), state), (same, replace(state, heads={k: h + 1 for k, h in state.heads.items()})),
    ):  # fmt: skip
        replace(server, privacy=privacy).open(at)
    assert seen[0] == seen[1] and len(set(seen)) == len(seen) - 1


# ---- what the server refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"missing": "renormalise"}, "missing = 'zero'"),
        ({"weighting": "examples"}, "most_examples"),
        ({"quorum": 2}, "quorum"),
        ({"memory": 100.0}, "memory"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_breaks_the_bound_is_refused(server: dict[str, Any], words: str) -> None:
    with pytest.raises(HyperparameterError, match=words):
        private(server=server)


UNKEPT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("glora", {"rho": 0.5}), ("glora", {"rank": 4}), ("glora", {"gamma": 0.0}), ("glora", {"history_lag": 1}),
    ("glora", {"weighting": "rank-partition"}), ("flexlora", {"weighting": "rank-partition"}),
)  # fmt: skip


def test_options_that_a_released_sum_cannot_keep_are_refused() -> None:
    for name, options in UNKEPT:
        plain = private(name)
        with pytest.raises(HyperparameterError, match=next(iter(options))):
            replace(plain, method=build(name, **options))


def test_a_trained_start_needs_a_word() -> None:
    warm = pushed(seed_adapter(4), "somebody", 0)
    with pytest.raises(HyperparameterError, match="warm_start"):
        private().init(warm)
    state = private(warm_start=True).init(warm)
    torch.testing.assert_close(whole(private(), state, "attn.q"), warm.modules["attn.q"].delta())


def test_ffa_lora_has_its_own_geometry() -> None:
    server = private("ffa-lora", geometry=GEOMETRIES["two-sided"])
    with pytest.raises(HyperparameterError, match="no effect"):
        server.open(server.init(seed_adapter(4)))


@pytest.mark.parametrize("name", ["ffa-lora"])
def test_a_change_outside_the_frozen_rows_is_no_change_of_it(name: str) -> None:
    method = build(name)
    assert isinstance(method, Accumulating)
    state = method.init(seed_adapter(4).modules["attn.q"], 0)
    with pytest.raises(HyperparameterError, match="outside the common frozen A"):
        method.accumulated(state, LoRA(torch.ones(30, 1).double(), noise((1, 22), "elsewhere")), 4)


# ---- the engine ------------------------------------------------------------------------------------------------------


def people(ranks: Mapping[str, int] = MIXED) -> list[Client]:
    return [Client(name, rank) for name, rank in ranks.items()]


def test_a_record_tells_nothing_of_single_clients(caplog: pytest.LogCaptureFixture) -> None:
    """Not even that one of them diverged: nothing in record, events or log."""
    server = private(rank=6)
    told = list(simulate(server, people(), diverging("b", 0), start(server, seed_adapter(6)), rounds=2))
    for record in told:
        assert not (record.losses or record.weights or record.refused or record.uploads or record.bytes.total)
        tally = record.state.server.tally
        assert tally is not None and not (tally.weights or tally.abstained or tally.refused)
    assert "'b'" not in caplog.text and "NaN" not in caplog.text
    quiet = private(rank=6)
    without_b = quiet.aggregate(
        begun := quiet.init(seed_adapter(6)),
        [u for u in trained(quiet, begun, MIXED, list(MIXED), {}).uploads if u.client.id != "b"],
    )
    for module in SHAPES:
        torch.testing.assert_close(whole(server, told[0].state.server, module), whole(quiet, without_b, module))


def test_a_client_that_fails_stops_nothing_and_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Toy):
        def train(self, download: Any, adapter: Adapter, position: int) -> Any:
            if download.client.id == "c":
                raise RuntimeError("its disk is full")
            return super().train(download, adapter, position)

    server = private(rank=6)
    record = next(simulate(server, people(), Fails(), start(server, seed_adapter(6)), rounds=1))
    assert record.round == 1 and not record.refused and "disk" not in caplog.text


class Diary:
    """What only the server may know."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []

    def __call__(self, round: int, client: str, what: str) -> None:
        self.lines.append((round, client, what))


class AllFail(Toy):
    def train(self, download: Any, adapter: Adapter, position: int) -> Any:
        raise RuntimeError("its disk is full")


def test_the_diary_hears_who_failed_and_that_nobody_counted(caplog: pytest.LogCaptureFixture) -> None:
    """And what is released is what it is without a diary."""
    diary = Diary()
    server = private(rank=6, diary=diary)
    for _ in simulate(server, people(), AllFail(), start(server, seed_adapter(6)), rounds=2):
        pass
    assert [(r, c) for r, c, _ in diary.lines] == [(r, c) for r in (1, 2) for c in (*MIXED, "")]
    assert all("its disk is full" in what for _, client, what in diary.lines if client)
    assert [f"ALL {len(MIXED)} clients" in what for _, client, what in diary.lines if not client] == [True, True]
    diary.lines.clear()
    server = private(rank=6, diary=diary)
    (told,) = simulate(server, people(), diverging("b", 0), start(server, seed_adapter(6)), rounds=1)
    refused, end = diary.lines
    assert refused[:2] == (1, "b") and "NaN" in refused[2] and not told.refused and not caplog.text
    assert end[:2] == (1, "") and end[2].startswith(f"{len(MIXED) - 1} of the {len(MIXED)} clients ")
    quiet = private(rank=6)
    (same,) = simulate(quiet, people(), diverging("b", 0), start(quiet, seed_adapter(6)), rounds=1)
    for module in SHAPES:
        assert torch.equal(whole(server, told.state.server, module), whole(quiet, same.state.server, module))


def test_the_diary_hears_of_uploads_that_are_handed_in() -> None:
    diary = Diary()
    server = private(clip=0.5, diary=diary)
    state, uploads = played(server, 0)
    stranger = replace(uploads[0], client=Client("x", 2))
    bad = [spoiled(uploads[1], math.nan), HOSTILE["sparse"](uploads[2]), stranger, uploads[0]]
    after = server.aggregate(state, [uploads[0], *bad])
    server.aggregate(state, [])
    server.aggregate(after, [])
    told = [("b", "NaN"), ("c", ""), ("x", "not among the clients"), ("a", "second"), ("", "1 of the 4"),
            ("", "no client was asked"), ("", "ALL 4 clients")]  # fmt: skip
    assert [client for _, client, _ in diary.lines] == [client for client, _ in told]
    assert all(words in what for (_, words), (_, _, what) in zip(told, diary.lines, strict=True))


def test_the_engine_draws_secretly_and_not_by_the_seed() -> None:
    """q = 0.5 of 4, 40 rounds with one seed twice: the same 160 coins by chance has probability 2^-160."""

    def drawn() -> list[tuple[str, int]]:
        server, toy = private(sampling=0.5, rank=6), Toy()
        list(simulate(server, people(), toy, start(server, seed_adapter(6)), rounds=40, seed=0))
        return [(client, round) for client, round, _ in toy.calls]

    one, other = drawn(), drawn()
    assert one != other
    assert 40 < len(one) < 120, "80 expected; 40 is more than six standard deviations away"


def test_the_engine_refuses_other_rounds_than_the_ledger_charges() -> None:
    server = private(rank=6)
    state = start(server, seed_adapter(6))
    with pytest.raises(HyperparameterError, match=r"sampling=0\.5"):
        next(simulate(server, people(), Toy(), state, rounds=1, participation=0.5))
    with pytest.raises(HyperparameterError, match=r"'d' is not among .*given"):
        next(simulate(server, people()[:3], Toy(), state, rounds=1))
