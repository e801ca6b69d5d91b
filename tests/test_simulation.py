"""The in-process engine, with a stand-in for training (`federations.pushed`): no model, no text.

Kind of evidence: *contract* (what a record holds, what a failure does, resuming gives the same bits). Bytes:
core/test_parcels.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora import METHODS, Adapter, Client, Download, Kept, LoRA, Server, Streamed, build
from fedlora.core import checkpoint
from fedlora.core.trainer import Failed, Job, OneByOne, Trained, Workers
from fedlora.errors import ClientFailed, ConfigError, HyperparameterError, QuorumNotMet
from fedlora.server.sampling import sample_clients
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.simulation import simulate
from support.federations import EQUAL, EXAMPLES, MIXED, SHAPES, seed_adapter
from support.toy_trainer import BATCH, Toy, clients, diverging, loss, run

NAMES = tuple(EQUAL)


def bits(state: RunState, folder: Path) -> str:
    """A checkpoint's name holds the digest of all its tensors and values: equal names are equal bits."""
    return checkpoint.save(folder, state.round, state, keep=1000).name


def failing(client: str, round: int, error: Exception) -> Toy:
    def wrong(download: Download, trained: Trained) -> Trained:
        if (download.client.id, download.round) == (client, round):
            raise error
        return trained

    return Toy(wrong)


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_record_holds_the_losses_and_weights_of_its_round() -> None:
    """p_i = n_i / sum n, from federations.EXAMPLES."""
    for t, record in enumerate(run(rounds=3)):
        assert record.round == record.state.round == t + 1
        assert record.losses == {name: loss(name, t) for name in NAMES}
        assert record.weights == pytest.approx({name: n / 90 for name, n in EXAMPLES.items()}, rel=1e-12)
        assert [u.client.id for u in record.uploads] == list(NAMES)
        assert [u.num_examples for u in record.uploads] == list(EXAMPLES.values())
        assert record.refused == {} and record.metrics == {}
        assert set(record.seconds) == {"download", "train", "upload", "aggregate"}
    assert next(run("flexlora", rounds=1, round=Streamed())).uploads == (), "it forgets them"


def test_the_server_rank_is_the_mean_over_modules() -> None:
    """GLoRA at full budget holds the union: min(sum r_i, d_out, d_in), so 22 -> 16 and 18 -> 16; FedIT holds r."""
    (record,) = run("glora", MIXED, rounds=1, dtype=torch.float64)
    assert record.server_rank == sum(MIXED.values()) == 16
    (record,) = run("glora", {"a": 6, "b": 6, "c": 6, "d": 6}, rounds=1, dtype=torch.float64)
    assert record.server_rank == (22 + 18) / 2, "four ranks of 6 make 24, more than 30 x 22 and 18 x 22 can hold"
    (record,) = run("fedit", EQUAL, rounds=1)
    assert record.server_rank == 4


class Counting:
    """An evaluator that reports the round."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def evaluate(self, server: Server, state: RunState) -> Mapping[str, float]:
        self.rounds.append(state.round)
        return {"accuracy": state.round / 10}


def test_evaluation_comes_every_so_many_rounds_and_at_the_end() -> None:
    evaluator = Counting()
    records = list(run(rounds=5, evaluator=evaluator, evaluate_every=2))
    assert evaluator.rounds == [2, 4, 5]
    assert [r.metrics for r in records] == [{}, {"accuracy": 0.2}, {}, {"accuracy": 0.4}, {"accuracy": 0.5}]
    assert ["evaluate" in r.seconds for r in records] == [False, True, False, True, True]


# ---- participation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(1.0, 4), (0.75, 3), (0.5, 2), (0.3, 1), (0.01, 1)])
def test_a_share_of_the_clients_takes_part(share: float, count: int) -> None:
    toy = Toy()
    for t, record in enumerate(run(trainer=toy, rounds=4, participation=share, seed=5)):
        chosen = sample_clients(NAMES, share, seed=5, round=t)
        assert len(chosen) == count
        assert list(record.losses) == list(record.weights) == chosen == sorted(chosen)
        assert math.fsum(record.weights.values()) == pytest.approx(1)
        assert [c for c, r, _ in toy.calls if r == t] == chosen


def test_a_client_that_is_absent_keeps_its_place_and_what_it_holds() -> None:
    """Its data stream and its local factors stay as they are until it comes again."""
    toy = Toy()
    before: RunState | None = None
    for record in run("fedsa-lora", trainer=toy, rounds=6, participation=0.5):
        for name, memory in record.state.clients.items():
            if name not in record.losses and before is not None:
                assert memory is before.clients[name]
        before = record.state
    for name in NAMES:
        positions = [position for c, _, position in toy.calls if c == name]
        assert positions == [BATCH * k for k in range(len(positions))]


# ---- clients that fail, and clients that diverge ---------------------------------------------------------------------


def test_a_client_that_raises_ends_the_run_with_its_name_and_round() -> None:
    records = run(trainer=failing("c", 1, RuntimeError("out of memory")))
    first = next(records)
    with pytest.raises(ClientFailed, match=r"client 'c' failed in round 2: RuntimeError") as caught:
        next(records)
    assert (caught.value.client, caught.value.round) == ("c", 2)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert first.round == 1 and first.refused == {}


def test_with_a_quorum_a_client_that_raises_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The others share its weight; it tries the same data again in its next round."""
    toy = failing("c", 1, RuntimeError("out of memory"))
    with caplog.at_level(logging.WARNING):
        first, second, third = run(trainer=toy, round=Kept(quorum=3))
    assert second.refused == {"c": "RuntimeError: out of memory"}
    assert second.weights == pytest.approx({"a": 10 / 50, "b": 25 / 50, "d": 15 / 50})
    assert list(second.losses) == ["a", "b", "d"]
    before, after = first.state.clients["c"], second.state.clients["c"]
    assert (after.kept, after.position) == (before.kept, before.position)
    assert after.held is not None and after.held.round == 1, "it has received its download"
    assert third.refused == {} and list(third.losses) == list(NAMES)
    assert [position for c, _, position in toy.calls if c == "c"] == [0, BATCH, BATCH]
    assert "client 'c' failed in round 2" in caplog.text


def test_what_is_wrong_with_the_run_itself_is_never_put_on_a_client() -> None:
    """An error of ours means a wrong configuration, which no quorum can mend."""
    with pytest.raises(ConfigError, match="no data"):
        list(run(trainer=failing("c", 0, ConfigError("no data")), round=Kept(quorum=1)))

    def without_base(download: Download, trained: Trained) -> Trained:
        return replace(trained, adapter=replace(trained.adapter, base=None))

    with pytest.raises(HyperparameterError, match="its `base` is None"):
        list(run("flora", trainer=Toy(without_base), rounds=1, round=Kept(quorum=1)))


def test_an_interrupt_is_never_put_on_a_client() -> None:
    def interrupt(*_: object) -> Trained:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run(trainer=Toy(interrupt), round=Kept(quorum=1)))


@pytest.mark.parametrize("name", METHODS)
def test_with_a_quorum_a_diverged_client_is_refused_and_the_round_goes_on(name: str) -> None:
    """Nothing of it reaches the state: it is as if the client had not been there, and it repeats its data."""
    toy = diverging("b", 1)
    _, record, last = run(name, trainer=toy, dtype=torch.float64, round=Kept(quorum=2))
    assert list(record.refused) == ["b"] and "NaN" in record.refused["b"]
    assert record.weights == pytest.approx({"a": 10 / 65, "c": 40 / 65, "d": 15 / 65})
    assert math.isnan(record.losses["b"])
    assert [u.client.id for u in record.uploads] == ["a", "c", "d"]
    assert [position for c, _, position in toy.calls if c == "b"] == [0, BATCH, BATCH]

    _, without, _ = run(name, trainer=failing("b", 1, OSError()), dtype=torch.float64, round=Kept(quorum=2))
    for module in SHAPES:
        for c in ("a", "b"):
            got, want = (
                Server(build(name)).download(r.state.server, Client(c, 4)).adapter.modules[module].tensors()
                for r in (record, without)
            )
            assert all(torch.equal(got[f], want[f]) for f in want)
    assert last.refused == {} and set(last.weights) == set(NAMES)
    assert all(math.isfinite(value) for value in last.losses.values())


def test_too_few_usable_uploads_end_the_run_and_say_who_was_missing() -> None:
    def wrong(download: Download, trained: Trained) -> Trained:
        if download.round == 1 and download.client.id == "a":
            raise RuntimeError("out of memory")
        if download.round == 1 and download.client.id == "b":
            return replace(trained, adapter=trained.adapter.map(lambda t: t * math.inf))
        return trained

    records = run(trainer=Toy(wrong), round=Kept(quorum=3))
    first = next(records)
    with pytest.raises(QuorumNotMet, match=r"2 usable uploads, .*quorum .*3") as caught:
        next(records)
    assert "b: " in str(caught.value) and "NaN or Inf" in str(caught.value)
    assert "a: RuntimeError: out of memory" in str(caught.value)
    assert first.state.round == 1


# ---- resuming, and being lazy ----------------------------------------------------------------------------------------


@pytest.mark.quick(7)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumed_from_any_round_is_the_uninterrupted_one_to_the_bit(
    name: str, participation: float, tmp_path: Path
) -> None:
    """From the state in memory, and from the checkpoint of it."""
    ranks = MIXED if name in ("glora", "flexlora", "padded-average") else EQUAL
    options: dict[str, Any] = {"rounds": 4, "participation": participation, "seed": 1}
    whole = list(run(name, ranks, **options))
    want = [bits(r.state, tmp_path / "whole") for r in whole]
    for record in whole[:-1]:
        folder = tmp_path / str(record.round)
        checkpoint.save(folder, record.round, record.state)
        loaded = checkpoint.load_newest(folder, RunState, METHODS[name].State)
        assert loaded is not None and loaded[0] == record.round
        for state in (record.state, loaded[1]):
            rest = list(run(name, ranks, state=state, **options))
            assert [bits(r.state, folder) for r in rest] == want[record.round :]
            for again, first in zip(rest, whole[record.round :], strict=True):
                facts = (again.losses, again.weights, again.bytes, again.server_rank)
                assert facts == (first.losses, first.weights, first.bytes, first.server_rank)


# ---- what is handed in -----------------------------------------------------------------------------------------------


def test_two_clients_of_one_id_are_refused() -> None:
    """Memory, weights and refusals go by the id: the second would silently be the first."""
    server = Server(build("glora"))
    twice = [Client("a", 2), Client("b", 2), Client("a", 4)]
    with pytest.raises(HyperparameterError, match=r"1 client ids .*such as 'a'"):
        next(simulate(server, twice, Toy(), start(server, seed_adapter(4)), rounds=1))


def test_every_client_is_told_and_has_a_fate_whatever_became_of_it() -> None:
    """One that trains, one that raises, one that diverges in what it sends, one whose local part diverged: B stays with
    FedSA-LoRA's clients, where no server sees it, and a NaN in it would stay for ever."""

    def wrong(download: Download, trained: Trained) -> Trained:
        if download.client.id == "b":
            raise RuntimeError("no memory")
        adapter = trained.adapter
        if download.client.id == "c":
            adapter = Adapter({n: LoRA(x.B, x.A * torch.nan) for n, x in adapter.modules.items()}, adapter.heads)
        if download.client.id == "d":
            adapter = Adapter({n: LoRA(x.B * torch.nan, x.A) for n, x in adapter.modules.items()}, adapter.heads)
        return replace(trained, adapter=adapter)

    done: list[str] = []
    (record,) = run("fedsa-lora", trainer=Toy(wrong), rounds=1, round=Kept(quorum=1), on_client=done.append)
    assert done == list(NAMES) and set(record.weights) == {"a"}
    assert record.refused["b"] == "RuntimeError: no memory" and record.losses["a"] == loss("a", 0)
    assert "factor A" in record.refused["c"] and "local factor B" in record.refused["d"]
    assert record.state.clients["d"].kept is None and record.state.server.tally is not None
    assert "d" in record.state.server.tally.refused


class Losing(Workers):
    """Draws every job, and loses b's."""

    def train_all(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Trained | Failed]]:
        for job, result in OneByOne(Toy()).train_all(jobs):
            if job.download.client.id != "b":
                yield job, result


def test_workers_that_lose_a_job_leave_nobody_without_a_fate() -> None:
    (record,) = run(trainer=Losing(), rounds=1, round=Kept(quorum=1))
    assert set(record.weights) == {"a", "c", "d"} and "gave no result" in record.refused["b"]


def test_a_trainer_that_returns_something_else_is_a_client_that_failed() -> None:
    class Nothing:
        def train(self, download: Download, adapter: Adapter, position: int) -> Any:
            return None if download.client.id == "c" else Toy().train(download, adapter, position)

    server = Server(build("glora"), round=Kept(quorum=1))
    (record,) = simulate(server, clients(EQUAL), Nothing(), start(server, seed_adapter(4)), rounds=1)
    assert record.refused == {"c": "TypeError: train() gave a NoneType; a Trained is needed"}


class InPlace:
    """Adds one to what it was given, in place."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        for lora in adapter.modules.values():
            for tensor in lora.tensors().values():
                tensor.add_(1.0)
        return Trained(adapter, 10, 0.0, position + 1)


def test_training_in_place_reaches_no_state_and_no_other_client(tmp_path: Path) -> None:
    """FedSA-LoRA's B begins as zeros and grows by one a round, for each client by itself."""
    server = Server(build("fedsa-lora"))
    state = start(server, Adapter({"m": LoRA(torch.zeros(3, 2), torch.ones(2, 4))}))
    three = [Client(name, 2) for name in "abc"]
    *_, last = simulate(server, three, InPlace(), state, rounds=2)
    for memory in last.state.clients.values():
        assert memory.kept is not None and torch.equal(memory.kept.modules["m"].tensors()["B"], torch.full((3, 2), 2.0))
    once, twice = (next(iter(simulate(server, three, InPlace(), last.state, rounds=3))).state for _ in range(2))
    assert bits(once, tmp_path / "1") == bits(twice, tmp_path / "2")
    assert not bool(state.server.start.modules["m"].factors[0].any())
