"""What one kind of rounds adds to the loop of `FedLoRA`: nothing here; `private_rounds` has the other kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedlora.errors import ConfigError
from fedlora.flower.rounds.membership import draw, number_drawn
from fedlora.flower.terms.policy import Policy
from fedlora.server.rounds import OpenRound

if TYPE_CHECKING:
    from fedlora.flower.rounds.strategy import FedLoRA


class RoundHooks:
    """Rounds that may be played again."""

    def check(self, strategy: FedLoRA, policy: Policy) -> None:
        """Raises `ConfigError` for a strategy, or a policy, that such rounds cannot have."""
        if strategy.server.privacy is not None:
            raise ConfigError(
                "a server with privacy is played by FedLoRA(hooks=PrivateRounds(...)): without them FedLoRA plays "
                "rounds again."
            )

    def before_attempt(self, strategy: FedLoRA, grid: Grid) -> None:
        """Before an attempt's clients are drawn, and its round opens. It may wait, and read the policy again."""

    def draw(self, strategy: FedLoRA, opened: OpenRound, online: Collection[str]) -> Collection[str]:
        """The clients that an attempt chooses. It asks those of them that are online; `asked_of` gives the others their
        fates. opened: the round."""
        known, policy = strategy.flower_state, strategy.policy
        return draw(
            policy, online, number_drawn(len(policy.clients), strategy.participation), seed=strategy.seed,
            finished=strategy.round, tried={name: before.times for name, before in known.unusable.items()},
        )  # fmt: skip

    def line(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """A round's line, with what such rounds add to it."""
        return dict(line)
