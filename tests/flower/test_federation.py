"""What FedLoRA takes of an answer, in one process through Flower's wire format. Kinds of evidence: *contract* (tensors
come back), *attack* (forged replies). Answers that do not come: test_rounds.py, test_grid.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedlora import Kept, Server, build
from fedlora.flower.records import NUMPY, PROTOCOL, to_array, to_tensor
from support.federations import noise
from support.flower_grid import bits, changed, fates, federation, last_line, nan, play, wired

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


# ---- faults ----------------------------------------------------------------------------------------------------------


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


def numpy(header: str, length: int | None = None, size: int = 144) -> Callable[[Message, Message], Message]:
    """A reply with a .npy of that header, which says that it has another length, and so many bytes of data."""
    body = header.encode()
    start = b"\x93NUMPY\x01\x00" + (length or len(body)).to_bytes(2, "little")
    return forged(stype=NUMPY, data=start + body + b"\0" * size)


ATTACKS: dict[str, tuple[Callable[[Message, Message], Any], str]] = {
    "a huge count": (forged(shape=(12, 2**30)), "it must be (12, 3)"),
    "fewer bytes": (forged(data=b"\0" * 10), "and 10 came"),
    "another type": (forged(dtype="int64"), "one of float64"),
    "unknown packing": (forged(stype="pickle"), "packed as 'pickle'"),
    "no numpy": (forged(stype=NUMPY), "numpy header that is not read"),
    "numpy header too long": (numpy("x" * 50, 60000, 70000), "60000"),
    "numpy header of another shape": (
        numpy("{'descr': '<f4', 'fortran_order': False, 'shape': (9, 9)}"),
        "header says",
    ),
    "numpy header with objects": (numpy("{'descr': '|O', 'fortran_order': False, 'shape': (12, 3)}"), "says |O"),
    "numpy header that is code": (numpy("__import__('os').abort()"), "numpy header that is not read"),
    "NaN": (nan, "NaN or Inf"),
    "a missing tensor": (arrays(lambda f: f.pop("A/b.v") and None), "1 tensors are missing"),
    "a tensor too many": (arrays(lambda f: f.update({"B/evil": to_array(torch.ones(2, 2))})), "1 were not asked for"),
    "NaN examples": (changed(num_examples=float("nan")), "num_examples"),
    "no examples": (altered(metrics=lambda r: MetricRecord({"loss": 1.0})), "no number 'num-examples'"),
    "an earlier round": (said(round=-1), "after round -1"),
    "another run": (said(run="other"), "of run 'other'"),
    "kept names that nobody has": (said(kept=["x" * 1000]), "list of kept parts"),
    "no json": (altered(config=lambda r: ConfigRecord({"protocol": PROTOCOL, "upload": "{"})), "not JSON"),
    "deep json": (altered(config=lambda r: ConfigRecord({"protocol": PROTOCOL, "upload": "[" * 100000})), "not JSON"),
    "another protocol": (altered(config=lambda r: ConfigRecord({"protocol": "x", "upload": "{}"})), PROTOCOL),
    "nothing at all": (lambda asked, reply: Message(RecordDict(), reply_to=asked), PROTOCOL),
    "loss NaN": (changed(loss=float("nan")), "its loss is nan"),
    "a loss below 0": (changed(loss=-1e-9), "its loss is -1e-09"),
    "a loss that drowns all others'": (changed(loss=1e300), "its loss is 1e+300"),
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
    without, there = federation(tmp_path / "b", server)
    there.offline = {"three"}
    play(without, there, 1)
    tally = strategy.state.server.tally
    assert tally is not None and set(tally.weights) == {"one", "two"}
    assert bits(replace(strategy.state.server, tally=None)) == bits(replace(without.state.server, tally=None))
    assert reason in last_line(strategy)["fates"]["three"]["why"], last_line(strategy)["fates"]
    assert fates(strategy)["three"] == "refused"
    play(strategy, grid, 2)  # and the next round works, whatever is held by now
    assert strategy.round == 2
