"""Writes policy.toml: once as a whole, later adding, removing or changing a site, with its comments left in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit

Rank = int | Mapping[str, int]
_HEAD = """\
# Who may take part, and how much they can count for: the server's word, whatever a client claims.
# Read anew at the beginning of each round. Sites come and go by `fedlora flower admit` and `fedlora flower remove`.
{share}
deadline = 600.0    # seconds; a round waits no longer
retries = 1         # of a round with too few usable replies; then the run stops, its state stored
quarantine = 3      # after so many rounds with refused uploads, and none accepted, a site is not asked; 0: it is
# max_upload_mb = 100  # of one reply; left out: twice what the site's own upload can have, and 1 MB

[clients]           # name = rank
"""

_SHARE = (
    "# max_weight_share = 0.5   # no site counts for more than this share of a round; left out: max(0.5, 2 / sites)"
)
_NO_SHARE = (
    "max_weight_share = 1  # no bound: server.memory adds uploads up as they come; max_examples bounds a site's claim"
)

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


def policy_text(clients: Mapping[str, Rank], *, private: bool = False, shares: bool = True) -> str:
    """A new policy with safe defaults. private: for a federation with [privacy]. shares: whether the server can bound
    the share of a site: not with server.memory."""
    head = _PRIVATE_HEAD if private else _HEAD.format(share=_SHARE if shares else _NO_SHARE)
    return head + tomlkit.dumps({name: _value(rank) for name, rank in clients.items()})


def with_client(text: str, name: str, rank: Rank) -> str:
    """A policy's text with one more site at the end, or with another rank for an existing one."""
    found: Any = tomlkit.parse(text)
    found["clients"][name] = _value(rank)
    return tomlkit.dumps(found)


def without_client(text: str, name: str) -> str:
    """A policy's text without one site."""
    found: Any = tomlkit.parse(text)
    found["clients"].pop(name, None)
    return tomlkit.dumps(found)


def _value(rank: Rank) -> Any:
    """A rank, or a rank for each module, on the site's own line."""
    if isinstance(rank, int):
        return rank
    table = tomlkit.inline_table()
    table.update(rank)
    return table


__all__ = ["policy_text", "with_client", "without_client"]
