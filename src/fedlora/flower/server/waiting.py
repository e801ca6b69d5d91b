"""Which nodes are online, whose they are, and waiting for enough of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from flwr.serverapp import Grid

from fedlora.errors import ConfigError
from fedlora.flower.grid import BoundedGrid

log = logging.getLogger(__name__)
_REMIND = 300.0  # seconds until the log says again who is missing


@dataclass(frozen=True)
class Nodes:
    """How clients find their nodes. by: the names under which the SuperLink "registered" their keys, never by their
    claims; or in the "order" of their ids, where nodes have no names."""

    by: Literal["registered", "order"]

    def online(self, grid: Grid, clients: Collection[str]) -> dict[str, int]:
        """The clients that are online -> their node ids. By names, all that are registered."""
        if self.by == "order":
            return dict(zip(clients, sorted(grid.get_node_ids()), strict=False))
        return {node.name: node.node_id for node in grid.get_nodes() if node.name}

    def wait(
        self, grid: BoundedGrid, clients: Callable[[], Collection[str]], least: int | None, seconds: float, round: int
    ) -> dict[str, int]:
        """Those that are online once `least` of the clients are (None: all), or after so many seconds.

        Args:
            clients: those of now, asked at each look. round: that waits, for the log.

        Raises:
            ConfigError: fewer nodes than clients that are told apart by their order: they would get others' names.
        """
        until, reminded = grid.clock.monotonic() + seconds, -math.inf
        while True:
            wanted = clients()
            online, now = self.online(grid, wanted), grid.clock.monotonic()
            enough = len(wanted) if least is None else least
            missing = [name for name in wanted if name not in online]
            if len(wanted) - len(missing) >= enough or now >= until:
                break
            if now - reminded >= _REMIND:
                reminded = now
                log.warning("round %d waits for %d clients; not online: %s", round, enough, ", ".join(missing))
                if self.by == "registered" and (nameless := sum(not node.name for node in grid.get_nodes())):
                    log.warning(
                        "%d nodes are online without a registered name: register it, or names='order'", nameless
                    )
            grid.clock.sleep(1.0)
        if self.by == "order" and missing:
            raise ConfigError(
                f"FedLoRA has {len(wanted)} clients, one for each node in the order of ids, and {len(online)} nodes "
                f"are online. Start as many: flwr run ... --federation-config 'num-supernodes={len(wanted)}'."
            )
        return online

    def known(self, online: dict[str, int], before: tuple[int, ...], fixed: bool) -> tuple[int, ...]:
        """The nodes to remember, of clients that nothing else tells apart. fixed: a client cannot move to another one.

        Raises:
            ConfigError: they cannot, and have others than before.
        """
        if self.by != "order":
            return before
        now = tuple(online.values())
        if fixed and before not in ((), now):
            raise ConfigError(
                "the folder has rounds of nodes with other ids, as those of a new simulation are: their order would "
                "give clients the history of others. Take a new folder; or keep the SuperLink and its nodes running, "
                "or register their names."
            )
        return now
