"""`BoundedGrid`: any Flower grid, with exactly one `Message` for each question, as it arrives.

    grid = BoundedGrid(grid)
    grid.limit = Limit(bytes=..., objects=..., described=...)
    for reply in grid.send_and_receive(messages, timeout=600):     # a generator: nothing is sent before it is drawn
        reply.metadata.src_node_id                                  # the node that was asked, always
        reply.has_error()                                           # `NoAnswer`: made here; any other: the client's own

Flower's own `send_and_receive` needs all messages at once, keeps all replies in a list, polls every 3 s, and says
nothing of who did not answer. Here messages are drawn and pushed one by one, and a reply is let go before the next is
pulled. On a SuperLink a reply is measured before it is in memory (`inside.HttpInbox`); on any other grid after it came.
A message may have gigabytes: wherever one is handled, `del` lets go of it before the next is made or comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedlora.core.text import quoted, shown
from fedlora.flower.envelope import parts
from fedlora.flower.inside import Arrival, Limit, http_inbox, too_large

log = logging.getLogger(__name__)
_GONE, _OFFLINE = (3, 4), 5  # flwr's codes: the message or its reply is gone; the node is
_PATIENCE = 120.0  # seconds for which a SuperLink may fail to take a message
_CODES = {"late": 3, "offline": 5, "refused": 6, "not sent": 3}
UNLIMITED = Limit(2**62, 2**62, 2**62)
T = TypeVar("T")


class Clock(Protocol):
    """A clock with a sleep: the module `time`, or a test's."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


class NoAnswer(Error):
    """Why there is no answer: "late", "offline", "refused" or "not sent". Made by the grid, never by a client: its own
    error arrives as a plain `Error`."""

    def __init__(self, fate: str, reason: str) -> None:
        super().__init__(_CODES[fate], reason)
        self.__dict__["_fate"] = fate

    @property
    def fate(self) -> str:
        return str(self.__dict__["_fate"])


@dataclass(frozen=True, eq=False)
class _Asked:
    """All that is kept of a question. stub: its metadata without its content. since, until: on the clock."""

    stub: Message
    since: float
    until: float


class BoundedGrid(Grid):
    """A Flower grid that takes any other's messages, with one answer or error for each question.

    limit: of each reply, until it is set anew. clock: which also waits.
    """

    def __init__(self, grid: Grid, *, clock: Clock = time) -> None:
        self.inner, self.limit, self.clock = grid, UNLIMITED, clock
        self._inbox = http_inbox(grid) or _OneByOne(grid)

    @classmethod
    def around(cls, grid: Grid) -> BoundedGrid:
        """The grid itself if it is one already: its clock and pause stay."""
        return grid if isinstance(grid, cls) else cls(grid)

    def set_run(self, run: Any) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Any:
        return self.inner.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.inner.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self._patiently(lambda: list(self.inner.get_node_ids()))

    def get_nodes(self) -> Iterable[Any]:
        """As Flower's; asked again for a while if the SuperLink answers with an error, which is then raised."""
        return self._patiently(lambda: list(self.inner.get_nodes()))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [id for message in messages for id in self.inner.push_messages([message])]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(list(message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """timeout: seconds for each answer, from when its own question was sent; who is late is told once all are."""
        asked: dict[str, _Asked] = {}
        dead, looked = False, self.clock.monotonic()  # dead: the SuperLink, not waited for again until it answers
        for message in messages:
            stub, since = _without_content(message), self.clock.monotonic()
            patience = 0.0 if dead else min(_PATIENCE, timeout or _PATIENCE)
            id, why = self._push(message, patience)
            del message  # its content; a grid in memory still holds it until its reply is pulled
            dead = bool(why) and self.clock.monotonic() - since >= patience
            if not id:
                there = f"the SuperLink takes no message for node {stub.metadata.dst_node_id}"
                yield _no_answer(stub, "not sent" if why else "offline", why or there)
                continue
            until = since + timeout if timeout is not None else float("inf")
            asked[id] = _Asked(stub, since, until)
            if self.clock.monotonic() - looked >= self._inbox.pause:  # an answer expires with its message
                yield from self._arrived(asked)
                looked = self.clock.monotonic()
        while asked:
            yield from self._arrived(asked)
            now = self.clock.monotonic()
            for id in [id for id, one in asked.items() if now >= one.until]:
                self._inbox.forget(id)
                yield _no_answer(asked.pop(id).stub, "late", f"no answer within {timeout:g} s")
            if asked:
                self.clock.sleep(max(0.01, min(self._inbox.pause, min(one.until for one in asked.values()) - now)))

    def _push(self, message: Message, patience: float) -> tuple[str, str]:
        """(its id, "") if it was taken; ("", "") if the node is not there; ("", why) if it could not be sent."""
        try:
            ids = self._patiently(lambda: list(self.inner.push_messages([message])), patience)  # HttpGrid walks twice
            return (ids[0] if ids and ids[0] else ""), ""
        except Exception as error:
            log.debug("a message could not be sent", exc_info=True)
            return "", f"it could not be sent its message: {_brief(error)}"

    def _arrived(self, asked: dict[str, _Asked]) -> Iterator[Message]:
        for arrival in self._inbox.look(dict.fromkeys(asked, self.limit)):
            one = asked.pop(arrival.reply_to, None)
            if one is None:  # a SuperLink gives only what was asked for, but another grid may not
                log.warning("a reply that nobody waits for does not count: it is late, replayed, or a second one")
                continue
            message = _judged(one, arrival, self.clock.monotonic())
            del arrival
            yield message
            del message

    def _patiently(self, ask: Callable[[], T], patience: float = _PATIENCE) -> T:
        """The SuperLink's answer, asked again while it answers with errors, for `patience` seconds."""
        until, warned = self.clock.monotonic() + patience, False
        while True:
            try:
                return ask()
            except httpx.HTTPError as error:
                if self.clock.monotonic() >= until:
                    raise
                if not warned:
                    log.warning("the SuperLink fails, and is asked again: %s", _brief(error))
                warned = True
                self.clock.sleep(2.0)


def _judged(one: _Asked, arrival: Arrival, now: float) -> Message:
    """The reply under the asked node's id, or the error in its place."""
    message = arrival.message
    if message is None:
        return _no_answer(one.stub, "refused", arrival.why)
    if message.has_error():  # first of all, because the SuperLink's own errors have neither group nor node
        code, reason = message.error.code, shown(message.error.reason or "it gave no reason", 800)
        if code == _OFFLINE:  # a client that says so itself harms only itself
            return _no_answer(one.stub, "offline", "its node is not there any more")
        if code in _GONE:  # whatever the reason, its work never arrives
            why = "no answer in time" if now >= one.until - 2 else "the SuperLink has no answer"
            return _no_answer(one.stub, "late", f"{why}, after {now - one.since:.0f} s: {reason}")
        return Message(Error(code, f"it failed: {reason}"), reply_to=one.stub)
    about, asked = message.metadata, one.stub.metadata
    if about.group_id != asked.group_id:
        why = f"it answers {quoted(about.group_id, 60)}, and this is {asked.group_id!r}: late or replayed"
        return _no_answer(one.stub, "refused", why)
    if about.src_node_id != asked.dst_node_id:
        why = f"node {about.src_node_id} answered in its place, and node {asked.dst_node_id} was asked"
        return _no_answer(one.stub, "refused", why)
    return message if message.has_content() else _no_answer(one.stub, "refused", "its reply is empty")


def _without_content(message: Message) -> Message:
    about = message.metadata
    return Message(RecordDict(), about.dst_node_id, about.message_type, ttl=about.ttl, group_id=about.group_id)


def _no_answer(stub: Message, fate: str, why: str) -> Message:
    return Message(NoAnswer(fate, why), reply_to=stub)


def _brief(error: BaseException) -> str:
    """An error in one line. For an HTTP error its first line, because httpx then explains status codes."""
    words = str(error).partition("\nFor more information check")[0]
    return shown(f"{type(error).__name__}: {words}", 200)


class _OneByOne:
    """Replies of any other grid, such as a simulation's: one id at a time, so that one reply is in memory at a time."""

    pause = 0.1  # seconds between two looks

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def look(self, wanted: Mapping[str, Limit]) -> Iterator[Arrival]:
        for id, limit in wanted.items():
            for message in self._grid.pull_messages([id]):
                size, reply_to = 0, message.metadata.reply_to_message_id
                if message.has_content():
                    records = parts(message.content, ArrayRecord).values()
                    size = sum(len(array.data) for arrays in records for array in arrays.values())
                refused = size > limit.bytes
                arrival = Arrival(reply_to, None if refused else message, too_large(size, limit.bytes) * refused)
                del message
                yield arrival
                del arrival

    def forget(self, message_id: str) -> None:
        """There is nothing to let go of."""
