"""FedLoRA: the rounds of Flower's `Strategy.start`, as a thin shell around `Server`.

    strategy = FedLoRA(server, policy, start(server, seed_adapter), run="trial", folder=Path("runs/trial"))
    strategy.start(grid, num_rounds=10)

A round, with the file of each step and the method of Flower that it stands for:

1. The policy says who may take part, and is read again. The server opens an *intake* for the uploads.
2. Clients are drawn, and who of them is online is     membership.py (sample_nodes)
   asked, at its own rank                              questions.py (configure_train), collecting.py
3. When all are asked, each answer gets its fate as    collecting.py (Grid.send_and_receive), attempt.py
   it comes
   Who has not answered at the deadline is late. Nobody fetches its answer, and its site goes back to its last work
   that counted.
4. The intake closes and gives the next state          attempt.py (aggregate_train)
   A robust rule may still refuse an upload.
5. The round's line is stored, then the checkpoint     round_lines.py, flower_state.py
   From here on the round counts.
6. The sites measure, then `after_round` is called     site_evaluation.py (configure_evaluate, aggregate_evaluate)
   The line is stored again, with what they give.

If too few answers count, refusals and receipts are stored in the checkpoint of the round before. The server waits up to
30 s for the drawn clients and begins again at 1, as often as the policy allows; it draws the same clients, unless the
policy or a quarantine changed. A private round is the same loop with other `hooks`, but it asks everyone once and has
no quorum. After a crash the caller gives the newest sound checkpoint (`resume`); later lines are cut off, and step 6 is
done if the record shows that it had not ended.

Flower's loop would call its methods above; this one does not, so `FedLoRA` is no `Strategy`. For stock clients,
`stock.StockFedLoRA` is one.
"""

from __future__ import annotations

import logging
import math
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
from fedlora.flower.rounds.lines import lines_of, log_to_stdout
from fedlora.flower.rounds.membership import PolicyReader, check_playable, draw, with_largest_share
from fedlora.flower.rounds.private_words import RELEASED
from fedlora.flower.rounds.progress import fates_of
from fedlora.flower.rounds.questions import MessageMaker, Question
from fedlora.flower.rounds.round_lines import RoundLines, is_finished
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
            record: for events.jsonl and rounds.jsonl; None: nowhere. resume: go on from this one instead of `state`;
            `flower_state.newest` reads it from `folder`. Weighting, quorum, rule and policy may differ from its own.
        participation, seed: of the sampling of clients, as in `simulate`. codec: the kind of clients.
        identify: how to identify nodes; by default by their registered names, never by their claims.
        after_round: called with each finished round's line, once its checkpoint is stored; its result is added to the
            line. With `record`, it is called again after a crash for a round that it had not finished. It may call
            `stop`.
        choosing: which score the sites are asked to measure, and when; None: never.
        hooks: what another kind of rounds adds, such as `PrivateRounds`. clock: the clock, which also waits.

    Raises:
        ConfigError: a method that these clients cannot run; without `resume`, a folder that has checkpoints.
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
        resume: FlowerState | None = None,
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
        self.flower_state = resume or FlowerState(run, state, members=policy.clients)
        self._identity = run_identity(run, server, state.server)
        if resume is None and folder is not None and (stored := checkpoint.newest_round(folder)) is not None:
            raise ConfigError(
                f"{folder} has a checkpoint of round {stored}, and this run would begin again at round 1: its own "
                f"would be lost beside it. Continue with resume=newest(...), or take another folder."
            )
        self._check(policy)
        self._policy_file = PolicyReader(policy_file, self._check)
        self._events = EventWriter(record / "events.jsonl" if record is not None else None)
        self.lines = RoundLines(None)
        self.stopped: str | None = None  # why no further round is played
        self._num_rounds: int | None = None
        self._timeout: float | None = None

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.flower_state.state.round

    @property
    def deadline(self) -> float:
        """Seconds for which anybody is waited for: those given to `start`, or the policy's."""
        return self.policy.deadline if self._timeout is None else self._timeout

    def stop(self, why: str) -> None:
        """Play no further round; for use in `after_round`."""
        self.stopped = why

    # ------------------------------------------------------------------------------------------------------ the rounds

    def start(self, grid: Grid, *, num_rounds: int = 3, timeout: float | None = None) -> Result:
        """Play rounds until `num_rounds` are done, counting those of a resumed run.

        Args:
            timeout: replaces the policy's deadline.

        Returns:
            For each round that this call began: the number of clients that trained (0 if it is private, because nobody
            is told), and its loss. The model is in `flower_state.state`.

        Raises:
            QuorumNotMet: a round had too few usable replies in each of its attempts; the state before it is stored.
            BudgetSpent: the budget pays for no private round at all. Errors of the method's own are not caught.
        """
        log_to_stdout()
        result, self.stopped, self._num_rounds, self._timeout = Result(), None, num_rounds, timeout
        with self._hooks.playing(self), self._reporting_the_end():
            self.lines = RoundLines(self._record / "rounds.jsonl" if self._record else None, upto=self.round)
            last = self.lines.get(self.round)
            if last is not None and not is_finished(last):  # a crash came between its checkpoint and its end
                self._finish(grid, last)
            while self.round < num_rounds and self.stopped is None:
                line = self._play(grid)
                trained = sum(fate == "trained" for fate in fates_of(line).values())
                loss = math.nan if line["loss"] is None else line["loss"]
                result.train_metrics_clientapp[self.round] = MetricRecord({"clients": trained, "loss": loss})
        return result

    def _play(self, grid: Grid) -> Mapping[str, Any]:
        """Play one round, and store it. Its line."""
        closed, seconds = self._play_attempts(grid)
        for fated in closed.overturned:
            self._event(fated)
        line = self._hooks.line({**closed.line, "seconds": round(seconds, 3)})
        self.lines.put(line)  # before the checkpoint: a surplus line can be cut off, a missing one cannot be made
        self.flower_state = closed.flower_state
        del closed  # the next round's state replaces this one's
        self._save()
        return self._finish(grid, line)

    def _play_attempts(self, grid: Grid) -> tuple[Closed, float]:
        """Make attempts, as many as the policy allows, until one counts. Its outcome, and its seconds."""
        nth = 0
        while True:
            nth += 1
            self.read_policy()
            began = self.clock.monotonic()
            attempt = self._ask_clients(grid, nth)
            try:
                return attempt.close(), self.clock.monotonic() - began
            except QuorumNotMet as error:
                said = [f"{name}: {reason}" for name, reason in attempt.missing.items()]
                others = "; ".join(one for one in said if one not in str(error))  # which names those that it refused
                why = f"{error} Not there: {others}." if others else str(error)
                self._event(Again(self.round + 1, nth, why))
                self.flower_state = attempt.not_counted(error)
                self._save()
                if nth > self.policy.retries:
                    raise QuorumNotMet(why) from error
            drawn = {name for name, one in attempt.fates.items() if one.fate not in ("not drawn", "quarantined")}
            del attempt
            needed, until = self.server.quorum or 1, self.clock.monotonic() + min(30.0, self.deadline)
            while self.clock.monotonic() < until and len(self.online(grid).keys() & drawn) < needed:
                self.clock.sleep(1.0)

    def _ask_clients(self, grid: Grid, nth: int) -> Attempt:
        """Ask the clients, and take their answers until the deadline."""
        intake = with_largest_share(self.server, self.policy).open(self.flower_state.state.server)
        self._hooks.before(self, grid, intake)  # it may read the policy again
        maker = self._look_who_is_online(grid)
        drawn = draw(
            self.policy, self.flower_state.refusals, maker.online, participation=self.participation, seed=self._seed,
            round=self.round, chosen=intake.asked,
        )  # fmt: skip
        attempt = Attempt(maker, drawn, intake, nth, self.deadline)
        others = {name: {"fate": fate, "why": why} for name, (fate, why) in drawn.not_asked.items()}
        self._event(Began(self.round + 1, nth, drawn.asked, others, self.deadline))
        for answer in self._exchange(grid, attempt.questions(), self.round + 1, "training"):
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
        began = self.clock.monotonic()
        evaluation = SiteEvaluation(self._look_who_is_online(grid), part)
        answers = self._exchange(grid, evaluation.questions(self.deadline), self.round, "measuring")
        found = evaluation.read(answers, self.choosing.metric)
        clients = evaluation.memories(found)  # stored with the next round: who holds something else by then says so
        self.flower_state = replace(self.flower_state, state=replace(self.flower_state.state, clients=clients))
        return replace(found, seconds=round(self.clock.monotonic() - began, 3)) if evaluation.asked else found

    # -------------------------------------------------------------------------------------------------------- inside

    @contextmanager
    def _reporting_the_end(self) -> Iterator[None]:
        """Report why the rounds in this block ended. A budget that pays for no further round is no error."""
        why = "interrupted"
        try:
            yield
            why = self.stopped or "complete"
        except QuorumNotMet:
            why = "quorum"
            raise
        except BudgetSpent as spent:  # nothing was released for this round
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
        return who_is_online(self._identify, grid, self.deadline, self.clock)

    def read_policy(self) -> None:
        """Read the policy's file again, before the next round; what changed while no server ran is new too."""
        self.policy, error = self._policy_file.read(self.policy)
        self.flower_state, change = self.flower_state.under(self.policy.clients, error)
        if change is not None:
            self._event(change)

    def _check(self, policy: Policy) -> None:
        """Raises `FedLoRAError` for a policy that this federation cannot play."""
        self._hooks.check(self, policy)
        check_playable(policy, self.server, self.flower_state.state.server, self.codec, self.participation)

    def _look_who_is_online(self, grid: Grid) -> MessageMaker:
        """Who makes the messages to those that are online now. While the SuperLink fails, it is asked again."""
        return MessageMaker(self.server, self.policy, self.codec, self.flower_state, self.online(grid))

    def _exchange(self, grid: Grid, questions: Iterable[Question], number: int, doing: str) -> Iterator[Answer]:
        """Send the questions, and pass on each answer as it comes. Report meanwhile for whom the others wait."""
        for found in collect(grid, questions, deadline=self.deadline, clock=self.clock):
            if isinstance(found, Waiting):
                self._event(Awaited(number, doing, found.clients, round(found.seconds, 1), round(found.left, 1)))
            else:
                yield found
            del found

    def _event(self, event: Event) -> None:
        """Write what may be told of the event, and log its words."""
        public = self._hooks.event(event, self.policy)
        if public is None:
            return
        try:
            self._events.write(public)
        except OSError as error:  # losing a report is better than losing a round
            log.warning("an event could not be written: %s", error)
        level = logging.INFO if isinstance(public, Done | Ended) else logging.WARNING  # the usual; all else is news
        for line in lines_of(public, self._num_rounds):
            log.log(level, "%s", line, extra=RELEASED)  # the hooks let it pass

    def _save(self) -> None:
        if self._folder is not None:
            checkpoint.save(self._folder, self.round, self.flower_state, of=self._identity)


__all__ = ["FedLoRA", "Identify", "registered_names"]
