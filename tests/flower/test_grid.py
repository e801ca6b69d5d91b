"""`BoundedGrid`: one message for each question, whose each is, and what became of who did not answer. Kinds of
evidence: contract, attack.

The grid below it is a script: what the SuperLink would give at which second, on a clock that costs no time.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message

from fedlora.flower.grid import BoundedGrid, Limit, NoAnswer
from support.flower_grid import FastClock, LocalGrid

NODES = {"acme": 11, "berlin": 12, "cork": 13}
NAMES = {node: name for name, node in NODES.items()}
TIMEOUT = 100.0
Made = Callable[[str], Message]  # from the id of the question


class Scripted(LocalGrid):
    """script: client -> (seconds after its question, what comes then). failing: until then the SuperLink fails."""

    def __init__(self, **script: list[tuple[float, Made]]) -> None:
        super().__init__({})
        self.clock, self.script, self.failing, self.slow = FastClock(), script, 0.0, 0.0
        self.due: list[tuple[float, Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        if self.clock.now < self.failing:
            request = httpx.Request("POST", "http://127.0.0.1/v1/runtime/push-messages")
            raise httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))
        self.clock.now += self.slow
        [message] = messages
        self.sent.append(message)
        name = NAMES[message.metadata.dst_node_id]
        self.due += [(self.clock.now + at, made(f"id-{name}")) for at, made in self.script.get(name, [])]
        return [f"id-{name}"]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        here = [message for at, message in self.due if at <= self.clock.now]
        self.due = [(at, message) for at, message in self.due if at > self.clock.now]
        return here


def metadata(reply_to: str, node: int, group: str = "g") -> Metadata:
    return Metadata(1, "r", node, 1, reply_to, group, 0.0, 10.0, "train")


def good(node: int, group: str = "g") -> Made:
    record = RecordDict({"config": ConfigRecord({"x": "y"})})
    return lambda reply_to: make_message(metadata=metadata(reply_to, node, group), content=record)


def error(code: int, node: int = 1, group: str = "", reason: str = "why") -> Made:
    """As the SuperLink makes it: from node 1, of no group."""
    return lambda reply_to: make_message(metadata=metadata(reply_to, node, group), error=Error(code, reason))


def questions() -> Iterator[Message]:
    for node in NODES.values():
        yield Message(RecordDict(), node, "train", group_id="g")


def asked(grid: Scripted, limit: Limit | None = None, messages: Any = None) -> dict[str, tuple[str, str, float]]:
    """Client -> (fate, why, when it was told); "answered" for content, "failed" for an error of its own."""
    bounded, found = BoundedGrid(grid, clock=grid.clock), {}
    bounded.limit = limit or bounded.limit
    for reply in bounded.send_and_receive(messages or questions(), timeout=TIMEOUT):
        name, fate, why = NAMES[reply.metadata.src_node_id], "answered", ""
        if reply.has_error():
            fate, why = "failed", reply.error.reason or ""
            if isinstance(reply.error, NoAnswer):
                fate = reply.error.fate
        assert name not in found, "one for each, whatever comes"
        found[name] = fate, why, grid.clock.now
    assert found.keys() == NODES.keys()
    return found


def fates(found: dict[str, tuple[str, str, float]]) -> list[str]:
    return [found[name][0] for name in NODES]


def test_each_answer_comes_as_it_does_and_the_late_are_told_by_name_at_the_deadline() -> None:
    found = asked(Scripted(berlin=[(2, good(12))], acme=[(40, good(11))], cork=[(101, good(13))]))
    assert list(found) == ["berlin", "acme", "cork"] and fates(found) == ["answered", "answered", "late"]
    assert [when for *_, when in found.values()] == pytest.approx([2, 40, TIMEOUT], abs=1.1)
    assert found["cork"][1] == "no answer within 100 s"
    grid = Scripted(**{name: [(1, good(node))] for name, node in NODES.items()})
    asked(grid)
    assert grid.clock.now < 3, "nobody is waited for once all have answered"


@pytest.mark.parametrize(
    ("comes", "fate", "why"),
    [
        ((61, error(5)), "offline", "not there any more"),  # flwr: from node 1, with the message's group or none
        ((1, error(3, reason="Message Unavailable")), "late", "Message Unavailable"),
        ((1, error(4)), "late", "has no answer"),
        ((1, error(2, 11, "g", "\x1b[2Jboom\n" + "x" * 10_000)), "failed", "it failed: .*boom"),
        ((1, good(11, "of yesterday\x1b")), "refused", r"'of yesterday\\x1b'.* 'g'.*replayed"),
        ((1, good(12)), "refused", "node 12 .*node 11 "),
        ((1, lambda _: good(11)("of-an-earlier-round")), "late", "no answer within"),
        ((1, lambda i: make_message(metadata=metadata(i, 11), content=RecordDict())), "answered", ""),
    ],
)
def test_what_comes_in_place_of_an_answer_is_its_askeds_alone(comes: Any, fate: str, why: str) -> None:
    found = asked(Scripted(acme=[comes], berlin=[(1, good(12))], cork=[(1, good(13))]))
    assert fates(found) == [fate, "answered", "answered"] and re.search(why, found["acme"][1])
    assert found["acme"][1].isprintable() and len(found["acme"][1]) < 900


def test_a_second_reply_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    twice = Scripted(acme=[(1, good(11)), (1, good(11)), (2, error(2, 11, "g"))], berlin=[(9, good(12))])
    assert fates(asked(twice)) == ["answered", "answered", "late"] and "a second one" in caplog.text


def test_a_reply_over_its_limit_is_refused_with_both_numbers() -> None:
    record = RecordDict({"arrays": ArrayRecord({"x": Array("float32", (250,), "fedlora.raw", bytes(1000))})})
    for most, fate in ((1000, "answered"), (999, "refused")):
        large = Scripted(acme=[(1, lambda i: make_message(metadata=metadata(i, 11), content=record))])
        found = asked(large, Limit(most, 100, 1000))["acme"]
        assert found[0] == fate and (fate == "answered" or ("1,000 bytes" in found[1] and "999 are" in found[1]))


@pytest.mark.parametrize(("until", "fate"), [(25.0, "answered"), (60.0, "answered"), (1000.0, "not sent")])
def test_a_superlink_that_fails_for_a_while_still_gets_its_messages(
    until: float, fate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has failed for the deadline of all, each of them fails at once, by name."""
    grid = Scripted(**{name: [(1, good(node))] for name, node in NODES.items()})
    grid.failing = until
    found = asked(grid)
    assert fates(found) == [fate] * 3 and grid.clock.now < TIMEOUT + 10 and "is asked again" in caplog.text
    assert fate == "answered" or "500" in found["acme"][1]


def test_a_superlink_that_says_who_is_offline_is_not_dead() -> None:
    """It fails for the first message's whole patience, answers the second ("offline"), and fails ten seconds more."""

    class Back(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            [message] = messages
            if message.metadata.dst_node_id != 12:
                return super().push_messages([message])
            self.failing = self.clock.now + 10
            return []

    grid = Back(cork=[(1, good(13))])
    grid.failing = TIMEOUT + 1
    assert fates(asked(grid)) == ["not sent", "offline", "answered"]


def test_a_message_that_cannot_be_sent_is_that_clients_alone() -> None:
    class Full(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            [message] = messages
            if message.metadata.dst_node_id == 11:
                raise ConnectionError("413 Request Entity Too Large")
            return super().push_messages([message])

    found = asked(Full(berlin=[(1, good(12))], cork=[(1, good(13))]))
    assert fates(found) == ["not sent", "answered", "answered"] and "413" in found["acme"][1]


def test_the_deadline_counts_from_each_ones_own_sending_and_answers_are_fetched_meanwhile() -> None:
    """Sending takes 60 s each; a SuperLink drops an answer 50 s after it came."""

    class Dropping(Scripted):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.due = [(at, message) for at, message in self.due if at + 50 >= self.clock.now]
            return super().pull_messages(message_ids)

    grid = Dropping(acme=[(20, good(11))], cork=[(35, good(13))])
    grid.slow = 60
    assert fates(asked(grid)) == ["answered", "late", "answered"]


def test_a_message_is_let_go_of_before_the_next_one_is_made() -> None:
    """Of a hundred clients, one adapter at a time is in memory."""
    alive: list[int] = []
    sent: list[weakref.ref[Message]] = []

    class Forgetting(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            ids = super().push_messages(messages)
            self.sent.clear()
            return ids

    def made() -> Iterator[Message]:
        for message in questions():
            gc.collect()
            alive.append(sum(ref() is not None for ref in sent))
            sent.append(weakref.ref(message))
            yield message
            del message

    asked(Forgetting(), messages=made())
    assert max(alive) <= 1  # the one that was just sent, in the generator above
