"""A private federation's plan, its releases, and its spending. docs/how-to/privacy.md states the guarantee.

Each round asks all members that are online, once. A member that is refused, offline, late, fails or abstains counts as
zero, and the round takes place: it has no quorum. The noised sum is stored and charged before the round is told or
stored; after a kill the same sum is used again, and nobody is asked for it.

FED/server/private/    for the server alone (mode 700), as RUN/private of `fedlora run`
    run.json    its id in the ledger         journal/    the noised sums
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedlora.core.lora import Adapter
from fedlora.errors import CheckpointError, ConfigError, HyperparameterError
from fedlora.flower.places import FederationFolder
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs import private_run
from fedlora.runs.folder import RunFolder
from fedlora.runs.private_releases import OnDisk, Planned, begin, read_private
from fedlora.runs.private_run import PrivacyPlan, PrivateRun
from fedlora.server.server import Server


def planned(settings: FederationSettings, server: Server, start: Adapter) -> tuple[Server, PrivacyPlan]:
    """The server with [privacy], and the cost of its rounds, from public constants alone. It releases nothing yet.

    Args:
        server: from these settings, without privacy. start: the common one, of the largest rank.

    Raises:
        ConfigError: a method, server or start that cannot be private: which, and why.
    """
    section, rounds = settings.privacy, settings.run.rounds
    assert section is not None, "only a federation with [privacy] is planned"
    try:
        privacy = section.build(
            Planned(), clients=section.named(), largest=max(start.ranks.values()), rounds=rounds, participation=1.0,
            seed=settings.run.seed,
        )  # fmt: skip
        private = replace(server, round=privacy)
        return private, private_run.planned(section, private, private.init(start), rounds, 1.0)
    except HyperparameterError as error:
        raise ConfigError(f"[privacy] cannot be kept: {error}") from error


def check_affordable(settings: FederationSettings, private: Server, plan: PrivacyPlan) -> None:
    """Check the cost before anything is released.

    Raises:
        ConfigError: the noise would leave nothing. BudgetSpent: all rounds would exceed the population's budget.
            LedgerError. Nothing is charged.
    """
    assert private.privacy is not None, "`planned` made it"
    private_run.check_plan(plan, private.privacy, _releases(settings, Path(), "planned"))


def opened_private(
    home: FederationFolder, settings: FederationSettings, private: Server, plan: PrivacyPlan, done: int
) -> PrivateRun:
    """The federation after `done` rounds, ready to continue. The first call writes its id.

    Raises:
        ConfigError: a ledger without rounds that were released. BudgetSpent, LedgerError. CheckpointError: the id is
            lost.
    """
    assert private.privacy is not None, "`planned` made it"
    if not done:  # later it is there, or nothing says how the rounds were charged
        begin(RunFolder(home.server))
    run, _ = read_private(RunFolder(home.server))
    try:
        return private_run.going_on(private, private.privacy, _releases(settings, home.private, run), plan, done)
    except CheckpointError as error:  # another ledger: it would fail again
        raise ConfigError(str(error)) from error


def _releases(settings: FederationSettings, folder: Path, run: str) -> OnDisk:
    assert settings.privacy is not None, "only a federation with [privacy] releases"
    return private_run.releases_of(settings.privacy, folder, run, settings.run.rounds, 1.0)


def has_released(home: FederationFolder) -> bool:
    """Whether a noised sum was ever made here."""
    return any((home.private / "journal").glob("*"))


def require_room(private: PrivateRun, round: int) -> None:
    """Raises `BudgetSpent` if this round would exceed the population's budget. Before any site trains for it."""
    privacy, releases, plan = private.server.privacy, private.releases, private.plan
    assert privacy is not None, "the server of a private run releases"
    releases.ledger.check(releases.event(round, privacy.mechanism(plan.size), plan.size, 1.0), releases.budget, 1)
