"""Private rounds on a network: one clipped and noised sum each. docs/how-to/privacy.md states their guarantee.

Each round asks all members that are online, once. A member that is refused, offline, late, fails or abstains counts as
zero, and the round takes place: there is no quorum, no second attempt, no second draw. The noised sum is stored and
charged before anything about the round is told or stored; after a kill the same sum is used again, and nobody is asked
for it. A round's reports hold only what the list of releases allows; single sites' fates are in private/log.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.serverapp import Grid

from fedlora.errors import BudgetSpent, CheckpointError, ConfigError, FedLoRAError, LedgerError
from fedlora.flower.rounds.events import Began, Ended, Event, Fated, PolicyChanged
from fedlora.flower.rounds.hooks import RoundHooks
from fedlora.flower.rounds.private_words import RELEASED, logs_kept_secret, public_event, public_line
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import FederationPrivacy, check_policy
from fedlora.runs.private_run import PrivateRun
from fedlora.server.intake import Intake

log = logging.getLogger(__name__)
_OURS = (ConfigError, CheckpointError, LedgerError, BudgetSpent)  # their texts are about the server's own files
_REMIND = 300.0  # seconds until the same line is repeated


class PrivateRounds(RoundHooks):
    """`FedLoRA(private.server, policy, state, hooks=PrivateRounds(private, terms))` plays private rounds.

    Args:
        private: the server, which releases, and its plan. terms: the federation's [privacy].

    Raises:
        ConfigError: from `FedLoRA`, for a policy that breaks the guarantee: it has retries = 0, and no share
            cap. From `start`: BudgetSpent: the budget cannot pay the first round (a later one ends the rounds);
            ConfigError, CheckpointError, LedgerError: about the server's files; FedLoRAError: anything else: only
            private/log has the reason.
    """

    def __init__(self, private: PrivateRun, terms: FederationPrivacy) -> None:
        privacy = private.server.privacy
        assert privacy is not None, "the server of a private run releases"
        self.private, self._terms, self._privacy = private, terms, privacy

    def check(self, strategy: FedLoRA, policy: Policy) -> None:
        if strategy.server.privacy is None:
            raise ConfigError("private rounds need a server with privacy.")
        if strategy.choosing is not None or strategy.participation != 1.0:
            raise ConfigError("a private federation asks all members to train in every round, and none to measure.")
        check_policy(policy, self._terms)

    @contextmanager
    def playing(self, strategy: FedLoRA) -> Iterator[None]:
        def note(what: str) -> None:
            self._note(strategy.flower_state.next_round, what)

        with logs_kept_secret(note):
            try:
                yield
            except _OURS:
                raise
            except Exception as error:
                note(f"the rounds failed: {type(error).__name__}: {error}")
                raise FedLoRAError(
                    f"round {strategy.flower_state.next_round} of a private federation failed. Either nothing was "
                    f"released, or the release is stored. The reason may reveal something about single sites, so it is "
                    f"only in {self.private.releases.folder}/log."
                ) from None

    def before_attempt(self, strategy: FedLoRA, grid: Grid) -> None:
        """Check the budget before any client trains, then wait until all members are online. Round 1 waits as long as
        needed for all members in the policy; a later one continues after the deadline with those that are online."""
        known, clock = strategy.flower_state, strategy.clock
        if strategy.server.open(known.state.server).stored:
            return
        self._require_room(known.next_round)
        began = remind = clock.monotonic()
        while missing := set(strategy.policy.clients) - set(strategy.online(grid)):
            now = clock.monotonic()
            if known.next_round > 1 and now - began >= strategy.deadline:
                return
            if known.next_round == 1 and now >= remind:
                remind = now + _REMIND
                self._note(1, f"round 1 waits for {', '.join(sorted(missing))}")
                members = len(strategy.policy.clients)
                log.warning("round 1 waits until all %d members are online", members, extra=RELEASED)
            clock.sleep(1.0)
            strategy.read_policy()

    def draw(self, strategy: FedLoRA, intake: Intake, online: Collection[str]) -> Collection[str]:
        """Those whom the release's terms ask; who was removed from the policy counts as zero."""
        return [name for name in intake.asked or () if name in strategy.policy.clients]

    def line(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return public_line(line, line.get("privacy") or self.private.spent(line["round"]))

    def event(self, event: Event, policy: Policy) -> Event | None:
        public = public_event(event, list(policy.clients))
        if isinstance(event, Began):
            self._note_away(event, policy)
        elif isinstance(event, Fated) and event.fate == "trained":
            loss = "" if event.loss is None else f", loss {event.loss:.4g}"
            self._note(event.round, f"{event.client} answered: {event.examples} examples in {event.seconds} s{loss}")
        elif isinstance(event, Fated) and event.fate != "refused":  # the intake notes its own refusals
            self._privacy.note(event.round, event.client, f"{event.fate}: {event.why}")
        elif isinstance(event, PolicyChanged | Ended) and event.why != getattr(public, "why", ""):
            self._note(event.round + isinstance(event, Ended), event.why)
        return public

    # ---------------------------------------------------------------------------------------------------------- inside

    def _require_room(self, round: int) -> None:
        """Raises `BudgetSpent` if this round would exceed the population's budget."""
        releases, plan = self.private.releases, self.private.plan
        event = releases.event(round, self._privacy.mechanism(plan.size), plan.size, 1.0)
        releases.ledger.check(event, releases.budget, 1)

    def _note_away(self, event: Began, policy: Policy) -> None:
        """Note the members that are not asked, unless the sum is there already, for which nobody is."""
        others = event.not_asked.items()
        away = {name: f"{one['fate']}: {one['why']}" for name, one in others if one["fate"] != "not drawn"}
        if event.asked or away:
            removed = sorted(set(self._terms.named()) - set(policy.clients))
            away |= dict.fromkeys(removed, "removed: policy.toml does not name it")
        for name, why in away.items():
            self._privacy.note(event.round, name, why)

    def _note(self, round: int, what: str) -> None:
        self._privacy.note(round, "", what)
