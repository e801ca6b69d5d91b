"""Words for an attack, from a run's manifest or summary, or a configuration. Imports nothing, for the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def in_words(facts: Mapping[str, Any], count: int) -> str:
    """An attack in one line. facts: from `attack_section.attack_facts`. count: all clients."""
    who = ", ".join(facts["clients"])
    return f"{facts['what']} by {len(facts['clients'])} of {count} clients ({who})"


def attacks_of(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The distinct attacks in stored configurations: kind and clients."""
    found: dict[str, None] = {}
    for config in configs:
        attack = config.get("attack") or {}
        if attack.get("kind", "none") != "none":
            who = ", ".join(attack.get("clients") or []) or f"{attack.get('fraction'):.0%} of the clients"
            found[f"{attack['kind']} by {who}"] = None
    return list(found)
