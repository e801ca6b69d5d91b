"""Sends a round's messages, and passes on each answer as it comes, under its client's name.

Flower's own `send_and_receive` polls every three seconds, gives all replies at the end, and leaves it to its caller to
find out whose they are and who is missing. Here everyone who was asked has one `Answer`, at the deadline at the latest.
Who answers is told by the message that is answered: errors that the SuperLink makes itself come from no node.
A site that lacks what its message left out says so, and is sent everything at once.
A message may have gigabytes: wherever rounds handle one, `del` lets go of it before the next is made or comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedlora.core.text import quoted, shown
from fedlora.errors import KeptStateError
from fedlora.flower.rounds.arrivals import Arrival, Limit, PlainInbox
from fedlora.flower.rounds.bounded_pull import HttpInbox, is_http
from fedlora.flower.rounds.events import Fate
from fedlora.flower.rounds.questions import Question

log = logging.getLogger(__name__)
_GONE, _OFFLINE = (3, 4), 5  # flwr's codes: the message or the reply is gone; the node is
LONG = 60.0  # seconds without an answer until the log says who is awaited
_PATIENCE = 120.0  # seconds for which the SuperLink may fail to take a message before the message fails
T = TypeVar("T")


class Clock(Protocol):
    """A clock with a sleep: the module `time`, or a test's."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True, eq=False)
class Answer:
    """The result of a question. message: the reply, to be judged, and `fate` is None; otherwise `fate` and `why`
    explain its absence. seconds: since the question. bytes: of the reply. sent: whether the SuperLink took the
    question."""

    client: str
    seconds: float
    message: Message | None = None
    fate: Fate | None = None
    why: str = ""
    bytes: int = 0
    sent: bool = True


Identify = Callable[[Grid], Mapping[str, int]]  # registered name -> node id, for nodes that are online
Waiting = Callable[[tuple[str, ...], float, float], None]  # clients, seconds without their answer, seconds left


def collect(
    grid: Grid,
    questions: Iterable[Question],
    *,
    deadline: float,
    clock: Clock,
    waiting: Waiting = lambda clients, seconds, left: None,
) -> Iterator[Answer]:
    """One answer for each question, in the order in which they come.

    Args:
        questions: made one by one. deadline: seconds from the first time that each is sent; without an answer by then a
            client is late, once all are sent. waiting: called when a client has not answered for `LONG` seconds, with
            all that have waited half as long; each is named once. (Flower hands a message out once: one that a broken
            line swallowed is never answered, and nothing else says so.)
    """
    inbox, asked = inbox_of(grid), dict[str, _Asked]()  # by message id

    def arrived() -> Iterator[Answer]:
        for arrival in inbox.look({id: one.limit for id, one in asked.items()}):
            one = asked.pop(arrival.reply_to, None)
            if one is None:  # a SuperLink gives only what was asked for, but another grid may not
                log.warning("a reply that nobody waits for does not count: it is late, replayed, or a second one")
                continue
            found = _found(grid, one, arrival, deadline, clock)
            del arrival
            if isinstance(found, Answer):
                yield found
            else:
                asked[found.id] = found
            del found

    dead, looked = False, clock.monotonic()  # dead: the SuperLink, which is not waited for again until it answers
    for question in questions:
        patience = 0.0 if dead else min(_PATIENCE, deadline)
        sent = _send(grid, question, patience, clock)
        del question
        dead = isinstance(sent, Answer) and sent.fate == "not sent" and sent.seconds >= patience
        if isinstance(sent, Answer):
            yield sent
        else:
            asked[sent.id] = sent
        if asked and clock.monotonic() - looked >= inbox.pause:  # an answer expires with its message
            yield from arrived()
            looked = clock.monotonic()
    told = set[str]()
    while asked:
        yield from arrived()
        now = clock.monotonic()
        for one in [one for one in asked.values() if now - one.began >= deadline]:
            del asked[one.id]
            detail = inbox.half(one.id)
            why = f"no answer within {deadline:g} s{f' ({detail})' if detail else ''}"
            yield Answer(one.client, now - one.began, fate="late", why=why)
        if asked:
            left = min(one.began for one in asked.values()) + deadline - now
            waits = {one.client: now - one.began for one in asked.values() if one.client not in told}
            if max(waits.values(), default=0.0) >= LONG:
                slow = {client: seconds for client, seconds in waits.items() if seconds >= LONG / 2}
                told |= slow.keys()
                waiting((*slow,), min(slow.values()), left)
            clock.sleep(max(0.01, min(inbox.pause, left)))


@dataclass(frozen=True)
class _Asked:
    """A question that was sent: all that is kept of it. began: when it was sent, the first time."""

    id: str
    client: str
    node: int
    group: str
    limit: Limit
    whole: Callable[[float], Question] | None
    began: float


def _send(grid: Grid, question: Question, patience: float, clock: Clock) -> _Asked | Answer:
    """patience: seconds for which the SuperLink may fail."""
    began, client, about = clock.monotonic(), question.client, question.message.metadata
    try:
        ids = list(patiently(lambda: grid.push_messages([question.message]), until=began + patience, clock=clock))
    except Exception as error:
        log.debug("a message could not be sent", exc_info=True)
        why = f"it could not be sent its message: {_brief(error)}"
        return Answer(client, clock.monotonic() - began, fate="not sent", why=why, sent=False)
    if not ids or not ids[0]:
        why = f"the SuperLink takes no message for node {about.dst_node_id}"
        return Answer(client, 0.0, fate="offline", why=why, sent=False)
    return _Asked(ids[0], client, about.dst_node_id, about.group_id, question.limit, question.whole, began)


def _found(grid: Grid, asked: _Asked, arrival: Arrival, deadline: float, clock: Clock) -> Answer | _Asked:
    """The answer; or the question again, whole, if the client lacks what its message left out."""
    seconds, message = clock.monotonic() - asked.began, arrival.message
    failed = (message.error.reason or "") if message is not None and message.has_error() else ""
    if asked.whole is None or seconds >= deadline or not failed.startswith(f"{KeptStateError.__name__}:"):
        return _answer(asked, arrival, seconds, deadline)
    log.warning("%s lacks what it was thought to hold, and is sent everything", asked.client)
    again = _send(grid, asked.whole(deadline - seconds), min(_PATIENCE, deadline - seconds), clock)
    return replace(again, sent=True) if isinstance(again, Answer) else replace(again, began=asked.began)


def _answer(asked: _Asked, arrival: Arrival, seconds: float, deadline: float) -> Answer:
    client, message = asked.client, arrival.message
    if message is None:
        return Answer(client, seconds, fate="refused", why=arrival.why, bytes=arrival.bytes)
    if message.has_error():  # first of all, because the SuperLink's own errors have neither group nor node
        code, reason = message.error.code, shown(message.error.reason or "it gave no reason", 800)
        if code == _OFFLINE:
            why = f"its node is not there any more, since {seconds:.0f} s or less"
            return Answer(client, seconds, fate="offline", why=why)
        if code in _GONE:
            why = f"no answer within {deadline:g} s"
            if seconds < deadline - 2:  # whatever the reason, its work never arrives
                why = f"the SuperLink has no answer, after {seconds:.0f} of {deadline:g} s: {reason}"
            return Answer(client, seconds, fate="late", why=why)
        return Answer(client, seconds, fate="failed", why=f"it failed: {reason}")
    why = ""
    if message.metadata.group_id != asked.group:
        why = f"it answers {quoted(message.metadata.group_id, 60)}, and this is {asked.group!r}: late or replayed"
    elif message.metadata.src_node_id != asked.node:
        why = f"node {message.metadata.src_node_id} answered in its place, and node {asked.node} was asked"
    elif not message.has_content():
        why = "its reply is empty"
    if why:
        return Answer(client, seconds, fate="refused", why=why, bytes=arrival.bytes)
    return Answer(client, seconds, message, bytes=arrival.bytes)


def inbox_of(grid: Grid) -> HttpInbox | PlainInbox:
    """The inbox for this kind of grid: for a real SuperLink one with limits while pulling."""
    return HttpInbox(grid) if is_http(grid) else PlainInbox(grid)


def registered_names(grid: Grid) -> dict[str, int]:
    """The names under which the SuperLink knows its nodes (`flwr supernode register --name`), by authentication, never
    by their claims."""
    return {node.name: node.node_id for node in grid.get_nodes() if node.name}


def patiently(ask: Callable[[], T], *, until: float, clock: Clock) -> T:
    """The SuperLink's answer, asked again while it answers with errors. until: the clock's time at which its error is
    raised."""
    warned = False
    while True:
        try:
            return ask()
        except httpx.HTTPError as error:
            if clock.monotonic() >= until:
                raise
            if not warned:
                log.warning("the SuperLink fails, and is asked again: %s", _brief(error))
            warned = True
            clock.sleep(2.0)


def _brief(error: BaseException) -> str:
    """An error in one line. For an HTTP error its first line, because httpx then explains status codes."""
    words = str(error).partition("\nFor more information check")[0]
    return shown(f"{type(error).__name__}: {words}", 200)
