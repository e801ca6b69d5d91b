"""What a private run says of itself on the screen: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def privacy_rows(spent: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, how much) of a summary's "privacy"."""
    who = "all clients a round" if spent["sampling"] == 1.0 else f"each client with chance {spent['sampling']:g}"
    yield (
        "epsilon of the planned rounds",
        f"{spent['epsilon_planned']:.3f} at delta {spent['delta']:g} ({spent['rounds_planned']} rounds, noise "
        f"multiplier {spent['noise_multiplier']:.3f}, {who})",
    )
    yield "epsilon of the rounds played", f"{spent['epsilon']:.3f}"
    ledger = spent["ledger"]
    yield (
        "epsilon of the population, all runs",
        f"{ledger['epsilon']:.3f} in {ledger['events']} releases ({ledger['population']})",
    )
