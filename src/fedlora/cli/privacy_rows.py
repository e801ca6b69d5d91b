"""What the screen shows about a private run: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlora.privacy.accounting import epsilon_up
from fedlora.runs.private_run import of_people


def where_to_look(place: object, *, drawn: bool = False) -> str:
    """The note before every private run: the screen must not depend on whether a round goes wrong. drawn: the choice of
    clients is a secret draw."""
    watched = (
        " Clients are drawn secretly, and the time when a round ends reveals who was drawn: nobody else may watch "
        "this screen."
    )
    return (
        f"private: neither the screen nor a published file says whether clients failed or were refused. Even if all "
        f"do, the round is released (as noise) and charged. As the operator, look into {place}, above all "
        f"after the first round; nobody else may see it.{watched * drawn}"
    )


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
    for what in of_people(ledger):
        yield "decided in the ledger", what
    yield "what became of single clients", "private/log in the run's folder, for the operator alone"
