"""Names of a message's pieces cannot be foreseen. Kinds of evidence: contract (Flower's own ids), attack (a store in
which somebody was first), oracle (ChaCha20's published vector)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedlora import Client, Server, build
from fedlora.client import receive, send
from fedlora.core.messages import Upload
from fedlora.core.parcels import pack
from fedlora.flower.messages.records import parcel_record, to_array, to_tensor, upload_record
from fedlora.flower.messages.salt import SALT, salted, unsalted, with_salt
from fedlora.server.server import start
from support.flower_grid import RUN, seed_adapter


def names(record: RecordDict) -> set[str]:
    """Of all objects that Flower cuts a record into."""
    return set(get_all_nested_objects(record))


def question() -> RecordDict:
    server = Server(build("ffa-lora"))  # A is frozen, B zero, the heads as they were: all of it is known to everybody
    download = server.download(start(server, seed_adapter()).server, Client("one", 2))
    return parcel_record(pack(download, None), RUN)


def reply() -> RecordDict:
    server = Server(build("glora"))
    download = server.download(start(server, seed_adapter()).server, Client("one", 2))
    upload = Upload(Client("one", 2), 10, send(receive(download, None), download.roles))
    return upload_record(upload, run=RUN, round=0, loss=0.5, kept=[])


@pytest.mark.parametrize("made", [question, reply])
def test_the_same_message_twice_has_no_piece_in_common(made: Any) -> None:
    one, other = names(made()), names(made())
    assert len(one) > 10 and not one & other


def test_also_in_the_second_chunk_of_a_large_tensor() -> None:
    """Flower cuts arrays into chunks of 5 MB, each an object: all of a frozen matrix of 12 MB would be known."""
    zeros = torch.zeros(3 * 2**20)
    one, other = (names(RecordDict({"a": ArrayRecord({"x": to_array(zeros)})})) for _ in range(2))
    assert len(one) == len(other) == 1 + 1 + 1 + 3  # record, arrays, array, chunks: none twice, though all are zeros
    assert not one & other


def test_settings_and_numbers_too() -> None:
    def made() -> RecordDict:
        return with_salt(RecordDict({"c": ConfigRecord({"a": 1}), "m": MetricRecord({"n": 2.0})}))

    assert not names(made()) & names(made())


def test_who_registers_what_another_will_send_is_not_in_its_way() -> None:
    """In Flower's own store an object that was registered with other children refuses the honest message: seen without
    salt, and not with it."""
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    def poisoned(record: RecordDict) -> SqlObjectStore:
        store = SqlObjectStore(":memory:")
        store.initialize()
        tree = get_object_tree(record)
        for node in tree.children:
            made = type(tree)(object_id=node.object_id, children=[type(tree)(object_id="0" * 64)])
            store.preregister(1, made)
        return store

    plain = RecordDict({"c": ConfigRecord({"settings": "the same for everybody"})})
    with pytest.raises(ValueError, match="different children"):
        poisoned(plain).preregister(1, get_object_tree(plain))
    store = poisoned(with_salt(RecordDict({"c": ConfigRecord({"settings": "the same for everybody"})})))
    assert store.preregister(1, get_object_tree(with_salt(plain)))


def test_what_was_salted_comes_back() -> None:
    for size in (0, 1, 47, 48, 49, 100_000):
        data = bytes(range(256)) * (size // 256 + 1)
        assert unsalted(salted(data[:size])) == data[:size] and len(salted(data[:size])) == size + SALT
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(to_tensor(to_array(tensor), (2, 3), "x"), tensor)


def test_the_keystream_is_chacha20s() -> None:
    """RFC 8439, 2.4.2: key 00 to 1f, counter 1, nonce 00 00 00 00 00 00 00 4a 00 00 00 00."""
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would "
        b"be it."
    )
    salt = bytes(range(32)) + (1).to_bytes(4, "little") + bytes.fromhex("000000000000004a00000000")
    assert unsalted(salt + text)[:16].hex() == "6e2e359a2568f98041ba0728dd0d6981"


def test_a_message_carries_it_through_flower(tmp_path: object) -> None:
    from support.flower_grid import wired

    record = question()
    back = wired(Message(record, 7, "train")).content
    assert names(back) == names(record)
