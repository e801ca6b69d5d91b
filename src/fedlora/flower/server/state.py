"""What a federation remembers, in one checkpoint a round; and what its rounds need from its clients."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from fedlora.core import checkpoint
from fedlora.core.lora import named_tensors
from fedlora.core.messages import Client
from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError, HyperparameterError, RankMismatch
from fedlora.flower.envelope import Receipt
from fedlora.flower.inside import Limit
from fedlora.flower.terms.policy import Policy
from fedlora.runs.robust import check_rule
from fedlora.server.checks import ranks_of
from fedlora.server.rules import Rule
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState

log = logging.getLogger(__name__)
_MB = 2**20


@dataclass(frozen=True, eq=False)
class FederationState:
    """A federation after a round: all of it is in one file, so that there is no moment at which only a part is stored.

    receipts: client -> which of its work counted (absent: never asked). line: the round's line of rounds.jsonl, as
    JSON; "" before the first round. nodes: the ids of the clients' nodes, where these are told apart by nothing else.
    """

    run: str
    state: RunState
    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    line: str = ""
    nodes: tuple[int, ...] = ()

    def under(self, clients: Collection[str]) -> FederationState:
        """The state without the memory of other clients. Their receipts stay: a site that is admitted again finds its
        own work by its receipt."""
        left = {name: memory for name, memory in self.state.clients.items() if name in clients}
        return replace(self, state=replace(self.state, clients=ReadOnly(left)))

    def store(self, folder: Path, server: Server) -> None:
        """Write it, beside the one before. Raises `CheckpointError`."""
        of = run_identity(self.run, server, self.state.server)
        checkpoint.save(folder, self.state.round, self, of=of)


def going_on(
    folder: Path | None, run: str, server: Server, begun: RunState, tell: Callable[[str], None] = log.warning
) -> FederationState:
    """What a run goes on from: its newest sound checkpoint, or `begun`, its state before the first round, if there is
    none. tell: receives a line for each damaged one.

    Raises:
        CheckpointError: there are some, but they are another run's, or damaged.
    """
    found = None
    if folder is not None:
        kind, of = server.method.State, run_identity(run, server, begun.server)
        found = checkpoint.load_newest(folder, FederationState, kind, of=of, tell=tell)
    return FederationState(run, begun) if found is None else found[1]


def run_identity(run: str, server: Server, state: ServerState) -> str:
    """The run's name in its checkpoints: its own, the method with its options, and a digest of all names and shapes."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in named_tensors(replace(state.start, heads=state.heads))]
    return f"{run}, {server.method!r}, modules {hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:8]}"


def drawn(clients: Collection[str], online: Collection[str], participation: float, *, seed: int, round: int
          ) -> list[str]:  # fmt: skip
    """The clients that a round asks: as many as participation draws of all, from those that are online. If all are,
    the engine's sample. round: the number of finished ones."""
    there = [name for name in clients if name in online]
    share = min(1.0, number_drawn(len(clients), participation) / max(1, len(there)))
    return sample_clients(there, share, seed=seed, round=round) if there else []


def number_drawn(sites: int, participation: float, quorum: int | None = None) -> int:
    """How many sites take part in a round. Raises `ConfigError` for a quorum that they cannot meet."""
    a_round = len(sample_clients([str(k) for k in range(sites)], participation, seed=0, round=0))
    if quorum is not None and quorum > a_round:
        raise ConfigError(f"server.quorum = {quorum} can never be met: {a_round} of {sites} sites are in a round.")
    return a_round


def least_usable(policy: Policy, quorum: int | None, rule: Rule | None, participation: float) -> int:
    """The usable uploads that the quorum and the rule ask for; 0: a round draws too few.

    Example: six clients, quorum 2, and Krum(f=1), which needs 2 f + 3: 5.
    """

    def enough(count: int) -> bool:
        return count >= (quorum or 1) and (rule is None or count >= rule.least(count))

    return min(takewhile(enough, range(number_drawn(len(policy.clients), participation), 0, -1)), default=0)


def check_playable(clients: Mapping[str, int], server: Server, state: ServerState, participation: float) -> None:
    """Raises `FedLoRAError` if no round could be played with these clients: their ranks or their number do not fit the
    method, the quorum or the rule."""
    served: list[Any] = []
    for name, rank in clients.items():
        try:
            if rank not in served:  # one readout of each rank is made, and dropped
                server.download(state, Client(name, rank))
        except (RankMismatch, HyperparameterError) as error:
            raise ConfigError(f"{server.method.name} cannot serve the rank {rank} of {name}: {error}") from error
        served.append(rank)
    count = number_drawn(len(clients), participation, server.round.quorum)
    if server.round.rule is not None:
        check_rule(server.round.rule, count)


def reply_limit(clients: Iterable[Client], state: ServerState) -> Limit:
    """The limit of these clients' uploads: twice the largest possible one and 1 MB."""
    largest = tensors = 0
    for client in clients:
        ranks = ranks_of(client, state)
        factors = {name: state.start.modules[name].factors for name in ranks}
        size = sum(
            ranks[name] * (B.shape[0] + A.shape[1]) * max(4, B.element_size(), A.element_size())
            for name, (B, A) in factors.items()
        )
        largest, tensors = max(largest, size), max(tensors, 2 * len(ranks))
    largest += sum(head.numel() * max(4, head.element_size()) for head in state.heads.values())
    tensors += len(state.heads)
    most = 2 * largest + _MB
    return Limit(most, 64 + 4 * tensors + most // (_MB // 4), 2 * _MB + 2048 * tensors)
