"""Private rounds on a network: one clipped and noised sum each. docs/how-to/privacy.md states their guarantee.

Each round asks all members that are online, once. A member that is refused, offline, late, fails or abstains counts as
zero, and the round takes place: there is no quorum, no second attempt, no second draw. The noised sum is stored and
charged before the round is told or stored; after a kill the same sum is used again, and nobody is asked for it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from flwr.serverapp import Grid

from fedlora.errors import ConfigError
from fedlora.flower.rounds.hooks import RoundHooks
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import FederationPrivacy, check_policy
from fedlora.runs.private_run import PrivateRun
from fedlora.server.rounds import OpenRound

log = logging.getLogger(__name__)
_REMIND = 300.0  # seconds until the same line is repeated


class PrivateRounds(RoundHooks):
    """`FedLoRA(private.server, policy, state, hooks=PrivateRounds(private, terms))` plays private rounds.

    Args:
        private: the server, which releases, and its plan. terms: the federation's [privacy].

    Raises:
        ConfigError: from `FedLoRA`, for a policy that breaks the guarantee: it has retries = 0.
            From `start`: BudgetSpent: the budget cannot pay the first round (a later one ends the rounds);
            ConfigError, CheckpointError, LedgerError: about the server's files.
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
                members, away = len(strategy.policy.clients), ", ".join(sorted(missing))
                log.warning("round 1 waits until all %d members are online; missing: %s", members, away)
            clock.sleep(1.0)
            strategy.read_policy()

    def draw(self, strategy: FedLoRA, opened: OpenRound, online: Collection[str]) -> Collection[str]:
        """Those whom the release's terms ask; who was removed from the policy counts as zero."""
        return [name for name in opened.asked or () if name in strategy.policy.clients]

    def line(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {**line, "privacy": self.private.spent(line["round"])}

    # ---------------------------------------------------------------------------------------------------------- inside

    def _require_room(self, round: int) -> None:
        """Raises `BudgetSpent` if this round would exceed the population's budget."""
        releases, plan = self.private.releases, self.private.plan
        event = releases.event(round, self._privacy.mechanism(plan.size), plan.size, 1.0)
        releases.ledger.check(event, releases.budget, 1)
