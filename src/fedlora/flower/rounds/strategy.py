"""FedLoRA: Flower's strategy as a thin shell around `Server`.

    strategy = FedLoRA(server, policy, start(server, seed_adapter), run="trial", folder=Path("runs/trial"))
    strategy.start(grid, num_rounds=10)

`start` adds what Flower's own loop lacks: a message for each node at its own rank, a deadline that also ends the
messages, a named fate for every client of the policy, a repeated round if too few answer, a checkpoint inside the
round, an error instead of a "successful" run without training, and continuing from a checkpoint.

membership.py   who is asked                      collecting.py   messages out, answers in, late ones by name
attempt.py      what the answers give             events.py, lines.py, round_lines.py   reports for others
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedlora.core import checkpoint
from fedlora.core.echo import shown
from fedlora.core.lora import named_tensors
from fedlora.errors import ConfigError, QuorumNotMet
from fedlora.flower.messages.codecs import Codec, OwnClients
from fedlora.flower.messages.measuring import HeldOut
from fedlora.flower.rounds.attempt import Attempt, Closed
from fedlora.flower.rounds.collecting import (
    Awaiting,
    Clock,
    Identify,
    collect,
    registered_names,
    who_is_online,
)
from fedlora.flower.rounds.events import Again, Awaited, Began, Done, Ended, Event, EventWriter, Fated
from fedlora.flower.rounds.lines import lines_of
from fedlora.flower.rounds.membership import Drawn, capped, check_playable, draw, read_again
from fedlora.flower.rounds.memory import FlowerState
from fedlora.flower.rounds.private_words import RELEASED
from fedlora.flower.rounds.round_lines import RoundLines
from fedlora.flower.rounds.site_evaluation import Asking, SiteEvaluation, SiteRound
from fedlora.flower.terms.policy import Policy
from fedlora.server.intake import Intake
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState

log = logging.getLogger(__name__)


class FedLoRA(Strategy):
    """Federated LoRA on Flower, by any method of fedlora.

    Args:
        server: with its method, quorum, weighting. policy: who may take part, and how. policy_file: read again before
            each round; None: the policy stays. state: the start, from `server.start`.
        run: the federation's name, by which clients keep their state. folder: for checkpoints; None keeps none.
            record: for events.jsonl and rounds.jsonl; None: nowhere. resume: go on from the newest checkpoint in
            `folder`, if any. It must be of this run, method, options, modules and shapes; weighting, quorum, rule and
            policy may differ. Its values take precedence over `state`, those of the start too.
        participation, seed: of the sampling of clients, as in `simulate`. codec: the kind of clients.
        identify: how to identify nodes; by default by their registered names, never by their claims.
        after_round: called with each finished round's line, once its checkpoint is stored; its result is added to the
            line. After a crash it is called again for a round that it had not finished. It may call `stop`.
        asking: when the sites are asked to measure, and for which score; None: never.
        clock: the clock, which also waits.

    Raises:
        ConfigError: a method that these clients cannot run, or a server that needs a second exchange of messages;
            without `resume`, a folder that has checkpoints. CheckpointError: they are another run's, or damaged.
    """

    PRIVATE: ClassVar[bool] = False  # whether its rounds are those of a server with privacy

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
        resume: bool = False,
        participation: float = 1.0,
        seed: int = 0,
        codec: Codec = OwnClients(),  # noqa: B008 - immutable
        identify: Identify = registered_names,
        after_round: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] | None = None,
        asking: Asking | None = None,
        clock: Clock = time,
    ) -> None:
        self.server, self.policy, self.run = server, policy, run
        self._folder, self._record, self._participation, self._seed = folder, record, participation, seed
        self._identify, self._codec, self._clock = identify, codec, clock
        self._after_round = after_round
        self._policy_file, self._policy_told = policy_file, ""
        self._events = EventWriter(record / "events.jsonl" if record is not None else None)
        self.lines = RoundLines(None)
        self.memory, self._whose = FlowerState(run, state), whose(run, server, state.server)
        if resume and folder is not None:
            kind = server.method.State
            loaded = checkpoint.load_newest(folder, FlowerState, kind, of=self._whose, tell=log.warning)
            if loaded is not None:
                self.memory = loaded[1]
        elif folder is not None and (stored := checkpoint.newest_round(folder)) is not None:
            raise ConfigError(
                f"{folder} has a checkpoint of round {stored}, and this run would begin again at round 1: its own "
                f"would be lost beside it. Continue with resume=True, or take another folder."
            )
        if (server.privacy is not None) != self.PRIVATE:
            raise ConfigError(
                "a server with privacy is played by PrivateFedLoRA, and no other server: FedLoRA plays rounds again, "
                "and tells what became of single sites."
            )
        self._check(policy)
        self.fates: Mapping[str, Fated] = {}  # of the last attempt
        self._uncounted: dict[str, str] = {}  # client -> why its last work did not count: sent with its next message
        self.online: Mapping[str, int] = {}  # at the last check
        self._asking = asking
        self._stopped: str | None = None
        self._of: int | None = None  # the requested number of rounds

    # ------------------------------------------------------------------------------------------------------ the rounds

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.memory.state.round

    @property
    def refused(self) -> dict[str, str]:
        """Client -> why it did not count in the last attempt, for all who were drawn or are in quarantine."""
        return {name: fated.why for name, fated in self.fates.items() if fated.fate not in ("trained", "not drawn")}

    def stop(self, why: str) -> None:
        """Play no further round; for use in `after_round`."""
        self._stopped = why

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Play rounds until `num_rounds` are done, counting those of a resumed run.

        Args:
            initial_arrays: not used, because the strategy has its own state. timeout: replaces the policy's deadline.
            train_config: additions to stock clients' config, besides "server-round". evaluate_fn: called as by Flower,
                with the server's model from `Codec.result`, before the first round and after each.

        Raises:
            ConfigError: a train_config for fedlora's own clients, which read the federation's settings, or an
                evaluate_config, because this strategy does not evaluate by Flower's messages.
            QuorumNotMet: a round had too few usable replies in each of its attempts; the state before it is stored.
        """
        if evaluate_config is not None:
            raise ConfigError("FedLoRA sends no evaluate_config. Measure at the server with evaluate_fn.")
        if train_config is not None:
            self._codec = self._codec.with_config(train_config)
        listen()
        result, self._stopped, self._of = Result(), None, num_rounds

        def evaluate() -> None:
            if evaluate_fn is None:
                return
            arrays = self._codec.result(self.server, self.memory.state.server)
            if (scores := evaluate_fn(self.round, arrays)) is not None:
                result.evaluate_metrics_serverapp[self.round] = scores

        self.lines = RoundLines(self._record / "rounds.jsonl" if self._record is not None else None, upto=self.round)
        why = "interrupted"
        try:
            last = self.lines.get(self.round)
            if last is not None and "metrics" not in last:
                self._finish(grid, last)
            evaluate()
            while self.round < num_rounds and self._stopped is None:
                number = self.round + 1
                closed = self._play(grid, timeout)
                if closed is None:
                    continue
                result.train_metrics_clientapp[number] = MetricRecord({"clients": closed.trained, "loss": closed.loss})
                del closed  # the next round's state replaces this one's
                evaluate()
            why = self._stopped or "complete"
        except QuorumNotMet:
            why = "quorum"
            raise
        except Exception as error:
            why = shown(f"failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._event(Ended(self.round, why))
        result.arrays = self._codec.result(self.server, self.memory.state.server)
        return result

    def _play(self, grid: Grid, timeout: float | None) -> Closed | None:
        """Play one round, in as many attempts as the policy allows. None: `stop` was called, and none was played."""
        number, attempt = self.round + 1, 0
        while True:
            attempt += 1
            self._read_policy(number)
            began = self._clock.monotonic()
            intake = capped(self.server, self.policy).open(self.memory.state.server)
            trial = self._attempt(grid, intake, attempt, timeout or self.policy.deadline)
            try:
                closed = trial.close()
            except QuorumNotMet as error:
                self.memory = replace(self.memory, refusals=trial.refusals)
                why = f"{error} Not there: {self.refused or 'nobody'}."
                self._event(Again(number, attempt, why))
                self._count(trial, dict.fromkeys(trial.asked, f"the whole attempt did not: {error}"))
                self._save()
                if attempt > self.policy.retries:
                    raise QuorumNotMet(why) from error
                del trial, intake
                self._wait_for_nodes(grid)
                continue
            for fated in closed.overturned:
                self._event(fated)
            self.fates = trial.fates
            judged = closed.memory.state.server.tally.judged if closed.memory.state.server.tally else None
            self._count(trial, judged.left_out if judged is not None else {})
            del trial, intake  # with the uploads, and the state before: what follows is long, and needs neither
            line = {**closed.line, "seconds": round(self._clock.monotonic() - began, 3)}
            self.lines.put(line)  # before the checkpoint: a surplus line can be cut off, a missing one cannot be made
            self.memory = closed.memory
            self._save()
            self._finish(grid, line)
            return closed

    def _attempt(self, grid: Grid, intake: Intake, attempt: int, deadline: float) -> Attempt:
        """Ask the clients, and take their answers until the deadline."""
        number, self.online = self.round + 1, self._online(grid)
        drawn = self._draw(intake)
        trial = Attempt(
            self.server, self.policy, self._codec, self.memory, drawn, self.online, intake, attempt=attempt,
            deadline=deadline, told=self._uncounted,
        )  # fmt: skip
        others = {name: {"fate": fate, "why": why} for name, (fate, why) in drawn.not_asked.items()}
        self._event(Began(number, attempt, drawn.asked, others, deadline))
        for answer in collect(
            grid, trial.questions(), deadline=deadline, clock=self._clock, awaiting=self._awaiting(number, "training")
        ):
            fated = trial.take(answer)
            del answer
            self._event(fated)
        self.fates = trial.fates
        for name in drawn.asked:
            if name not in trial.asked:  # the method cannot serve it
                self._event(self.fates[name])
        return trial

    def _count(self, trial: Attempt, others: Mapping[str, str]) -> None:
        """Keep, for each asked client, why its work did not count. others: clients that did not train."""
        for name in trial.asked:
            fated = trial.fates[name]
            why = others.get(name, "") if fated.fate == "trained" else f"{fated.fate}: {fated.why}"
            self._uncounted.pop(name, None)
            if why:
                said = shown(f"round {trial.number}: the work of this site did not count: {why}", 600)
                self._uncounted[name] = said

    def _draw(self, intake: Intake) -> Drawn:
        """Draw the clients to ask, for a round whose intake does not choose them itself."""
        return draw(
            self.policy, self.memory.refusals, self.online,
            participation=self._participation, seed=self._seed, round=self.round,
        )  # fmt: skip

    def _finish(self, grid: Grid, line: Mapping[str, Any]) -> None:
        """The work after a stored round: evaluation, and the final version of its line."""
        due = self._asking is not None and self._asking.due(self.round)
        line = {**line, **(self.measure(grid, "validation") if due else SiteRound()).facts()}
        more = self._after_round(line) if self._after_round is not None else None
        line = {"metrics": {}, **line, **(more or {})}
        self.lines.put(line)
        self._event(Done(line["round"], line))

    def measure(self, grid: Grid, part: HeldOut) -> SiteRound:
        """Let the sites measure on their held-out data; no site, if sites are never asked."""
        if self._asking is None:
            return SiteRound()
        began, self.online = self._clock.monotonic(), self._online(grid)
        evaluation = SiteEvaluation(self.server, self.policy, self.memory, part, self.online)
        answers = collect(
            grid, evaluation.questions(self._codec, self.policy.deadline), deadline=self.policy.deadline,
            clock=self._clock, awaiting=self._awaiting(self.round, "measuring"),
        )  # fmt: skip
        found = evaluation.read(answers, self._asking.metric)
        self.memory = replace(
            self.memory, state=replace(self.memory.state, clients=evaluation.memories(found))
        )  # stored with the next round: who holds something else by then says so, and is sent everything
        return replace(found, seconds=round(self._clock.monotonic() - began, 3)) if evaluation.asked else found

    def _awaiting(self, number: int, doing: str) -> Awaiting:
        def told(clients: list[str], seconds: float, left: float) -> None:
            self._event(Awaited(number, doing, tuple(clients), round(seconds, 1), round(left, 1)))

        return told

    # ------------------------------------------------------------------------------------------- what Flower asks for

    def summary(self) -> None:
        log.info("FedLoRA: %s, %d clients, round %d", self.server.method.name, len(self.policy.clients), self.round)

    def _not_used(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error: `start` makes messages one by one, and names every answer."""
        raise NotImplementedError("FedLoRA plays its rounds in `start`; no other loop can.")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _not_used

    # -------------------------------------------------------------------------------------------------------- inside

    def _check(self, policy: Policy) -> None:
        """Raises `FedLoRAError` for a policy that this federation cannot play."""
        check_playable(policy, self.server, self.memory.state.server, self._codec, self._participation)

    def _read_policy(self, number: int) -> None:
        """Read the policy's file again."""
        if self._policy_file is None:
            return
        self.policy, change = read_again(self._policy_file, self._check, self.policy, number)
        told, self._policy_told = self._policy_told, "" if change is None else change.why
        if change is None or (change.why and change.why == told):
            return
        self._event(change)
        self.memory = self.memory.after(change)

    def _wait_for_nodes(self, grid: Grid, seconds: float = 30.0) -> None:
        """Wait before a round is repeated, until enough clients are online, but no longer than this."""
        needed, until = self.server.quorum or 1, self._clock.monotonic() + min(seconds, self.policy.deadline)
        while self._clock.monotonic() < until and len(set(self._online(grid)) & set(self.policy.clients)) < needed:
            self._clock.sleep(1.0)

    def _online(self, grid: Grid) -> dict[str, int]:
        return who_is_online(self._identify, grid, self.policy.deadline, self._clock)

    def _event(self, event: Event) -> None:
        """Write the event, and log its words."""
        try:
            self._events.write(event)
        except OSError as error:  # losing a report is better than losing a round
            log.warning("an event could not be written: %s", error)
        level = logging.INFO if isinstance(event, Done | Ended) else logging.WARNING
        for line in lines_of(event, self._of):
            log.log(level, "%s", line, extra=RELEASED)

    def _save(self) -> None:
        if self._folder is not None:
            checkpoint.save(self._folder, self.round, self.memory, of=self._whose)


def whose(run: str, server: Server, state: ServerState) -> str:
    """The name in a run's checkpoints: its own, the method with its options, and a digest of all names and shapes."""
    method = server.method
    options: dict[str, object] = (
        {f.name: getattr(method, f.name) for f in fields(method)} if is_dataclass(method) else {}
    )
    said = ", ".join(f"{name}={value}" for name, value in options.items() if isinstance(value, str | int | float))
    shapes = [(name, tuple(tensor.shape)) for name, tensor in named_tensors(replace(state.start, heads=state.heads))]
    return f"{run}, {method.name}({said}), modules {hashlib.sha256(repr(sorted(shapes)).encode()).hexdigest()[:8]}"


def listen() -> None:
    """Print fedlora's log if nobody else does, because Flower gives a ServerApp a handler only for its own logger."""
    package = logging.getLogger("fedlora")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    if package.getEffectiveLevel() > logging.INFO:
        package.setLevel(logging.INFO)


__all__ = ["FedLoRA", "FlowerState", "Identify", "registered_names", "whose"]
