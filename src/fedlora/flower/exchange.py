"""One exchange with some clients: a message for each, made as it is drawn, and whose each reply is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedlora.errors import HyperparameterError, RankMismatch
from fedlora.flower.grid import BoundedGrid

log = logging.getLogger(__name__)


class Exchange:
    """Mutable: it notes who was asked and has not answered.

    Args:
        kind: of the messages, such as "train". group: their id. nodes: client -> its node, of those to ask. content:
            makes a client's message; it raises `RankMismatch` or `HyperparameterError` for one whom the method cannot
            serve, who then gets none. unsent: told of each such client, and why. timeout: seconds to live.
    """

    def __init__(
        self, kind: str, group: str, nodes: Mapping[str, int], content: Callable[[str], RecordDict],
        unsent: Callable[[str, str], None], timeout: float,
    ) -> None:  # fmt: skip
        self._kind, self._group, self._nodes, self._timeout = kind, group, nodes, timeout
        self._content, self._unsent = content, unsent
        self._waiting: dict[int, str] = {}

    def questions(self, grid: Grid) -> Iterable[Message]:
        """The messages. A `BoundedGrid` draws them one by one; Flower's own grids walk through them twice."""
        made = self._made()
        return made if isinstance(grid, BoundedGrid) else list(made)

    def _made(self) -> Iterator[Message]:
        for name, node in self._nodes.items():
            try:
                content = self._content(name)
            except (RankMismatch, HyperparameterError) as error:
                self._unsent(name, f"the method cannot serve it: {error}")
                continue
            self._waiting[node] = name
            message = Message(content, node, self._kind, ttl=self._timeout, group_id=self._group)
            del content
            yield message
            del message

    def whose(self, reply: Message) -> str | None:
        """The client that was asked and answers so, once; None, with a log line, if there is none."""
        name = self._waiting.pop(reply.metadata.src_node_id, None)
        if name is None:
            log.warning("a reply of node %d does not count: it was not asked", reply.metadata.src_node_id)
        return name
