"""`FedLoRA`, a Flower `Strategy`: federated LoRA by any method of fedlora, for stock PEFT clients and fedlora's own.

    strategy = FedLoRA("glora", 10, r=16, lora_alpha=32)                    # ten nodes, clients that know only PEFT
    result = strategy.start(grid, initial_arrays, num_rounds=20)

    strategy = FedLoRA(Server(build("fedex-lora")), {"acme": 4, "berlin": 8}, adapter=seed, folder=Path("fed"))

A round: `configure_train` opens it and makes each client's own message, at its rank, as it is drawn;
`aggregate_train` takes one reply at a time, gives each client its fate (`server.answers`), and closes the round, which
gives the next state. That is stored in one file together with the round's line; from there on the round counts. So a
process that was killed at any moment, and started again, goes on to the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedlora.core.lora import Adapter
from fedlora.core.messages import Client
from fedlora.core.text import shown
from fedlora.errors import BudgetSpent, ConfigError, HyperparameterError, RankMismatch
from fedlora.flower.envelope import parts
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.peft import peft_adapter, peft_record, ranks_of_clients
from fedlora.flower.scores import NUMBERS, averaged
from fedlora.flower.server.answers import Answers
from fedlora.flower.server.journal import Journal, log_to_stdout
from fedlora.flower.server.private import require_room
from fedlora.flower.server.speaking import speaks
from fedlora.flower.server.state import FederationState, check_playable, drawn, going_on, least_usable, reply_limit
from fedlora.flower.server.waiting import Nodes
from fedlora.flower.terms.policy import Policy
from fedlora.methods.registry import build
from fedlora.runs.private_run import PrivateRun
from fedlora.server.kept import Kept
from fedlora.server.rounds import OpenRound
from fedlora.server.server import Server, start
from fedlora.server.state import RunState

log = logging.getLogger(__name__)
_WAIT = 30.0  # seconds until rounds begin with the nodes that are there


class FedLoRA(Strategy):
    """Federated LoRA on Flower.

    Args:
        server: with its method, quorum, weighting and rule; or a method's name, with a quorum of 1.
        clients: name -> rank; or names of clients of rank r; or how many there are.
        r, lora_alpha: of stock PEFT clients, which exchange `get_peft_model_state_dict` and know nothing of fedlora.
            None: fedlora's own clients (`fedlora.flower.site.node.Node`).
        adapter: the common start. None: the `initial_arrays` of `start`, a PEFT state dict of linear layers.
        run: the federation's name, by which clients keep their state.
        folder: for checkpoints, rounds.jsonl and now.json; a strategy made anew there goes on after the last round.
            None: nothing is stored.
        fraction_train, fraction_evaluate: shares of the clients that train in a round, and measure after it; as many of
            those that are online. seed: of that draw, which is the engine's while all are.
        names: how nodes are told apart: by the names under which the SuperLink "registered" their keys, never by their
            claims; or in "order" of their ids, for simulations, whose nodes have no names. By default "order" if
            `clients` is a number.

    Raises:
        ConfigError, HyperparameterError: arguments that are not as above.
    """

    def __init__(
        self, server: Server | str, clients: int | Sequence[str] | Mapping[str, int], *, r: int | None = None,
        lora_alpha: float | None = None, adapter: Adapter | None = None, run: str = "federation",
        folder: Path | str | None = None, fraction_train: float = 1.0, fraction_evaluate: float = 0.0, seed: int = 0,
        names: Literal["registered", "order"] | None = None,
    ) -> None:  # fmt: skip
        shares = fraction_train, fraction_evaluate or 1.0  # 0: nobody measures
        if not all(0 < share <= 1 for share in shares) or names not in (None, "registered", "order"):
            raise ConfigError(
                f"fraction_train and fraction_evaluate are shares up to 1, and names is 'registered' or 'order'; got "
                f"{fraction_train}, {fraction_evaluate}, {names!r:.80}."
            )
        rank = r or (max(adapter.ranks.values()) if adapter is not None else None)
        self.speaks = speaks(r, lora_alpha, run)
        self.nodes = Nodes(names or ("order" if isinstance(clients, int) else "registered"))
        if isinstance(server, str):
            server = Server(build(server), "frozen" if r else None, seed, Kept(quorum=1))
        self.server, self.run, self.folder = server, run, None if folder is None else Path(folder)
        self._checkpoints = None if self.folder is None else self.folder / "checkpoints"
        self.policy = Policy.made({"clients": ranks_of_clients(clients, rank)}, "FedLoRA")
        self.fraction_train, self.fraction_evaluate, self.seed = fraction_train, fraction_evaluate, seed
        self.journal = Journal(self.folder)
        self.stopped: str | None = None  # why no further round is played
        self.private: PrivateRun | None = None  # what a private server releases, and charges
        self._adapter, self._timeout, self._began = adapter, 3600.0, 0.0
        self._kept: FederationState | None = None
        self._answers: Answers | None = None
        self._whose: dict[int, str] = {}  # node -> its client, of those that were sent a message last
        self._unsent: dict[str, str] = {}  # client -> why it was sent none

    _patience = _WAIT  # seconds until a round begins with the nodes that are there; inf: as long as needed

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:  # fmt: skip
        """As Flower's, but it begins after the last round that is stored.

        Args:
            num_rounds: in all, those of a resumed run too. timeout: seconds for each client's answer, from when its own
                message was sent. should_stop: called after each round of this call; True ends them. The result has the
                metrics of this call's rounds, and its arrays once they have ended: they are another adapter in memory.

        Raises:
            ConfigError: a start or clients that the method cannot serve, or too few nodes for names in order.
            QuorumNotMet: a round had too few usable answers; start it again, and the round is played again.
            CheckpointError: a round could not be stored. httpx.HTTPError: the SuperLink did not answer for two minutes.
        """
        log_to_stdout()
        grid, self.stopped, self._timeout = BoundedGrid.around(grid), None, timeout
        self._begin(initial_arrays)
        result, train, evaluate = Result(), train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        self.summary()
        with self.journal.telling_the_end(lambda: self.stopped):
            online = self._wait(grid, None, _WAIT)  # once; later for as many as a round needs
            self._kept = replace(self.kept, nodes=self.nodes.known(online, self.kept.nodes, self.speaks.at_nodes))
            while True:
                self._measure(grid, result, evaluate, evaluate_fn)
                played = self.round in result.train_metrics_clientapp
                stop = should_stop is not None and played and should_stop(self.round, result)
                if self.round >= num_rounds or self.stopped is not None or stop:
                    break
                try:
                    questions = self.configure_train(self.round + 1, ArrayRecord(), train, grid)
                    metrics = self._played(grid.send_and_receive(questions, timeout=self._timeout))
                except BudgetSpent as spent:  # nothing was released for this round
                    if not self.round:
                        raise
                    log.warning("round %d is not played: %s", self.round + 1, spent)
                    self.stopped = "budget"
                    break
                result.train_metrics_clientapp[self.round] = metrics
        result.arrays = self.arrays()
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open the round, and return its messages: a `BoundedGrid` makes each as it draws it."""
        self._refresh()
        grid, opened = BoundedGrid.around(grid), self.server.open(self.state.server)
        online = self._awaited(grid, opened)
        self._clock, self._began = grid.clock, grid.clock.monotonic()
        chosen = drawn(self.policy.clients, online, self.fraction_train, seed=self.seed, round=self.round)
        chosen = chosen if opened.asked is None else [*opened.asked]  # a private round draws its own
        self._answers = Answers(self.kept, opened, [*self.policy.clients], online, chosen, self.policy.max_examples)
        asked = [self.policy.client(name) for name in self._answers.asked]
        grid.limit = reply_limit(asked, self.state.server)
        return self._questions(MessageType.TRAIN, self._answers.asked, online, config)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Take the replies as they come, and close and store the round. Raises `QuorumNotMet`, `CheckpointError`."""
        metrics = self._played(replies)
        return self.arrays(), metrics

    def _played(self, replies: Iterable[Message]) -> MetricRecord:
        answers = self._answers
        assert answers is not None, "configure_train opens the round"
        for reply in replies:
            client, state = self.policy.client(self._whose[reply.metadata.src_node_id]), self.state.server
            answers.take(client.id, reply, partial(self.speaks.reply, client=client, server=self.server, state=state))
            self.journal.answered(client.id)
            del reply  # before the next one is pulled
        for name, why in self._unsent.items():
            answers.settle(name, "not sent", why)
        spent = None if self.private is None else self.private.spent
        after = answers.close(spent, seconds=round(self._clock.monotonic() - self._began, 3))
        self._answers = answers = None  # its uploads, before the state is written
        self._store(after)
        line = self.journal.lines(self.round)[-1]
        trained = sum(one["fate"] == "trained" for one in line["fates"].values())
        return MetricRecord({"train_loss": math.nan if line["loss"] is None else line["loss"], "clients": trained})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages to the clients that measure. config: for fedlora's own, "measure", the part."""
        clients = self._refresh()  # one that was removed meanwhile is sent no model any more
        online = self.nodes.online(grid, clients)
        share = self.fraction_evaluate
        asked = drawn(clients, online, share, seed=self.seed, round=self.round) if share else []
        BoundedGrid.around(grid).limit = NUMBERS
        return self._questions(MessageType.EVALUATE, asked, online, config)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of each number that clients report, weighted by their examples. None if there is none."""
        each, lost = list[MetricRecord](), dict(self._unsent)
        for reply in replies:
            name = self._whose[reply.metadata.src_node_id]
            self.journal.answered(name)
            if reply.has_error():
                lost[name] = reply.error.reason or "it gave no reason"
            else:
                each += parts(reply.content, MetricRecord).values()
        for name, why in lost.items():
            log.warning("%s is not measured: %s", name, shown(why))
        return averaged(each, self.policy.max_examples)

    def summary(self) -> None:
        """Log what is played."""
        log.info("FedLoRA: %s, %d clients, round %d", self.server.method.name, len(self.policy.clients), self.round)

    @property
    def kept(self) -> FederationState:
        """All that it remembers after the last round. There is none before `start`."""
        assert self._kept is not None, "start begins with a state"
        return self._kept

    @property
    def state(self) -> RunState:
        """The run's state after the last round."""
        return self.kept.state

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.state.round

    def arrays(self) -> ArrayRecord:
        """The server's model as a PEFT state dict, which stock clients read: of the start's ranks, with their
        lora_alpha; without stock clients with lora_alpha = r. A warning says where that is not the whole model."""
        state = self.state.server
        if self.server.method.moves_base or state.heads or not self.server.has_global_model(state):
            log.warning(
                "%s: result.arrays and evaluate_fn get B and A that a new client would start from, which are not the "
                "whole model. docs/how-to/flower.md, 'The whole model', says how to write it.", self.server.method.name,
            )  # fmt: skip
        whoever = Client("whoever asks", state.start.ranks)
        return peft_record(self.server.download(state, whoever).adapter, self.speaks.factor)

    def _refresh(self) -> Mapping[str, Any]:
        """The clients that may take part, as they are before a round, while it waits, and before a measurement."""
        return self.policy.clients

    def _awaited(self, grid: BoundedGrid, opened: OpenRound) -> dict[str, int]:
        """Those that are online once there are enough for a round. A private round's mean is divided by all clients:
        the first one waits for all of them, a later one as long as for an answer."""
        if opened.stored:
            return self.nodes.online(grid, self.policy.clients)
        if self.private is not None:  # before any client trains
            require_room(self.private, self.round + 1)
        if opened.asked is not None:
            return self._wait(grid, None, math.inf if self.round == 0 else self._timeout)
        least = least_usable(self.policy, self.server.round.quorum, self.server.round.rule, self.fraction_train)
        return self._wait(grid, least, self._patience)

    def _wait(self, grid: BoundedGrid, least: int | None, seconds: float) -> dict[str, int]:
        seconds = seconds if seconds == math.inf else min(seconds, self._timeout)
        return self.nodes.wait(grid, self._refresh, least, seconds, self.round + 1)

    def _measure(
        self, grid: BoundedGrid, result: Result, config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:  # fmt: skip
        """Measure the last round, if it is not measured yet, and tell its scores."""
        scores: dict[str, Any] = {}
        if self.journal.measured(self.round):
            return
        if self.round and self.fraction_evaluate:
            questions = self.configure_evaluate(self.round, ArrayRecord(), config, grid)
            found = self.aggregate_evaluate(self.round, grid.send_and_receive(questions, timeout=self._timeout))
            if found is not None:
                scores["clients"] = dict(found)
                result.evaluate_metrics_clientapp[self.round] = found
        if evaluate_fn is not None and (measured := evaluate_fn(self.round, self.arrays())) is not None:
            scores["server"] = dict(measured)
            result.evaluate_metrics_serverapp[self.round] = measured
        if scores and self.round:
            self.journal.scored(self.round, scores)

    def _begin(self, initial: ArrayRecord | None) -> None:
        """The state to go on from, and its line, if a kill left it untold."""
        if self._kept is None:
            begun = start(self.server, self._adapter or peft_adapter(initial, self.speaks.factor))
            self.speaks.check(self.server, begun.server, self.policy.clients)
            check_playable(self.policy.clients, self.server, begun.server, self.fraction_train)
            self._kept, self._adapter = going_on(self._checkpoints, self.run, self.server, begun), None
        if self.kept.line:
            self.journal.played(self.kept.line)

    def _questions(
        self, kind: str, clients: Sequence[str], online: dict[str, int], config: ConfigRecord
    ) -> Iterator[Message]:
        """A message to each of these clients, made as it is drawn. One whom the method cannot serve gets none."""
        self.nodes.known(online, self.kept.nodes, self.speaks.at_nodes)
        measure = kind == MessageType.EVALUATE
        number = self.round + (not measure)
        self.journal.asked(number, "measure" if measure else "train", clients)
        self._whose, self._unsent = {}, {}

        def made() -> Iterator[Message]:
            for name in clients:
                try:
                    download = self.server.download(self.state.server, self.policy.client(name))
                    content = self.speaks.question(download, self.kept, config, number, measure)
                except (RankMismatch, HyperparameterError) as error:
                    self._unsent[name] = f"the method cannot serve it: {error}"
                    self.journal.answered(name)
                    continue
                self._whose[online[name]] = name
                group = f"{self.run}-{number}-{kind}"
                message = Message(content, online[name], kind, ttl=self._timeout, group_id=group)
                del download, content  # before the next one is made
                yield message
                del message

        return made()

    def _store(self, after: FederationState) -> None:
        """Store a round, and tell it."""
        if self._checkpoints is not None:
            after.store(self._checkpoints, self.server)
        self._kept = after
        self.journal.played(after.line)
