"""FedLoRA on Flower, in one process. Kinds of evidence: *parity* (the in-process engine is the reference: the same
server state, bit for bit, with every message through Flower's own wire format), *contract* (what travels comes back),
*attack* (forged replies, late ones, nodes that fail: nothing that was accepted is lost). Processes: test_deployment.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedlora import Adapter, Client, Kept, Server, build
from fedlora.core.checkpoint import encoded
from fedlora.core.trainer import Trained
from fedlora.errors import CheckpointError, ConfigError, QuorumNotMet
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.messages.records import (
    NUMPY,
    PROTOCOL,
    RecordError,
    parcel_record,
    record_parcel,
    to_array,
    to_tensor,
)
from fedlora.flower.site.node import Node
from fedlora.flower.terms.policy import Policy
from fedlora.server.server import start
from fedlora.simulation import simulate
from support.federations import noise
from support.flower_grid import RANKS, RUN, Toy, Watching, bits, close, federation, seed_adapter, wired

# ---- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    "method",
    [
        "glora",
        "fedit",
        "flexlora",
        "svd",
        "fedsa-lora",
        "ffa-lora",
        "fedsvd",
        "fedex-lora",
        "flora",
        "hetlora",
        "rolora",
        "lora-fair",
        "fedrot-lora",
    ],
)
@pytest.mark.parametrize("participation", [1.0, 0.7])
def test_flower_and_the_engine_have_the_same_server_state(tmp_path: Path, method: str, participation: float) -> None:
    """Three rounds, all messages through Flower's wire format, clients' state on disk: bit for bit `simulate`'s."""
    equal = method in ("fedit", "fedsa-lora", "fedex-lora", "rolora", "lora-fair", "fedrot-lora")
    ranks = dict.fromkeys(RANKS, 4) if equal else RANKS
    server = Server(build(method), seed=3)
    there, here = Watching(), Watching()
    strategy, grid = federation(tmp_path, server, ranks, participation=participation, seed=5, trainer=there)
    strategy.start(grid, num_rounds=3)
    clients = [Client(name, rank) for name, rank in ranks.items()]
    records = list(
        simulate(server, clients, here, start(server, seed_adapter()), rounds=3, participation=participation, seed=5)
    )
    got, want = strategy.flower_state.state, records[-1].state
    assert got.round == want.round == 3
    if method == "fedex-lora" and participation < 1:  # who was away adds up the steps that it missed: rounding differs
        close(got.server, want.server)
    else:
        assert bits(got.server) == bits(want.server)
        assert there.got == here.got  # also what clients do not train, and the server replaces (fedsvd's A)
        torch.testing.assert_close(there.bases, here.bases, rtol=0, atol=1e-5)


def test_what_travels_is_what_the_engine_counts(tmp_path: Path) -> None:
    """Bytes of the arrays down, against `Traffic`: frozen parts once, base changes in steps."""
    for method in ("ffa-lora", "fedsvd", "fedex-lora", "glora"):
        ranks = dict.fromkeys(RANKS, 4)
        server = Server(build(method))
        strategy, grid = federation(tmp_path / method, server, ranks)
        strategy.start(grid, num_rounds=3)
        records = list(simulate(server, [Client(n, 4) for n in ranks], Toy(), start(server, seed_adapter()), rounds=3))
        for k, record in enumerate(records):
            mine = grid.sent[3 * k : 3 * k + 3]
            sent = sum(len(a.data) for m in mine for a in m.content.array_records["arrays"].values())
            assert sent == record.bytes.down_adapter + record.bytes.down_heads + record.bytes.down_base, (method, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = noise((5, 3), "t", dtype=torch.float64).to(dtype)
    tensor[0, 0], tensor[1, 1] = float("nan"), -0.0  # the server refuses them; the wire does not change them
    record = RecordDict({"arrays": ArrayRecord({"x": to_array(tensor.mT)})})
    message = wired(Message(record, 7, "train"))
    back = to_tensor(message.content.array_records["arrays"]["x"], (3, 5), "x")
    assert back.dtype == dtype
    assert torch.equal(back.contiguous().view(torch.uint8), tensor.mT.contiguous().view(torch.uint8))


def test_a_transposed_array_of_a_stock_client_is_taken() -> None:
    """numpy stores it in Fortran's order, as Flower's own `Array` packs it; with one row or column it is in both."""
    for rows, columns in ((3, 5), (1, 4), (4, 1)):
        wanted = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        found = to_tensor(Array(np.asfortranarray(wanted.numpy())), (rows, None), "B")
        assert torch.equal(found, wanted) and found.is_contiguous()
    cube = np.arange(24.0).reshape(2, 3, 4)
    assert to_tensor(Array(cube.transpose()), (4, 3, 2), "x").tolist() == cube.transpose().tolist()


def test_a_parcel_comes_back_as_it_was() -> None:
    from fedlora.core.parcels import pack

    server = Server(build("fedex-lora"))
    state = start(server, seed_adapter()).server
    parcel = pack(server.download(state, Client("one", 4)), None)
    back, run = record_parcel(wired(Message(parcel_record(parcel, "r"), 7, "train")).content)
    assert run == "r" and (back.client, back.round, back.roles) == (parcel.client, parcel.round, parcel.roles)
    (tree, tensors), (said, sent) = encoded(back), encoded(parcel)
    assert tree == said and {k: t.tolist() for k, t in tensors.items()} == {k: t.tolist() for k, t in sent.items()}
    assert back.ranks == parcel.ranks and back.versions == parcel.versions and back.held is None


# ---- faults ----------------------------------------------------------------------------------------------------------


def good_state(folder: Path, method: str = "glora", without: str = "three") -> Any:
    """The state of one round in which `without` did not take part."""
    server = Server(build(method), round=Kept(quorum=1))
    strategy, grid = federation(folder, server)
    grid.offline = {without}
    strategy.start(grid, num_rounds=1)
    return strategy.flower_state.state.server


def altered(**changes: Callable[[Any], Any]) -> Callable[[Message, Message], Message]:
    """A reply with other records."""

    def meddle(asked: Message, reply: Message) -> Message:
        content = reply.content
        for name, change in changes.items():
            content[name] = change(content[name])
        return reply

    return meddle


def arrays(change: Callable[[dict[str, Array]], None]) -> Callable[[Message, Message], Message]:
    def alter(record: ArrayRecord) -> ArrayRecord:
        found = dict(record)
        change(found)
        return ArrayRecord(found)

    return altered(arrays=alter)


def forged(name: str = "B/a.q", **fields: Any) -> Callable[[Message, Message], Message]:
    def alter(found: dict[str, Array]) -> None:
        a = found[name]
        made = Array(a.dtype, a.shape, a.stype, a.data)
        for field, value in fields.items():
            setattr(made, field, value)
        found[name] = made

    return arrays(alter)


def said(**changes: Any) -> Callable[[Message, Message], Message]:
    def alter(record: ConfigRecord) -> ConfigRecord:
        return ConfigRecord({**dict(record), "upload": json.dumps(json.loads(str(record["upload"])) | changes)})

    return altered(config=alter)


def numbers(**changes: Any) -> Callable[[Message, Message], Message]:
    names = {name.replace("_", "-"): value for name, value in changes.items()}
    return altered(metrics=lambda record: MetricRecord({**dict(record), **names}))


def numpy_header(text: str, length: int | None = None) -> bytes:
    body = text.encode()
    return b"\x93NUMPY\x01\x00" + (length or len(body)).to_bytes(2, "little") + body


HUGE = numpy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (12, 3), }" + " " * 30)
ATTACKS: dict[str, tuple[Callable[[Message, Message], Any], str]] = {
    "wrong shape": (forged(shape=(12, 2)), "it must be (12, 3)"),
    "transposed": (forged(shape=(3, 12)), "it must be (12, 3)"),
    "rank-1 broadcast": (
        arrays(lambda f: f.update({"B/a.q": to_array(torch.ones(12, 1)), "A/a.q": to_array(torch.ones(1, 9))})),
        "it must be (12, 3)",
    ),
    "one dimension": (forged(shape=(36,)), "it must be (12, 3)"),
    "a huge count": (forged(shape=(12, 2**30)), "it must be (12, 3)"),
    "fewer bytes": (forged(data=b"\0" * 10), "and 10 came"),
    "more bytes": (forged(data=b"\0" * 1000), "and 1,000 came"),
    "another type": (forged(dtype="int64"), "one of float64"),
    "object type": (forged(dtype="object"), "one of float64"),
    "unknown packing": (forged(stype="pickle"), "packed as 'pickle'"),
    "no numpy": (forged(stype=NUMPY), "numpy header that is not read"),
    "numpy header too long": (
        forged(stype=NUMPY, data=numpy_header("x" * 50, 60000) + b"\0" * 70000),
        "60000",
    ),
    "numpy header of another shape": (
        forged(
            stype=NUMPY,
            data=numpy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (999999, 999999)}") + b"\0" * 144,
        ),
        "its header says",
    ),
    "numpy header with objects": (
        forged(
            stype=NUMPY, data=numpy_header("{'descr': '|O', 'fortran_order': False, 'shape': (12, 3)}") + b"\0" * 144
        ),
        "its header says |O",
    ),
    "numpy header that is code": (
        forged(stype=NUMPY, data=numpy_header("__import__('os').abort()") + b"\0" * 144),
        "numpy header that is not read",
    ),
    "NaN": (arrays(lambda f: f.update({"B/a.q": to_array(torch.full((12, 3), float("nan")))})), "NaN or Inf"),
    "infinite head": (
        arrays(lambda f: f.update({"heads/head.weight": to_array(torch.full((3, 5), float("inf")))})),
        "NaN or Inf",
    ),
    "a missing tensor": (arrays(lambda f: f.pop("A/b.v") and None), "1 tensors are missing"),
    "a tensor too many": (arrays(lambda f: f.update({"B/evil": to_array(torch.ones(2, 2))})), "1 were not asked for"),
    "no arrays": (altered(arrays=lambda r: ArrayRecord({})), "tensors are missing"),
    "NaN examples": (numbers(num_examples=float("nan")), "num_examples"),
    "infinite examples": (numbers(num_examples=float("inf")), "num_examples"),
    "negative examples": (numbers(num_examples=-5.0), "num_examples"),
    "no examples": (altered(metrics=lambda r: MetricRecord({"loss": 1.0})), "no number 'num-examples'"),
    "an earlier round": (said(round=-1), "this is round 0"),
    "another run": (said(run="other"), "of 'test'"),
    "kept names": (said(kept=[1, 2]), "list of kept parts"),
    "kept names that nobody has": (said(kept=["x" * 1000]), "list of kept parts"),
    "no json": (altered(config=lambda r: ConfigRecord({"protocol": PROTOCOL, "upload": "{"})), "not JSON"),
    "deep json": (
        altered(config=lambda r: ConfigRecord({"protocol": PROTOCOL, "upload": "[" * 100000})),
        "not JSON",
    ),
    "another protocol": (altered(config=lambda r: ConfigRecord({"protocol": "x", "upload": "{}"})), "fedlora/5"),
    "nothing at all": (lambda asked, reply: Message(RecordDict(), reply_to=asked), "fedlora/5"),
    "its app raised": (lambda asked, reply: Message(Error(2, "boom"), reply_to=asked), "it failed: boom"),
    "nothing came": (lambda asked, reply: None, "no answer within 3600 s"),
    "loss NaN": (numbers(loss=float("nan")), "its loss is nan"),
    "loss -inf": (numbers(loss=float("-inf")), "its loss is -inf"),
    "loss inf": (numbers(loss=float("inf")), "its loss is inf"),
}


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_reply_costs_its_sender_the_round_and_nobody_else(tmp_path: Path, name: str) -> None:
    """The state is what it is without that client, bit for bit but for the tally's reasons; the reason is recorded."""
    meddle, reason = ATTACKS[name]
    server = Server(build("glora"), round=Kept(quorum=1))
    facts: list[Any] = []
    strategy, grid = federation(tmp_path / "a", server, after_round=facts.append)
    grid.meddle = {"three": meddle}
    strategy.start(grid, num_rounds=1)
    want = good_state(tmp_path / "b")
    tally = strategy.flower_state.state.server.tally
    assert tally is not None and set(tally.weights) == {"one", "two"}
    assert bits(replace(strategy.flower_state.state.server, tally=None)) == bits(replace(want, tally=None))
    assert reason in facts[0]["missing"]["three"], facts[0]["missing"]
    fate = {"nothing came": "late", "its app raised": "failed"}.get(name, "refused")
    assert facts[0]["fates"]["three"]["fate"] == fate
    strategy.start(grid, num_rounds=2)  # and the next round works, whatever is held by now
    assert strategy.round == 2


def test_a_second_reply_and_a_late_one_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(build("glora"), round=Kept(quorum=1))
    facts: list[Any] = []
    strategy, grid = federation(tmp_path, server, after_round=facts.append)
    kept: list[Message] = []

    def twice(asked: Message, reply: Message) -> list[Message]:
        kept.append(reply)
        return [reply, reply]

    def late(asked: Message, reply: Message) -> list[Message]:
        return [kept[0]]

    grid.meddle = {"two": twice}
    strategy.start(grid, num_rounds=1)
    assert set(facts[0]["weights"]) == set(RANKS) and not facts[0]["missing"]
    assert "a second one" in caplog.text
    grid.meddle = {"two": late}
    strategy.start(grid, num_rounds=2)
    assert set(facts[1]["weights"]) == {"one", "three"} and "no answer" in facts[1]["missing"]["two"]


def test_a_third_of_the_nodes_corrupt(tmp_path: Path) -> None:
    """Nine clients, three of them hostile in three ways, five rounds: the honest six's state."""
    ranks = {f"c{k}": 2 + k % 3 for k in range(9)}
    server = Server(build("glora"), round=Kept(quorum=4))
    strategy, grid = federation(tmp_path / "a", server, ranks, policy=Policy(ranks, retries=0))
    grid.meddle = {"c1": ATTACKS["NaN"][0], "c4": ATTACKS["nothing at all"][0], "c7": ATTACKS["its app raised"][0]}
    strategy.start(grid, num_rounds=5)
    honest, grid2 = federation(tmp_path / "b", server, ranks, policy=Policy(ranks, retries=0))
    grid2.offline = {"c1", "c4", "c7"}
    honest.start(grid2, num_rounds=5)
    got, want = (replace(s.flower_state.state.server, tally=None) for s in (strategy, honest))
    assert bits(got) == bits(want)


def test_too_few_replies_are_tried_again_and_then_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a run that ends well without training: the error names who was missing, the state is stored."""
    monkeypatch.setattr("fedlora.flower.rounds.strategy.time.sleep", lambda s: None)
    server = Server(build("glora"), round=Kept(quorum=3))
    strategy, grid = federation(tmp_path, server, policy=Policy(RANKS, retries=2, deadline=0.05))
    strategy.start(grid, num_rounds=1)
    before = bits(strategy.flower_state.state)
    grid.meddle = {"two": ATTACKS["its app raised"][0]}
    grid.offline = {"one"}
    with pytest.raises(QuorumNotMet, match=r"quorum is 3.*one.*not online"):
        strategy.start(grid, num_rounds=2)
    assert len(grid.sent) == 3 + 3 * 2  # three attempts at two clients
    assert bits(strategy.flower_state.state) == before
    again, grid = federation(tmp_path, server, resume=True)
    again.start(grid, num_rounds=2)
    assert again.round == 2


@pytest.mark.quick(4)
@pytest.mark.parametrize("method", ["glora", "fedsa-lora", "fedex-lora", "ffa-lora"])
@pytest.mark.parametrize("lost", ["before the reply", "after the reply"])
def test_killed_and_resumed_is_the_same_trajectory(tmp_path: Path, method: str, lost: str) -> None:
    """The server dies in round 3, before or after all its clients stored theirs. Reference: never interrupted."""
    ranks = dict.fromkeys(RANKS, 4)
    server = Server(build(method))
    whole, grid = federation(tmp_path / "a", server, ranks)
    whole.start(grid, num_rounds=4)

    strategy, grid = federation(tmp_path / "b", server, ranks)
    strategy.start(grid, num_rounds=2)

    class Killed(BaseException): ...

    def die(asked: Message, reply: Message) -> Message:
        raise Killed

    grid.meddle = {("one" if lost == "before the reply" else "three"): die}
    with pytest.raises(Killed):
        strategy.start(grid, num_rounds=4)
    again, grid = federation(tmp_path / "b", server, ranks, resume=True)
    assert again.round == 2
    again.start(grid, num_rounds=4)
    assert bits(again.flower_state.state.server) == bits(whole.flower_state.state.server)


def test_a_folder_with_checkpoints_is_no_place_for_another_run(tmp_path: Path) -> None:
    """Begun again there, its own states would be lost beside those of later rounds. Another method, option or module is
    another run, whatever it is called; what may change between rounds is not."""
    server, ranks = Server(build("glora", rho=1.0)), dict.fromkeys(RANKS, 4)
    strategy, grid = federation(tmp_path, server, ranks)
    strategy.start(grid, num_rounds=3)
    before = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    with pytest.raises(ConfigError, match=r"round 3.*resume=newest") as refused:
        federation(tmp_path, server, ranks)
    assert str(tmp_path / "server") in str(refused.value)
    for other in (Server(build("svd")), Server(build("glora", rho=0.5))):
        with pytest.raises(CheckpointError, match=r"another run.*glora\(.*rho=1.0"):
            federation(tmp_path, other, ranks, resume=True)
    with pytest.raises(CheckpointError, match="another run"):
        federation(tmp_path, server, dict.fromkeys(RANKS, 8), resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()} == before
    assert federation(tmp_path, replace(server, round=Kept(weighting="uniform")), ranks, resume=True)[0].round == 3


def test_a_record_of_finished_rounds_is_no_place_for_another_run(tmp_path: Path) -> None:
    """Before, one that began at round 1 cut them off without a word. The line of a round 1 whose checkpoint a crash
    prevented is no finished one."""
    strategy, grid = federation(tmp_path / "a", Server(build("glora")), record=tmp_path / "o")
    strategy.start(grid, num_rounds=2)
    lines = (tmp_path / "o" / "rounds.jsonl").read_text().splitlines(keepends=True)
    with pytest.raises(ConfigError, match=r"rounds\.jsonl has 2 finished rounds.*resume=newest"):
        federation(tmp_path / "b", Server(build("glora")), record=tmp_path / "o")
    assert (tmp_path / "o" / "rounds.jsonl").read_text().splitlines(keepends=True) == lines
    unfinished = {k: v for k, v in json.loads(lines[0]).items() if k != "metrics"}
    (tmp_path / "o" / "rounds.jsonl").write_text(json.dumps(unfinished) + "\n")
    federation(tmp_path / "b", Server(build("glora")), record=tmp_path / "o")


def test_a_node_that_lost_its_state_says_so_and_is_sent_everything_at_once(tmp_path: Path) -> None:
    """FFA-LoRA's A travels once. A node whose disk was replaced misses it, and trains in the same round."""
    ranks = dict.fromkeys(RANKS, 4)
    facts: list[Any] = []
    strategy, grid = federation(
        tmp_path, Server(build("ffa-lora"), round=Kept(quorum=2)), ranks, after_round=facts.append
    )
    strategy.start(grid, num_rounds=1)
    for path in (tmp_path / "nodes" / "two").rglob("*.safetensors"):
        path.unlink()
    strategy.start(grid, num_rounds=2)
    assert set(facts[1]["weights"]) == set(RANKS) and not facts[1]["missing"]
    to_two = [message for message in grid.sent if grid.nodes[message.metadata.dst_node_id][0] == "two"]
    assert [any(name.endswith("/A") for name in m.content["arrays"]) for m in to_two] == [True, False, True]


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, grid = federation(tmp_path, Server(build("glora")))
    strategy.start(grid, num_rounds=2)
    stored = {p.name: p.read_bytes() for p in (tmp_path / "server").iterdir()}
    nodes = {p: p.read_bytes() for p in (tmp_path / "nodes").rglob("*.safetensors")}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((CheckpointError, QuorumNotMet), match=r"No space left|quorum"):
        strategy.start(grid, num_rounds=3)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in (tmp_path / "server").iterdir() if p.suffix != ".part"} == stored
    assert all(path.read_bytes() == content for path, content in nodes.items())
    again, grid = federation(tmp_path, Server(build("glora")), resume=True)
    again.start(grid, num_rounds=3)
    assert again.round == 3


# ---- nodes -----------------------------------------------------------------------------------------------------------


def test_work_for_another_client_or_of_no_server_is_refused(tmp_path: Path) -> None:
    node = Node("one", Toy(), tmp_path)
    with pytest.raises(RecordError, match="this site speaks fedlora/5"):
        node.work(RecordDict({"config": ConfigRecord({"x": 1})}))


@pytest.mark.parametrize("method", ["glora", "fedsa-lora"])
def test_a_node_keeps_the_state_that_a_round_starts_from_however_often_it_is_played(
    tmp_path: Path, method: str
) -> None:
    """Training that is not reproducible (as on a GPU) leaves another file each time; and a federation begun anew in the
    same folder meets states of later rounds."""
    from fedlora.core.parcels import pack

    class Restless(Toy):
        calls = 0

        def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
            self.calls += 1
            done = super().train(download, adapter, position)
            return replace(done, adapter=done.adapter.map(lambda t: t + 1e-6 * self.calls))

    server, node = Server(build(method)), Node("one", Restless(), tmp_path)
    state = start(server, seed_adapter()).server

    def play(round: int) -> float:
        download = replace(server.download(state, Client("one", 4)), round=round)
        receipt = Receipt(round, round)  # of a server that goes back by a round, or begins anew
        return float(node.work(parcel_record(pack(download, None), RUN, receipt=receipt))["metrics"]["loss"])

    assert [play(0), play(1), play(2)] == pytest.approx([0.5, 0.8, 1.1])  # the loss tells the data position
    assert [play(2), play(2), play(2)] == pytest.approx([1.1] * 3)
    assert [play(0), play(1)] == pytest.approx([0.5, 0.8])  # begun anew
    for path in tmp_path.rglob("round-00001*"):
        path.unlink()
    from fedlora.errors import KeptStateError

    if method == "glora":  # keeps nothing: it goes on, and reads its data from the beginning
        assert play(1) == pytest.approx(0.5)
        return
    with pytest.raises(KeptStateError, match=r"round 1, .*has that of round 2.*empty"):
        play(1)
