"""policy.toml: who may take part, at which rank and with which weight, decided by the server, whatever a client claims.

Also the names of sites and of the server, which stand in commands, folders and certificates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import tomlkit
from pydantic import Field

from fedlora.core.messages import Client
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.given_files import read_toml
from fedlora.runs.reading import checked
from fedlora.training.settings import Section

Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_SITE = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$"
SiteName = Annotated[str, Field(pattern=_SITE)]
Rank = Annotated[int, Field(ge=1, le=4096)]
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_HEAD = """\
# Who may take part, and how much they can count for: the server's word, whatever a client claims. The server reads it
# anew at the beginning of each round. Sites come and go by `fedlora flower admit` and `fedlora flower remove`.
deadline = 600.0        # seconds; a round waits no longer for answers
# max_examples = 1e9    # the most that a site's claim of examples counts for

[clients]               # name = rank
"""


class Policy(Section):
    """What the server allows.

    clients: name -> its rank: the allow-list, in the order in which rounds draw from it.
    max_examples: the most that a claim counts for. deadline: seconds for a reply, also the life of a message.
    """

    clients: Annotated[dict[SiteName, Rank], Field(min_length=1)]
    max_examples: Above = 1e9
    deadline: Above = 3600.0

    def client(self, name: str) -> Client:
        """A client, with its rank."""
        return Client(name, self.clients[name])

    @classmethod
    def read(cls, path: Path) -> Policy:
        """From policy.toml: [clients] name = rank, and the fields above. Raises `ConfigError`."""
        return cls.made(read_toml(path, "the policy"), f"the policy {path}")

    @classmethod
    def made(cls, fields: dict[str, Any], what: str) -> Policy:
        """From a person's values. what: their place, for errors. Raises `ConfigError` with each mistake."""
        try:
            return checked(cls, fields)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}.") from error


def policy_text(clients: Mapping[str, int]) -> str:
    """A new policy.toml, with safe defaults."""
    return with_client(_HEAD, clients)


def with_client(text: str, clients: Mapping[str, int]) -> str:
    """A policy's text with more sites at its end, or other ranks of existing ones; its comments stay."""
    found: Any = tomlkit.parse(text)
    for name, rank in clients.items():
        found["clients"][name] = rank
    return tomlkit.dumps(found)


def without_client(text: str, name: str) -> str:
    """A policy's text without one site."""
    found: Any = tomlkit.parse(text)
    found["clients"].pop(name, None)
    return tomlkit.dumps(found)


def sites(text: str) -> dict[str, int]:
    """Site -> rank, from "acme=8,berlin=4".

    Raises:
        ConfigError: an entry without a rank, an invalid name or rank, a repeated name.

    Example:
        >>> sites("acme=8, berlin=4")
        {'acme': 8, 'berlin': 4}
    """
    found: dict[str, int] = {}
    for entry in text.split(","):
        name, rank = named_rank(entry)
        if rank is None:
            raise ConfigError(f"--sites takes NAME=RANK, such as acme=8,berlin=4; got {quoted(entry)} without a rank.")
        check_site(name, found)
        found[name] = rank
    return found


def named_rank(entry: str) -> tuple[str, int | None]:
    """("acme", 8) from "acme=8", and ("acme", None) from "acme". Raises `ConfigError` for an impossible rank."""
    name, equals, rank = (part.strip() for part in entry.partition("="))
    if equals and not (rank.isascii() and rank.isdecimal() and 1 <= int(rank[:9]) <= 4096):
        raise ConfigError(f"{quoted(name)}: a rank is a whole number from 1 to 4096; got {quoted(rank, 40)}.")
    return name, int(rank) if equals else None


def check_site(name: str, others: Collection[str] = ()) -> None:
    """Raises `ConfigError` for an invalid name of a site, or one that differs from one of `others` only in case."""
    if not re.match(_SITE, name) or name.endswith("\n"):
        raise ConfigError(
            f"{quoted(name)} cannot be the name of a site: it has up to 63 letters, digits, '_', '-' and '.', and "
            f"begins with a letter, a digit or '_'."
        )
    same = [other for other in others if other.casefold() == name.casefold()]
    if same:
        raise ConfigError(f"{quoted(name)} exists already, as {same[0]!r}: upper case does not make another name.")


def server_name(name: str) -> str:
    """The server's name, in the form for certificates.

    Raises:
        ConfigError: a URL, an address, a name with a port, or no name.

    Example:
        >>> server_name("FL.example.org")
        'fl.example.org'
    """
    labels = name.lower().split(".")
    if len(name) > 253 or labels[-1].isdecimal() or not all(map(_LABEL.fullmatch, labels)):
        raise ConfigError(
            f"--server-name is a host name that the sites can look up, such as fl.example.org; got {quoted(name)}. It "
            f"has no https://, no port (--port sets it), ASCII letters only, and is no address: certificates are of "
            f"names. Where there is no DNS, a line in each site's /etc/hosts gives one a name."
        )
    return name.lower()
