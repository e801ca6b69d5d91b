"""FedLoRA: the rounds of Flower's `Strategy.start`, as a thin shell around `Server`.

    strategy = FedLoRA(server, policy, start(server, seed_adapter), run="trial", folder=Path("runs/trial"))
    strategy.start(grid, num_rounds=10)

`start` has what Flower's own loop lacks: a message for each node at its own rank, a deadline that also ends the
messages, a named fate for every client of the policy, a repeated round if too few answer, a checkpoint inside the
round, an error instead of a "successful" run without training, and continuing from a checkpoint. So none of the other
methods of `Strategy` would ever be called, and `FedLoRA` is no subclass; `stock.StockFedLoRA` is, for stock clients.

Where the parts of a round are, beside what Flower calls them:

membership.py        who is asked                                     sample_nodes
questions.py         the messages                                     configure_train
collecting.py        messages out, answers in, late ones by name      Grid.send_and_receive
attempt.py           each answer's fate, and the next state           aggregate_train
site_evaluation.py   the sites' measurements                          configure_evaluate, aggregate_evaluate
round_lines.py, events.py, lines.py                                   the log

An *intake* (`Server.open`) takes in one round's uploads and gives the next state. The *memory* (`FlowerState`) is what
a checkpoint holds: `memory.state.server` is the model, as `Server` has it. The *policy* says who may take part.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedlora.core import checkpoint
from fedlora.core.echo import shown
from fedlora.errors import BudgetSpent, ConfigError, QuorumNotMet
from fedlora.flower.messages.codecs import Codec, OwnClients
from fedlora.flower.messages.measuring import HeldOut
from fedlora.flower.rounds.attempt import Attempt, Closed
from fedlora.flower.rounds.choosing import Choosing
from fedlora.flower.rounds.collecting import (
    Answer,
    Clock,
    Identify,
    Waiting,
    collect,
    registered_names,
    who_is_online,
)
from fedlora.flower.rounds.events import Again, Awaited, Began, Done, Ended, Event, EventWriter
from fedlora.flower.rounds.flower_state import FlowerState, run_identity
from fedlora.flower.rounds.hooks import RoundHooks
from fedlora.flower.rounds.lines import lines_of
from fedlora.flower.rounds.membership import PolicyReader, check_playable, draw, with_largest_share
from fedlora.flower.rounds.private_words import RELEASED
from fedlora.flower.rounds.progress import fates_of
from fedlora.flower.rounds.questions import Asker, Question
from fedlora.flower.rounds.round_lines import RoundLines
from fedlora.flower.rounds.site_evaluation import SiteEvaluation, SiteRound
from fedlora.flower.terms.policy import Policy
from fedlora.server.server import Server
from fedlora.server.state import RunState

log = logging.getLogger(__name__)


class FedLoRA:
    """Federated LoRA on Flower, by any method of fedlora.

    Args:
        server: with its method, quorum, weighting. policy: who may take part, and how. policy_file: read again before
            each round; None: the policy stays. state: the start, from `server.start`.
        run: the federation's name, by which clients keep their state. folder: for checkpoints; None keeps none.
            record: for events.jsonl and rounds.jsonl; None: nowhere. resume: go on from the newest checkpoint in
            `folder`, if any, or from this one that was read there. It must be of this run, method, options, modules and
            shapes; weighting, quorum, rule and policy may differ. Its values take precedence over `state`, those of the
            start too.
        participation, seed: of the sampling of clients, as in `simulate`. codec: the kind of clients.
        identify: how to identify nodes; by default by their registered names, never by their claims.
        after_round: called with each finished round's line, once its checkpoint is stored; its result is added to the
            line. After a crash it is called again for a round that it had not finished. It may call `stop`.
        choosing: which score the sites are asked to measure, and when; None: never.
        hooks: what another kind of rounds adds, such as `PrivateRounds`. clock: the clock, which also waits.

    Raises:
        ConfigError: a method that these clients cannot run, or a server that needs a second exchange of messages;
            without `resume`, a folder that has checkpoints. CheckpointError: they are another run's, or damaged.
    """

    def __init__(
        self,
        server: Server,
        policy: Policy,
        state: RunState,
        *,
        policy_file: Path | None = None,
        run: str = "federation",
        folder: Path | None = None,
        record: Path | None = None,
        resume: bool | FlowerState = False,
        participation: float = 1.0,
        seed: int = 0,
        codec: Codec = OwnClients(),  # noqa: B008 - immutable
        identify: Identify = registered_names,
        after_round: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] | None = None,
        choosing: Choosing | None = None,
        hooks: RoundHooks = RoundHooks(),  # noqa: B008 - immutable
        clock: Clock = time,
    ) -> None:
        self.server, self.policy, self.run, self.clock = server, policy, run, clock
        self.participation, self.choosing, self._hooks = participation, choosing, hooks
        self._folder, self._record, self._seed = folder, record, seed
        self.codec, self.after_round, self._identify = codec, after_round, identify
        self.memory, self._identity = FlowerState(run, state, members=policy.clients), run_identity(run, server, state.server)
        if isinstance(resume, FlowerState):
            self.memory = resume
        elif resume and folder is not None:
            kind = server.method.State
            loaded = checkpoint.load_newest(folder, FlowerState, kind, of=self._identity, tell=log.warning)
            if loaded is not None:
                self.memory = loaded[1]
        elif folder is not None and (stored := checkpoint.newest_round(folder)) is not None:
            raise ConfigError(
                f"{folder} has a checkpoint of round {stored}, and this run would begin again at round 1: its own "
                f"would be lost beside it. Continue with resume=True, or take another folder."
            )
        self._check(policy)
        self._policy_file = PolicyReader(policy_file, self._check)
        self._events = EventWriter(record / "events.jsonl" if record is not None else None)
        self.lines = RoundLines(None)
        self.stopped: str | None = None  # why no further round is played
        self._num_rounds: int | None = None

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.memory.state.round

    def stop(self, why: str) -> None:
        """Play no further round; for use in `after_round`."""
        self.stopped = why

    # ------------------------------------------------------------------------------------------------------ the rounds

    def start(self, grid: Grid, *, num_rounds: int = 3, timeout: float | None = None) -> Result:
        """Play rounds until `num_rounds` are done, counting those of a resumed run.

        Args:
            timeout: replaces the policy's deadline.

        Returns:
            The number of clients that trained in each round, and its loss. The model is in `memory.state`.

        Raises:
            QuorumNotMet: a round had too few usable replies in each of its attempts; the state before it is stored.
        """
        log_to_stdout()
        result, self.stopped, self._num_rounds = Result(), None, num_rounds
        with self._hooks.playing(self), self._telling_the_end():
            self.lines = RoundLines(self._record / "rounds.jsonl" if self._record else None, upto=self.round)
            last = self.lines.get(self.round)
            if last is not None and "metrics" not in last:  # a crash came between its checkpoint and its end
                self._finish(grid, last)
            while self.round < num_rounds and self.stopped is None:
                line = self._play(grid, timeout)
                trained = sum(fate == "trained" for fate in fates_of(line).values())
                loss = math.nan if line["loss"] is None else line["loss"]
                result.train_metrics_clientapp[self.round] = MetricRecord({"clients": trained, "loss": loss})
        return result

    def _play(self, grid: Grid, timeout: float | None) -> Mapping[str, Any]:
        """Play one round, and store it. Its line."""
        closed, seconds = self._closed(grid, timeout)
        for fated in closed.overturned:
            self._event(fated)
        line = self._hooks.line({**closed.line, "seconds": round(seconds, 3)})
        self.lines.put(line)  # before the checkpoint: a surplus line can be cut off, a missing one cannot be made
        self.memory = closed.memory
        del closed  # the next round's state replaces this one's
        self._save()
        return self._finish(grid, line)

    def _closed(self, grid: Grid, timeout: float | None) -> tuple[Closed, float]:
        """The first attempt that counts, of as many as the policy allows, and its seconds."""
        nth = 0
        while True:
            nth += 1
            self.read_policy()
            began = self.clock.monotonic()
            attempt = self._attempt(grid, nth, timeout or self.policy.deadline)
            try:
                return attempt.close(), self.clock.monotonic() - began
            except QuorumNotMet as error:
                why = f"{error} Not there: {attempt.missing or 'nobody'}."
                self._event(Again(self.round + 1, nth, why))
                self.memory = attempt.not_counted(error)
                self._save()
                if nth > self.policy.retries:
                    raise QuorumNotMet(why) from error
            del attempt  # with the uploads
            self._wait_for_nodes(grid)

    def _attempt(self, grid: Grid, nth: int, deadline: float) -> Attempt:
        """Ask the clients, and take their answers until the deadline."""
        intake = with_largest_share(self.server, self.policy).open(self.memory.state.server)
        self._hooks.before(self, grid, intake, deadline)
        asker = self._asker(grid)
        drawn = draw(
            self.policy, self.memory.refusals, asker.online, participation=self.participation, seed=self._seed,
            round=self.round, chosen=intake.asked,
        )  # fmt: skip
        attempt = Attempt(asker, drawn, intake, nth, deadline)
        others = {name: {"fate": fate, "why": why} for name, (fate, why) in drawn.not_asked.items()}
        self._event(Began(self.round + 1, nth, drawn.asked, others, deadline))
        for answer in self._answers(grid, attempt.questions(), deadline, self.round + 1, "training"):
            fated = attempt.take(answer)
            del answer
            self._event(fated)
        for fated in attempt.unserved:
            self._event(fated)
        return attempt

    def _finish(self, grid: Grid, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """The work after a stored round: evaluation, and the final version of its line."""
        if self.choosing is not None:
            found = self.measure(grid, "validation") if self.choosing.sites_due(self.round) else SiteRound()
            line = {**line, **found.facts()}
        more = self.after_round(line) if self.after_round is not None else None
        line = self._hooks.line({"metrics": {}, **line, **(more or {})})
        self.lines.put(line)
        self._event(Done(line["round"], line))
        return line

    def measure(self, grid: Grid, part: HeldOut) -> SiteRound:
        """Let the sites measure on their held-out data; no site, if sites are never asked."""
        if self.choosing is None:
            return SiteRound()
        began, deadline = self.clock.monotonic(), self.policy.deadline
        evaluation = SiteEvaluation(self._asker(grid), part)
        answers = self._answers(grid, evaluation.questions(deadline), deadline, self.round, "measuring")
        found = evaluation.read(answers, self.choosing.metric)
        clients = evaluation.memories(found)  # stored with the next round: who holds something else by then says so
        self.memory = replace(self.memory, state=replace(self.memory.state, clients=clients))
        return replace(found, seconds=round(self.clock.monotonic() - began, 3)) if evaluation.asked else found

    # -------------------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _telling_the_end(self) -> Iterator[None]:
        """Write down why the rounds in this block ended."""
        why = "interrupted"
        try:
            yield
            why = self.stopped or "complete"
        except QuorumNotMet:
            why = "quorum"
            raise
        except BudgetSpent as spent:  # a private round: nobody trained for it
            log.warning("round %d is not played: %s", self.round + 1, spent, extra=RELEASED)
            why = self.stopped = "budget"
            if not self.round:
                raise
        except Exception as error:
            why = shown(f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._event(Ended(self.round, why))

    def online(self, grid: Grid) -> dict[str, int]:
        """The clients that are online -> their node ids."""
        return who_is_online(self._identify, grid, self.policy.deadline, self.clock)

    def read_policy(self) -> None:
        """Read the policy's file again, before the next round; what changed while no server ran is new too."""
        self.policy, error = self._policy_file.read(self.policy)
        self.memory, change = self.memory.under(self.policy.clients, error)
        if change is not None:
            self._event(change)

    def _check(self, policy: Policy) -> None:
        """Raises `FedLoRAError` for a policy that this federation cannot play."""
        self._hooks.check(self, policy)
        check_playable(policy, self.server, self.memory.state.server, self.codec, self.participation)

    def _asker(self, grid: Grid) -> Asker:
        return Asker(self.server, self.policy, self.codec, self.memory, self.online(grid))

    def _answers(
        self, grid: Grid, questions: Iterable[Question], deadline: float, number: int, doing: str
    ) -> Iterator[Answer]:
        """Each client's answer as it comes. Tells meanwhile for whom the others wait."""
        for found in collect(grid, questions, deadline=deadline, clock=self.clock):
            if isinstance(found, Waiting):
                self._event(Awaited(number, doing, found.clients, round(found.seconds, 1), round(found.left, 1)))
            else:
                yield found
            del found  # a reply may be large

    def _wait_for_nodes(self, grid: Grid, seconds: float = 30.0) -> None:
        """Wait before a round is repeated, until enough clients are online, but no longer than this."""
        needed, until = self.server.quorum or 1, self.clock.monotonic() + min(seconds, self.policy.deadline)
        while self.clock.monotonic() < until and len(set(self.online(grid)) & set(self.policy.clients)) < needed:
            self.clock.sleep(1.0)

    def _event(self, event: Event) -> None:
        """Write what may be told of the event, and log its words."""
        public = self._hooks.event(event, self.policy)
        if public is None:
            return
        try:
            self._events.write(public)
        except OSError as error:  # losing a report is better than losing a round
            log.warning("an event could not be written: %s", error)
        level = logging.INFO if isinstance(public, Done | Ended) else logging.WARNING
        for line in lines_of(public, self._num_rounds):
            log.log(level, "%s", line, extra=RELEASED)

    def _save(self) -> None:
        if self._folder is not None:
            checkpoint.save(self._folder, self.round, self.memory, of=self._identity)


def log_to_stdout() -> None:
    """Print fedlora's log if nobody else does, because Flower gives a ServerApp a handler only for its own logger."""
    package = logging.getLogger("fedlora")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    if package.getEffectiveLevel() > logging.INFO:
        package.setLevel(logging.INFO)


__all__ = ["FedLoRA", "Identify", "registered_names"]
