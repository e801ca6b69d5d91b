"""The events of a simulated federation: a finished client, a finished round, and its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedlora.core.messages import Upload
from fedlora.core.sent import Attacked
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.simulation.traffic import Traffic


class Evaluator(Protocol):
    """Measures a state, on whatever data it was made for.

    Example:
        >>> class Size:
        ...     def evaluate(self, server, state):
        ...         return {"norm": sum(lora.norm() for lora in server.global_update(state.server).values())}
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1, evaluator=Size()))
        >>> sorted(record.metrics)
        ['norm']
    """

    def evaluate(self, server: Server, state: RunState) -> Mapping[str, float]:
        """Metric name -> value."""


@dataclass(frozen=True)
class ClientDone:
    """One client of a round has finished. loss: its mean training loss, None if it failed. refused: why it does not
    count; None: its own upload is fine, or it abstained. A robust rule judges later: see the record.

    Example:
        >>> played = play(server, clients, trainer, start(server, seed_adapter), rounds=1)
        >>> [event.client for event in played if isinstance(event, ClientDone)]
        ['site-1', 'site-2']
    """

    round: int
    client: str
    loss: float | None
    refused: str | None


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One finished round.

    round: its number, from 1. losses: client -> mean training loss. weights: client -> p_i for those that counted ({}
    in a private round). refused: client -> why not (a refused upload or a failed client). seconds: by phase.
    server_rank: the state's rank, averaged over modules. metrics: the evaluator's, {} if it did not run. uploads: those
    that counted, as the server got them; () if it discards them. A private round's record has only state, metrics,
    seconds and server_rank; its `state.clients` is secret, as it shows who took part. attacked: what an adversary did,
    None without one. loss: the mean of `losses` over the clients that count, weighted by their examples
    (`core.trainer.round_loss`); None if none counts. examples: client -> how many it says it trained on, for accepted
    uploads; 0: it abstained.

    Example:
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1))
        >>> record.round, record.losses, record.weights
        (1, {'site-1': 0.5, 'site-2': 0.5}, {'site-1': 0.5, 'site-2': 0.5})
    """

    round: int
    state: RunState
    losses: Mapping[str, float]
    weights: Mapping[str, float]
    refused: Mapping[str, str]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    bytes: Traffic
    server_rank: float
    uploads: tuple[Upload, ...]
    attacked: Attacked | None = None
    loss: float | None = None
    examples: Mapping[str, float] = field(default_factory=dict)
