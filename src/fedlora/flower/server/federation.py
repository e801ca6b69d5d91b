"""`Federation`: the strategy of a federation's folder, and `play`, the main function of its ServerApp."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedlora.core.messages import ClientMemory
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import shown
from fedlora.errors import FedLoRAError, counted
from fedlora.flower.envelope import RecordError
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import locked
from fedlora.flower.scores import SiteRound, SiteScores, record_measured
from fedlora.flower.server.finishing import finish, fitting_summary
from fedlora.flower.server.journal import scores_line
from fedlora.flower.server.opening import Opening, opening
from fedlora.flower.server.private import opened_private
from fedlora.flower.server.speaking import OwnClients
from fedlora.flower.server.state import FederationState, check_playable, run_identity
from fedlora.flower.strategy import FedLoRA
from fedlora.flower.terms import HeldOut
from fedlora.flower.terms.policy import Policy
from fedlora.runs.finishing import best_state
from fedlora.runs.folder import plain
from fedlora.runs.private_run import PrivateRun
from fedlora.runs.stopping import Line
from fedlora.runs.tracking import Called, Trackers
from fedlora.server.state import RunState

log = logging.getLogger(__name__)


class Federation(FedLoRA):
    """The rounds of a federation's folder: fedlora's own clients, by the policy as it stands, measured at the sites or
    at the server, until run.rounds are played or patience ends.

    Args:
        b: the checked start. begun: the state to go on from. private: its releases, if it is.
    """

    trackers: Trackers
    speaks: OwnClients
    _patience = math.inf  # a round waits as long as needed for its sites

    def __init__(self, b: Opening, begun: FederationState, private: PrivateRun | None) -> None:
        run = b.settings.run
        super().__init__(
            b.server if private is None else private.server, b.policy.clients, run=b.settings.id, folder=b.home.server,
            fraction_train=run.participation, fraction_evaluate=1.0, seed=run.seed,
        )  # fmt: skip
        self.opening, self.private, self.policy = b, private, b.policy
        self._kept, self.speaks = begun, OwnClients(b.settings.id, b.join.terms())
        self._part: HeldOut = "validation"
        self._policy_error, self._sites = "", SiteRound()
        super()._begin(None)
        self._tracked = 0  # the last round that trackers know

    def _begin(self, initial: ArrayRecord | None) -> None:
        """Trackers get all rounds before: after a restart they get them again."""
        super()._begin(initial)
        b = self.opening
        unmeasured = b.choosing.due(self.round) and not self.journal.measured(self.round)
        self._tracked = self.round - unmeasured
        self.trackers = Trackers(
            b.settings.run.report_to, b.home.server, {"federation": self.run, **b.settings.agreed()},
            self.lines(self._tracked), anew=self.round > 0, called=Called(self.run),
        )  # fmt: skip

    def lines(self, upto: int | None = None) -> list[dict[str, Any]]:
        """The lines of the rounds until `upto`, by default all that are played."""
        return self.journal.lines(self.round if upto is None else upto)

    @property
    def best(self) -> Line | None:
        """The line of the best round, if any was measured."""
        return self.opening.choosing.best(self.lines())

    @property
    def ended(self) -> dict[str, Any] | None:
        """Whether the federation ends early after the rounds until now, and why."""
        settings = self.opening.settings
        return self.opening.choosing.stop(self.lines(), settings.run.rounds, settings.evaluate.stopping())

    def best_state(self) -> RunState | None:
        """The stored state of the best round; None, with a log line, if it is lost."""
        kind, of = self.server.method.State, run_identity(self.run, self.server, self.state.server)
        found = best_state(self._best_folder, FederationState, kind, of, self.best)
        return None if found is None else found.state

    def arrays(self) -> ArrayRecord:
        """Nothing: nobody here reads the model as Flower's record."""
        return ArrayRecord()

    def _refresh(self) -> Mapping[str, Any]:
        """The clients, after a look at the policy's file; one that cannot be used changes nothing, and is told once."""
        error, before = "", self.policy.clients
        try:
            found = Policy.read(self.opening.home.policy)
            if found != self.policy:
                check_playable(found.clients, self.server, self.state.server, self.fraction_train)
                if (privacy := self.opening.settings.privacy) is not None:
                    privacy.check_members(found.clients)
            self.policy = found
        except FedLoRAError as refused:
            error = str(refused)
        if error and error != self._policy_error:
            log.warning("policy.toml is not taken, and the one before stays until the file is right again: %s", error)
        self._policy_error, self._timeout = error, self.policy.deadline
        for name, rank in self.policy.clients.items():
            if before.get(name) != rank:
                log.warning("round %d on: %s may take part, at rank %s", self.round + 1, name, shown(rank))
        for name in before.keys() - self.policy.clients.keys():
            log.warning("round %d on: %s may take part no longer", self.round + 1, name)
        self._kept = self.kept.under(self.policy.clients)
        return self.policy.clients

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The sites' scores, checked (`_sites`); their mean. A site that measured holds all that its next training
        starts from, which then does not travel again."""
        measured, lost, clients = dict[str, SiteScores](), dict[str, str](), dict(self.state.clients)
        for reply in replies:
            name = self._whose[reply.metadata.src_node_id]
            one = self._scores(name, reply)
            if isinstance(one, SiteScores):
                most = self.policy.max_examples  # a claim, as in training
                measured[name] = replace(one, examples=max(1, int(min(one.examples, most))))
                held = replace(self.speaks.sent[name], local=one.kept)
                clients[name] = replace(clients.get(name, ClientMemory()), held=held)
            else:
                lost[name] = one
            self.journal.answered(name)
        self._kept = replace(self.kept, state=replace(self.state, clients=ReadOnly(clients)))
        lost |= self._unsent
        self._sites = SiteRound(
            {name: measured[name] for name in self.policy.clients if name in measured},
            {name: lost.get(name, "it is not online") for name in self.policy.clients if name not in measured},
        )
        for name, why in lost.items():
            log.warning("round %d: %s: not measured: %s", self.round, shown(name), shown(why, 1000))
        mean = self._sites.mean()
        return MetricRecord(dict(mean)) if mean else None

    def _scores(self, name: str, reply: Message) -> SiteScores | str:
        """A site's scores, or why it has none. It never raises, because a reply is a stranger's."""
        if reply.has_error():
            return reply.error.reason or "it gave no reason"
        try:
            return record_measured(
                reply.content, run=self.run, round=self.round, part=self._part, metric=self.opening.choosing.metric,
                local=self.speaks.sent[name].local,
            )  # fmt: skip
        except RecordError as error:
            return str(error)
        except Exception as error:  # a forged record can raise anything, and its sender is to blame
            log.exception("the measurement of %s cannot be read", name)
            return f"its measurement cannot be read: {type(error).__name__}"

    def measure(self, grid: BoundedGrid, part: HeldOut) -> SiteRound:
        """Let the sites measure the state as it is, on their held-out data."""
        self._part = part
        config = ConfigRecord({"measure": part})
        questions = self.configure_evaluate(self.round, ArrayRecord(), config, grid)
        self.aggregate_evaluate(self.round, grid.send_and_receive(questions, timeout=self._timeout))
        return self._sites

    def _measure(
        self, grid: Any, result: Result, config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:  # fmt: skip
        """The work after a stored round, also of one that a kill left without it: scores, the best state, trackers, and
        whether to stop. It reads only what is stored, so that a federation that was killed decides as if it had not
        been."""
        b, number = self.opening, self.round
        if number and number != self._tracked:
            if b.choosing.due(number):
                evaluator, scores = b.at_server.validation, dict[str, Any](metrics={})
                if b.choosing.by == "server" and evaluator is not None:
                    scores["metrics"] = plain(dict(evaluator.evaluate(self.server, self.state)))
                if b.choosing.by == "sites":
                    scores |= plain(self.measure(grid, "validation").facts())
                whole = {**self.lines()[-1], **scores}
                if b.choosing.better(whole, b.choosing.best(self.lines(number - 1))):
                    # two are kept, since the one before is the best until this round's scores are told
                    self.kept.store(self._best_folder, self.server)
                self.journal.scored(number, scores)
                log.info("%s", scores_line(number, scores))
            self.trackers.log(self.lines()[-1])
            self._tracked = number
        if (ended := self.ended) is not None:
            log.info("round %d: %s", number, ended["why"])
            self.stopped = "stopped early"

    @property
    def _best_folder(self) -> Path:
        return self.opening.home.checkpoints / "best"


def play(grid: Grid, folder: Path) -> dict[str, Any]:
    """Play all remaining rounds, then write adapters and a summary. The main function of a ServerApp.

    A finished federation plays nothing and returns its summary again; raising run.rounds in federation.toml extends it.
    If it is raised during play, this call ends with the rounds of its start, and the next one plays the others.
    """
    home = FederationFolder(folder.resolve())
    with locked(home.server / ".lock", f"plays the rounds in {home.server}"):
        b, begun = opening(folder, log.warning)
        private = opened_private(home, b.settings, b.server, b.plan, b.rounds) if b.plan is not None else None
        federation = Federation(b, begun, private)
        del begun  # kept by the strategy alone, whose rounds replace it
        summary, over = fitting_summary(home.summary, b.settings, b.rounds), b.rounds == b.settings.run.rounds
        if summary is not None and (over or federation.ended is not None):
            log.info("%s", ending(summary))
            return summary
        home.summary.unlink(missing_ok=True)
        bounded = BoundedGrid.around(grid)
        federation.start(bounded, num_rounds=b.settings.run.rounds)
        with federation.journal.telling_the_end(lambda: federation.stopped):
            return finish(bounded, federation)


def ending(summary: Mapping[str, Any]) -> str:
    """The federation is over, and how to continue, in two sentences."""
    early, rounds = summary.get("stopped_early"), counted(summary["rounds"], "round")
    outcome, way = f"complete after {rounds}", "raise run.rounds in federation.toml and start it again"
    if "privacy" in summary:
        way = "make another federation that charges the same ledger: epsilon was promised for these rounds"
    if early:
        outcome = f"stopped early after {rounds} of {summary['of']}: {early['why']}"
        way = "begin another federation with its adapter (fedlora flower init --start)"
        if "privacy" in summary and early.get("best_round") is None:
            way = "raise the ledger's budget, if the population may lose more (fedlora privacy), and start it again"
    place = "server/adapter is its adapter" if summary.get("adapter", True) else "server/summary.json has its scores"
    return f"{outcome}; {place}. To go on, {way}."
