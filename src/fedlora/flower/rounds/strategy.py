"""FedLoRA, not a Flower `Strategy`: the rounds of its `start`, as a thin shell around `Server`.

    strategy = FedLoRA(server, policy, start(server, seed_adapter), run="trial", folder=Path("runs/trial"))
    strategy.start(grid, num_rounds=10)

`start` plays rounds, each by `_play`:

    _play_attempts            makes attempts until one counts:
        1. _open_attempt
        2. _collect_answers
        3. Attempt.close
    4. lines.put, _save
    5. _finish

1. Read the policy's file again, wait for enough clients, open the server's round for uploads, and draw clients
   (`hooks`, membership.py). After 30 s without enough it asks those that are there, and the failed attempt names who is
   missing. If a round does not draw everybody, others stand in for clients that are offline, or gave nothing usable in
   an earlier attempt. A policy that changes during a round holds from its next attempt.
2. Send each drawn client that is online a message at its own rank (questions.py, collecting.py), and give each answer
   its fate as it comes (attempt.py). Each client has the policy's deadline from the moment at which its own message was
   sent. Without an answer by then (checked when all messages are sent) it is late: nobody fetches its answer, and its
   site goes back to its last work that counted.
3. Close the round, which gives the next state. A robust rule may give an upload no weight.
4. Store the round's line (round_lines.py), then the checkpoint (flower_state.py). From here on the round counts.
5. Let the sites measure (site_evaluation.py), call `after_round`, and store the line again with what they give. (The
   start, round 0, is not measured.)

3 fails if the quorum or the robust rule asks for more usable uploads (`membership.least_usable` says how many). Then
the server stores the old model again, with new receipts, as the checkpoint of the round before, and begins again at 1,
as often as the policy allows. What each fate does to its client, in this attempt and in a later one, is the table
`attempt.EFFECTS`. Example, with four clients, participation 0.75, quorum 3:

    attempt 1   asks a, b, c: a trained, b refused, c late. One upload of three is usable, so nothing counts.
    attempt 2   asks a and d, who have not failed in this round, then one of b and c: here b. All three trained: it
                counts.
    the line    a, b, d: trained. c: late, as in attempt 1, and its site repeats the round's data.

A private round is the same loop with other `hooks`: it asks its clients once and has no quorum. After a crash the
caller gives the newest sound checkpoint (`resume`): lines of later rounds are cut off, attempts are counted from 1
again, and step 5 is done again if the record shows that it had not ended.

You may give another `hooks` (they also draw the clients; a federation's folder always has its own), `codec`,
`identify`, `after_round`, `choosing` or `clock`. Hooks and finishing.py also use what has no underscore here. Flower's
loop would call `configure_train` at 1, `send_and_receive` at 2, `aggregate_train` at 3, `configure_evaluate`,
`aggregate_evaluate` and your `evaluate_fn` (here `after_round`) at 5. This one has none of them; for stock clients,
`stock.StockFedLoRA` is a `Strategy`.
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
from fedlora.core.text import quoted, shown
from fedlora.errors import BudgetSpent, ConfigError, FedLoRAError, QuorumNotMet, counted
from fedlora.flower.messages.codecs import Codec, OwnClients
from fedlora.flower.messages.measuring import HeldOut
from fedlora.flower.rounds.attempt import Attempt
from fedlora.flower.rounds.choosing import Choosing
from fedlora.flower.rounds.collecting import Answer, Clock, Identify, collect, patiently, registered_names
from fedlora.flower.rounds.events import Awaited, Began, Done, Ended, Event, EventWriter
from fedlora.flower.rounds.flower_state import FlowerState, run_identity
from fedlora.flower.rounds.hooks import RoundHooks
from fedlora.flower.rounds.log_lines import lines_of, log_to_stdout
from fedlora.flower.rounds.membership import (
    asked_of,
    check_playable,
    least_usable,
)
from fedlora.flower.rounds.progress import fates_of
from fedlora.flower.rounds.questions import MessageMaker, Question
from fedlora.flower.rounds.round_lines import RoundLines, is_finished, rounds_done
from fedlora.flower.rounds.site_evaluation import SiteEvaluation, SiteRound
from fedlora.flower.terms.policy import Policy
from fedlora.server.server import Server
from fedlora.server.state import RunState

log = logging.getLogger(__name__)


class FedLoRA:
    """Federated LoRA on Flower, by any method of fedlora.

    Args:
        server: with its method, quorum, weighting and rule.
        policy: who may take part, and how.
        state: the start, from `server.start`.
        policy_file: read again before each attempt; None: the policy stays.
        run: the federation's name, by which clients keep their state.
        folder: for checkpoints; None keeps none.
        record: a folder for events.jsonl and rounds.jsonl; None: nowhere.
        resume: go on from this one instead of `state`; `flower_state.newest` reads it from `folder`, and refuses one of
            another method, which nothing here does. Weighting, quorum, rule and policy may differ from its own. Lines
            of later rounds are cut off from rounds.jsonl.
        participation, seed: of the sampling of clients, as in `simulate`.
        codec: the kind of clients.
        identify: how to identify nodes; by default by their registered names, never by their claims.
        after_round: called with each finished round's line, once its checkpoint is stored; its result is added to the
            line. With `record`, it is called again after a crash for a round that it had not finished. It may call
            `stop`, which is not stored.
        choosing: which score the sites are asked to measure, and when; None: never.
        hooks: what another kind of rounds adds, such as `PrivateRounds`.
        clock: the clock, which also waits.

    Raises:
        ConfigError: a method that these clients cannot run; a `resume` of another run; without one, a folder that has
            checkpoints, or a record that has finished rounds.
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
        self._folder, self.seed = folder, seed
        self.codec, self.after_round, self._identify = codec, after_round, identify
        self.flower_state = resume or FlowerState(run, state, members=policy.clients)
        self._identity = run_identity(run, server, state.server)
        if resume is None:
            _require_new(folder, record)
        elif resume.run != run:
            raise ConfigError(f"resume is of the run {resume.run!r}, and this is {run!r}: give that run's checkpoint.")
        self._check(policy)
        self._policy_file, self._policy_error = policy_file, ""
        self._events = EventWriter(record / "events.jsonl" if record is not None else None)
        self.lines = RoundLines(record / "rounds.jsonl" if record is not None else None, upto=self.round)
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
            For each round that this call began: the number of clients that trained, and its loss. The model is in
            `flower_state.state`.

        Raises:
            QuorumNotMet: a round had too few usable replies in each of its attempts; the state before it is stored.
            BudgetSpent: the budget pays for no private round at all.
            CheckpointError: a round could not be stored. httpx.HTTPError: the SuperLink did not answer until the
            deadline. Errors of the method's own are not caught. After any error go on with a new object and `resume`:
            this one may be ahead of its checkpoints.
        """
        log_to_stdout()
        result, self.stopped, self._num_rounds, self._timeout = Result(), None, num_rounds, timeout
        with self._reporting_the_end():
            last = self.lines.get(self.round)
            if last is not None and not is_finished(last):  # it was killed between its checkpoint and its end
                if self.choosing is not None and self.choosing.asks_sites(last):
                    self._wait_for_those_of(last, grid)
                self.read_policy()  # which may have changed while nothing ran
                self._finish(grid, last)
            while self.round < num_rounds and self.stopped is None:
                line = self._play(grid)
                trained = sum(fate == "trained" for fate in fates_of(line).values())
                loss = math.nan if line["loss"] is None else line["loss"]
                result.train_metrics_clientapp[self.round] = MetricRecord({"clients": trained, "loss": loss})
        return result

    def _play(self, grid: Grid) -> Mapping[str, Any]:
        """Play one round, and store it. Its line."""
        flower_state, line = self._play_attempts(grid)
        line = self._hooks.line(line)
        self.lines.put(line)  # before the checkpoint: a surplus line can be cut off, a missing one cannot be made
        self._save(flower_state)
        del flower_state  # the next round's replaces it
        return self._finish(grid, line)

    def _play_attempts(self, grid: Grid) -> tuple[FlowerState, Mapping[str, Any]]:
        """Make attempts until one counts, as many as the policy allows. The next state, and the round's line."""
        nth, began = 0, self.clock.monotonic()
        while True:
            nth += 1
            attempt = self._open_attempt(grid, nth)
            self._collect_answers(grid, attempt)
            try:
                flower_state, line = attempt.close()
                return flower_state, {**line, "seconds": round(self.clock.monotonic() - began, 3)}
            except QuorumNotMet as error:
                self._save(attempt.not_counted())
                failed = attempt.failed(error)
                self._report(failed)
                if nth > self.policy.retries:
                    raise QuorumNotMet(failed.why) from error
            del attempt  # its uploads

    def _open_attempt(self, grid: Grid, nth: int) -> Attempt:
        """Draw the clients, and open the round for their uploads, both by the policy as it is now."""
        self.read_policy()
        self._hooks.before_attempt(self, grid)
        self._wait_for_enough(grid)
        maker = self._message_maker(grid)
        opened = self.server.open(self.flower_state.state.server)
        chosen = {*self._hooks.draw(self, opened, maker.online)}
        if strangers := chosen - self.policy.clients.keys():
            raise ConfigError(f"the hooks drew {quoted(sorted(strangers))}: the policy has no such clients.")
        drawn = asked_of(self.policy, maker.online, chosen)
        not_asked = {name: {"fate": fate, "why": why} for name, (fate, why) in drawn.not_asked.items()}
        attempt = Attempt(maker, drawn, opened, nth, self.deadline, self._report)
        self._report(Began(attempt.round, attempt.nth, drawn.asked, not_asked, self.deadline))
        return attempt

    def _wait_for_enough(self, grid: Grid) -> None:
        """Wait until as many clients are online as a round needs."""

        def enough() -> bool:
            least = least_usable(self.policy, self.server.round.quorum, self.server.round.rule, self.participation)
            return len({*self.online(grid)} & self.policy.clients.keys()) >= least

        self._wait_until(enough)

    def _wait_for_those_of(self, line: Mapping[str, Any], grid: Grid) -> None:
        """Wait until everyone is online that was there in a round, so that a restart measures whom it would have."""
        there = {name for name, fate in fates_of(line).items() if fate != "offline"}
        self._wait_until(lambda: there & self.policy.clients.keys() <= {*self.online(grid)})

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """After 30 s (longer while the SuperLink fails) the rounds go on with those that are there."""
        until = self.clock.monotonic() + min(30.0, self.deadline)
        while self.clock.monotonic() < until and not ready():
            self.clock.sleep(1.0)
            self.read_policy()

    def _collect_answers(self, grid: Grid, attempt: Attempt) -> None:
        """Ask the drawn clients, and give each its fate, until all have answered or the deadline has come."""
        for answer in self._exchange(grid, attempt.questions(), attempt.round, "training"):
            attempt.take(answer)
            del answer

    def _finish(self, grid: Grid, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """The work after a stored round: evaluation, and the final version of its line."""
        if self.choosing is not None:
            found = self.measure(grid, "validation") if self.choosing.asks_sites(line) else SiteRound()
            line = {**line, **found.facts()}
        more = self.after_round(line) if self.after_round is not None else None
        line = {"metrics": {}, **line, **(more or {})}
        self._report(Done(line["round"], line))  # before the line: it may be told twice, and is never missing
        self.lines.put(line)
        return line

    def measure(self, grid: Grid, part: HeldOut) -> SiteRound:
        """Let the sites measure on their held-out data; no site, if sites are never asked."""
        if self.choosing is None:
            return SiteRound()
        self.read_policy()  # a site that was removed meanwhile is sent no model any more
        began = self.clock.monotonic()
        evaluation = SiteEvaluation(self._message_maker(grid), part)
        answers = self._exchange(grid, evaluation.questions(self.deadline), self.round, "measuring")
        found = evaluation.read(answers, self.choosing.metric)
        clients = evaluation.memories(found)  # stored with the next round; a client that then lacks something says so
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
            log.warning("round %d is not played: %s", self.flower_state.next_round, spent)
            why = self.stopped = "budget"
            if not self.round:
                raise
        except Exception as error:
            why = shown(f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._report(Ended(self.round, why))

    def online(self, grid: Grid) -> dict[str, int]:
        """The clients that are online -> their node ids. While the SuperLink fails, it is asked again."""
        until = self.clock.monotonic() + self.deadline
        return dict(patiently(lambda: self._identify(grid), until=until, clock=self.clock))

    def read_policy(self) -> None:
        """Read the policy's file again, before each attempt; what changed while no server ran is new too. A file that
        cannot be used changes nothing, and is told once."""
        error = ""
        if self._policy_file is not None:
            try:
                found = Policy.read(self._policy_file)
                if found != self.policy:
                    self._check(found)
                self.policy = found
            except FedLoRAError as refused:
                error = str(refused)
        news, self._policy_error = "" if error == self._policy_error else error, error
        self.flower_state, change = self.flower_state.under(self.policy.clients, news)
        if change is not None:
            self._report(change)

    def _check(self, policy: Policy) -> None:
        """Raises `FedLoRAError` for a policy that this federation cannot play."""
        self._hooks.check(self, policy)
        check_playable(policy, self.server, self.flower_state.state.server, self.codec, self.participation)

    def _message_maker(self, grid: Grid) -> MessageMaker:
        """Makes the messages to those that are online now."""
        return MessageMaker(self.server, self.policy, self.codec, self.flower_state, self.online(grid))

    def _exchange(self, grid: Grid, questions: Iterable[Question], of_round: int, doing: str) -> Iterator[Answer]:
        """Send the questions, and pass on each answer as it comes. Report meanwhile for whom the others wait."""

        def waiting(clients: tuple[str, ...], seconds: float, left: float) -> None:
            self._report(Awaited(of_round, doing, clients, round(seconds, 1), round(left, 1)))

        return collect(grid, questions, deadline=self.deadline, clock=self.clock, waiting=waiting)

    def _report(self, event: Event) -> None:
        """Write the event, and log its words."""
        try:
            self._events.write(event)
        except OSError as error:  # losing a report is better than losing a round
            log.warning("an event could not be written: %s", error)
        level = logging.INFO if isinstance(event, Done | Ended) else logging.WARNING  # the usual; all else is news
        for line in lines_of(event, self._num_rounds):
            log.log(level, "%s", line)

    def _save(self, flower_state: FlowerState) -> None:
        """Store the state; from then on it is this object's."""
        if self._folder is not None:
            checkpoint.save(self._folder, flower_state.state.round, flower_state, of=self._identity)
        self.flower_state = flower_state


def _require_new(folder: Path | None, record: Path | None) -> None:
    """Raises `ConfigError` for a checkpoint, or a line of a finished round, that a run from round 1 would lose."""
    stored = checkpoint.newest_round(folder) if folder is not None else None
    if stored is not None:
        raise ConfigError(
            f"{folder} has a checkpoint of round {stored}, and this run would begin again at round 1: its own "
            f"would be lost beside it. Continue with resume=newest(...), or take another folder."
        )
    if record is not None and (told := rounds_done(record / "rounds.jsonl", finished=True)):
        raise ConfigError(
            f"{record / 'rounds.jsonl'} has {counted(told, 'finished round')}, and this run would begin again at round "
            f"1 and cut them off. Continue with resume=newest(...), or take another folder for the record."
        )
