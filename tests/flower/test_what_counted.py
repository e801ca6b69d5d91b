"""What a site begins with is its state after the last round in which its work counted. Kinds of evidence: *identity*
(what every site is given to train, and from which place of its data on, is bit for bit the engine's, which has all
memories itself), *contract* (a state that is not there is refused by name, with a way out).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedlora import Adapter, Client, Kept, LoRA, Server, build
from fedlora.core.trainer import Trained
from fedlora.flower.envelope import Receipt, RecordError, receipt_of
from fedlora.flower.strategy import FedLoRA
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.flower_grid import (
    RANKS,
    LocalGrid,
    Watching,
    bits,
    changed,
    fates,
    federation,
    last_line,
    play,
    seed_adapter,
)
from support.kills import dying_at
from support.private_flower import private_federation
from support.toy_federations import toy_federation, write_policy

EQUAL = dict.fromkeys(RANKS, 4)
KEEPING = {"fedsa-lora": {}, "glora": {"heads": "local"}, "ffa-lora": {"heads": "local"}}  # method -> server's options
Harm = Callable[[Trained], Trained]


def times(B: float, A: float, head: float) -> Harm:
    def harm(done: Trained) -> Trained:
        modules = {name: LoRA(lora.B * B, lora.A * A) for name, lora in done.adapter.modules.items()}
        heads = {name: h * head for name, h in done.adapter.heads.items()}
        return replace(done, adapter=replace(done.adapter, modules=modules, heads=heads))

    return harm


NAN = float("nan")
HARM = {  # what becomes of a site's work in one round: refused by the server, by the site, or failed
    "what is shared": times(1000, NAN, 1000),
    "what stays": times(NAN, 1, NAN),
    "all of it": times(NAN, NAN, NAN),
    "its loss": lambda done: replace(done, loss=NAN),
}


class Sick(Watching):
    """Site "one" diverges in some rounds. It notes the place in the data from which each client trained."""

    def __init__(self, harm: Harm | None = None, rounds: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._harm, self._rounds = harm, rounds
        self.places: dict[tuple[str, int], int] = {}

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        self.places[download.client.id, download.round] = position
        done = super().train(download, adapter, position)
        return self._harm(done) if self._harm and self._of(download) else done

    def _of(self, download: Any) -> bool:
        return download.client.id == "one" and download.round in self._rounds

    def given(self, *rounds: int) -> list[Any]:
        """What each client was given to train in these rounds (counted from 0), and its place in its data."""
        return [(key, self.places[key], self.got[key]) for key in sorted(self.got) if key[1] in rounds]


def served(method: str) -> Server:
    return Server(build(method), round=Kept(quorum=1), **KEEPING[method])  # type: ignore[arg-type]


def playing(folder: Path, method: str, trainer: Any) -> tuple[FedLoRA, LocalGrid]:
    return federation(folder, served(method), EQUAL, trainer=trainer)


def without_one(folder: Path, method: str, rounds: int, absent: int) -> tuple[FedLoRA, Sick]:
    """The same federation where nothing was lost, and "one" was not online in that round (from 1)."""
    trainer = Sick()
    strategy, grid = playing(folder, method, trainer)
    for number in range(1, rounds + 1):
        grid.offline = {"one"} if number == absent else set()
        play(strategy, grid, number)
    return strategy, trainer


# ---- work that did not count -----------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", KEEPING)
@pytest.mark.parametrize("harm", HARM)
def test_refused_work_leaves_no_trace_at_a_site_as_in_the_engine(tmp_path: Path, method: str, harm: str) -> None:
    """Refused in its first round, and twice in a row later. The engine keeps what the client had; its data move on."""
    there, here = Sick(HARM[harm], (0, 2, 3)), Sick(HARM[harm], (0, 2, 3))
    strategy, grid = playing(tmp_path, method, there)
    play(strategy, grid, 6)
    clients, begin = [Client(name, 4) for name in RANKS], start(served(method), seed_adapter())
    if harm == "its loss":  # only a network refuses a loss: the engine's client is refused for its tensors
        here = Sick(HARM["all of it"], (0, 2, 3))
    *_, last = simulate(served(method), clients, here, begin, rounds=6)
    assert there.given(*range(6)) == here.given(*range(6))
    assert bits(strategy.state.server) == bits(last.state.server)
    assert strategy.kept.receipts["one"] == Receipt(6)
    stored = list((tmp_path / "nodes" / "one").rglob("*.safetensors"))
    assert len(stored) <= 4, "of 6; of 5; and what 5 began with: the state of 2, the place in the data of 4"


# ---- backups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", KEEPING)
def test_a_restored_server_takes_its_sites_back_with_it(tmp_path: Path, method: str) -> None:
    """Set back from round 5 to the backup of round 3: a site cannot tell whether round 5 was finished. "one" is away in
    the first round after it. Reference: rounds 4 and 5 were never played before."""
    trainer, server = Sick(), tmp_path / "a" / "server"
    strategy, grid = playing(tmp_path / "a", method, Sick())
    play(strategy, grid, 3)
    shutil.copytree(server, tmp_path / "backup")
    play(strategy, grid, 5)
    shutil.rmtree(server)
    shutil.copytree(tmp_path / "backup", server)
    again, grid = playing(tmp_path / "a", method, trainer)
    grid.offline = {"one"}
    play(again, grid, 4)
    grid.offline = set()
    play(again, grid, 6)
    whole, there = without_one(tmp_path / "b", method, 6, 4)
    assert trainer.given(3, 4, 5) == there.given(3, 4, 5)
    assert bits(again.state.server) == bits(whole.state.server)


@pytest.mark.parametrize("method", KEEPING)
def test_a_restored_site_is_refused_by_name_and_the_way_out_works(tmp_path: Path, method: str) -> None:
    trainer = Sick()
    strategy, grid = playing(tmp_path, method, trainer)
    mine = tmp_path / "nodes" / "one"
    play(strategy, grid, 2)
    shutil.copytree(mine, tmp_path / "old")
    play(strategy, grid, 5)
    newest = tmp_path / "newest"
    shutil.copytree(mine, newest)
    for number in (6, 7):  # twice: it is refused as long as nobody mends it
        shutil.rmtree(mine)
        shutil.copytree(tmp_path / "old", mine)
        play(strategy, grid, number)
        why = last_line(strategy)["fates"]["one"]["why"]
        assert fates(strategy)["one"] == "failed" and "round 5" in why and "backup" in why and "empty" in why
    assert ("one", 5) not in trainer.got and ("two", 5) in trainer.got
    shutil.rmtree(mine)
    shutil.copytree(newest, mine)  # the first way out: a backup of the right round
    play(strategy, grid, 8)
    assert fates(strategy)["one"] == "trained" and trainer.places["one", 7] == 15, "five rounds of 3, by hand"
    shutil.rmtree(mine)  # the other one
    play(strategy, grid, 9)
    assert fates(strategy)["one"] == "failed", "it lacks what its message left out; the next one leaves out nothing"
    play(strategy, grid, 10)
    first = {name: part for name, part in trainer.got["one", 0].items() if _local(name, method)}
    assert first and first == {name: trainer.got["one", 9][name] for name in first}, "the common start"
    assert fates(strategy)["one"] == "trained" and trainer.places["one", 9] == 0


def _local(name: str, method: str) -> bool:
    return name.endswith("/B") if method == "fedsa-lora" else name.startswith("/heads/")


# ---- what the server knows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [None, "7", '{"counted": -2}', '{"counted": "a"}', '{"counted": true}', "[" * 9999])
def test_a_message_that_does_not_say_what_counted_is_refused(tmp_path: Path, said: Any) -> None:
    record = RecordDict({"config": ConfigRecord({} if said is None else {"receipt": said})})
    with pytest.raises(RecordError, match="counted"):
        receipt_of(record)


def test_after_a_kill_in_a_private_round_the_sites_go_on_from_the_last_work_that_is_known_to_count(
    tmp_path: Path,
) -> None:
    """The sum was stored, but not its checkpoint: no site is asked again, and the server cannot know who trained. So do
    the engine's clients, whose memory is that of the checkpoint."""
    strategy, grid = private_federation(tmp_path, EQUAL)
    play(strategy, grid, 1)
    with dying_at(1, [(FedLoRA, "_store")]):
        play(strategy, grid, 2)
    trainer = Sick()
    again, grid = private_federation(tmp_path, EQUAL, trainer=trainer)
    play(again, grid, 2)
    assert not trainer.got and again.kept.receipts == dict.fromkeys(EQUAL, Receipt(1))
    play(again, grid, 3)
    assert trainer.places == {(name, 2): 3 for name in EQUAL} and again.kept.receipts["one"] == Receipt(3)


def test_a_claim_of_examples_counts_in_a_measurement_as_in_training(tmp_path: Path) -> None:
    """max_examples = 5, and every site measured on more: each counts 5, whatever `one` claims."""
    write_policy(tmp_path, RANKS, max_examples=5)
    strategy, grid = toy_federation(tmp_path, Server(build("glora"), round=Kept(quorum=1)))
    grid.meddle["one"] = changed(**{"num-examples": 10**12})
    play(strategy, grid, 1)
    assert strategy._sites is not None
    assert {name: one.examples for name, one in strategy._sites.measured.items()} == dict.fromkeys(RANKS, 5)
