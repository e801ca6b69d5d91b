"""Contract tests: the table of architecture and `fedlora.core.method`, every contract over every method.

Each row of CLAIMS says what a method promises; a promise is tested to hold, and its absence is tested to be real: a
method that claims nothing must be seen to fail. Expected values are dense float64 sums of the clients' products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from fedlora import METHODS, Client, Server, ServerState, Upload, build
from fedlora.analysis.audit import regauge
from fedlora.core.lora import stack
from fedlora.errors import FactorNotShared, NoGlobalModel, RankMismatch
from support.federations import EQUAL, FULL, MIXED, PARTIAL, SHAPES, Round, rounds


@dataclass(frozen=True)
class Claim:
    """exact: the mean update ("equal": with equal ranks only). gauge: its invariance; None: the roles let one factor
    travel, so there is no gauge to change. state: the readouts' invariance too. mixed: different ranks."""

    label: str
    name: str
    hparams: dict[str, object]
    exact: bool | Literal["equal"]
    gauge: bool | None
    state: bool | None
    mixed: bool
    global_model: bool = True


RAFLORA: dict[str, object] = {"weighting": "rank-partition"}
SUBSPACE: dict[str, object] = {"coordinates": "subspace"}
CLAIMS = (
    Claim("glora", "glora", {}, exact=True, gauge=True, state=True, mixed=True),
    Claim("glora paper", "glora", {"preset": "paper"}, exact=True, gauge=True, state=True, mixed=True),
    Claim("glora car-off", "glora", {"preset": "car-off"}, exact=True, gauge=True, state=True, mixed=True),
    Claim("glora rank 4", "glora", {"rank": 4}, exact=False, gauge=True, state=True, mixed=True),
    Claim("glora energy", "glora", {"basis": "energy"}, exact=True, gauge=True, state=True, mixed=True),
    Claim("glora raflora", "glora", RAFLORA, exact="equal", gauge=True, state=True, mixed=True),
    Claim("flexlora thin", "flexlora", {}, exact=True, gauge=True, state=True, mixed=True),
    Claim("flexlora dense", "flexlora", {"solver": "dense"}, exact=True, gauge=True, state=True, mixed=True),
    Claim("flexlora raflora", "flexlora", {"preset": "raflora"}, exact="equal", gauge=True, state=True, mixed=True),
    Claim("svd", "svd", {"energy": 1.0}, exact=True, gauge=True, state=True, mixed=True),
    Claim("svd 0.9", "svd", {"energy": 0.9}, exact=False, gauge=True, state=True, mixed=True),
    Claim("flora", "flora", {}, exact=True, gauge=True, state=True, mixed=True),
    Claim("fedex-lora", "fedex-lora", {}, exact=True, gauge=True, state=False, mixed=False),
    Claim("ffa-lora", "ffa-lora", {}, exact=True, gauge=None, state=None, mixed=True),
    Claim("fedsvd", "fedsvd", {}, exact=True, gauge=None, state=None, mixed=True),
    Claim("rolora", "rolora", {}, exact=True, gauge=None, state=None, mixed=True),
    Claim("fedit", "fedit", {}, exact=False, gauge=False, state=False, mixed=False),
    Claim("fedrot-lora", "fedrot-lora", {}, exact=False, gauge=False, state=False, mixed=False),
    Claim("lora-fair", "lora-fair", {}, exact=False, gauge=False, state=False, mixed=False),
    Claim("lora-fair l2", "lora-fair", {"metric": "l2"}, exact=False, gauge=False, state=False, mixed=False),
    Claim("hetlora", "hetlora", {}, exact=False, gauge=False, state=False, mixed=True),
    Claim("hetlora dense", "hetlora", {"solver": "dense"}, exact=False, gauge=False, state=False, mixed=True),
    Claim("hetlora pruning", "hetlora", {"pruning": True}, exact=False, gauge=False, state=False, mixed=True),
    Claim("padded-average", "padded-average", {}, exact=False, gauge=False, state=False, mixed=True),
    Claim("padded subspace", "padded-average", SUBSPACE, exact=False, gauge=True, state=True, mixed=True),
    Claim("fedsa-lora", "fedsa-lora", {}, exact=False, gauge=None, state=None, mixed=False, global_model=False),
)
PLAYS = [
    pytest.param(claim, ranks, who, id=f"{claim.label}-{ranks_id}-{who_id}")
    for claim in CLAIMS
    for ranks_id, ranks in (("equal", EQUAL), ("mixed", MIXED))
    for who_id, who in (("full", FULL), ("partial", PARTIAL))
    if claim.mixed or ranks is EQUAL
]
WITH_MODEL = [play for play in PLAYS if play.values[0].global_model]
every_play = pytest.mark.parametrize(("claim", "ranks", "who"), PLAYS)
every_play_with_a_model = pytest.mark.parametrize(("claim", "ranks", "who"), WITH_MODEL)
every_claim = pytest.mark.parametrize("claim", CLAIMS, ids=[c.label for c in CLAIMS])


def server_of(claim: Claim) -> Server:
    return Server(build(claim.name, **claim.hparams))  # type: ignore[arg-type]


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; ||got|| where want is zero, as a fresh adapter's product is."""
    return float((got - want).norm() / (want.norm() if bool(want.any()) else 1.0))


def base(server: Server, state: ServerState, module: str) -> Tensor | float:
    """The change of the base weight that clients of this round trained on."""
    d_out, d_in = SHAPES[module]
    change = server.method.readout(state.modules[module], None, state.start.modules[module].rank).base
    return torch.zeros(d_out, d_in, dtype=torch.float64) if change is None else change.total.delta()


def test_every_method_has_a_row() -> None:
    assert {claim.name for claim in CLAIMS} == set(METHODS)


@every_play_with_a_model
def test_exactness_holds_where_it_is_claimed_and_only_there(claim: Claim, ranks: dict, who: tuple) -> None:
    """effective(aggregate(s, us)) - base(s) == sum_i p_i B_i A_i."""
    server = server_of(claim)
    for played in rounds(server, ranks, who):
        for module in SHAPES:
            got = server.global_update(played.after)[module].delta() - base(server, played.before, module)
            error = relative(got, played.mean(module))
            exact = ranks is EQUAL if claim.exact == "equal" else claim.exact
            assert error < 1e-11 if exact else error > 1e-3


@every_play
def test_every_readout_has_the_asked_rank_and_no_dead_slot(claim: Claim, ranks: dict, who: tuple) -> None:
    """Contracts rank and alive, from init on, for known and unknown clients."""
    server = server_of(claim)
    played = list(rounds(server, ranks, who))
    for state in (played[0].before, *(p.after for p in played)):
        for name, rank in (*ranks.items(), ("stranger", max(ranks.values()))):
            for lora in server.download(state, Client(name, rank)).adapter.modules.values():
                assert lora.rank == rank
                if lora.B is not None and lora.A is not None:
                    assert not bool(((lora.B == 0).all(0) & (lora.A == 0).all(1)).any())


@every_play
def test_the_order_of_uploads_changes_no_bit(claim: Claim, ranks: dict, who: tuple) -> None:
    server = server_of(claim)
    for played in rounds(server, ranks, who):
        again = server.aggregate(played.before, played.uploads[::-1])
        assert bits(server, again, ranks) == bits(server, played.after, ranks)


@every_play
def test_inputs_are_left_alone(claim: Claim, ranks: dict, who: tuple) -> None:
    """Purity: aggregating and reading out again gives the same bits from the same, unchanged inputs."""
    server = server_of(claim)
    for played in rounds(server, ranks, who):
        before = bits(server, played.before, ranks)
        uploads = [
            tensor_bits(t) for u in played.uploads for x in u.adapter.modules.values() for t in x.tensors().values()
        ]
        server.aggregate(played.before, played.uploads)
        assert bits(server, played.before, ranks) == before
        assert uploads == [
            tensor_bits(t) for u in played.uploads for x in u.adapter.modules.values() for t in x.tensors().values()
        ]


@every_play
def test_gauge_invariance_holds_where_it_is_claimed_and_only_there(claim: Claim, ranks: dict, who: tuple) -> None:
    """The server's update, and where claimed every readout, when each (B_i, A_i) becomes (B_i Q_i, Q_i^-1 A_i)."""
    server = server_of(claim)
    if claim.gauge is None:
        with pytest.raises(FactorNotShared):
            regauge(next(rounds(server, ranks, who)).uploads[0], 10.0)
        return
    for t, played in enumerate(rounds(server, ranks, who)):
        moved = server.aggregate(played.before, [regauge(u, 10.0, seed=t) for u in played.uploads])
        drift = max(
            relative(server.global_update(moved)[m].delta(), server.global_update(played.after)[m].delta())
            for m in SHAPES
        )
        assert drift < 1e-10 if claim.gauge else drift > 1e-3
        readout_drift = max(
            relative(a.modules[m].delta(), b.modules[m].delta())
            for name, rank in ranks.items()
            for m in SHAPES
            for a, b in [[server.download(s, Client(name, rank)).adapter for s in (moved, played.after)]]
        )
        assert readout_drift < 1e-9 if claim.state else readout_drift > 1e-3


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if c.exact or c.label in ("glora rank 4", "svd 0.9")], ids=lambda c: c.label
)
def test_cutting_a_client_in_two_halves_changes_nothing_for_exact_methods(claim: Claim) -> None:
    """Halves: one client as two of half the weight. GLoRA at an absolute R; the mean itself for the others."""
    server = server_of(claim)
    ranks = MIXED if claim.mixed else EQUAL
    played: Round = next(rounds(server, ranks, FULL))
    first, *rest = played.uploads
    halves = [
        Upload(replace(first.client, id=f"{first.client.id}-{k}"), first.num_examples / 2, first.adapter)
        for k in (1, 2)
    ]
    split = server.aggregate(played.before, [*halves, *rest])
    for m in SHAPES:
        assert relative(server.global_update(split)[m].delta(), server.global_update(played.after)[m].delta()) < 1e-10


@every_claim
def test_mixed_ranks_are_served_where_claimed_and_refused_by_name_elsewhere(claim: Claim) -> None:
    server = server_of(claim)
    if claim.mixed:
        assert len(list(rounds(server, MIXED, FULL))) == 3
    else:
        with pytest.raises(RankMismatch, match=r"one rank.*Use glora, flexlora"):
            list(rounds(server, MIXED, FULL))


@every_claim
def test_a_method_without_global_model_says_so(claim: Claim) -> None:
    server = server_of(claim)
    played = next(rounds(server, EQUAL, FULL))
    assert server.has_global_model(played.after) == claim.global_model
    if not claim.global_model:
        with pytest.raises(NoGlobalModel, match="Evaluate the clients"):
            server.global_update(played.after)


def test_fedex_base_is_right_for_a_client_that_missed_two_rounds() -> None:
    """What `d` applies in round 4 is the sum of all residuals, computed here densely round by round."""
    server = Server(build("fedex-lora"))
    expected = dict.fromkeys(SHAPES, 0.0)
    who = (("a", "b", "c", "d"), ("a", "b"), ("b", "c"))
    for played in rounds(server, EQUAL, who):
        total = sum(u.num_examples for u in played.uploads)
        for m in SHAPES:
            pairs = [(u.num_examples / total, *u.adapter.modules[m].factors) for u in played.uploads]
            mean_B, mean_A = sum(p * B for p, B, _ in pairs), sum(p * A for p, _, A in pairs)
            expected[m] = expected[m] + sum(p * B @ A for p, B, A in pairs) - mean_B @ mean_A
    download = server.download(played.after, Client("d", EQUAL["d"]))
    for m in SHAPES:
        assert relative(download.base_delta[m].delta(), expected[m]) < 1e-12


def test_fedsa_keeps_b_at_the_client() -> None:
    """B never travels in either direction, and each client gets its own one back bit for bit."""
    server = Server(build("fedsa-lora"))
    for played in rounds(server, EQUAL, FULL):
        for upload in played.uploads:
            assert all(lora.B is None for lora in upload.adapter.modules.values())
            assert not upload.adapter.heads
        assert all(lora.B is None for lora in server.download(played.after, Client("a", 4)).adapter.modules.values())


def test_exact_methods_agree_with_each_other() -> None:
    """GLoRA at rho = 1, FlexLoRA thin and dense: the same mean of the same uploads."""
    first = next(rounds(Server(build("glora")), MIXED, FULL))
    updates = []
    for name, hparams in (("glora", {}), ("flexlora", {}), ("flexlora", {"solver": "dense"})):
        server = Server(build(name, **hparams))
        state = server.aggregate(server.init(first.before.start), first.uploads)
        updates.append(server.global_update(state))
    for m in SHAPES:
        for other in updates[1:]:
            assert stack([updates[0][m], other[m]], [1.0, -1.0]).norm() < 1e-12 * updates[0][m].norm()


def tensor_bits(t: Tensor) -> bytes:
    return t.detach().contiguous().numpy().tobytes()


def bits(server: Server, state: ServerState, ranks: dict[str, int]) -> list[bytes]:
    """Everything that clients and evaluation can see of a state."""
    seen = [tensor_bits(head) for head in state.heads.values()]
    for name, rank in ranks.items():
        download = server.download(state, Client(name, rank))
        for lora in (*download.adapter.modules.values(), *download.base_delta.values()):
            seen += [tensor_bits(t) for t in lora.tensors().values()]
    return seen
