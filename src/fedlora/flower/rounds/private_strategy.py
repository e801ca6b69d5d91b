"""PrivateFedLoRA: rounds of one clipped and noised sum on a network. docs/how-to/privacy.md states its guarantee.

Each round asks all members once. A member that is refused, offline, late, fails or abstains counts as zero, and the
round takes place: there is no quorum, no second attempt, no second draw. The noised sum is stored and charged before
anything about the round is told or stored; after a kill the same sum is used again, and nobody is asked for it.
A round's reports hold only what the list of releases allows; single sites' fates are in private/log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedlora.errors import BudgetSpent, CheckpointError, ConfigError, FedLoRAError, LedgerError
from fedlora.flower.rounds.attempt import Attempt, Closed
from fedlora.flower.rounds.events import Done, Ended, Event, Fate, Fated, PolicyChanged
from fedlora.flower.rounds.membership import Drawn
from fedlora.flower.rounds.private_words import RELEASED, logs_kept_secret, public_event, public_line
from fedlora.flower.rounds.strategy import FedLoRA, listen
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import FederationPrivacy, check_policy
from fedlora.runs.private_run import PrivateRun
from fedlora.server.intake import Intake
from fedlora.server.private_options import Privacy
from fedlora.server.state import RunState

log = logging.getLogger(__name__)
_OURS = (ConfigError, CheckpointError, LedgerError, BudgetSpent)  # their texts are about the server's own files
_REMIND = 300.0  # seconds until the same line is repeated


class PrivateFedLoRA(FedLoRA):
    """As `FedLoRA`, private.

    Args:
        policy: who is asked; with quarantine = 0, retries = 0 and no share cap. private: its server, which releases,
            and its plan. terms: the federation's [privacy]. more: as `FedLoRA`; sites are never asked to measure.

    Raises:
        ConfigError: a policy that breaks the guarantee.
    """

    PRIVATE = True

    def __init__(
        self, policy: Policy, state: RunState, *, private: PrivateRun, terms: FederationPrivacy, **more: Any
    ) -> None:
        self.private, self._terms = private, terms
        self.out_of_budget: Mapping[str, Any] | None = None
        if more.get("asking") is not None or more.get("participation", 1.0) != 1.0:
            raise ConfigError("a private federation asks all members to train in every round, and none to measure.")
        super().__init__(private.server, policy, state, **more)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """As `FedLoRA.start`. A round that the population's budget cannot pay ends the rounds.

        Raises:
            BudgetSpent: it cannot pay the first one. ConfigError, CheckpointError, LedgerError: about the server's
                files. FedLoRAError: anything else; only private/log has the reason.
        """
        listen()
        with logs_kept_secret(self._note):
            try:
                return super().start(*args, **kwargs)
            except _OURS:
                raise
            except Exception as error:
                self._note(f"the rounds failed: {type(error).__name__}: {error}")
                raise FedLoRAError(
                    f"round {self.round + 1} of a private federation failed. Either nothing was released, or the "
                    f"release is stored. The reason may reveal something about single sites, so it is only in "
                    f"{self.private.releases.folder}/log."
                ) from None

    # ------------------------------------------------------------------------------------------------------ the rounds

    def _play(self, grid: Grid, timeout: float | None) -> Closed | None:
        number = self.round + 1
        self._read_policy(number)
        deadline = timeout or self.policy.deadline
        try:
            intake = self.server.open(self.memory.state.server)
            asked = bool(intake.asked)
            if asked:
                self._require_room(number)  # before any client trains for it
                self._wait_for_members(grid, number, deadline)
            trial = self._attempt(grid, intake, 1, deadline)
            if asked:
                self._tell_lost(number, trial)
            closed = trial.close()  # stores and charges the sum
        except BudgetSpent as spent:
            if not self.round:
                raise
            self._out_of_budget(number, spent)
            return None
        self.fates = {}
        del trial, intake  # with the sum, and the state before
        line = public_line({**closed.line, "seconds": None}, self.private.spent(number))
        self.lines.put(line)
        self.memory = closed.memory
        self._save()
        self._finish(grid, line)
        return replace(closed, trained=0, loss=math.nan, overturned=())

    def _draw(self, intake: Intake) -> Drawn:
        """All members; nobody, if the round's noised sum already exists."""
        fates = dict[str, tuple[Fate, str]]()
        for name in self.policy.clients:
            if name not in (intake.asked or ()):
                fates[name] = ("not drawn", "")
            elif name not in self.online:
                fates[name] = ("offline", "it is not online")
        return Drawn(tuple(name for name in self.policy.clients if name not in fates), fates)

    def _finish(self, grid: Grid, line: Mapping[str, Any]) -> None:
        """The work after a stored round: only the server measures, on public examples."""
        more = self._after_round(line) if self._after_round is not None else None
        line = public_line({"metrics": {}, **line, **(more or {})}, line["privacy"])
        self.lines.put(line)
        self._event(Done(line["round"], line))

    # ---------------------------------------------------------------------------------------------------------- inside

    @property
    def _privacy(self) -> Privacy:
        found = self.server.privacy
        if found is None:
            raise ConfigError("PrivateFedLoRA needs a server with privacy.")
        return found

    def _check(self, policy: Policy) -> None:
        check_policy(policy, self._terms)
        super()._check(policy)

    def _require_room(self, number: int) -> None:
        """Raises `BudgetSpent` if this round would exceed the population's budget."""
        releases, plan = self.private.releases, self.private.plan
        event = releases.event(number, self._privacy.mechanism(plan.size), plan.size, 1.0)
        releases.ledger.check(event, releases.budget, 1)

    def _wait_for_members(self, grid: Grid, number: int, seconds: float) -> None:
        """Wait until all members are online. Round 1 waits as long as needed for all members in the policy; a later
        one continues after `seconds` with those that are online."""
        began = told = self._clock.monotonic()
        while missing := set(self.policy.clients) - set(self._online(grid)):
            now = self._clock.monotonic()
            if self.round and now - began >= seconds:
                return
            if not self.round and now >= told:
                told = now + _REMIND
                self._note(f"round 1 waits for {', '.join(sorted(missing))}")
                log.warning("round 1 waits until all %d members are online", len(self.policy.clients), extra=RELEASED)
            self._clock.sleep(1.0)
            self._read_policy(number)

    def _out_of_budget(self, number: int, spent: BudgetSpent) -> None:
        why = self.private.releases.why_spent(self.round)
        self.out_of_budget = {"round": self.round, "of": self._of, "best_round": None, "best": None, "why": why}
        log.warning("round %d is not played: %s", number, spent, extra=RELEASED)
        self.stop("budget")

    def _event(self, event: Event) -> None:
        public = public_event(event, list(self.policy.clients))
        if public is not None:
            super()._event(public)
        if isinstance(event, Fated) and event.fate == "trained":
            loss = "" if event.loss is None else f", loss {event.loss:.4g}"
            self._note(f"{event.client} answered: {event.examples} examples in {event.seconds} s{loss}")
        elif isinstance(event, PolicyChanged | Ended) and event.why != getattr(public, "why", ""):
            self._note(event.why)

    def _tell_lost(self, number: int, trial: Attempt) -> None:
        """Note the members whose answers never reached the intake; the round notes its own refusals."""
        for name, fated in trial.fates.items():
            if fated.fate not in ("trained", "refused"):  # the intake noted these
                self._privacy.note(number, name, f"{fated.fate}: {fated.why}")
        for name in sorted(set(self._terms.named()) - set(self.policy.clients)):
            self._privacy.note(number, name, "removed: policy.toml does not name it")

    def _note(self, what: str) -> None:
        self._privacy.note(self.round + 1, "", what)


__all__ = ["PrivateFedLoRA"]
