"""The table [privacy] of a federation: like a run's, but with the differences that a network brings.

The ledger assumes q = 1, because traffic and timing show who takes part. Every round asks all members, and divides the
mean by a number from the settings, whoever answers. The guarantee is the server's: a site sets nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from fedlora.errors import ConfigError, HyperparameterError
from fedlora.flower.terms import HELD_OUT
from fedlora.privacy.accounting import epsilon_up, how_strong
from fedlora.runs.privacy_section import SIMULATED, PrivacySection

if TYPE_CHECKING:
    from fedlora.flower.terms.settings import FederationSettings


class FederationPrivacy(PrivacySection):
    """As [privacy] of a run; docs/how-to/privacy.md.

    members: the names of all sites that may ever take part. They are public, and the noised sum is divided by their
    number, whoever answers. `init` writes them. ledger: a path at the server, which does not travel; "" at a site.
    """

    ledger: str = ""
    members: list[Annotated[str, Field(min_length=1)]] | None = None

    @model_validator(mode="after")
    def _of_real_sites(self) -> FederationPrivacy:
        if self.population == SIMULATED:
            raise ValueError(
                f"privacy.population = {SIMULATED!r} is an experiment's, but a federation's sites are real: name the "
                f"people whose data they hold"
            )
        return self

    def named(self) -> tuple[str, ...]:
        """The members. Raises `ConfigError` if they are not set."""
        if not self.members:
            raise ConfigError("privacy.members is missing: the names of all sites that may ever take part")
        if len(set(self.members)) < len(self.members):
            raise ConfigError(f"privacy.members names a site twice: {', '.join(self.members)}")
        return tuple(self.members)

    def check_members(self, clients: Iterable[str]) -> None:
        """Raises `ConfigError` for a site that is not a member."""
        members = self.named()
        if odd := [name for name in clients if name not in members]:
            raise ConfigError(
                f"{odd[0]!r} is not one of the {len(members)} members of this private federation, and every round "
                f"divides the mean by their number. To let more sites in, make another federation that charges the "
                f"same ledger, or name them in privacy.members before the first round"
            )

    def checked(self) -> FederationPrivacy:
        """The table, checked at a server. Raises `ConfigError`."""
        members = len(self.named())
        if not self.ledger:
            raise ConfigError("privacy.ledger is missing: the file that charges all runs on these clients")
        if self.delta >= 1 / members:
            raise ConfigError(
                f"privacy.delta = {self.delta:g} with {members} clients promises nothing: publishing all data of one "
                f"random client already has delta = 1 / n = {1 / members:.2g}. Use a delta far below that"
            )
        return self


def refusals(settings: FederationSettings) -> Iterator[str]:
    """A line for each setting that [privacy] excludes."""
    run = settings.run
    if run.participation != 1.0:
        yield (
            f"run.participation = {run.participation:g} draws some sites, and [privacy] asks all, since traffic and "
            f"timing show who was drawn: leave it out"
        )
    if settings.privacy is not None:
        yield from settings.privacy.excludes(settings.server)
    if settings.robust.rule != "none":
        yield (
            f"robust.rule = {settings.robust.rule!r} weighs each site by the others' uploads, so one site's "
            f"influence has no bound: leave out [robust] or [privacy]"
        )
    for key in filter(settings.share, HELD_OUT):
        yield (
            f"data.{key} is a share that sites measure on, and their scores would be released without noise: leave it "
            f"out, or name a file of public data at the server"
        )


def promise(privacy: FederationPrivacy, rounds: int) -> str:
    """The federation's guarantee in a sentence, for everybody."""
    try:
        cost = privacy.epsilon or privacy.cost(rounds, 1.0)
        spent = f"epsilon {epsilon_up(cost)} at delta {privacy.delta:g} for all {rounds} rounds{how_strong(cost)}"
    except HyperparameterError:  # without the libraries of fedlora[privacy], as at a site
        spent = f"noise multiplier {privacy.noise_multiplier:g} (its epsilon needs pip install 'fedlora[privacy]')"
    return (
        f"{spent}; the unit is one site: its whole contribution to a round is present or zero. The server is trusted: "
        f"it sees every update"
    )
