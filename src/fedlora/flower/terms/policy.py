"""Who may take part, at which rank and with which weight, decided by the server, whatever a client claims."""

from __future__ import annotations

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

Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Policy:
    """What the server allows.

    clients: name -> its rank, or its ranks by module: the allow-list, in the order in which rounds draw from it.
    max_examples: the most that a claim counts for. max_upload_mb: for one reply, in 2^20 bytes; None: twice this
    client's largest upload, and 1. deadline: seconds for a reply, also the life of a message. retries: of a round with
    too few replies.
    """

    clients: Mapping[str, int | Mapping[str, int]]
    max_examples: Above = 1e9
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
