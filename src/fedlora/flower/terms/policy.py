"""Who may take part, at which rank and with which weight, decided by the server, whatever a client claims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from fedlora.core.messages import Client
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.terms.names import check_site, checked_rank
from fedlora.given_files import parse_toml, read_toml
from fedlora.server.terms import Weighting


def shares_lost(claimed: Mapping[str, float], counted: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Clients whose share was reduced: the claimed share, and the one that counted."""
    most = math.ldexp(1.0, math.frexp(max(claimed.values(), default=0.0))[1] - 1)  # rounds no share; sums stay finite
    claimed = {name: claim / most for name, claim in claimed.items()}
    of_claims, of_counts = math.fsum(claimed.values()), math.fsum(counted[name] for name in claimed)
    if not of_claims or not of_counts:
        return {}
    shares = {name: (claimed[name] / of_claims, counted[name] / of_counts) for name in claimed}
    return {name: {"claimed": p, "counted": q} for name, (p, q) in shares.items() if q < p * (1 - 1e-9)}


Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Policy:
    """What the server allows.

    clients: name -> its rank, or its ranks by module: the allow-list, in the order in which rounds draw from it.
    max_weight_share: the largest p_i; a claim of more examples counts as the number with this share. None: one half, or
    2 / clients if there are fewer than four. max_examples: the most that a claim counts for. max_upload_mb: for one
    reply, in 2^20 bytes; None: twice this client's largest upload, and 1. quarantine: rounds with refused uploads, and
    none with an accepted one, after which a client is no longer asked; 0 always asks. deadline: seconds for a reply,
    also the life of a message. retries: of a round with too few replies.
    """

    clients: Mapping[str, int | Mapping[str, int]]
    max_weight_share: Annotated[float, Field(gt=0, le=1)] | None = None
    max_examples: Above = 1e9
    quarantine: Count = 3
    deadline: Above = 3600.0
    retries: Count = 1
    max_upload_mb: Above | None = None

    @field_validator("clients", mode="before")
    @classmethod
    def _named_and_ranked(cls, clients: Any) -> Any:
        if not isinstance(clients, Mapping) or not clients:
            raise ValueError("[clients] has a line NAME = RANK for each client; without one, nobody could take part")
        for client, ranks in clients.items():
            check_site(client)
            if ranks == {}:
                raise ValueError(f"{client} has no rank")
            for rank in ranks.values() if isinstance(ranks, Mapping) else [ranks]:
                checked_rank(rank, client)
        return clients

    def client(self, name: str) -> Client:
        """A client, with its rank or its ranks by module."""
        rank = self.clients[name]
        return Client(name, rank if isinstance(rank, int) else dict(rank))

    @property
    def share(self) -> float:
        """The largest p_i: `max_weight_share`, or its default.

        Example:
            >>> [round(Policy(dict.fromkeys("abcdefgh"[:n], 4)).share, 2) for n in (1, 2, 3, 4, 8)]
            [1.0, 1.0, 0.67, 0.5, 0.5]
        """
        if self.max_weight_share is not None:
            return self.max_weight_share
        return min(1.0, max(0.5, 2 / len(self.clients)))

    def largest_shares(self, weighting: Weighting, clients: int) -> list[float]:
        """The largest possible weight of each client in a round of `clients`, whatever it claims.

        Example:
            >>> Policy(dict.fromkeys("abcd", 4), max_weight_share=0.3).largest_shares("examples", 3)
            [0.3333333333333333, 0.3333333333333333, 0.3333333333333333]
        """
        return [max(1 / clients, self.share if weighting == "examples" else 0.0)] * clients

    @classmethod
    def read(cls, path: Path) -> Policy:
        """From policy.toml: [clients] name = rank, and the fields above. Raises `ConfigError`."""
        return cls.made(read_toml(path, "the policy"), f"the policy {path}")

    @classmethod
    def of(cls, text: str, path: Path) -> Policy:
        """From the text that policy.toml is about to have. path: its place. Raises `ConfigError`."""
        return cls.made(parse_toml(text), f"the policy {path}")

    @classmethod
    def made(cls, fields: dict[str, Any], what: str) -> Policy:
        """From a person's values. what: their place, for errors. Raises `ConfigError` with each mistake."""
        if odd := [key for key in fields if not key.isidentifier() or key.startswith("_")]:
            raise ConfigError(f"{what} has an unknown key {quoted(odd[0], 60)}.")
        try:
            return cls(**fields)
        except ValidationError as error:
            found = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
            raise ConfigError(f"{what}: {'; '.join(f'{key}: {said}' for key, said in found)}.") from error
