"""Writes policy.toml: once as a whole, later adding, removing or changing a site, with its comments left in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit

from fedlora.flower.setup.templates import filled

Rank = int | Mapping[str, int]


def policy_text(clients: Mapping[str, Rank], *, private: bool = False) -> str:
    """A new policy with safe defaults. private: for a federation with [privacy]."""
    head = filled("policy.toml", private=private)
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
