"""Replies as they come in: a reply's limits, its result, and the inbox of a grid that is no SuperLink's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedlora.flower.messages.parts import parts


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
    bytes: int = 0
    why: str = ""


class PlainInbox:
    """The inbox of any grid: it measures replies after they have arrived. pause: seconds between two checks."""

    pause = 0.1

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def look(self, wanted: Mapping[str, Limit]) -> Iterator[Arrival]:
        """The replies since the last check to the messages with these ids."""
        for message in self._grid.pull_messages(list(wanted)):
            reply_to = message.metadata.reply_to_message_id
            limit, size = wanted.get(reply_to), 0  # None: nobody waits for it
            if message.has_content():
                records = parts(message.content, ArrayRecord).values()
                size = sum(len(array.data) for arrays in records for array in arrays.values())
            if limit is not None and size > limit.bytes:
                yield Arrival(reply_to, None, size, too_large(size, limit.bytes))
            else:
                yield Arrival(reply_to, message, size)

    def half(self, message_id: str) -> str:
        """What is known about a reply that is incomplete: nothing."""
        return ""


def too_large(size: int, most: int) -> str:
    """Why a reply is refused."""
    return (
        f"its reply has {size:,} bytes or more, and {most:,} are allowed (twice what its upload can have, or the "
        f"policy's max_upload_mb)"
    )
