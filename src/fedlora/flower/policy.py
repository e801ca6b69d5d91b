"""Who may take part, at which rank and with which weight: the server's word, whatever a client claims."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import ConfigError


@dataclass(frozen=True)
class Policy:
    """What the server allows.

    clients: name -> its rank, or its ranks by module: the allow-list, and the order in which rounds draw from it.
    max_weight_share: the largest p_i; a claim of more examples counts as so many as give this share. max_examples: the
    most that a claim counts for. quarantine: refused uploads after which a client is no longer asked; 0 asks for ever.
    deadline: seconds for a round's replies, and how long a message lives. retries: of a round with too few replies.
    """

    clients: Mapping[str, int | Mapping[str, int]]
    max_weight_share: float = 1.0
    max_examples: float = 1e9
    quarantine: int = 3
    deadline: float = 3600.0
    retries: int = 1

    def __post_init__(self) -> None:
        if not self.clients:
            raise ConfigError("the policy names no clients, so nobody could take part.")
        for name, value in (("max_weight_share", self.max_weight_share), ("max_examples", self.max_examples)):
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"the policy's {name} is a positive number; got {value}.")
        numbers = (self.max_weight_share, self.deadline, self.retries, self.quarantine)
        whole = isinstance(self.retries, int) and isinstance(self.quarantine, int)
        if not whole or not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            raise ConfigError("the policy: retries and quarantine are whole numbers, deadline and shares finite ones.")
        if self.max_weight_share > 1 or self.deadline <= 0 or self.retries < 0 or self.quarantine < 0:
            raise ConfigError("the policy: max_weight_share <= 1, deadline > 0, retries >= 0, quarantine >= 0.")

    def examples(self, claimed: Mapping[str, float]) -> dict[str, float]:
        """What each client's examples count for: capped, and so that no share exceeds `max_weight_share`.

        With fewer than 1 / max_weight_share clients that is impossible, and all count alike.
        """
        counts = {name: min(n, self.max_examples) for name, n in claimed.items()}
        share, positive = self.max_weight_share, sorted(n for n in counts.values() if n > 0)
        if share >= 1 or not positive:
            return counts
        if share * len(positive) <= 1:
            return {name: float(n > 0) for name, n in counts.items()}
        for large in range(1, len(positive) + 1):  # the `large` largest are cut to one level
            rest = math.fsum(positive[: len(positive) - large])
            if share * large >= 1:
                break
            level = share * rest / (1 - share * large)
            if large == len(positive) or positive[-large - 1] <= level:
                if positive[-large] > level:
                    return {name: min(n, level) for name, n in counts.items()}
                return counts
        return {name: float(n > 0) for name, n in counts.items()}

    @classmethod
    def read(cls, path: Path) -> Policy:
        """From policy.toml: [clients] name = rank, and the fields above. Raises `ConfigError`."""
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the policy {path} cannot be read: {error}.") from error
        known = {"clients", "max_weight_share", "max_examples", "quarantine", "deadline", "retries", "max_rank"}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ConfigError(
                f"the policy {path} has an unknown field {unknown[0]!r}; it knows {', '.join(sorted(known))}."
            )
        most = raw.pop("max_rank", None)
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise ConfigError(f"the policy {path}: max_rank is a whole number from 1; got {most!r}.")
        clients = raw.get("clients")
        if not isinstance(clients, dict):
            raise ConfigError(f"the policy {path} has no table [clients] with name = rank.")
        for name, ranks in clients.items():
            for rank in ranks.values() if isinstance(ranks, dict) else [ranks]:
                if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or (most and rank > most):
                    raise ConfigError(
                        f"the policy {path}: client {name!r} has rank {rank!r}; whole numbers from 1"
                        f"{f' to max_rank = {most}' if most else ''} are ranks."
                    )
        try:
            return cls(**raw)
        except TypeError as error:
            raise ConfigError(f"the policy {path}: {error}.") from error
