"""FedLoRA: Flower's strategy as a thin shell around `Server`.

    strategy = FedLoRA(server, spec, policy, state=start(server, seed_adapter), run="trial", folder=Path("runs/trial"))
    strategy.start(grid, rounds=10)

What Flower's own loop lacks is in `start`: a message for each node at its own rank, a deadline that is also the life of
the messages, a round that is played again when too few answer, a checkpoint inside the round, an error instead of a
"successful" run without training, and going on from where a checkpoint stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedlora.core import checkpoint
from fedlora.core.messages import Client, ClientMemory, Download, as_pruned
from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError, QuorumNotMet, RankMismatch, UploadRefused
from fedlora.flower.codecs import Codec, OwnClients, Reply
from fedlora.flower.policy import Policy
from fedlora.flower.records import RecordError, to_array
from fedlora.server.sampling import sample_clients
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState, Tally

log = logging.getLogger(__name__)
Identify = Callable[[Grid], Mapping[str, int]]  # registered name -> node id, of the nodes that are online


@dataclass(frozen=True, eq=False)
class FlowerState:
    """All that the server remembers of a federation: a run's state, and how often each client was refused."""

    TAG: ClassVar[str] = "flower/1"

    run: str
    state: RunState
    refusals: Mapping[str, int] = field(default_factory=dict)


def registered_names(grid: Grid) -> dict[str, int]:
    """The names under which the SuperLink knows its nodes (`flwr supernode register --name`), by authentication."""
    return {node.name: node.node_id for node in grid.get_nodes() if node.name}


class FedLoRA(Strategy):
    """Federated LoRA on Flower, by any method of fedlora.

    Args:
        server: with its method, quorum, weighting. policy: who may take part, and how. state: where to begin, as
            `server.start` makes it; a checkpoint in `folder` wins over it where `resume` is on.
        run: the federation's name: clients keep their state by it. folder: where checkpoints go; None keeps none.
        participation, seed: of the sampling of clients, as `simulate`. codec: what kind of clients these are.
        identify: how nodes are told apart; by default the names under which they are registered, never what they claim.
        on_round: called with each finished round's facts.

    Raises:
        ConfigError: a method that these clients cannot run, or a server that needs a second exchange of messages; a
            checkpoint of another run.
    """

    def __init__(
        self,
        server: Server,
        policy: Policy,
        state: RunState,
        *,
        run: str = "federation",
        folder: Path | None = None,
        resume: bool = False,
        participation: float = 1.0,
        seed: int = 0,
        codec: Codec = OwnClients(),  # noqa: B008 - immutable
        identify: Identify = registered_names,
        on_round: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.server, self.policy, self.run = server, policy, run
        self._folder, self._participation, self._seed = folder, participation, seed
        self._identify, self._on_round, self._codec = identify, on_round, codec
        self.memory = FlowerState(run, state)
        if resume and folder is not None:
            loaded = checkpoint.load_newest(folder, FlowerState, server.method.State)
            if loaded is not None:
                if loaded[1].run != run:
                    raise ConfigError(f"{folder} holds the run {loaded[1].run!r}, not {run!r}.")
                self.memory = loaded[1]
        codec.require(server, state.server, policy)
        if server.open(state.server).exchanges > 1:
            raise ConfigError("the Flower app has no second exchange in a round, which a sketch needs; simulate it.")
        self._asked: dict[int, Download] = {}  # node id -> what it was sent in this attempt
        self._group, self._began = "", time.monotonic()
        self.refused: dict[str, str] = {}

    # ------------------------------------------------------------------------------------------- what Flower asks for

    def summary(self) -> None:
        log.info("FedLoRA: %s, %d clients, round %d", self.server.method.name, len(self.policy.clients), self.round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """A message for each client of the round, at its own rank. `arrays` is not used: each has its own."""
        online = dict(self._identify(grid))
        state = self.memory.state
        for name in filter(self._quarantined, self.policy.clients):
            self.refused[name] = f"it is in quarantine after {self.memory.refusals[name]} refused uploads"
        asked = [name for name in self.policy.clients if not self._quarantined(name)]
        share = self._participation
        if 0 < len(asked) < len(self.policy.clients):  # as many as before, of those that are left
            share = min(1.0, share * len(self.policy.clients) / len(asked))
        chosen = sample_clients(asked, share, seed=self._seed, round=state.round) if asked else []
        self._asked, messages = {}, []
        for name in chosen:
            if name not in online:
                self.refused[name] = "it is not online"
                continue
            memory = state.clients.get(name, ClientMemory())
            rank = self.policy.clients[name]
            client = as_pruned(Client(name, rank if isinstance(rank, int) else dict(rank)), memory)
            download = self.server.download(state.server, client)
            self._asked[online[name]] = download
            messages.append(
                Message(
                    self._codec.question(download, memory.held, self.run),
                    online[name],
                    MessageType.TRAIN,
                    ttl=self.policy.deadline,  # or a straggler would work through stale rounds
                    group_id=self._group,
                )
            )
        return messages  # a list: a generator is answered with HTTP 500 in deployment

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in the replies, aggregate, and store the new state before anything else happens.

        Raises:
            QuorumNotMet: too few usable ones. The state is unchanged.
        """
        state, opened = self.memory.state, self.server.open(self.memory.state.server)
        memories, refusals = dict(state.clients), dict(self.memory.refusals)
        taken: dict[str, Reply] = {}
        for message in replies:
            client, result = self._read(message)
            if isinstance(result, str):  # what failed at the client (memory, a lost disk) is no attempt at anything
                self._refuse(client, result, {} if message.has_error() else refusals)
            elif client in taken:
                self._refuse(client, "a second reply in one round; the first one stands.", refusals)
            else:
                taken[client] = result
        terms, sound = self.server.terms(state.server), {}
        for name, reply in taken.items():  # who counts is known before shares are capped: a refused claim caps nobody
            try:
                terms.check(reply.upload)
                sound[name] = float(reply.upload.num_examples)
            except UploadRefused as refusal:
                self._refuse(name, refusal.reason, refusals)
        losses = {}
        for name, count in self.policy.examples(sound).items():
            reply = taken[name]
            try:
                opened.add(replace(reply.upload, num_examples=count))
            except UploadRefused as refusal:
                self._refuse(name, refusal.reason, refusals)
                continue
            losses[name] = reply.loss
            refusals.pop(name, None)
            before = memories.get(name, ClientMemory())
            memories[name] = ClientMemory(None, 0, reply.held, before.ranks if reply.ranks is None else reply.ranks)
        for node, download in self._asked.items():
            name = download.client.id
            if name not in losses and name in memories:  # what it holds now is not known
                memories[name] = replace(memories[name], held=None)
                log.debug("node %d, client %s: no usable reply", node, name)
        try:
            after = opened.close()
        except (QuorumNotMet, RankMismatch) as error:
            self.memory = replace(self.memory, refusals=ReadOnly(refusals))
            if isinstance(error, RankMismatch):  # some upload's rank, which only the method can see
                raise QuorumNotMet(f"round {self.round + 1} cannot be aggregated: {error}") from error
            raise
        for name, reason in (after.tally.refused if after.tally is not None else {}).items():
            if losses.pop(name, None) is not None:  # a defence's doing, with all uploads before it
                self._refuse(name, reason, refusals)
        run_state = RunState(after.round, after, ReadOnly(memories))
        self.memory = FlowerState(self.run, run_state, ReadOnly(refusals))
        self._save()
        tally = after.tally or Tally({})
        metrics = MetricRecord({"clients": len(losses), "loss": sum(losses.values()) / max(len(losses), 1)})
        facts = {
            "round": after.round,
            "seconds": round(time.monotonic() - self._began, 3),
            "losses": losses,
            "weights": dict(tally.weights),
            "refused": {**tally.refused, **self.refused},
        }
        if self._on_round is not None:
            self._on_round(facts)
        return self._arrays(after), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """None: evaluation is the server's, on its own held-out data."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    # ------------------------------------------------------------------------------------------------------ the rounds

    @property
    def round(self) -> int:
        """How many rounds are done."""
        return self.memory.state.round

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        *unused: Any,
        **also_unused: Any,
    ) -> Result:
        """Play rounds until `num_rounds` are done, counting those of a resumed run.

        Raises:
            QuorumNotMet: a round had too few usable replies, in each of its attempts; the state before it is stored.
        """
        result, began = Result(), time.monotonic()
        nothing, config = ArrayRecord(), ConfigRecord()
        result.arrays = self._arrays(self.memory.state.server)
        while self.round < num_rounds:
            number = self.round + 1
            for attempt in range(self.policy.retries + 1):
                self._group, self.refused, self._began = f"{self.run}-{number}-{attempt}", {}, time.monotonic()
                messages = self.configure_train(number, nothing, config, grid)
                replies = grid.send_and_receive(messages, timeout=timeout or self.policy.deadline) if messages else []
                try:
                    arrays, metrics = self.aggregate_train(number, replies)
                except QuorumNotMet as error:
                    log.warning("round %d, attempt %d: %s Not there: %s", number, attempt + 1, error, self.refused)
                    if attempt == self.policy.retries:
                        self._save()
                        raise QuorumNotMet(f"{error} Not there: {self.refused or 'nobody'}.") from error
                    self._wait_for_nodes(grid)
                else:
                    break
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            log.info("round %d of %d done, %.1f s since the start", number, num_rounds, time.monotonic() - began)
        return result

    # -------------------------------------------------------------------------------------------------------- inside

    def _read(self, message: Message) -> tuple[str, Reply | str]:
        """(client, what it sent) or (client, why that is not used). Never raises: a reply is a stranger's."""
        node = message.metadata.src_node_id
        asked = self._asked.get(node)
        name = asked.client.id if asked is not None else f"node {node}"
        if message.metadata.group_id != self._group:
            return (
                name,
                f"it answers {str(message.metadata.group_id)[:60]!r}, and this is {self._group!r}: late or replayed",
            )
        if message.has_error():
            return name, f"it failed: {str(message.error.reason)[:300]}"
        if asked is None:
            return name, "nobody asked it"
        try:
            return name, self._codec.reply(message.content, asked, self.memory.state.server, self.run)
        except RecordError as error:
            return name, str(error)
        except Exception as error:  # whatever else a forged record brings about is its sender's
            log.exception("the reply of %s cannot be read", name)
            return name, f"its reply cannot be read: {type(error).__name__}"

    def _refuse(self, client: str, reason: str, refusals: dict[str, int]) -> None:
        log.warning("round %d, client %s: %s", self.round + 1, client, reason)
        self.refused.setdefault(client, reason)
        if client in self.policy.clients:
            refusals[client] = refusals.get(client, 0) + 1

    def _quarantined(self, client: str) -> bool:
        return bool(self.policy.quarantine) and self.memory.refusals.get(client, 0) >= self.policy.quarantine

    def _wait_for_nodes(self, grid: Grid, seconds: float = 30.0) -> None:
        """Before a round is tried again: until enough clients are online, or no longer than this."""
        needed, until = self.server.quorum or 1, time.monotonic() + min(seconds, self.policy.deadline)
        while time.monotonic() < until and len(set(self._identify(grid)) & set(self.policy.clients)) < needed:
            time.sleep(1.0)

    def _save(self) -> None:
        if self._folder is not None:
            checkpoint.save(self._folder, self.round, self.memory)

    def _arrays(self, state: ServerState) -> ArrayRecord:
        """The server's update as Flower's result; empty for methods without a global model."""
        if not self.server.has_global_model(state):
            return ArrayRecord()
        named = self.server.global_update(state)
        return ArrayRecord({f"{f}/{m}": to_array(t) for m, lora in named.items() for f, t in lora.tensors().items()})


__all__ = ["FedLoRA", "FlowerState", "registered_names"]
