"""Replies from a SuperLink, counted before they are in memory. Kinds of evidence: *attack*, *contract* with flwr.

The SuperLink is played by a store of the objects that flwr makes of a message. A real one: test_real_superlink.py.
"""

from __future__ import annotations

import json
import random
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree

from fedlora import Adapter, LoRA
from fedlora.cli.flower import needed
from fedlora.core.messages import Client, Upload
from fedlora.core.method import Roles
from fedlora.errors import ConfigError
from fedlora.flower import inside
from fedlora.flower.inside import HttpInbox, Limit, TooLarge, answers_at_most, http_inbox
from fedlora.flower.records import record_upload, upload_record
from support import flower_grid  # noqa: F401 - which gives messages the identity that flwr wants

MB = 2**20
LIMIT = Limit(2 * MB, 100, 20_000)


class Link:
    """What a SuperLink holds: replies by what they answer, and objects. late: ids of those that are not there yet."""

    def __init__(self) -> None:
        self.replies: dict[str, Any] = {}
        self.trees: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.late: set[str] = set()
        self.pulled: list[str] = []
        self.confirmed: list[str] = []
        self._client = SimpleNamespace(event_hooks={})
        self.grid = SimpleNamespace(_runtime_client=self, node=None, run=SimpleNamespace(run_id=1))

    def hold(self, reply: Message) -> str:
        """A reply as a node pushes it. Returns the id of the answered message."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        answers = reply.metadata.reply_to_message_id
        self.trees[answers] = get_object_tree(reply)
        self.objects |= {i: o.deflate() for i, o in get_all_nested_objects(reply).items()}
        self.replies[answers] = message_to_proto(remove_content_from_message(reply))
        return str(answers)

    def PullMessages(self, request: Any) -> Any:
        ids = [i for i in request.message_ids if i in self.replies]
        return SimpleNamespace(
            messages_list=[self.replies.pop(i) for i in ids], message_object_trees=[self.trees[i] for i in ids]
        )

    def PullObject(self, request: Any) -> Any:
        self.pulled.append(request.object_id)
        there = request.object_id not in self.late
        content = self.objects.get(request.object_id)
        for hook in self._client.event_hooks.get("response", []):
            hook(SimpleNamespace(headers={"content-length": str(len(content or b""))}))
        return SimpleNamespace(object_found=content is not None, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.confirmed.append(request.message_object_id)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    import flwr.proto.message_pb2 as messages

    for name in ("PullObjectRequest", "ConfirmMessageReceivedRequest"):
        monkeypatch.setattr(messages, name, SimpleNamespace)  # `node` is none of flwr's here
    return Link()


def reply(record: RecordDict | None = None, number: int = 1) -> Message:
    asked = Message(RecordDict(), 7, "train", group_id="g")
    asked.metadata.__dict__["_message_id"] = f"{number}" * 64
    if record is None:
        return Message(Error(2, "boom"), reply_to=asked)
    return Message(record, reply_to=asked)


def array(data: bytes) -> Array:
    return Array("float32", (len(data) // 4,), "fedlora.raw", data)


def arrays(**named: bytes) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({name: array(data) for name, data in named.items()})})


def pulled(link: Link, answers: str, limit: Limit = LIMIT) -> Any:
    found = list(HttpInbox(link.grid).look({answers: limit}))
    assert len(found) == 1
    return found[0]


def test_a_reply_comes_back_as_it_was_and_the_superlink_may_forget_it(link: Link) -> None:
    record = arrays(x=b"abcd" * 100, y=b"efgh", z=b"")
    record["config"], record["metrics"] = ConfigRecord({"a": "b"}), MetricRecord({"n": 3.5})
    sent = reply(record)
    answers = link.hold(sent)
    link.replies[answers].metadata.src_node_id = 4711  # whose it is is the SuperLink's word and not the message's
    arrival = pulled(link, answers)
    assert arrival.message.content == sent.content and arrival.why == ""
    about = arrival.message.metadata
    assert (about.reply_to_message_id, about.group_id, about.src_node_id) == ("1" * 64, "g", 4711)
    assert link.confirmed == [sent.object_id]


def test_a_reply_that_the_superlink_cannot_give_costs_nobody_else_the_round(link: Link) -> None:
    good, bad = link.hold(reply(arrays(x=b"abcd"), 1)), link.hold(reply(arrays(x=b"efgh"), 2))
    honest = link.PullMessages

    def broken(request: Any) -> Any:
        if bad in request.message_ids:
            asked = httpx.Request("POST", "http://127.0.0.1/v1/runtime/pull-messages")
            raise httpx.HTTPStatusError("no", request=asked, response=httpx.Response(500, request=asked))
        return honest(request)

    link.PullMessages = broken  # type: ignore[method-assign]
    inbox = HttpInbox(link.grid)
    assert [a.reply_to for a in inbox.look({bad: LIMIT, good: LIMIT})] == [good]


def test_equal_pieces_that_multiply_are_refused_before_they_are_put_together(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 MB of zeros are 20 pieces in flwr, and one of them is stored: 5 MB to send, here 1 MB of limit more."""
    answers = link.hold(reply(arrays(x=bytes(100 * MB))))
    assert sum(map(len, link.objects.values())) < 6 * MB
    monkeypatch.setattr(
        "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents",
        lambda *a, **k: pytest.fail("was put together"),
    )
    arrival = pulled(link, answers, Limit(6 * MB, 100, 20_000))
    assert arrival.message is None and "104,857,600" in arrival.why and "6,291,456 are allowed" in arrival.why
    assert link.confirmed


def test_arrays_are_no_pieces_of_arrays(link: Link) -> None:
    """flwr would take them for pieces, of the size of their data: a hundred of a hundred of them are no message."""
    sent = reply(arrays(x=bytes(MB // 4)))
    answers = link.hold(sent)
    inner = next(i for i, content in link.objects.items() if content.startswith(b"Array "))
    body = json.dumps({"dtype": "float32", "shape": [1], "stype": "x", "arraychunk_ids": [0] * 100}).encode()
    bomb = b"Array %s %d\0" % (inner.encode(), len(body)) + body
    outer = get_object_id(bomb)
    for i, content in link.objects.items():
        if content.startswith(b"ArrayRecord"):
            link.objects[i] = content.replace(inner.encode(), outer.encode())
    link.objects[outer] = bomb
    link.trees[answers].children.append(ObjectTree(object_id=outer))
    arrival = pulled(link, answers)
    assert arrival.message is None and "chunk" in arrival.why


def test_a_reply_is_in_memory_once_from_its_pieces_to_its_tensors() -> None:
    """Counted by tracemalloc, which sees bytes: of 16 arrays at most 3 beside the reply itself (its pieces, put
    together, read)."""
    shapes = {f"m{k}": (8, 2**14) for k in range(16)}
    adapter = Adapter({name: LoRA(None, torch.full((8, 2**14), float(k))) for k, name in enumerate(shapes)})
    client, roles = Client("one", 8), Roles(B="frozen")
    sent = reply(upload_record(Upload(client, 10, adapter), run="r", round=0, loss=0.5, kept=[]))
    whole = {i: o.deflate() for i, o in get_all_nested_objects(sent).items()}
    one, key = 4 * 8 * 2**14, sent.object_id
    del sent
    tracemalloc.start()
    try:
        contents = {i: bytes(bytearray(content)) for i, content in whole.items()}
        before = tracemalloc.get_traced_memory()[0]
        message = inside.put_together(key, contents, Limit(64 * MB, 1000, MB))
        upload, _, _ = record_upload(message.content, client, run="r", round=0, shapes=shapes, roles=roles, heads={})
        more = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    for name, lora in upload.adapter.modules.items():
        assert torch.equal(lora.tensors()["A"], adapter.modules[name].tensors()["A"])
    assert before > 16 * one and more < 4 * one, (more / one, "arrays")


def test_pieces_that_differ_are_pulled_no_further_than_the_limit(link: Link) -> None:
    data = random.Random(0).randbytes(3 * MB)
    answers = link.hold(reply(arrays(**{f"n{k}": data[k * MB : (k + 1) * MB] for k in range(3)})))
    arrival = pulled(link, answers)
    assert arrival.message is None and "2,097,152 are allowed" in arrival.why
    got = sum(len(link.objects[i]) for i in link.pulled[:-1])
    assert got <= LIMIT.bytes + 4096


def test_one_piece_that_is_too_large_is_refused_by_its_head(link: Link) -> None:
    """`content-length` is looked at before the body is read, with httpx's own hooks."""
    read: list[int] = []

    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            read.append(1)
            yield b"x" * 10_000

    transport = httpx.MockTransport(lambda r: httpx.Response(200, headers={"content-length": "10000"}, stream=Body()))
    client = SimpleNamespace(_client=httpx.Client(transport=transport))
    with answers_at_most(client, 9_999), pytest.raises(TooLarge) as raised:
        client._client.post("http://x")
    assert raised.value.size == 10_000 and not read
    with answers_at_most(client, 10_000):
        assert len(client._client.post("http://x").content) == 10_000
    assert client._client.event_hooks["response"] == []
    client._client.close()


def test_text_and_numbers_have_a_limit_of_their_own(link: Link) -> None:
    """A list of a million numbers takes thirty times the memory of its bytes."""
    record = arrays(x=b"abcd")
    record["metrics"] = MetricRecord({"n": [0] * 30_000})
    arrival = pulled(link, link.hold(reply(record)))
    assert arrival.message is None and "beside arrays; 20,000 are allowed" in arrival.why


def test_too_many_pieces_are_not_pulled_at_all(link: Link) -> None:
    arrival = pulled(link, link.hold(reply(arrays(**{f"n{k}": b"%04d" % k for k in range(60)}))))
    assert arrival.message is None and not link.pulled


def test_pieces_that_are_announced_and_never_sent_hold_up_nobody(link: Link) -> None:
    """flwr waits two hours for them. The others' replies arrive, and the inbox reports how much of this one did."""
    slow = link.hold(reply(arrays(x=b"abcd" * 10), 1))
    fast = link.hold(reply(arrays(x=b"efgh" * 10), 2))
    missing = next(i for i, content in link.objects.items() if content.startswith(b"ArrayChunk") and b"abcd" in content)
    link.late.add(missing)
    inbox = HttpInbox(link.grid)
    assert [a.reply_to for a in inbox.look({slow: LIMIT, fast: LIMIT})] == [fast]
    assert list(inbox.look({slow: LIMIT})) == []
    asked = len(link.pulled)
    link.late.clear()
    arrival = next(iter(inbox.look({slow: LIMIT})))
    assert arrival.message is not None and arrival.message.content.array_records["arrays"]["x"].data == b"abcd" * 10
    assert len(link.pulled) - asked < 5  # what had come was not pulled again
    other = link.hold(reply(arrays(x=b"ijkl" * 10), 3))
    link.late.add(next(i for i, content in link.objects.items() if b"ijkl" in content))
    assert list(inbox.look({other: LIMIT})) == []
    inbox.forget(other)
    assert not inbox._coming


FORGED = {
    "no head": lambda content: b"xxxx",
    "half a letter": lambda content: b"\xff\xfe\x00",
    "another kind": lambda content: content.replace(b"ArrayRecord", b"ArrayRecorx"),
    "a kind that is in no message": lambda content: b"os.system  0\0",
    "a body that is no JSON": lambda content: content.partition(b"\0")[0] + b"\0{",
    "deep JSON": lambda content: content.partition(b"\0")[0] + b"\0" + b"[" * 9_000,
}


@pytest.mark.parametrize("kind", ["Message", "RecordDict", "ArrayRecord", "Array", "ArrayChunk"])
@pytest.mark.parametrize("name", FORGED)
def test_objects_that_flwr_does_not_make_cost_their_sender_the_round(link: Link, name: str, kind: str) -> None:
    """In flwr each of these ends the ServerApp. (A chunk's body may be anything.)"""
    answers = link.hold(reply(arrays(x=b"abcd" * 10)))
    for object_id, content in link.objects.items():
        if content.startswith(kind.encode() + b" "):
            link.objects[object_id] = FORGED[name](content)
    [arrival] = HttpInbox(link.grid).look({answers: LIMIT})
    if arrival.message is None:
        assert "its reply" in arrival.why and arrival.why.isprintable()
    else:
        harmless = kind == "ArrayChunk" and name in ("a body that is no JSON", "deep JSON")
        assert harmless or (name == "another kind" and kind != "ArrayRecord")


# ---- the contract with flwr ------------------------------------------------------------------------------------------


def test_another_flwr_takes_the_public_path_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a federation refuse it by the same words."""
    from flwr.superlink.grid.http_grid import HttpGrid

    assert inside.untested() == ""
    monkeypatch.setattr(inside, "version", lambda name: "1.43.0")
    with pytest.warns(UserWarning, match=r"flwr 1\.43\.0 .*1\.41\.x and 1\.42\.x.*'flwr>=1\.41,<1\.43'.* only after"):
        assert http_inbox(HttpGrid("127.0.0.1:1", insecure=True, token="x")) is None
    with pytest.raises(ConfigError, match=r"flwr 1\.43\.0 "):
        needed()
    monkeypatch.delitem(sys.modules, "fedlora.flower.inside")  # as with a flwr that is too old to have this module
    monkeypatch.setitem(sys.modules, "flwr.serverapp", None)
    with pytest.raises(ConfigError, match=r"flwr \d.*: .*flwr\.serverapp"):
        needed()


def test_flwr_is_inside_as_the_bounded_pull_takes_it_to_be() -> None:
    """What inside.py uses of flwr's client beside its public interface: another version that has changed it fails here.
    Its handlers: test_real_superlink.py."""
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient("http://127.0.0.1:1")
    assert isinstance(client._client, httpx.Client)
    client.close()
    assert all(hasattr(client, name) for name in ("PullMessages", "PullObject", "ConfirmMessageReceived"))
    content = array(b"abcd").deflate()
    assert inside._head(content)[0] == "Array" and json.loads(content.partition(b"\0")[2])["arraychunk_ids"] == [0]
