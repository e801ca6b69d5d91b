"""flwr's inside, as far as a ServerApp needs it, and the one check of flwr's version: nothing else here imports it.

Replies from a real SuperLink are measured before they are in memory (`HttpInbox`).

Flower cuts a message into objects: a tree of their ids, and each by its id. `HttpGrid` pulls all of a reply, whatever
its size, waits up to two hours for objects that never come, and ends the run if one cannot be read. Equal pieces are
stored once and multiplied on assembly, so a few megabytes become as many gigabytes as their sender likes. Here a reply
is counted while it is pulled and before it is assembled; if it is too large, or unreadable, only its sender loses the
round.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedlora.core.text import shown

log = logging.getLogger(__name__)
TESTED = ("1.41.", "1.42.")
_TREE = 32 * 2**20  # bytes in the list of one message's objects


@dataclass(frozen=True)
class Limit:
    """The most that one reply may take: bytes in total, both packed and unpacked; objects, into which Flower cuts it;
    bytes other than arrays' data (names, numbers, text)."""

    bytes: int
    objects: int
    described: int


@dataclass(frozen=True, eq=False)
class Arrival:
    """A reply that came, or why it was not accepted. reply_to: the id of the message that it answers."""

    reply_to: str
    message: Message | None
    why: str = ""


def too_large(size: int, most: int) -> str:
    """Why a reply is refused."""
    return f"its reply has {size:,} bytes or more, and {most:,} are allowed (twice what its upload can have)"


def untested() -> str:
    """Why the installed flwr may have another inside than this was written for, and the way out; "" if it has not."""
    found = version("flwr")
    if found.startswith(TESTED):
        return ""
    return (
        f"flwr {found} is installed, and fedlora knows the inside of {' and '.join(f'{one}x' for one in TESTED)}: pip "
        f"install 'flwr>=1.41,<1.43'"
    )


class TooLarge(Exception):
    """An answer of the SuperLink exceeds the limit. Carries `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size:,} bytes")
        self.size = size


@dataclass(eq=False)
class _Coming:
    """A reply whose objects are being pulled. missing: their ids, in order. listed: the SuperLink's metadata of it,
    without content."""

    listed: Any
    missing: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    described: int = 0


def http_inbox(grid: Grid) -> HttpInbox | None:
    """The inbox of a grid that talks to a SuperLink. None for any other grid; and, with a warning, on a flwr that was
    not tested: replies are then measured only after they came, and Flower waits for announced ones up to two hours."""
    if why := untested():
        warnings.warn(f"{why}. Until then replies are measured only after they are in memory.", stacklevel=2)
        return None
    from flwr.superlink.grid.http_grid import HttpGrid

    return HttpInbox(grid) if isinstance(grid, HttpGrid) else None


class HttpInbox:
    """The replies that a SuperLink holds for a ServerApp. A reply comes once all its objects are there."""

    pause = 1.0

    def __init__(self, grid: Any) -> None:
        self._grid, self.client = grid, grid._runtime_client
        self._coming: dict[str, _Coming] = {}
        self._warned: set[str] = set()

    def look(self, wanted: Mapping[str, Limit]) -> Iterator[Arrival]:
        """One reply at a time; the caller must be done with one before the next is pulled. If the SuperLink answers
        with an error, it is asked again at the next look: no other node loses the round for that."""
        for message_id, limit in wanted.items():
            try:
                found = self._look(message_id, limit)
            except httpx.HTTPError as error:
                if message_id not in self._warned:
                    log.warning("no reply can be pulled, which is tried until the deadline: %s", shown(error, 200))
                self._warned.add(message_id)
                continue
            if found is not None:
                self._coming.pop(message_id, None)
                yield found
                del found

    def forget(self, message_id: str) -> None:
        """Let go of what has come of a reply."""
        self._coming.pop(message_id, None)

    def _look(self, message_id: str, limit: Limit) -> Arrival | None:
        from flwr.common.serde_utils import metadata_from_proto

        coming = self._coming.get(message_id)
        try:
            if coming is None:
                coming = self._announced(message_id, limit)
                if coming is None:
                    return None
                self._coming[message_id] = coming
            if not self._pull(coming, limit):
                return None
            message = put_together(coming.listed.metadata.message_id, coming.contents, limit)
            about = metadata_from_proto(coming.listed.metadata)  # the SuperLink's, not the sender's
            message.__dict__["_metadata"] = about
            found = Arrival(message_id, message)
        except TooLarge as error:
            found = Arrival(message_id, None, too_large(error.size, limit.bytes))
        except _Unreadable as error:
            found = Arrival(message_id, None, str(error))
        if coming is not None:
            self._confirm(coming)
        return found

    def _announced(self, message_id: str, limit: Limit) -> _Coming | None:
        """The reply to one message, if the SuperLink has one, and the ids of its objects."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        with answers_at_most(self.client, _TREE):
            pulled = self.client.PullMessages(PullAppMessagesRequest(message_ids=[message_id]))
        for message, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            if message.metadata.reply_to_message_id == message_id:
                ids: dict[str, None] = {}
                for number, object_id in enumerate(_ids(tree)):
                    if number >= limit.objects:
                        raise _Unreadable(f"its reply has more than {limit.objects:,} pieces")
                    ids[object_id] = None
                return _Coming(message, list(ids))
        return None

    def _pull(self, coming: _Coming, limit: Limit) -> bool:
        """Pull what is there. Returns whether that is all."""
        from flwr.proto.message_pb2 import PullObjectRequest

        run_id = self._grid.run.run_id
        while coming.missing:
            object_id = coming.missing[0]
            with answers_at_most(self.client, limit.bytes - coming.size + 4096):
                try:
                    got = self.client.PullObject(
                        PullObjectRequest(node=self._grid.node, run_id=run_id, object_id=object_id)
                    )
                except TooLarge as error:
                    raise TooLarge(coming.size + error.size) from None
            if not got.object_found:
                raise _Unreadable("a piece of its reply is gone; it may have stopped sending half way")
            if not got.object_available:
                return False
            content = got.object_content
            del got
            coming.size += len(content)
            coming.described += 0 if _head(content)[0] == "ArrayChunk" else len(content)
            if coming.size > limit.bytes:
                raise TooLarge(coming.size)
            if coming.described > limit.described:
                raise _Unreadable(
                    f"its reply has {coming.described:,} bytes beside arrays; {limit.described:,} are allowed"
                )
            coming.contents[object_id] = content
            del coming.missing[0]
        return True

    def _confirm(self, coming: _Coming) -> None:
        """Let the SuperLink delete the reply, accepted or refused."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        coming.contents = {}
        try:
            self.client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=coming.listed.metadata.message_id,
            ))  # fmt: skip
        except Exception as error:  # it deletes it at the run's end
            log.warning("the SuperLink keeps a reply longer than it need: %s", shown(error))


class _Unreadable(Exception):
    """A reply's objects are not in flwr's format."""


def put_together(message_id: str, contents: dict[str, bytes], limit: Limit) -> Message:
    """Assemble a message from its objects, after checking its size. It takes them out of `contents` array by array, so
    that an upload is in memory once.

    Raises:
        TooLarge: its arrays. _Unreadable: it is not a message of flwr.
    """
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents as inflated

    arrays, total = _arrays(contents)
    if total > limit.bytes:
        raise TooLarge(total)
    try:
        left, whole = Counter(piece for own in arrays.values() for piece in own), dict[str, Any]()
        for array, own in arrays.items():
            whole[array] = inflated(array, {one: contents[one] for one in (array, *own)})
            left.subtract(own)
            for piece in own:
                if not left[piece]:  # arrays of zeros share theirs
                    del contents[piece]
        message = inflated(message_id, contents, objects=whole)
    except Exception as error:  # a forged object can raise anything, and its sender is to blame
        raise _Unreadable(f"its reply cannot be put together: {shown(f'{type(error).__name__}: {error}')}") from error
    if not isinstance(message, Message):
        raise _Unreadable(f"its reply is no message, but a {type(message).__name__}")
    message.metadata.__dict__["_message_id"] = message_id
    return message


def _arrays(contents: Mapping[str, bytes]) -> tuple[dict[str, list[str]], int]:
    """(array -> its pieces, by ids; the bytes of all arrays once assembled: a list may name one piece many times).

    Only chunks are pieces. flwr would take an array for one, and arrays of arrays grow without limit.
    """
    heads = {key: _head(content) for key, content in contents.items()}
    found, total = dict[str, list[str]](), 0
    for key, (kind, children, begin) in heads.items():
        if kind == "Array":
            if any(heads[child][0] != "ArrayChunk" for child in children if child in heads):
                raise _Unreadable("an array of its reply has a piece that is no chunk of an array")
            try:
                sizes = [len(contents[child]) - heads[child][2] for child in children]
                total += sum(sizes[index] for index in json.loads(contents[key][begin:])["arraychunk_ids"])
            except Exception as error:
                raise _Unreadable("an array of its reply has no list of its pieces") from error
            found[key] = children
    return found, total


def _head(content: bytes) -> tuple[str, list[str], int]:
    """(kind, ids of its children, offset of its body) of an object."""
    end = content.find(b"\0")
    try:
        kind, children, _ = content[: max(end, 0)].decode().split(" ")
    except ValueError as error:
        raise _Unreadable("a piece of its reply has no head") from error
    return kind, children.split(",") if children else [], end + 1


def _ids(tree: Any) -> Iterator[str]:
    """The ids of a tree's objects, without recursion, because a stranger chooses its depth."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node.object_id
        waiting += node.children


@contextmanager
def answers_at_most(client: Any, most: int) -> Iterator[None]:
    """Refuse an answer of more than `most` bytes by its head, before its body is read: `TooLarge`."""

    def refuse(response: Any) -> None:
        length = response.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise TooLarge(int(length))

    http, before = client._client, client._client.event_hooks
    http.event_hooks = {**before, "response": [*before.get("response", []), refuse]}
    try:
        yield
    finally:
        http.event_hooks = before
