"""The resident trainer and its socket. Kinds of evidence: contract (the same work in this process), attack."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedlora import Client, Server, build
from fedlora.flower.node import Node
from fedlora.flower.records import RAW, parcel_record, to_array
from fedlora.flower.resident import TrainerFailed, ask, private_directory, serve, socket_of
from fedlora.flower.wire import receive_message, send_message
from fedlora.server.server import start
from support.flower_grid import RUN, Toy, seed_adapter


def test_the_resident_trainer_answers_over_its_socket(tmp_path: Path) -> None:
    """The same work in this process and through the socket; an exception comes back as its words; strangers' modes."""
    server = Server(build("glora"))
    from fedlora.core.parcels import pack

    state = start(server, seed_adapter()).server
    record = parcel_record(pack(server.download(state, Client("one", 2)), None), RUN)
    folder = tmp_path / "n"
    work = Node("one", Toy(), tmp_path / "state").work
    sock = socket_of(tmp_path / "unused.toml", "one", folder)
    thread = threading.Thread(target=serve, args=(work, sock), kwargs={"owner": None, "idle": 1.5}, daemon=True)
    thread.start()
    for _ in range(100):
        if sock.exists():
            break
        threading.Event().wait(0.02)
    assert folder.stat().st_mode & 0o777 == 0o700 and sock.stat().st_mode & 0o777 == 0o600
    reply = ask(tmp_path / "unused.toml", "one", folder, record)
    alone = Node("one", Toy(), tmp_path / "other").work(record)
    assert {k: a.data for k, a in reply["arrays"].items()} == {k: a.data for k, a in alone["arrays"].items()}
    assert dict(reply["metrics"]) == dict(alone["metrics"]) and dict(reply["config"]) == dict(alone["config"])
    with pytest.raises(TrainerFailed, match="'one', and the work is for 'two'"):
        other = parcel_record(pack(server.download(state, Client("two", 2)), None), RUN)
        ask(tmp_path / "unused.toml", "one", folder, other)
    thread.join(10)
    assert not thread.is_alive() and not sock.exists()


def test_a_trainer_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(TrainerFailed, match=r"did not start: .*nothing\.toml"):
        ask(tmp_path / "nothing.toml", "one", tmp_path / "n", RecordDict())


def test_a_directory_that_others_can_read_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    private_directory(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_the_socket_format_is_lossless_and_breaks_off_cleanly() -> None:
    import socket

    one, other = socket.socketpair()
    record = RecordDict({"a": ArrayRecord({"x": to_array(torch.ones(2, 3, dtype=torch.bfloat16))}),
                         "m": MetricRecord({"n": 1.5}), "c": ConfigRecord({"s": "t"})})  # fmt: skip
    threading.Thread(target=send_message, args=(one, {"do": "it"}, record)).start()
    words, back = receive_message(other)
    assert words == {"do": "it"} and back is not None
    assert back["a"]["x"].data == record["a"]["x"].data and back["a"]["x"].stype == RAW
    assert dict(back["m"]) == {"n": 1.5} and dict(back["c"]) == {"s": "t"}
    one.send(b"\0" * 5)
    one.close()
    with other, pytest.raises(ConnectionError, match="broke off"):
        receive_message(other)
