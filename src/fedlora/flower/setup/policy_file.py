"""Writes policy.toml: once as a whole, later adding, removing or changing a site, with its comments left in place."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from fedlora.core.echo import quoted
from fedlora.errors import ConfigError
from fedlora.given_files import read_given

Rank = int | Mapping[str, int]
_HEAD = """\
# Who may take part, and how much they can count for: the server's word, whatever a client claims.
# Read anew at the beginning of each round. Sites come and go by `fedlora flower admit` and `fedlora flower remove`.
# max_weight_share = 0.5   # no site counts for more than this share of those who count; left out: max(0.5, 2 / sites)
deadline = 600.0    # seconds; a round waits no longer
retries = 1         # of a round with too few usable replies; then the run stops, its state stored
quarantine = 3      # refused uploads in a row after which a site is no longer asked; 0 asks for ever
# max_upload_mb = 100  # of one reply; left out: twice what the site's own upload can have, and 1 MB

[clients]           # name = rank
"""


_PRIVATE_HEAD = """\
# Who is asked: the server's word, whatever a client claims. Read anew at the beginning of each round.
# The federation is private: all of them are asked in every round, who does not answer counts as zero, and nobody is
# added to privacy.members of federation.toml. Sites are let in by `fedlora flower admit`.
deadline = 600.0    # seconds; a round waits so long for sites to be online, and so long for their answers
retries = 0         # a private round is played once
quarantine = 0      # and everybody is asked
# max_upload_mb = 100  # of one reply; left out: twice what the site's own upload can have, and 1 MB

[clients]           # name = rank
"""


def policy_text(clients: Mapping[str, Rank], *, private: bool = False) -> str:
    """A new policy with safe defaults. private: for a federation with [privacy]."""
    return (_PRIVATE_HEAD if private else _HEAD) + tomlkit.dumps({name: _value(rank) for name, rank in clients.items()})


def with_client(text: str, name: str, rank: Rank) -> str:
    """The policy with one more site at the end, or with another rank for an existing one. Raises `ConfigError`."""
    found, clients = _parsed(text)
    clients[name] = _value(rank)
    return _checked(found, text, {**tomllib.loads(text)["clients"], name: rank})


def without_client(text: str, name: str) -> str:
    """The policy without one site. Raises `ConfigError`."""
    found, clients = _parsed(text)
    clients.pop(name, None)
    return _checked(found, text, {k: v for k, v in tomllib.loads(text)["clients"].items() if k != name})


def read_policy_text(path: Path) -> str:
    """The policy's text. Raises `ConfigError`."""
    try:
        return read_given(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy {path} cannot be read: {error}.") from error


def _value(rank: Rank) -> Any:
    """A rank, or a rank for each module, on the site's own line."""
    if isinstance(rank, int):
        return rank
    table = tomlkit.inline_table()
    table.update(rank)
    return table


def _parsed(text: str) -> tuple[tomlkit.TOMLDocument, Any]:
    """The file, and its table [clients]."""
    try:
        tomllib.loads(text)
        found = tomlkit.parse(text)
    except (tomllib.TOMLDecodeError, TOMLKitError) as error:
        raise ConfigError(f"the policy is not TOML: {error}. Repair it first.") from error
    if not isinstance(clients := found.get("clients"), Mapping):
        raise ConfigError("the policy has no table [clients] with name = rank.")
    return found, clients


def _checked(found: tomlkit.TOMLDocument, before: str, clients: Mapping[str, Rank]) -> str:
    """The file's text, if it has the intended clients and nothing else has changed."""
    made = tomlkit.dumps(found)
    wanted = {
        **tomllib.loads(before),
        "clients": {k: dict(v) if isinstance(v, Mapping) else v for k, v in clients.items()},
    }
    if tomllib.loads(made) != wanted:
        raise ConfigError(
            f"policy.toml has a form that this command cannot change: write {quoted(str(dict(clients)))} below "
            f"[clients] yourself, and call this again."
        )
    return made


__all__ = ["policy_text", "read_policy_text", "with_client", "without_client"]
