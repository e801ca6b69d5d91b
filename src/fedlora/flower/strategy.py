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
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedlora.core import checkpoint
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory, Download, Held
from fedlora.core.parcels import held_after, pack
from fedlora.core.text import shown
from fedlora.errors import BudgetSpent, ConfigError, QuorumNotMet
from fedlora.flower.envelope import Receipt, parts
from fedlora.flower.grid import BoundedGrid, Exchange, NoAnswer
from fedlora.flower.peft import peft_adapter, peft_record, peft_upload, ranks_of_clients, require_stock
from fedlora.flower.records import parcel_record, record_upload
from fedlora.flower.scores import as_question
from fedlora.flower.server.answers import Answers, Reply
from fedlora.flower.server.journal import Journal, beside, log_to_stdout, round_line
from fedlora.flower.server.private import require_room
from fedlora.flower.server.state import (
    FederationState,
    check_playable,
    drawn,
    least_usable,
    newest,
    reply_limit,
    run_identity,
)
from fedlora.flower.terms.policy import Policy
from fedlora.methods.registry import build
from fedlora.runs.private_run import PrivateRun
from fedlora.server.kept import Kept
from fedlora.server.rounds import OpenRound
from fedlora.server.server import Server, start
from fedlora.server.state import RunState

log = logging.getLogger(__name__)
_WAIT, _REMIND = 30.0, 300.0  # seconds to wait for nodes; until that is told again


class FedLoRA(Strategy):
    """Federated LoRA on Flower.

    Args:
        server: with its method, quorum, weighting and rule; or a method's name, with a quorum of 1.
        clients: name -> rank, or ranks by module; or names of clients of rank r; or how many there are.
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
        self, server: Server | str, clients: int | Sequence[str] | Mapping[str, Any], *, r: int | None = None,
        lora_alpha: float | None = None, adapter: Adapter | None = None, run: str = "federation",
        folder: Path | str | None = None, fraction_train: float = 1.0, fraction_evaluate: float = 0.0, seed: int = 0,
        names: Literal["registered", "order"] | None = None,
    ) -> None:  # fmt: skip
        if (r is None) != (lora_alpha is None) or (lora_alpha is not None and not 0 < lora_alpha < math.inf):
            raise ConfigError(
                f"r and lora_alpha are those of stock PEFT clients, both or neither; got {r}, {lora_alpha}."
            )
        rank = r or (max(adapter.ranks.values()) if adapter is not None else None)
        self.factor = lora_alpha / r if r and lora_alpha else 1.0  # of clients' B to the server's
        self.stock, self.names = r is not None, names or ("order" if isinstance(clients, int) else "registered")
        if isinstance(server, str):
            server = Server(build(server), "frozen" if self.stock else None, seed, Kept(quorum=1))
        self.server, self.run, self.folder = server, run, None if folder is None else Path(folder)
        self.policy = Policy.made({"clients": ranks_of_clients(clients, rank)}, "FedLoRA")
        self.fraction_train, self.fraction_evaluate, self.seed = fraction_train, fraction_evaluate, seed
        self.journal = Journal(self.folder)
        self.stopped: str | None = None  # why no further round is played
        self.private: PrivateRun | None = None  # what a private server releases, and charges
        self._adapter, self._timeout, self._began = adapter, 3600.0, 0.0
        self._kept: FederationState | None = None
        self._answers: Answers | None = None
        self._not_sent: dict[str, str] = {}  # client -> why it gets no message
        self._sent: dict[str, Held] = {}  # client -> what it holds once it has the message that it was sent

    _patience = _WAIT  # seconds until a round begins with the nodes that are there
    _terms = ""  # that fedlora's own clients must have in their join.toml

    # ------------------------------------------------------------------------------------------- Flower's own methods

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:  # fmt: skip
        """As Flower's, but it begins after the last round that is stored.

        Args:
            num_rounds: in all, those of a resumed run too. timeout: seconds for each client's answer, from when its own
                message was sent. should_stop: called after each round; True ends the rounds. The result has the
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
        with self._telling_the_end():
            self._refresh()
            self._know(self._wait(grid, None, _WAIT))  # once; later for as many as a round needs
            while True:
                self._measure(grid, result, evaluate, evaluate_fn)
                stop = should_stop is not None and self.round > 0 and should_stop(self.round, result)
                if self.round >= num_rounds or self.stopped is not None or stop:
                    break
                questions = self.configure_train(self.round + 1, ArrayRecord(), train, grid)
                metrics = self._played(grid.send_and_receive(questions, timeout=self._timeout))
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
        self._clock = grid.clock
        self._began = self._clock.monotonic()
        chosen = self._chosen(opened, online)
        self._answers = Answers(self.kept, opened, [*self.policy.clients], online, chosen, self.policy.max_examples)
        asked = [self.policy.client(name) for name in self._answers.asked]
        grid.limit = reply_limit(asked, self.state.server)
        self._asked = self._exchange(MessageType.TRAIN, self._answers.asked, online, config)
        return self._asked.questions()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Take the replies as they come, and close and store the round. Raises `QuorumNotMet`, `CheckpointError`."""
        metrics = self._played(replies)
        return self.arrays(), metrics

    def _played(self, replies: Iterable[Message]) -> MetricRecord:
        answers = self._answers
        assert answers is not None, "configure_train opens the round"
        for reply in replies:
            self._take(answers, reply)
            del reply  # before the next one is pulled
        after = answers.close(self._more, seconds=round(self._clock.monotonic() - self._began, 3))
        self._answers = answers = None  # its uploads, before the state is written
        self._store(after)
        line = self.journal.lines(self.round)[-1]
        trained = sum(one["fate"] == "trained" for one in line["fates"].values())
        return MetricRecord({"train_loss": math.nan if line["loss"] is None else line["loss"], "clients": trained})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages to the clients that measure, if any do."""
        online = self._online(grid) if self.round and self.fraction_evaluate else {}
        asked = drawn(self.policy.clients, online, self.fraction_evaluate, seed=self.seed, round=self.round)
        self._asked = self._exchange(MessageType.EVALUATE, asked, online, config)
        return self._asked.questions()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of each number that clients report, weighted by their examples. None if there is none."""
        found: dict[str, list[tuple[float, float]]] = {}
        for reply in replies:
            name = self._asked.whose(reply)
            self.journal.answered(name)
            if reply.has_error():
                log.warning("%s is not measured: %s", name, shown(reply.error.reason))
                continue
            for metrics in parts(reply.content, MetricRecord).values():
                numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
                weight = numbers.pop("num-examples", 0.0)
                for key, value in numbers.items() if weight > 0 else ():
                    found.setdefault(key, []).append((weight, value))
        means = {key: sum(w * x for w, x in each) / sum(w for w, _ in each) for key, each in found.items()}
        return MetricRecord(dict(means)) if means else None

    def summary(self) -> None:
        """Log what is played."""
        log.info("FedLoRA: %s, %d clients, round %d", self.server.method.name, len(self.policy.clients), self.round)

    # ------------------------------------------------------------------------------------------------------- its own

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
        """The server's model as a PEFT state dict, which stock clients read: of rank r; otherwise of the start's ranks,
        with lora_alpha = r. A change of the base weights is not in it."""
        ranks: Any = self.state.server.start.ranks if not self.stock else next(iter(self.policy.clients.values()))
        return peft_record(self.server.download(self.state.server, Client("whoever asks", ranks)).adapter, self.factor)

    # ---------------------------------------------------------------------------- what another kind of rounds changes

    def _refresh(self) -> None:
        """Before a round, and before a measurement."""

    def _online(self, grid: Grid) -> dict[str, int]:
        """The clients that are online -> their node ids."""
        if self.names == "order":
            return dict(zip(self.policy.clients, sorted(grid.get_node_ids()), strict=False))
        return {node.name: node.node_id for node in grid.get_nodes() if node.name}

    def _awaited(self, grid: BoundedGrid, opened: OpenRound) -> dict[str, int]:
        """Those that are online once there are enough for a round. A private round's mean is divided by all clients:
        the first one waits for all of them, a later one as long as for an answer."""
        if opened.stored:
            return self._online(grid)
        if self.private is not None:  # before any client trains
            require_room(self.private, self.round + 1)
        if opened.asked is not None:
            return self._wait(grid, None, math.inf if self.round == 0 else self._timeout)
        rule, quorum = self.server.round.rule, self.server.round.quorum
        return self._wait(grid, least_usable(self.policy, quorum, rule, self.fraction_train), self._patience)

    def _wait(self, grid: BoundedGrid, least: int | None, patience: float) -> dict[str, int]:
        """Those that are online once `least` clients are (None: all), or after so many seconds."""
        clock, told = grid.clock, -math.inf
        until = clock.monotonic() + min(patience, math.inf if patience == math.inf else self._timeout)
        while True:
            found, now = self._online(grid), clock.monotonic()
            wanted = len(self.policy.clients) if least is None else least  # the policy may change meanwhile
            if len(found.keys() & self.policy.clients.keys()) >= wanted:
                break
            if now >= until:
                break
            if now - told >= _REMIND:
                told = now
                away = ", ".join(name for name in self.policy.clients if name not in found)
                log.warning("round %d waits for %d clients; not online: %s", self.round + 1, wanted, away)
                if self.names == "registered" and (nameless := sum(not node.name for node in grid.get_nodes())):
                    log.warning(
                        "%d nodes are online without a registered name: register it, or names='order'", nameless
                    )
            clock.sleep(1.0)
            self._refresh()
        wanted = len(self.policy.clients)
        if self.names == "order" and len(found) < wanted:  # clients would get each other's names
            raise ConfigError(
                f"FedLoRA has {wanted} clients, one for each node in the order of ids, and {len(found)} nodes are "
                f"online. Start as many: flwr run ... --federation-config 'num-supernodes={wanted}'."
            )
        return found

    def _chosen(self, opened: OpenRound, online: Mapping[str, int]) -> Sequence[str]:
        """The clients that a round asks: a private one draws its own."""
        if opened.asked is not None:
            return opened.asked
        return drawn(self.policy.clients, online, self.fraction_train, seed=self.seed, round=self.round)

    def _more(self, round: int) -> Mapping[str, Any]:
        """Further facts for the round's line, once it is aggregated."""
        return {} if self.private is None else {"privacy": self.private.spent(round)}

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
        if evaluate_fn is not None and (told := evaluate_fn(self.round, self.arrays())) is not None:
            scores["server"] = dict(told)
            result.evaluate_metrics_serverapp[self.round] = told
        if scores and self.round:
            self.journal.scored(self.round, scores)

    # -------------------------------------------------------------------------------------------------------- inside

    def _begin(self, initial: ArrayRecord | None) -> None:
        """The state to go on from, and its line, if a kill left it untold."""
        if self._kept is None:
            if self._adapter is None and initial is None:
                raise ConfigError("FedLoRA needs a start: adapter=, or initial_arrays, a PEFT state dict.")
            begun = start(self.server, self._adapter or peft_adapter(initial or ArrayRecord(), self.factor))
            if self.stock:
                require_stock(self.server, begun.server, self.policy.clients)
            check_playable(self.policy.clients, self.server, begun.server, self.fraction_train)
            found = None
            if self.folder is not None:
                found = newest(self.folder / "checkpoints", self.run, self.server, begun.server)
            self._kept, self._adapter = found or FederationState(self.run, begun), None
        if self.kept.line:
            self.journal.played(self.kept.line)

    def _know(self, online: Mapping[str, int]) -> None:
        """Keep the nodes of clients that are told apart by nothing else. Raises `ConfigError` for others than before:
        stock clients choose their data by the node."""
        if self.names != "order":
            return
        nodes = tuple(online.values())
        if self.stock and self.kept.nodes not in ((), nodes):
            raise ConfigError(
                f"{self.folder} has round {self.round}, and these nodes have other ids than then, as those of a new "
                f"simulation: their order would give clients the history of others. Take a new folder; or keep the "
                f"SuperLink and its nodes running, or register their names."
            )
        self._kept = replace(self.kept, nodes=nodes)

    def _download(self, name: str) -> Download:
        return self.server.download(self.state.server, self.policy.client(name))

    def _exchange(self, kind: str, clients: Iterable[str], online: Mapping[str, int], config: ConfigRecord) -> Exchange:
        """An exchange with these clients, of those that are online."""
        self._not_sent = {}
        number, nodes = self.round + (kind == MessageType.TRAIN), {name: online[name] for name in clients}
        self.journal.asked(number, "train" if kind == MessageType.TRAIN else "measure", nodes)

        def content(name: str) -> RecordDict:
            return self._content(kind, number, self._download(name), config)

        return Exchange(kind, f"{self.run}-{number}-{kind}", nodes, content, self._unsent, self._timeout)

    def _unsent(self, name: str, why: str) -> None:
        """A client gets no message."""
        self._not_sent[name] = why
        if self._answers is not None:
            self._answers.settle(name, "not sent", why)
        self.journal.answered(name)

    def _content(self, kind: str, number: int, download: Download, config: ConfigRecord) -> RecordDict:
        """What a message holds, without what its client holds already."""
        if self.stock:
            arrays = peft_record(download.adapter, self.factor)
            return RecordDict({"arrays": arrays, "config": ConfigRecord({**dict(config), "server-round": number})})
        name, asks = download.client.id, kind == MessageType.EVALUATE
        self._sent[name] = held_after(download, download.start, untrained=asks)
        held = self.state.clients.get(name, ClientMemory()).held
        receipt = self.kept.receipts.get(name, Receipt())
        record = parcel_record(pack(download, held), self.run, self._terms, receipt)
        for key, value in config.items():
            parts(record, ConfigRecord)["config"].setdefault(key, value)
        return as_question(record, str(config.get("measure", "validation"))) if asks else record

    def _take(self, answers: Answers, reply: Message) -> None:
        """Give a client the fate of its answer."""
        name = self._asked.whose(reply)
        if reply.has_error():
            fate: Any = reply.error.fate if isinstance(reply.error, NoAnswer) else "failed"
            answers.settle(name, fate, reply.error.reason or "it gave no reason")
        else:
            answers.take(name, lambda: self._read(reply.content, self.policy.client(name)))
        self.journal.answered(name)

    def _read(self, content: RecordDict, client: Client) -> Reply:
        """A reply as an upload. Raises `RecordError`; the server checks values."""
        state = self.state.server
        factors = {name: state.start.modules[name].factors for name in client.ranks(state.start.modules)}
        shapes = {name: (B.shape[0], A.shape[1]) for name, (B, A) in factors.items()}
        if self.stock:
            upload, loss = peft_upload(content, client, shapes, self.factor)
            return Reply(upload, loss, None)
        upload, loss, kept = record_upload(
            content, client, run=self.run, round=state.round, shapes=shapes, roles=self.server.roles(state),
            heads=state.heads,
        )  # fmt: skip
        return Reply(upload, loss, replace(self._sent[client.id], local=tuple(kept)))

    def _store(self, after: FederationState) -> None:
        """Store a round, and tell it."""
        if self.folder is not None:
            of = run_identity(self.run, self.server, after.state.server)
            checkpoint.save(self.folder / "checkpoints", after.state.round, after, of=of)
        self._kept = after
        self.journal.played(after.line)
        line = self.journal.lines(self.round)[-1]
        for said in beside(line):
            log.warning("%s", said)
        log.info("%s", round_line(line))

    @contextmanager
    def _telling_the_end(self) -> Iterator[None]:
        """Tell why the rounds in this block ended. A budget that pays for no further round is no error."""
        kind, why = "interrupted", ""
        try:
            yield
            kind, why = ("stopped", self.stopped) if self.stopped is not None else ("complete", "")
        except QuorumNotMet as error:
            kind, why = "quorum", str(error)
            log.warning("%s", shown(why, 4000))
            raise
        except BudgetSpent as spent:  # nothing was released for this round
            log.warning("round %d is not played: %s", self.round + 1, spent)
            kind, why, self.stopped = "budget", str(spent), "budget"
            if not self.round:
                raise
        except Exception as error:
            kind, why = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            self.journal.ended(kind, why)
