"""Who is there: by the names under which nodes are registered, and never by what they claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.serverapp import Grid

from fedlora.flower.rounds.collecting import Clock, patiently

Identify = Callable[[Grid], Mapping[str, int]]  # registered name -> node id, of the nodes that are online


def registered_names(grid: Grid) -> dict[str, int]:
    """The names under which the SuperLink knows its nodes (`flwr supernode register --name`), by authentication."""
    return {node.name: node.node_id for node in grid.get_nodes() if node.name}


def who_is_online(identify: Identify, grid: Grid, deadline: float, clock: Clock) -> dict[str, int]:
    """By `identify`, asked again for as long as a round may take where the SuperLink fails."""
    return dict(patiently(lambda: identify(grid), until=clock.monotonic() + deadline, clock=clock))


__all__ = ["Identify", "registered_names", "who_is_online"]
