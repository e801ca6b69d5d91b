"""The table [privacy] of a federation: like a run's, but with the differences that a network brings.

The ledger assumes q = 1, because traffic and timing show who takes part. Every round asks all members, and divides the
mean by a number from the settings, whoever answers. The guarantee is the server's: a site sets nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from fedlora.errors import ConfigError, HyperparameterError
from fedlora.flower.terms.policy import Policy
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
        if self.sampling == "poisson":
            raise ValueError(
                "privacy.sampling = 'poisson' makes epsilon smaller only while nobody can see who takes part. On a "
                "network, traffic and timing show it. So a federation's ledger uses q = 1, and every round asks all "
                "members. Leave sampling out; the secret draw is for `fedlora run`, in one process"
            )
        if self.population == SIMULATED:
            raise ValueError(
                f"privacy.population = {SIMULATED!r} means that an experiment simulates its clients, but a "
                f"federation's sites are real. Name the people whose data they hold"
            )
        return self

    def named(self) -> tuple[str, ...]:
        """The members. Raises `ConfigError` if they are not set."""
        if not self.members:
            raise ConfigError(
                "privacy.members is missing: the names of all sites that may ever take part. The mean is divided by "
                "their number, whoever answers. `fedlora flower init` writes them"
            )
        if len(set(self.members)) < len(self.members):
            raise ConfigError(f"privacy.members names a site twice: {', '.join(self.members)}")
        return tuple(self.members)

    def check_members(self, clients: Iterable[str]) -> None:
        """Raises `ConfigError` for a site that is not a member."""
        members = self.named()
        if odd := [name for name in clients if name not in members]:
            raise ConfigError(
                f"{odd[0]!r} is not one of the {len(members)} members of this private federation "
                f"({', '.join(members[:5])}{', ...' if len(members) > 5 else ''}). As promised, every round divides "
                f"the mean by their number, so nobody can be added. To let more sites in, make another federation "
                f"that charges the same ledger, or name them in privacy.members before the first round"
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


def with_private_defaults(raw: Any) -> Any:
    """A federation's tables; if there is [privacy], with its defaults in [server] and [data]: the sites hold nothing
    out, because their measurements would be released without noise."""
    if not isinstance(raw, Mapping) or raw.get("privacy") is None or not isinstance(raw.get("data", {}), Mapping):
        return raw
    return {**raw, "data": {"validation": 0.0, "test": 0.0, **raw.get("data", {})}}


def refusals(settings: FederationSettings) -> Iterator[str]:
    """A line for each setting that [privacy] excludes."""
    run, server, evaluate = settings.run, settings.server, settings.evaluate
    if run.participation != 1.0:
        yield (
            f"run.participation = {run.participation:g} draws some of the sites, but on a network [privacy] asks all "
            f"of them in every round (q = 1): leave it out"
        )
    if settings.privacy is not None:
        yield from settings.privacy.excludes(server)
    if settings.robust.rule != "none":
        yield (
            f"robust.rule = {settings.robust.rule!r} weighs each site by the others' uploads, so one site's "
            f"influence has no bound: leave out [robust] or [privacy]"
        )
    measured = "at the sites, on their own data, and releases scores without noise: leave it out"
    for part, share in (("validation", settings.data.validation), ("test", settings.data.test)):
        if share:
            yield (
                f"data.{part} = {share:g} measures {measured}, and let the server measure on a file of public data "
                f"(data.{part} with a file's name)"
            )
    if evaluate.target == "clients":
        yield f"evaluate.target = 'clients' measures {measured}"
    if evaluate.clients_at_end:
        yield f"evaluate.clients_at_end measures {measured}"


def promise(privacy: FederationPrivacy, rounds: int) -> str:
    """The federation's guarantee in a sentence, for everybody."""
    try:
        cost = privacy.cost(rounds, 1.0)
        epsilon, strength = f"epsilon {epsilon_up(cost)}", how_strong(cost)
    except HyperparameterError:  # without the libraries of fedlora[privacy], as at a site
        strength = how_strong(privacy.epsilon or 0.0)
        epsilon = (
            f"epsilon {epsilon_up(privacy.epsilon)}"
            if privacy.epsilon is not None
            else (f"noise multiplier {privacy.noise_multiplier:g} (epsilon needs pip install 'fedlora[privacy]')")
        )
    return (
        f"{epsilon} at delta {privacy.delta:g} for all {rounds} rounds{strength}; the unit is one site: its whole "
        f"contribution to a round is present or zero. The server is trusted: it sees every update"
    )


def check_policy(policy: Policy, privacy: FederationPrivacy) -> None:
    """Raises `ConfigError` for a policy that would break the privacy guarantee."""
    privacy.check_members(policy.clients)


__all__ = ["FederationPrivacy", "check_policy", "promise", "refusals", "with_private_defaults"]
