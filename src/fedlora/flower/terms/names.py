"""Names in commands, folders and certificates: of sites and of the server. Invalid ones are refused."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from fedlora.core.text import quoted
from fedlora.errors import ConfigError

MOST_RANK = 4096
_SITE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def sites(text: str) -> dict[str, int]:
    """Site -> rank, from "acme=8,berlin=4".

    Raises:
        ConfigError: an entry without a rank, an invalid name or rank, a repeated name, or no entry.

    Example:
        >>> sites("acme=8, berlin=4")
        {'acme': 8, 'berlin': 4}
    """
    found: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, rank = named_rank(entry)
        if rank is None:
            raise ConfigError(f"--sites takes NAME=RANK, such as acme=8,berlin=4; got {quoted(entry)} without a rank.")
        check_site(name, found)
        found[name] = rank
    if not found:
        raise ConfigError(f"--sites names no site; give, for example, acme=8,berlin=4. Got {quoted(text)}.")
    return found


def named_rank(entry: str) -> tuple[str, int | None]:
    """("acme", 8) from "acme=8", and ("acme", None) from "acme". Raises `ConfigError` for an invalid rank."""
    name, equals, rank = (part.strip() for part in entry.partition("="))
    whole = rank.isascii() and rank.isdecimal() and len(rank) < 9
    return name, checked_rank(int(rank) if whole else rank, name) if equals else None


def check_site(name: str, others: Sequence[str] | dict[str, int] = ()) -> None:
    """Raises `ConfigError` for an invalid name of a site, or one that differs from one of `others` only in case."""
    if not _SITE.fullmatch(name):
        raise ConfigError(
            f"{quoted(name)} cannot be the name of a site. Files and commands contain the name, so it has up to 63 "
            f"letters, digits, '_', '-' and '.', and begins with a letter, a digit or '_'."
        )
    same = [other for other in others if other.casefold() == name.casefold()]
    if same:
        raise ConfigError(
            f"{quoted(name)} exists already{f', as {same[0]!r}' if same[0] != name else ''}: each site needs its own "
            f"name, and upper case alone does not make another one."
        )


def checked_rank(rank: object, name: str) -> int:
    """The rank. Raises `ConfigError` for an impossible one."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MOST_RANK:
        raise ConfigError(
            f"the site {quoted(name)}: a rank is a whole number from 1 to {MOST_RANK}; got {quoted(rank, 40)}. LoRA's "
            f"are mostly 2 to 64."
        )
    return rank


def server_name(name: str) -> str:
    """The server's name, in the form for certificates.

    Raises:
        ConfigError: a URL, an address, a name with a port, or no name.

    Example:
        >>> server_name("FL.example.org")
        'fl.example.org'
    """
    try:
        ipaddress.ip_address(name.strip("[]"))
        address = True
    except ValueError:
        address = False
    if address or len(name) > 253 or not all(map(_LABEL.fullmatch, name.lower().split("."))):
        raise ConfigError(
            f"--server-name is a host name that the sites can look up, such as fl.example.org; got {quoted(name)}. It "
            f"has no https://, no port (--port sets it) and ASCII letters only (xn--...), and is no address: "
            f"certificates are of names. Where there is no DNS, a line in each site's /etc/hosts gives one a name."
        )
    return name.lower()


__all__ = ["MOST_RANK", "check_site", "checked_rank", "named_rank", "server_name", "sites"]
