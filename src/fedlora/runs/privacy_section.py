"""The table [privacy] in a run's configuration: the limit on one client's influence, and where it is charged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from fedlora.errors import BudgetSpent
from fedlora.privacy.accounting import LEAST_DELTA, LEAST_EPSILON, MOST_EPSILON
from fedlora.privacy.events import Budget
from fedlora.privacy.ledger import Ledger
from fedlora.server.private import Private, Releases
from fedlora.training.settings import Positive, Section

Above = Annotated[float, Field(gt=0)]

SIMULATED = "SIMULATED clients of one run of an experiment on public data"  # a population's name


class PrivacySection(Section):
    """Differential privacy of what is released; the unit is one client, and the server is trusted.

    docs/how-to/privacy.md explains the guarantee. With run.participation below 1 each client takes part in a round with
    that chance, drawn secretly, which lowers epsilon.

    clipping_norm: C, the largest norm of one client's change in a round; larger ones are scaled down to it.
    noise_multiplier: z, the noise relative to one client's largest effect; set this or `epsilon`. epsilon: the cost of
    all run.rounds together at `delta`. delta: the probability that the guarantee fails. dims: sum
    changes in so many directions of each side of a module (default: whole). rank: R of the server's update (default:
    the clients' largest). most_examples: a client counts min(n_i, most_examples) / most_examples; default: all equally.
    population: a name for these clients. ledger: the file that charges all runs on these clients; keep it. budget: the
    most epsilon that these runs together may spend at `delta` (default: what the first run needs); later it can only
    lower the ledger's.
    """

    clipping_norm: Above
    noise_multiplier: Above | None = None
    epsilon: Annotated[float, Field(ge=LEAST_EPSILON, le=MOST_EPSILON)] | None = None
    delta: Annotated[float, Field(ge=LEAST_DELTA, lt=1)]
    population: Annotated[str, Field(min_length=1, max_length=200)]
    ledger: Annotated[str, Field(min_length=1)]
    budget: Above | None = None  # the population's; the ledger has its own
    dims: Positive | None = None
    rank: Positive | None = None
    most_examples: Positive | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PrivacySection:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError(
                "give either privacy.epsilon (the cost of all rounds together) or privacy.noise_multiplier"
            )
        if self.epsilon is not None and self.budget is not None and self.budget < self.epsilon:
            raise ValueError(
                f"privacy.budget = {self.budget:g} is of all runs together, and privacy.epsilon = {self.epsilon:g} of "
                f"this one alone is more"
            )
        return self

    def multiplier(self, rounds: int, participation: float) -> float:
        """z: as given, or for the given epsilon. Needs the extra `privacy`."""
        from fedlora.privacy.accounting import noise_multiplier_for

        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return noise_multiplier_for(self.epsilon or 0.0, rounds, self.delta, participation)

    def cost(self, rounds: int, participation: float) -> float:
        """Epsilon for all rounds of this run alone."""
        from fedlora.privacy.accounting import epsilon

        return epsilon(self.multiplier(rounds, participation), rounds, self.delta, participation)

    def most(self, rounds: int, participation: float) -> Budget:
        """The population's budget at the end of this run, if its ledger does not have one."""
        return Budget(self.budget or self.epsilon or self.cost(rounds, participation) * (1 + 1e-9), self.delta)

    def limit(self, ledger: Ledger, rounds: int, participation: float) -> Budget | None:
        """The limit to charge with: this run's own, below the ledger's; None: only the ledger's.

        Raises:
            BudgetSpent: privacy.budget exceeds the ledger's. LedgerError: the ledger cannot be read.
        """
        if not (budgets := ledger.read().budgets):
            return self.most(rounds, participation)
        recorded = budgets[-1]
        own = None if self.budget is None else Budget(self.budget, self.delta)
        if own is not None and own.delta == recorded.delta and own.epsilon > recorded.epsilon:
            raise BudgetSpent(
                f"privacy.budget = {own.epsilon:g}, but by the ledger {ledger.path.name} its population may "
                f"spend {recorded.epsilon:g} in all. Leave privacy.budget out, or raise the ledger's for good: fedlora "
                f"privacy {ledger.path.name} --budget {own.epsilon:g} --delta {own.delta:g}"
            )
        return own

    def excludes(self, server: Section) -> Iterator[str]:
        """A line for each key of [server] that contradicts private rounds."""
        weighting = "uniform" if self.most_examples is None else "examples"
        for key, agrees in (("weighting", weighting), ("quorum", None), ("stream", False)):
            if (value := getattr(server, key)) not in (None, agrees):
                yield (
                    f"server.{key} = {value!r} is for rounds that are not private: these have one noised sum, count by "
                    f"privacy.most_examples, and never fail, because that would reveal who came. Leave it out"
                )

    def build(
        self, releases: Releases, *, clients: Sequence[str], largest: int, rounds: int, participation: float, seed: int
    ) -> Private:
        """The privacy parameters for these clients. largest: their largest rank. seed: for the public directions."""
        return Private(
            clipping_norm=self.clipping_norm, noise_multiplier=self.multiplier(rounds, participation),
            clients=tuple(clients), rank=self.rank or largest, releases=releases, dims=self.dims,
            sampling=participation, most_examples=self.most_examples, seed=seed,
        )  # fmt: skip
