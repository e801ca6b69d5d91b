"""What the screen shows about a private run: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlora.privacy.accounting import epsilon_up


def privacy_rows(spent: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows (what, how much) from a summary's "privacy"."""
    who = "all clients a round" if spent["sampling"] == 1.0 else f"each client with chance {spent['sampling']:g}"
    yield (
        "epsilon of the planned rounds",
        f"{epsilon_up(spent['epsilon_planned'])} at delta {spent['delta']:g} ({spent['rounds_planned']} rounds, noise "
        f"multiplier {spent['noise_multiplier']:.3f}, {who})",
    )
    yield "epsilon of the rounds played", epsilon_up(spent["epsilon"])
    ledger = spent["ledger"]
    yield (
        "epsilon of the population, all runs",
        f"{epsilon_up(ledger['epsilon'])} in {ledger['events']} releases ({ledger['population']})",
    )
