"""What a private run will cost, and what can be left of its signal: from public constants alone, before it begins.

The mean change of a round has norm C at most, over all parts together, and every entry of it gets noise of standard
deviation sigma = z K / (q n), where K is C and the grid. In a part of a x b entries the noise has norm sigma sqrt(a b),
and its strongest direction sigma (sqrt(a) + sqrt(b)). A direction of a sum of T rounds that all clients agree on can be
told from that noise only if T times its size exceeds sqrt(T) sigma (a b)^(1/4). Source: Benaych-Georges and Nadakuditi,
"The singular values and vectors of low rank perturbations of large rectangular random matrices" (2012).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedlora.errors import ConfigError
from fedlora.privacy.geometry import Layout
from fedlora.privacy.mechanism import Mechanism
from fedlora.runs.preparation import Prepared
from fedlora.server.private_options import Privacy
from fedlora.server.private_round import PrivateRound


@dataclass(frozen=True)
class PartPlan:
    """One module or head. rows, columns: of what is summed. signal: the norm of its mean change where all clients agree
    and the clip is spread evenly over the parts; most: where all of it is here. noise: the noise's norm. strongest: its
    strongest direction. lost: a direction weaker than this, in one round's mean, drowns even after all rounds."""

    rows: int
    columns: int
    signal: float
    most: float
    noise: float
    strongest: float
    lost: float

    @property
    def entries(self) -> int:
        return self.rows * self.columns

    @property
    def drowned(self) -> bool:
        """Whether nothing could be left of it, whatever the clients learned."""
        return self.most <= self.lost


@dataclass(frozen=True)
class PrivacyPlan:
    """epsilon: of all rounds, at delta. size: d. sigma: the noise's deviation in each entry of the mean change."""

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
        """Raises `ConfigError` where nothing can be left in any part, whatever the clients learned."""
        if self.parts and all(part.drowned for part in self.parts.values()):
            name, best = max(self.parts.items(), key=lambda item: item[1].most / item[1].lost)
            raise ConfigError(
                f"this budget leaves nothing: in {self.rounds} rounds even a change that all {self.clients} clients "
                f"agree on, with the whole clip {self.clip:g} in {name}, has {best.most:.3g} in a round's mean, and "
                f"what is below {best.lost:.3g} drowns in the noise. Take more clients, a larger epsilon, more rounds "
                f"at the same noise, or a smaller privacy.shape ('two-sided' with few dims, or ffa-lora)."
            )


def plan(prepared: Prepared) -> PrivacyPlan:
    """Of a run that is prepared. Nothing of the clients' data counts but how many clients there are.

    Raises:
        ConfigError: no [privacy]. HyperparameterError: as `Server.open`.
    """
    config, server = prepared.config, prepared.server
    if config.privacy is None or server.privacy is None:
        raise ConfigError("this configuration has no table [privacy], so there is nothing to plan.")
    opened = server.open(server.init(prepared.seed_adapter))
    if not isinstance(opened, PrivateRound):
        raise ConfigError("this configuration has no table [privacy], so there is nothing to plan.")
    cost = config.privacy.cost(config.run.rounds, config.run.participation)
    return plan_of(server.privacy, opened.layout, opened.mechanism, config.run.rounds, cost, config.privacy.delta)


def plan_of(
    privacy: Privacy, layout: Layout, mechanism: Mechanism, rounds: int, epsilon: float, delta: float
) -> PrivacyPlan:
    """The same, of its parts."""
    sigma = mechanism.scale(layout.size) * mechanism.grid / privacy.denominator
    blocks = {name: bases.shape for name, bases in layout.modules.items()}
    blocks |= {f"head {name}": (math.prod(shape), 1) for name, shape in layout.heads.items()}
    parts = {
        name: PartPlan(
            a, b, signal=privacy.clip / math.sqrt(len(blocks)), most=privacy.clip, noise=sigma * math.sqrt(a * b),
            strongest=sigma * (math.sqrt(a) + math.sqrt(b)), lost=sigma * (a * b) ** 0.25 / math.sqrt(rounds),
        )
        for name, (a, b) in blocks.items()
    }  # fmt: skip
    return PrivacyPlan(
        epsilon, delta, rounds, privacy.noise_multiplier, privacy.clip, privacy.sampling, len(privacy.clients),
        privacy.rank, layout.size, sigma, parts,
    )  # fmt: skip
