"""Messages out, answers in: whose each is, and what became of who did not answer. Kinds of evidence: contract, attack.

The grid is a script: what the SuperLink would give at which second, on a clock that costs no time.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message

from fedlora.flower.rounds.arrivals import Limit
from fedlora.flower.rounds.collecting import LONG, Answer, collect, patiently
from fedlora.flower.rounds.questions import Question
from support.flower_grid import FastClock, LocalGrid

NODES = {"acme": 11, "berlin": 12, "cork": 13}
DEADLINE = 100.0


class Scripted(LocalGrid):
    """script: client -> (second, what comes then, made from the question's id)."""

    def __init__(self, clock: FastClock, script: dict[str, list[tuple[float, Callable[[str], Message]]]]) -> None:
        super().__init__({})
        self.clock, self.script, self.looks = clock, script, 0
        self.due: list[tuple[float, Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        [message] = messages
        self.sent.append(message)
        name = next(name for name, node in NODES.items() if node == message.metadata.dst_node_id)
        message_id = f"id-{name}"
        self.due += [(self.clock.now + at, made(message_id)) for at, made in self.script.get(name, [])]
        return [message_id]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.looks += 1
        here = [message for at, message in self.due if at <= self.clock.now]
        self.due = [(at, message) for at, message in self.due if at > self.clock.now]
        return here


def metadata(reply_to: str, node: int, group: str = "g") -> Metadata:
    return Metadata(1, "r", node, 1, reply_to, group, 0.0, 10.0, "train")


def good(node: int, group: str = "g", size: int = 4) -> Callable[[str], Message]:
    record = RecordDict({"config": ConfigRecord({"x": "y" * size})})
    return lambda reply_to: make_message(metadata=metadata(reply_to, node, group), content=record)


def error(code: int, node: int = 1, group: str = "", reason: str = "why") -> Callable[[str], Message]:
    """As the SuperLink makes it: from node 1, of no group."""
    return lambda reply_to: make_message(metadata=metadata(reply_to, node, group), error=Error(code, reason))


LARGE = Limit(2**40, 2**40, 2**40)


def questions(limit: Limit = LARGE) -> Iterator[Question]:
    for name, node in NODES.items():
        yield Question(name, Message(RecordDict(), node, "train", group_id="g"), limit)


def collected(**script: list[tuple[float, Callable[[str], Message]]]) -> tuple[dict[str, Answer], FastClock]:
    clock = FastClock()
    answers = list(collect(Scripted(clock, script), questions(), deadline=DEADLINE, clock=clock))
    assert sorted(a.client for a in answers) == sorted(NODES)  # one for everyone, whatever comes
    return {answer.client: answer for answer in answers}, clock


def test_it_is_told_once_who_lets_the_others_wait() -> None:
    """Flower hands a message out once; one that was lost on its way is waited for until the deadline."""
    clock = FastClock()
    grid = Scripted(clock, {"berlin": [(2, good(12))], "acme": [(LONG + 20, good(11))]})
    told: list[Any] = []
    settings = {"deadline": DEADLINE, "clock": clock, "waiting": lambda *said: told.append((clock.now, *said))}
    list(collect(grid, questions(), **settings))
    [(at, clients, seconds, left)] = told
    assert at == pytest.approx(LONG, abs=1.1) and clients == ("acme", "cork")
    assert seconds + left == pytest.approx(DEADLINE) and DEADLINE > LONG

    clock = FastClock()
    grid = Scripted(clock, {name: [(2, good(node))] for name, node in NODES.items()})
    list(collect(grid, questions(), **{**settings, "clock": clock}))
    assert len(told) == 1


def test_who_was_asked_a_second_ago_is_not_said_to_let_others_wait() -> None:
    """Sending takes 50 s here, as gigabytes to many sites do. Before, both were named after the first one's 75 s."""
    clock, told = FastClock(), list[Any]()

    def slowly() -> Iterator[Question]:
        for question in questions():
            yield question
            clock.sleep(25)

    script = {"berlin": [(2, good(12))]}
    waiting = lambda *said: told.append((clock.now, *said))  # noqa: E731
    list(collect(Scripted(clock, script), slowly(), deadline=DEADLINE, clock=clock, waiting=waiting))
    assert [(clients, seconds) for _, clients, seconds, _ in told] == [
        (("acme",), pytest.approx(75, abs=1.1)), (("cork",), pytest.approx(LONG, abs=1.1))
    ]  # fmt: skip


def test_each_answer_as_it_comes_with_its_seconds_and_the_late_by_name() -> None:
    clock = FastClock()
    grid = Scripted(clock, {"berlin": [(2, good(12))], "acme": [(40, good(11))], "cork": [(101, good(13))]})
    seen = [(a.client, a.fate, clock.now) for a in collect(grid, questions(), deadline=DEADLINE, clock=clock)]
    assert [(name, fate) for name, fate, _ in seen] == [("berlin", None), ("acme", None), ("cork", "late")]
    assert seen[0][2] == pytest.approx(2, abs=1.1) and seen[1][2] == pytest.approx(40, abs=1.1)
    assert seen[2][2] == pytest.approx(DEADLINE, abs=0.1)
    answers, _ = collected(berlin=[(2, good(12))], acme=[(40, good(11))])
    assert answers["acme"].seconds == pytest.approx(40, abs=1.1) and answers["acme"].message is not None
    assert answers["cork"].why == "no answer within 100 s" and answers["cork"].seconds == pytest.approx(
        DEADLINE, abs=0.1
    )


def test_nobody_is_waited_for_once_all_have_answered() -> None:
    _, clock = collected(**{name: [(1, good(node))] for name, node in NODES.items()})
    assert clock.now < 3


def test_a_node_that_goes_away_in_mid_round_is_offline_by_its_name() -> None:
    """flwr 1.41: NODE_UNAVAILABLE (5) comes from node 1 with the message's group, or none."""
    answers, clock = collected(acme=[(1, good(11))], berlin=[(61, error(5))], cork=[(1, good(13))])
    assert answers["berlin"].fate == "offline" and "not there any more" in answers["berlin"].why
    assert clock.now < 63


@pytest.mark.parametrize("code", [3, 4])
def test_errors_of_the_superlink_are_attributed_by_what_they_answer(code: int) -> None:
    """Unknown or expired messages: from node 1, of an empty group. Before, they were failures, which a site answers."""
    answers, _ = collected(acme=[(1, error(code, reason="Message Unavailable"))], berlin=[(99.5, error(code))])
    assert answers["acme"].fate == "late" and "Message Unavailable" in answers["acme"].why
    assert answers["berlin"].fate == "late" and answers["cork"].fate == "late"


def test_an_error_of_the_app_is_its_failure_in_bounded_printable_words() -> None:
    answers, _ = collected(acme=[(1, error(2, 11, "g", "\x1b[2Jboom\n" + "x" * 10_000))])
    assert answers["acme"].fate == "failed" and "boom" in answers["acme"].why
    assert answers["acme"].why.isprintable() and len(answers["acme"].why) < 830


def test_a_reply_to_another_message_is_no_answer_and_the_right_one_still_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stale(reply_to: str) -> Message:
        return good(11)("of-an-earlier-attempt")

    answers, _ = collected(acme=[(1, stale), (5, good(11))], berlin=[(1, stale)])
    assert answers["acme"].fate is None and answers["acme"].message is not None
    assert answers["berlin"].fate == "late"
    assert "late, replayed" in caplog.text


def test_a_second_reply_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    answers, _ = collected(acme=[(1, good(11)), (1, good(11)), (2, error(2, 11, "g"))], berlin=[(9, good(12))])
    assert answers["acme"].fate is None
    assert "a second one" in caplog.text


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (good(11, group="of yesterday\x1b"), r"'of yesterday\\x1b'.* 'g'.*replayed"),
        (good(12), "node 12 .*node 11 "),
    ],
)
def test_a_reply_of_another_group_or_node_is_refused(made: Callable[[str], Message], why: str) -> None:
    answers, _ = collected(acme=[(1, made)])
    assert answers["acme"].fate == "refused" and re.search(why, answers["acme"].why)


def test_a_reply_over_its_limit_is_refused_with_both_numbers() -> None:
    from flwr.app import Array, ArrayRecord

    record = RecordDict({"arrays": ArrayRecord({"x": Array("float32", (250,), "fedlora.raw", bytes(1000))})})
    for most, fate in ((1000, None), (999, "refused")):
        clock = FastClock()
        script: Any = {"acme": [(1, lambda i: make_message(metadata=metadata(i, 11), content=record))]}
        limit = Limit(most, 100, 1000)
        answers = list(collect(Scripted(clock, script), questions(limit), deadline=DEADLINE, clock=clock))
        assert answers[0].fate == fate
        assert fate is None or ("1,000 bytes" in answers[0].why and "999 are allowed" in answers[0].why)


class Failing(Scripted):
    """The SuperLink answers errors until a second."""

    until = 0.0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        if self.clock.now < self.until:
            request = httpx.Request("POST", "http://127.0.0.1/v1/runtime/push-messages")
            raise httpx.HTTPStatusError("500", request=request, response=httpx.Response(500, request=request))
        return super().push_messages(messages)


@pytest.mark.parametrize(("until", "fate"), [(25.0, None), (60.0, None), (1000.0, "not sent")])
def test_a_superlink_that_fails_for_a_while_still_gets_its_messages(until: float, fate: str | None) -> None:
    """Once it has failed for the deadline of all, each of them fails at once, by name."""
    clock = FastClock()
    grid = Failing(clock, {name: [(1, good(node))] for name, node in NODES.items()})
    grid.until = until
    answers = list(collect(grid, questions(), deadline=DEADLINE, clock=clock))
    assert {a.client: a.fate for a in answers} == dict.fromkeys(NODES, fate)
    assert clock.now < DEADLINE + 10 and (fate is None or "500" in answers[0].why)


@pytest.mark.parametrize("when", ["the third", "whole"])
def test_each_message_has_the_superlinks_patience_of_its_own(when: str) -> None:
    """Two slow messages take 140 s; or a site says after 140 s that it lacks something. Then the SuperLink fails for
    ten seconds. Before, one clock ran for all messages from the first one on, so the first error was final."""
    clock, slow = FastClock(), when == "the third"

    class Slow(Failing):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            found = super().push_messages(messages)
            clock.now += 70 * (slow and clock.now < 140)
            self.until = 150.0 if clock.now >= 140 or (not slow and len(self.sent) == 3) else 0.0
            return found

    lacks = error(2, 13, "g", "KeptStateError: it is gone")
    grid = Slow(clock, {**{name: [(1, good(node))] for name, node in NODES.items()}, **({} if slow else {"cork": []})})

    def asked() -> Iterator[Question]:
        def whole(ttl: float) -> Question:
            grid.script["cork"] = [(1, good(13))]
            return Question("cork", Message(RecordDict(), 13, "train", group_id="g"), LARGE)

        for question in questions():
            yield replace(question, whole=None if slow else whole)

    if not slow:
        grid.script["cork"], grid.until = [(140, lacks)], 0.0
    answers = {a.client: a.fate for a in collect(grid, asked(), deadline=600.0, clock=clock)}
    assert answers == dict.fromkeys(NODES) and clock.now > 150


def test_a_superlink_that_says_who_is_offline_is_not_dead() -> None:
    """It fails for the first message's whole patience, answers the second ("offline"), and fails for ten seconds more.
    Before, only a message that was taken gave the patience back, and the third was lost at its first error."""
    clock = FastClock()

    class Back(Failing):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            [message] = messages
            if message.metadata.dst_node_id != 12:
                return super().push_messages([message])
            self.until = clock.now + 10
            return []

    grid = Back(clock, {"cork": [(1, good(13))]})
    grid.until = DEADLINE + 1
    answers = {a.client: a.fate for a in collect(grid, questions(), deadline=DEADLINE, clock=clock)}
    assert answers == {"acme": "not sent", "berlin": "offline", "cork": None}


def test_who_is_online_is_asked_again_while_the_superlink_fails() -> None:
    clock, grid = FastClock(), LocalGrid({})

    def identify(_: Any) -> dict[str, int]:
        if clock.now < 30:
            raise httpx.ReadTimeout("timed out")
        return NODES

    assert patiently(lambda: identify(grid), until=DEADLINE, clock=clock) == NODES
    clock.now = 0.0
    with pytest.raises(httpx.ReadTimeout):
        patiently(lambda: identify(grid), until=10.0, clock=clock)


@pytest.mark.parametrize("answer", [[""], [None], []])
def test_a_message_that_the_superlink_does_not_take_is_told_at_once(answer: list[Any]) -> None:
    class Refusing(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            [message] = messages
            return answer if message.metadata.dst_node_id == 12 else super().push_messages([message])

    clock = FastClock()
    script: Any = {"acme": [(1, good(11))], "cork": [(1, good(13))]}
    answers = {a.client: a for a in collect(Refusing(clock, script), questions(), deadline=DEADLINE, clock=clock)}
    assert answers["berlin"].fate == "offline" and clock.now < 3


def test_a_message_that_cannot_be_sent_is_that_clients_failure_and_nobody_elses() -> None:
    class Failing(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            [message] = messages
            if message.metadata.dst_node_id == 11:
                raise ConnectionError("413 Request Entity Too Large")
            return super().push_messages([message])

    clock = FastClock()
    script: Any = {"berlin": [(1, good(12))], "cork": [(1, good(13))]}
    answers = {a.client: a for a in collect(Failing(clock, script), questions(), deadline=DEADLINE, clock=clock)}
    assert answers["acme"].fate == "not sent" and "413" in answers["acme"].why
    assert answers["berlin"].fate is None and answers["cork"].fate is None


def test_a_message_is_let_go_of_before_the_next_one_is_made() -> None:
    """Of a hundred clients, one adapter at a time is in memory."""
    alive: list[int] = []
    sent: list[weakref.ref[Message]] = []

    class Forgetting(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            ids = super().push_messages(messages)
            self.sent.clear()
            return ids

    def made() -> Iterator[Question]:
        for question in questions():
            gc.collect()
            alive.append(sum(ref() is not None for ref in sent))
            sent.append(weakref.ref(question.message))
            yield question
            del question

    clock = FastClock()
    list(collect(Forgetting(clock, {}), made(), deadline=DEADLINE, clock=clock))
    assert max(alive) <= 1  # the one that was just sent, in the generator above


def test_an_answer_is_fetched_while_others_are_sent_their_messages() -> None:
    """Sending takes 120 s, and a SuperLink drops an answer with its message, after 100 s. Before, the answers that came
    in time were looked for when all were sent, and lost."""
    clock = FastClock()

    class Slow(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            self.clock.now += 40
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.due = [(at, message) for at, message in self.due if at + 50 >= self.clock.now]
            return super().pull_messages(message_ids)

    script: Any = {name: [(5, good(node))] for name, node in NODES.items()}
    answers = list(collect(Slow(clock, script), questions(), deadline=DEADLINE, clock=clock))
    assert {a.client: a.fate for a in answers} == dict.fromkeys(NODES)


def test_the_deadline_counts_from_each_ones_own_sending() -> None:
    """Sending three adapters takes a while; who is sent the last one has as long as the first."""
    clock = FastClock()

    class Slow(Scripted):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            self.clock.now += 60
            return super().push_messages(messages)

    script: Any = {"acme": [(110, good(11))], "cork": [(35, good(13))]}
    answers = list(collect(Slow(clock, script), questions(), deadline=DEADLINE, clock=clock))
    assert {a.client: a.fate for a in answers} == {"acme": None, "berlin": "late", "cork": None}
