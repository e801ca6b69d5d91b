"""Everything that a server remembers, and everything that a run remembers: immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory
from fedlora.server.judged import Judged


@dataclass(frozen=True)
class Tally:
    """Who counted in an aggregation. weights: client -> p_i. abstained: sent 0 examples. refused: client -> reason;
    also of a client that counts, if its second upload was refused.
    judged: a robust rule's report on every accepted upload; None without a rule.

    Example:
        >>> server.aggregate(server.init(seed_adapter), uploads).tally.weights
        {'site-1': 0.5, 'site-2': 0.5}
    """

    weights: Mapping[str, float]
    abstained: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    judged: Judged | None = None


@dataclass(frozen=True, eq=False)
class ServerState:
    """Everything that the server remembers.

    modules: module -> the method's own state. start: the common seed adapter.

    Example:
        >>> state = server.aggregate(server.init(seed_adapter), uploads)
        >>> state.round, sorted(state.modules), state.tally.weights
        (1, ['q', 'v'], {'site-1': 0.5, 'site-2': 0.5})
    """

    round: int
    modules: Mapping[str, Any]
    heads: Mapping[str, Tensor]
    start: Adapter
    tally: Tally | None


@dataclass(frozen=True, eq=False)
class RunState:
    """A whole run between two rounds, as a checkpoint stores it. `round` rounds are done.

    Example:
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1))
        >>> record.state.round, sorted(record.state.clients)
        (1, ['site-1', 'site-2'])
    """

    round: int
    server: ServerState
    clients: Mapping[str, ClientMemory] = field(default_factory=dict)
