"""FedLoRA's answers, in one process through Flower's wire format. Kinds of evidence: *contract* (what travels comes
back), *attack* (forged replies, late ones, nodes that fail: nothing that was accepted is lost). Parity: test_parity.py.
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

from fedlora import Client, Kept, Server, build
from fedlora.core.checkpoint import encoded
from fedlora.core.parcels import pack
from fedlora.errors import CheckpointError, QuorumNotMet
from fedlora.flower.records import (
    NUMPY,
    PROTOCOL,
    parcel_record,
    record_parcel,
    to_array,
    to_tensor,
)
from fedlora.server.server import start
from support.federations import noise
from support.flower_grid import RANKS, bits, fates, federation, last_line, play, seed_adapter, wired

# ---- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = noise((5, 3), "t", dtype=torch.float64).to(dtype)
    tensor[0, 0], tensor[1, 1] = float("nan"), -0.0  # the server refuses them; the wire does not change them
    record = RecordDict({"arrays": ArrayRecord({"x": to_array(tensor.mT)})})
    message = wired(Message(record, 7, "train"))
    back = to_tensor(message.content.array_records["arrays"]["x"], (3, 5), "x")
    assert back.dtype == dtype
    assert torch.equal(back.contiguous().view(torch.uint8), tensor.mT.contiguous().view(torch.uint8))
    empty = to_tensor(to_array(tensor[:, :0]), (5, None), "B")  # as of a base change whose steps cancelled
    assert (empty.shape, empty.dtype) == ((5, 0), dtype)


def test_a_transposed_array_of_a_stock_client_is_taken() -> None:
    """numpy stores it in Fortran's order, as Flower's own `Array` packs it; with one row or column it is in both."""
    for rows, columns in ((3, 5), (1, 4), (4, 1)):
        wanted = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        found = to_tensor(Array(np.asfortranarray(wanted.numpy())), (rows, None), "B")
        assert torch.equal(found, wanted) and found.is_contiguous()
    cube = np.arange(24.0).reshape(2, 3, 4)
    assert to_tensor(Array(cube.transpose()), (4, 3, 2), "x").tolist() == cube.transpose().tolist()


def test_a_parcel_comes_back_as_it_was() -> None:
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
    play(strategy, grid, 1)
    return strategy.state.server


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


ATTACKS: dict[str, tuple[Callable[[Message, Message], Any], str]] = {
    "wrong shape": (forged(shape=(12, 2)), "it must be (12, 3)"),
    "rank-1 broadcast": (
        arrays(lambda f: f.update({"B/a.q": to_array(torch.ones(12, 1)), "A/a.q": to_array(torch.ones(1, 9))})),
        "it must be (12, 3)",
    ),
    "a huge count": (forged(shape=(12, 2**30)), "it must be (12, 3)"),
    "fewer bytes": (forged(data=b"\0" * 10), "and 10 came"),
    "another type": (forged(dtype="int64"), "one of float64"),
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
    "a missing tensor": (arrays(lambda f: f.pop("A/b.v") and None), "1 tensors are missing"),
    "a tensor too many": (arrays(lambda f: f.update({"B/evil": to_array(torch.ones(2, 2))})), "1 were not asked for"),
    "NaN examples": (numbers(num_examples=float("nan")), "num_examples"),
    "no examples": (altered(metrics=lambda r: MetricRecord({"loss": 1.0})), "no number 'num-examples'"),
    "an earlier round": (said(round=-1), "after round -1"),
    "another run": (said(run="other"), "of run 'other'"),
    "kept names that nobody has": (said(kept=["x" * 1000]), "list of kept parts"),
    "no json": (altered(config=lambda r: ConfigRecord({"protocol": PROTOCOL, "upload": "{"})), "not JSON"),
    "deep json": (
        altered(config=lambda r: ConfigRecord({"protocol": PROTOCOL, "upload": "[" * 100000})),
        "not JSON",
    ),
    "another protocol": (altered(config=lambda r: ConfigRecord({"protocol": "x", "upload": "{}"})), PROTOCOL),
    "nothing at all": (lambda asked, reply: Message(RecordDict(), reply_to=asked), PROTOCOL),
    "its app raised": (lambda asked, reply: Message(Error(2, "boom"), reply_to=asked), "it failed: boom"),
    "nothing came": (lambda asked, reply: None, "no answer within 3600 s"),
    "loss NaN": (numbers(loss=float("nan")), "its loss is nan"),
    "a loss below 0": (numbers(loss=-1e-9), "its loss is -1e-09"),
    "a loss that drowns all others'": (numbers(loss=1e300), "its loss is 1e+300"),
}


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_reply_costs_its_sender_the_round_and_nobody_else(tmp_path: Path, name: str) -> None:
    """The state is what it is without that client, bit for bit but for the tally's reasons; the reason is recorded."""
    meddle, reason = ATTACKS[name]
    server = Server(build("glora"), round=Kept(quorum=1))
    strategy, grid = federation(tmp_path / "a", server)
    grid.meddle = {"three": meddle}
    play(strategy, grid, 1)
    want = good_state(tmp_path / "b")
    tally = strategy.state.server.tally
    assert tally is not None and set(tally.weights) == {"one", "two"}
    assert bits(replace(strategy.state.server, tally=None)) == bits(replace(want, tally=None))
    assert reason in last_line(strategy)["fates"]["three"]["why"], last_line(strategy)["fates"]
    assert fates(strategy)["three"] == {"nothing came": "late", "its app raised": "failed"}.get(name, "refused")
    play(strategy, grid, 2)  # and the next round works, whatever is held by now
    assert strategy.round == 2


def test_a_full_disk_loses_nothing_that_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, grid = federation(tmp_path, Server(build("glora")))
    play(strategy, grid, 2)
    checkpoints = tmp_path / "server" / "checkpoints"
    stored = {p.name: p.read_bytes() for p in checkpoints.iterdir()}
    nodes = {p: p.read_bytes() for p in (tmp_path / "nodes").rglob("*.safetensors")}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((CheckpointError, QuorumNotMet), match=r"No space left|quorum"):
        play(strategy, grid, 3)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in checkpoints.iterdir() if p.suffix != ".part"} == stored
    assert all(path.read_bytes() == content for path, content in nodes.items())
    again, grid = federation(tmp_path, Server(build("glora")))
    play(again, grid, 3)
    assert again.round == 3


# ---- nodes -----------------------------------------------------------------------------------------------------------


def test_a_node_that_lost_its_state_says_so_and_is_sent_everything_with_its_next_message(tmp_path: Path) -> None:
    """FFA-LoRA's A travels once. A node whose disk was replaced misses it: it loses that round, and no other one."""
    strategy, grid = federation(tmp_path, Server(build("ffa-lora"), round=Kept(quorum=2)), dict.fromkeys(RANKS, 4))
    play(strategy, grid, 1)
    for path in (tmp_path / "nodes" / "two").rglob("*.safetensors"):
        path.unlink()
    play(strategy, grid, 2)
    assert fates(strategy) == {"one": "trained", "two": "failed", "three": "trained"}
    assert "Ask again for everything" in last_line(strategy)["fates"]["two"]["why"]
    play(strategy, grid, 3)
    assert set(fates(strategy).values()) == {"trained"}
    to_two = [message for message in grid.sent if grid.nodes[message.metadata.dst_node_id][0] == "two"]
    assert [any(name.endswith("/A") for name in m.content["arrays"]) for m in to_two] == [True, False, True]
