"""A private run with its folder and ledger: its cost, its releasing server, and its spending.

`plan` uses only public constants, before the run begins. A round's mean change has norm at most C, over all parts
together, and each of its entries gets noise of standard deviation sigma = z K gamma / (q n), where K gamma, the
sensitivity, is C and a little for the grid gamma (`privacy.mechanism`). In a part of a x b entries the noise has norm
sigma sqrt(a b), and its strongest direction sigma (sqrt(a) + sqrt(b)). In a sum over T rounds, a direction that all
clients agree on stands out from that noise only if T times its size exceeds sqrt(T) sigma (a b)^(1/4). Source:
Benaych-Georges and Nadakuditi, "The singular values and vectors of low rank perturbations of large rectangular random
matrices" (2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlora.errors import ConfigError
from fedlora.privacy.accounting import epsilon, epsilon_up
from fedlora.privacy.ledger import Ledger
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.runs.privacy_section import SIMULATED, PrivacySection
from fedlora.runs.private_releases import OnDisk, private_folder, read_private
from fedlora.server.private import Private
from fedlora.server.private_round import PrivateRound
from fedlora.server.server import Server
from fedlora.server.state import ServerState


@dataclass(frozen=True)
class PartPlan:
    """One module or head. rows, columns: of the summed change. signal: the norm of its mean change if all clients agree
    and the clip is spread evenly over the parts. noise: the noise's norm. strongest: the noise's strongest direction.
    lost: a direction below this in one round's mean drowns even after all rounds."""

    rows: int
    columns: int
    signal: float
    noise: float
    strongest: float
    lost: float


@dataclass(frozen=True)
class PrivacyPlan:
    """epsilon: for all rounds, at delta. size: d. sigma: the noise's deviation in each entry of the mean change."""

    epsilon: float
    delta: float
    rounds: int
    noise_multiplier: float
    clip: float
    sampling: float
    clients: int
    rank: int
    size: int
    sigma: float
    parts: Mapping[str, PartPlan]

    def require_signal(self) -> None:
        """Raise `ConfigError` if nothing can survive in any part: not even the whole clip, if all clients agree."""
        name, least = min(((name, part.lost) for name, part in self.parts.items()), key=lambda one: one[1])
        if self.clip <= least:
            raise ConfigError(
                f"this budget leaves nothing: in {self.rounds} rounds even a change that all {self.clients} clients "
                f"agree on, with the whole clip {self.clip:g} in {name}, drowns in the noise, which hides all below "
                f"{least:.3g} there. Use more clients, a larger epsilon, more rounds, or privacy.dims."
            )


def plan(prepared: Prepared) -> PrivacyPlan:
    """The plan for a prepared run. Raises like `planned`."""
    config, server = prepared.config, prepared.server
    state = server.init(prepared.seed_adapter)
    return planned(config.privacy, server, state, config.run.rounds, config.run.participation)


def planned(
    section: PrivacySection | None, server: Server, state: ServerState, rounds: int, participation: float
) -> PrivacyPlan:
    """The plan for a private server before its first round. From the clients' data it uses only the number of clients.

    Raises:
        ConfigError: no [privacy]. HyperparameterError: as in `Server.open`.
    """
    opened, privacy = server.open(state), server.privacy
    if section is None or privacy is None or not isinstance(opened, PrivateRound):
        raise ConfigError("this configuration has no table [privacy], so there is nothing to plan.")
    layout, mechanism = opened.layout, opened.mechanism
    sigma = mechanism.scale(layout.size) * mechanism.grid / privacy.denominator
    blocks = {name: bases.shape for name, bases in layout.modules.items()}
    blocks |= {f"head {name}": (math.prod(shape), 1) for name, shape in layout.heads.items()}
    parts = {
        name: PartPlan(
            a, b, signal=privacy.clipping_norm / math.sqrt(len(blocks)), noise=sigma * math.sqrt(a * b),
            strongest=sigma * (math.sqrt(a) + math.sqrt(b)), lost=sigma * (a * b) ** 0.25 / math.sqrt(rounds),
        )
        for name, (a, b) in blocks.items()
    }  # fmt: skip
    return PrivacyPlan(
        section.cost(rounds, participation), section.delta, rounds, privacy.noise_multiplier, privacy.clipping_norm,
        privacy.sampling, len(privacy.clients), privacy.rank, layout.size, sigma, parts,
    )  # fmt: skip


@dataclass(frozen=True)
class PrivateRun:
    """server: the run's, whose rounds are stored and charged. plan: for all its rounds."""

    server: Server
    releases: OnDisk
    plan: PrivacyPlan

    def spent(self, round: int) -> dict[str, Any]:
        """The entry for metrics, summary and card after that many rounds: this run's own epsilon so far and as planned,
        and the ledger's record of the population."""
        p = self.plan
        return {
            "epsilon": epsilon(p.noise_multiplier, round, p.delta, p.sampling) if round else 0.0,
            "epsilon_planned": p.epsilon, "delta": p.delta, "rounds_planned": p.rounds,
            "noise_multiplier": p.noise_multiplier, "clip": p.clip, "sampling": p.sampling, "clients": p.clients,
            "unit": "one client's contribution, present or zero", "run": self.releases.run,
            "ledger": dict(self.releases.ledger.describe(p.delta)),
        }  # fmt: skip


def check_affordable(prepared: Prepared) -> None:
    """Check before a fresh run has a folder. Does nothing for a run that is not private. Raises like `check_plan`."""
    if (privacy := prepared.server.privacy) is not None:
        check_plan(plan(prepared), privacy, _releases(prepared.config, Path(), "planned"))


def check_plan(plan: PrivacyPlan, privacy: Private, releases: OnDisk) -> None:
    """Check a plan before anything is released.

    Raises:
        ConfigError: the noise would leave nothing. BudgetSpent: all rounds would exceed the population's budget;
            nothing was charged.
    """
    plan.require_signal()
    releases.check_budget(privacy.mechanism(plan.size), plan.size, privacy.sampling)


def opened_private(prepared: Prepared, folder: RunFolder, state: ServerState) -> PrivateRun | None:
    """The run continuing from `state`, whose folder exists; None if it is not private.

    Raises:
        CheckpointError: the ledger lacks rounds that were released. HyperparameterError: as in `Server.open`.
    """
    privacy = prepared.server.privacy
    if privacy is None:
        return None
    run, _ = read_private(folder)
    releases = _releases(prepared.config, private_folder(folder), run)
    return going_on(prepared.server, privacy, releases, plan(prepared), state.round)


def going_on(server: Server, privacy: Private, releases: OnDisk, plan: PrivacyPlan, done: int) -> PrivateRun:
    """The run with a server that releases from now on. done: rounds so far. Raises `CheckpointError` if the ledger
    lacks one."""
    releases.check_charged(done)
    return PrivateRun(replace(server, round=replace(privacy, releases=releases)), releases, plan)


def _releases(config: RunConfig, folder: Path, run: str) -> OnDisk:
    assert config.privacy is not None, "its server is private"
    return releases_of(config.privacy, folder, run, config.run.rounds, config.run.participation)


def releases_of(section: PrivacySection, folder: Path, run: str, rounds: int, participation: float) -> OnDisk:
    """A private server's releases, stored in `folder` and charged as `run`."""
    ledger = Ledger(Path(section.ledger), section.population)
    return OnDisk(folder, run, ledger, section.limit(ledger, rounds, participation), rounds, section.delta)


def guarantee(spent: Mapping[str, Any]) -> str:
    """For the card: epsilon for the planned rounds, even if fewer were played, and for the whole population."""
    ledger, share = spent["ledger"], spent["sampling"]
    who = "all" if share == 1.0 else f"a secret draw of {share:g}"
    simulation = f"no account of anybody's data ({SIMULATED}): " if ledger["population"] == SIMULATED else ""
    return (
        f"{simulation}epsilon {epsilon_up(spent['epsilon_planned'])} at delta {spent['delta']:g} for "
        f"{spent['rounds_planned']} planned rounds (noise multiplier {spent['noise_multiplier']:.3f}, clip "
        f"{spent['clip']:g}, {who} of {spent['clients']} clients per round); unit: one client's contribution, against "
        f"anyone who gets what the server releases. All runs on these clients together, by their ledger and as "
        f"planned: epsilon {epsilon_up(ledger['planned_epsilon'])}"
    )
