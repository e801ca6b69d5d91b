"""Contract tests: every contract of `fedlora.testing` over every built-in method and every variant of it.

Each row of CLAIMS says what a method promises; a promise is tested to hold, and its absence is tested to be real: what
is not claimed must be seen to fail, by far. Expected values are dense float64 sums of the clients' products.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jaxtyping
import pytest
import torch

from fedlora import METHODS, Client, Server, build
from fedlora.analysis.audit import regauge
from fedlora.core.lora import stack
from fedlora.errors import FactorNotShared
from fedlora.testing import CONTRACTS, Claim, ContractBroken, basics, measure, promises
from fedlora.testing.comparing import relative
from fedlora.testing.federations import EQUAL, FULL, MIXED, PARTIAL, SHAPES, Ranks, Round, Who, rounds

VISIBLE = 1e-3  # what is not promised is off by more


@dataclass(frozen=True)
class Row:
    label: str
    name: str
    hparams: dict[str, object]
    claim: Claim

    def server(self) -> Server:
        return Server(build(self.name, **self.hparams))  # type: ignore[arg-type]


def row(label: str, hparams: dict[str, object] | None = None, name: str | None = None, **claim: object) -> Row:
    return Row(label, name or label.split()[0], hparams or {}, Claim(**claim))  # type: ignore[arg-type]


RAFLORA: dict[str, object] = {"weighting": "rank-partition"}
SUBSPACE: dict[str, object] = {"coordinates": "subspace"}
CLAIMS = (
    row("glora", exact=True, gauge=True, state=True, mixed=True),
    row("glora paper", {"preset": "paper"}, exact=True, gauge=True, state=True, mixed=True),
    row("glora car-off", {"preset": "car-off"}, exact=True, gauge=True, state=True, mixed=True),
    row("glora rank 4", {"rank": 4}, exact=False, gauge=True, state=True, mixed=True),
    row("glora energy", {"basis": "energy"}, exact=True, gauge=True, state=True, mixed=True),
    row("glora raflora", RAFLORA, exact="equal", gauge=True, state=True, mixed=True),
    row("flexlora thin", exact=True, gauge=True, state=True, mixed=True),
    row("flexlora raflora", {"preset": "raflora"}, exact="equal", gauge=True, state=True, mixed=True),
    row("svd", {"energy": 1.0}, exact=True, gauge=True, state=True, mixed=True),
    row("svd 0.9", {"energy": 0.9}, exact=False, gauge=True, state=True, mixed=True),
    row("flora", exact=True, gauge=True, state=True, mixed=True),
    row("fedex-lora", exact=True, gauge=True, state=False, mixed=False),
    row("ffa-lora", exact=True, gauge=None, state=None, mixed=True),
    row("fedsvd", exact=True, gauge=None, state=None, mixed=True),
    row("rolora", exact=True, gauge=None, state=None, mixed=True),
    row("fedit", exact=False, gauge=False, state=False, mixed=False),
    row("fedrot-lora", exact=False, gauge=False, state=False, mixed=False),
    row("lora-fair", exact=False, gauge=False, state=False, mixed=False),
    row("lora-fair l2", {"metric": "l2"}, exact=False, gauge=False, state=False, mixed=False),
    row("hetlora", exact=False, gauge=False, state=False, mixed=True, weights=False),
    row("padded-average", exact=False, gauge=False, state=False, mixed=True),
    row("padded subspace", SUBSPACE, "padded-average", exact=False, gauge=True, state=True, mixed=True),
    row("fedsa-lora", exact=False, gauge=None, state=None, mixed=False, global_model=False),
)
PLAYS = [
    pytest.param(row, ranks, who, id=f"{row.label}-{ranks_id}-{who_id}")
    for row in CLAIMS
    for ranks_id, ranks in (("equal", EQUAL), ("mixed", MIXED))
    for who_id, who in (("full", FULL), ("partial", PARTIAL))
    if row.claim.mixed or ranks is EQUAL
]
every_play = pytest.mark.parametrize(("row", "ranks", "who"), PLAYS)
every_row = pytest.mark.parametrize("row", CLAIMS, ids=[row.label for row in CLAIMS])


def test_every_method_has_a_row() -> None:
    assert {row.name for row in CLAIMS} == set(METHODS)


@pytest.fixture(scope="module", autouse=True)
def played_once() -> Iterator[None]:
    """Contracts of one server, one federation and the same participants look at the same rounds: played once, and kept.
    That playing them again gives the same bits and that nobody changes them is what "purity" asks, which plays its own.
    """

    @functools.cache
    def kept(server: Server, ranks: tuple[tuple[str, int], ...], who: Who, *dtype: torch.dtype) -> tuple[Round, ...]:
        return tuple(rounds(server, dict(ranks), who, *dtype))

    def once(server: Server, ranks: Ranks, who: Who, *dtype: torch.dtype) -> Iterator[Round]:
        return iter(kept(server, tuple(ranks.items()), who, *dtype))

    with pytest.MonkeyPatch.context() as patched:
        for module in (basics, promises):
            patched.setattr(module, "rounds", once)
        yield


@pytest.mark.quick(90)
@pytest.mark.parametrize("name", ["rank", "alive", "order", "purity", "exact"])
@every_play
def test_a_contract_is_kept_in_every_federation(name: str, row: Row, ranks: dict[str, int], who: tuple) -> None:
    """What is not claimed fails in every round and module: no promise is missing."""
    contract = CONTRACTS[name]
    measured = contract(row.server(), row.claim, ranks, who)
    if contract.wanted(row.claim, ranks) is False and row.claim.global_model:
        assert measured.least > VISIBLE


@pytest.mark.quick(30)
@pytest.mark.parametrize("name", ["gauge", "state"])
@every_play
def test_gauge_invariance_holds_where_it_is_claimed_and_only_there(
    name: str, row: Row, ranks: dict[str, int], who: tuple
) -> None:
    """The server's update, and where claimed every readout, when each (B_i, A_i) becomes (B_i Q_i, Q_i^-1 A_i)."""
    contract = CONTRACTS[name]
    measured = contract(row.server(), row.claim, ranks, who)
    if contract.wanted(row.claim, ranks) is False:
        assert measured.least > VISIBLE
    if contract.wanted(row.claim, ranks) is None:
        with pytest.raises(FactorNotShared):
            regauge(next(rounds(row.server(), ranks, who)).uploads[0], 10.0)


@pytest.mark.parametrize("row", [row for row in CLAIMS if row.claim.global_model], ids=lambda row: row.label)
def test_cutting_a_client_in_two_halves_changes_nothing_for_exact_methods(row: Row) -> None:
    """Halves: one client as two of half the weight. GLoRA at an absolute R; the mean itself for the others."""
    measured = CONTRACTS["halves"](row.server(), row.claim, MIXED if row.claim.mixed else EQUAL, FULL)
    if row.claim.exact or row.label in ("glora rank 4", "svd 0.9"):
        assert measured.holds


@every_row
def test_mixed_ranks_are_served_where_claimed_and_refused_by_name_elsewhere(row: Row) -> None:
    measured = CONTRACTS["mixed"](row.server(), row.claim, MIXED, FULL)
    assert ("served for 3 rounds" in measured.says) == row.claim.mixed
    if not row.claim.mixed:
        assert "one rank" in measured.says and "Use glora, flexlora" in measured.says


def test_a_method_without_global_model_says_so() -> None:
    for row in CLAIMS:
        measured = CONTRACTS["global model"](row.server(), row.claim, EQUAL, FULL)
        assert row.claim.global_model or "Evaluate the clients" in measured.says


@pytest.mark.quick(17)
@every_row
@pytest.mark.parametrize("name", ["protocol", "weights"])
def test_every_method_is_one_and_counts_weights(name: str, row: Row) -> None:
    assert CONTRACTS[name](row.server(), row.claim).holds is (name != "weights" or row.claim.weights)


def test_a_state_counts_the_rounds_that_made_it() -> None:
    for row in [next(row for row in CLAIMS if row.name == name) for name in METHODS]:
        for number, played in enumerate(rounds(row.server(), EQUAL, FULL)):
            assert {state.round for state in played.before.modules.values()} == {number}
            assert {state.round for state in played.after.modules.values()} == {number + 1}


@pytest.fixture
def shapes_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotations of linalg, where every method calls it in every federation."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)


@pytest.mark.quick(6)
@pytest.mark.usefixtures("shapes_checked")
@pytest.mark.parametrize("label", ["glora raflora", "svd 0.9", *sorted(set(METHODS) - {"svd"})])
def test_what_is_claimed_is_what_is_measured_without_being_told(label: str) -> None:
    """One row of each method, and one that is exact with equal ranks only."""
    row = next(row for row in CLAIMS if label in (row.label, row.name))
    assert measure(build(row.name, **row.hparams)) == row.claim  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("label", "name", "claim", "says"),
    [
        ("fedit", "exact", {"exact": True}, "claimed yes; measured: off the mean"),
        ("glora", "exact", {"exact": False}, "promises less"),
        ("fedit", "gauge", {"gauge": True}, "claimed yes; measured: in other coordinates it "),
        ("ffa-lora", "gauge", {"gauge": True}, "claimed yes; measured: one factor"),
        ("glora", "gauge", {"gauge": None}, "claimed no gauge.*; measured: in other coordinates it "),
        ("fedex-lora", "state", {"state": True}, "claimed yes; measured: in other coordinates readouts"),
        ("fedit", "mixed", {"mixed": True}, "claimed yes; measured: refused: FedIT averages"),
        ("glora", "mixed", {"mixed": False}, "promises less"),
        ("fedsa-lora", "global model", {"global_model": True}, "claimed yes; measured: the server says"),
    ],
)
def test_a_false_claim_is_refused_with_what_was_measured(
    label: str, name: str, claim: dict[str, object], says: str
) -> None:
    """Each claim of a row turned round: the error names the method, the contract, the claim and the number."""
    (found,) = [r for r in CLAIMS if r.label == label]
    false = Claim(**{**vars(found.claim), **claim})  # type: ignore[arg-type]
    with pytest.raises(ContractBroken, match=rf"{found.name} breaks the contract '{name}': .*{says}"):
        CONTRACTS[name](found.server(), false, MIXED if name == "mixed" else EQUAL, FULL)


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
    """GLoRA at rho = 1 and FlexLoRA: the same mean of the same uploads."""
    first = next(rounds(Server(build("glora")), MIXED, FULL))
    updates = []
    for name in ("glora", "flexlora"):
        server = Server(build(name))
        state = server.aggregate(server.init(first.before.start), first.uploads)
        updates.append(server.global_update(state))
    for m in SHAPES:
        assert stack([updates[0][m], updates[1][m]], [1.0, -1.0]).norm() < 1e-12 * updates[0][m].norm()
