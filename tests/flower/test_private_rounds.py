"""Private rounds on Flower: toys over its wire format, with the real journal, ledger and list of releases.

Kinds of evidence: *parity* (bit for bit the in-process engine's private run, with the same noise), *property*
(neighbours in exact integers), *non-interference* (where what is released is held fixed, no message to another site may
differ whatever becomes of the sites), *hostile input*.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")
pytest.importorskip("opendp")
pytest.importorskip("dp_accounting")

from flwr.app import ArrayRecord, Error, Message

from fedlora import Client
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.records import to_array, to_tensor
from fedlora.flower.server.journal import Journal as Told
from fedlora.flower.server.journal import read_now
from fedlora.flower.strategy import FedLoRA
from fedlora.flower.terms.policy import Policy
from fedlora.privacy import Budget, Journal, Ledger
from fedlora.privacy.events import Event
from fedlora.privacy.exact import squared_norm
from fedlora.privacy.mechanism import Mechanism
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.flower_grid import RANKS, FastClock, LocalGrid, Meddle, Watching, bits, changed, play, seed_adapter
from support.kills import dying_at
from support.private_flower import DELTA, leave, private_federation, private_run


def of_values(value: float) -> Meddle:
    """Every number that was sent becomes this one."""

    def meddle(asked: Message, reply: Message) -> Message:
        found = dict(reply.content["arrays"])
        for key in [k for k in found if k.startswith(("B/", "A/", "heads/"))]:
            found[key] = to_array(torch.full(tuple(found[key].shape), value))
        reply.content["arrays"] = ArrayRecord(found)
        return reply

    return meddle


HARM: dict[str, Meddle] = {
    "late": lambda asked, reply: None,
    "failed": lambda asked, reply: Message(Error(2, "a row of 'secret.csv' is bad"), reply_to=asked),
    "nan": of_values(float("nan")),
    "1e38": of_values(1e38),
    "a loss of NaN": changed(loss=float("nan")),
    "0 examples": changed(num_examples=0.0),
    "1e300 examples": changed(num_examples=1e300),
    "twice": lambda asked, reply: [reply, reply],
    "twice, the first one bad": lambda asked, reply: [of_values(float("nan"))(asked, Message(reply.content, reply_to=asked)), reply],  # noqa: E501
}  # fmt: skip


def same_noise(self: Any, total: Tensor) -> Tensor:
    """In place of `Mechanism.noised`: the same noise whenever vectors are as long, so that sums can be compared."""
    return total + fixed_noise(len(total))


def same_release(self: Any, total: Tensor) -> Tensor:
    """In place of `Mechanism.noised`: what is released says nothing of the sum, so that all that differs otherwise is
    a leak."""
    return fixed_noise(len(total))


def fixed_noise(size: int) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (made * 2**18).round().to(torch.int64)


def released(folder: Path, round: int) -> torch.Tensor:
    """The journal's integers, less the noise of `same_noise`."""
    (path,) = (folder / "private" / "journal").glob(f"round-{round:05d}-*.noised")
    _, _, body = path.read_bytes().partition(b"\n")
    found = torch.frombuffer(bytearray(body), dtype=torch.int64)
    return found - fixed_noise(len(found))


# ---- the same as in one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "dims"), [("glora", 3), ("flexlora", 3), ("ffa-lora", None)])
def test_a_private_federation_is_the_engine_s_private_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, dims: int | None
) -> None:
    """States and what each client was given to train; the noise is the same, and so are the ledgers' events."""
    monkeypatch.setattr(Mechanism, "noised", same_noise)
    ranks = dict.fromkeys(RANKS, 4) if method == "ffa-lora" else RANKS
    there, here = Watching(), Watching()
    options: dict[str, Any] = {"method": method, "dims": dims}
    run = private_run(tmp_path / "flower", ranks, **options)
    strategy, grid = private_federation(tmp_path / "flower", ranks, trainer=there, run=run)
    play(strategy, grid, 3)
    server = private_run(tmp_path / "engine", ranks, **options).server
    clients = [Client(name, rank) for name, rank in ranks.items()]
    records = list(simulate(server, clients, here, start(server, seed_adapter()), rounds=3))
    assert bits(strategy.state.server) == bits(records[-1].state.server) and there.got == here.got
    mine, theirs = (Ledger(tmp_path / at / "ledger.jsonl", "toys").read().events
                    for at in ("flower", "engine"))  # fmt: skip
    assert mine == theirs and len(mine) == 3 and {e.sampling for e in mine} == {1.0}


# ---- what one site can do --------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize("harm", [*HARM, "offline", "removed"])
def test_whatever_one_site_does_moves_the_sum_by_no_more_than_the_ledger_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """Exact integers, the second round (so that readouts are not zero): with "two" as it is, with it harmful, and with
    its part zero. The others' parts are the same in all; where it is refused its part is exactly zero."""
    monkeypatch.setattr(Mechanism, "noised", same_noise)
    sums = {}
    for kind in ("as it is", harm, "zero"):
        folder = tmp_path / kind.replace(" ", "-")
        strategy, grid = private_federation(folder)
        play(strategy, grid, 1)
        if kind == harm == "removed":
            strategy.policy = Policy(clients={k: v for k, v in RANKS.items() if k != "two"})
        elif kind == harm and harm in HARM:
            grid.meddle = {"two": HARM[harm]}
        elif kind != "as it is":
            grid.offline = {"two"}
        play(strategy, grid, 2)
        sums[kind] = released(folder, 2)
    bound = Mechanism.of(1.0, 1.0, len(sums["zero"])).bound(len(sums["zero"]))
    for kind in ("as it is", harm):
        assert squared_norm(sums[kind] - sums["zero"]) <= bound**2, kind
    assert squared_norm(sums["as it is"] - sums["zero"]) > 0  # or nothing is tested here
    if harm in ("1e300 examples", "twice"):  # all count alike, once
        assert torch.equal(sums[harm], sums["as it is"])
    elif harm != "1e38":
        assert torch.equal(sums[harm], sums["zero"])


def test_a_round_without_answers_takes_place_and_is_charged(tmp_path: Path) -> None:
    """Pure noise: z = 1 and n = 3, so that the mean change of each of 3 x 3 x 2 numbers and the head has deviation 1/3.
    After round 1 it waits for the members as long as a round's deadline, and then goes on."""
    strategy, grid = private_federation(tmp_path, run=private_run(tmp_path, dims=None))
    play(strategy, grid, 1)
    before, sent = strategy.state.server, len(grid.sent)
    grid.offline = set(RANKS)
    clock = FastClock()
    strategy.start(BoundedGrid(grid, clock=clock), num_rounds=2, timeout=50.0)
    assert strategy.round == 2 and len(grid.sent) == sent and clock.monotonic() >= 50.0
    assert len(Ledger(tmp_path / "ledger.jsonl", "toys").read().events) == 2
    after = strategy.state.server
    moved = (after.heads["head.weight"] - before.heads["head.weight"]).double()
    assert 0.1 < float(moved.std()) < 0.6


# ---- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("payer", "said"), [("other", "others have charged"), ("this-run", "old backup")])
def test_it_stops_before_the_budget_is_passed_and_nobody_trains_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, payer: str, said: str
) -> None:
    """Room for three rounds of z = 1; another run takes one of them, or this one did, before it was set back."""
    from fedlora.privacy import epsilon

    run = private_run(tmp_path, budget=Budget(epsilon(1.0, 3, DELTA) * 1.001, DELTA))
    strategy, grid = private_federation(tmp_path, run=run)
    play(strategy, grid, 1)
    size = run.plan.size
    other = Event.of(Mechanism.of(1.0, 1.0, size), size, run=payer, round=1, sampling=1.0, rounds=1, delta=DELTA,
                     released=64 * "0")  # fmt: skip
    Ledger(tmp_path / "ledger.jsonl", "toys").charge(other)
    with caplog.at_level(logging.INFO):
        play(strategy, grid, 3)
    assert strategy.round == 2 and len(grid.sent) == 6
    assert strategy.stopped == "budget" and said in run.releases.why_spent(strategy.round)
    assert "round 3 is not played" in caplog.text
    assert read_now(tmp_path / "server" / "now.json")["ended"]["kind"] == "stopped"
    assert len(Ledger(tmp_path / "ledger.jsonl", "toys").read().events) == 3


# ---- who is there ----------------------------------------------------------------------------------------------------


def test_round_1_waits_for_all_members_however_long_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As docs/how-to/privacy.md says. One comes after a day; one never does, and is taken out of the policy."""

    class Day(FastClock):
        def sleep(self, seconds: float, /) -> None:
            super().sleep(3600.0)
            if self.now > 24 * 3600.0:
                grid.offline = {"three"}
            if self.now > 48 * 3600.0:
                strategy.policy = Policy(clients={"one": 2, "two": 4})

    clock = Day()
    strategy, grid = private_federation(tmp_path)
    grid.offline = {"two", "three"}
    strategy.start(BoundedGrid(grid, clock=clock), num_rounds=1)
    assert strategy.round == 1 and clock.monotonic() > 48 * 3600.0
    assert [grid.nodes[m.metadata.dst_node_id][0] for m in grid.sent] == ["one", "two"]
    assert "waits for 3 clients; not online: two, three" in caplog.text


# ---- killed ----------------------------------------------------------------------------------------------------------


STAGES: dict[str, tuple[int, Any, str, int, int]] = {  # at which call of what; sums in the journal then, and charged
    "before the sum is written": (1, Journal, "store", 1, 1),
    "before the charge": (1, Ledger, "charge", 2, 1),
    "before its checkpoint": (1, FedLoRA, "_store", 2, 2),
    "before its line": (2, Told, "played", 2, 2),
    "after its line": (2, FedLoRA, "_measure", 2, 2),
}


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_any_stage_the_same_sums_leave_and_are_charged_once(tmp_path: Path, stage: str) -> None:
    """Killed in each stage of the second round's end. What the journal held stays, byte for byte; each round has one
    sum and one event; nobody trains for a sum that was there; and the journal alone gives the same state."""

    def sums() -> dict[str, str]:
        found = (tmp_path / "private" / "journal").glob("*.noised")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    def charged() -> list[Event]:
        return list(Ledger(tmp_path / "ledger.jsonl", "toys").read().events)

    call, owner, name, *at_the_kill = STAGES[stage]
    play(*private_federation(tmp_path), 1)
    with dying_at(call, [(owner, name)]) as died:
        play(*private_federation(tmp_path), 2)
    before, trainer = sums(), Watching()
    assert died and [len(before), len(charged())] == at_the_kill
    strategy, grid = private_federation(tmp_path, trainer=trainer)
    play(strategy, grid, 2)
    assert before.items() <= sums().items() and len(sums()) == 2
    assert [event.round for event in charged()] == [1, 2]
    assert {event.released for event in charged()} == set(sums().values())
    assert {round for _, round in trainer.got} == ({1} if len(before) == 1 else set())
    assert [line["round"] for line in strategy.journal.lines()] == [1, 2]
    shutil.rmtree(tmp_path / "server")
    again, grid = private_federation(tmp_path)
    play(again, grid, 2)
    assert bits(again.state.server) == bits(strategy.state.server) and not grid.sent


def sent_to(grid: LocalGrid, site: str) -> list[Any]:
    """The content of all messages to one site."""
    found = [m.content for m in grid.sent if grid.nodes[m.metadata.dst_node_id][0] == site]
    return [
        (
            {k: to_tensor(v, [None] * len(v.shape), k).tolist() for k, v in one.array_records["arrays"].items()},
            dict(one.config_records["config"]),
        )
        for one in found
    ]


@pytest.mark.parametrize("harm", ["late", "failed", "nan", "offline"])
def test_no_site_learns_what_became_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """The release is the same in both federations, so any other difference is a leak. The second site is harmed in both
    rounds."""
    monkeypatch.setattr(Mechanism, "noised", same_release)
    found = {}
    for kind in ("well", "harmed"):
        folder = tmp_path / kind
        strategy, grid = private_federation(folder)
        if kind == "harmed" and harm in HARM:
            grid.meddle = {"two": HARM[harm]}
        elif kind == "harmed":
            leave(grid, "two")
        play(strategy, grid, 2)
        ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()[1:]]
        charged = [{k: v for k, v in line.items() if k not in ("before", "released")} for line in ledger]
        found[kind] = sent_to(grid, "one"), charged
        assert not any(receipt.why for receipt in strategy.kept.receipts.values())
    assert found["harmed"] == found["well"] and len(found["well"][0]) == 2
