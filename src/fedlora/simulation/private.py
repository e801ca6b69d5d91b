"""Private rounds in the engine: which rounds it may play, and records that tell nothing about single clients."""

from __future__ import annotations

from collections.abc import Iterable

from fedlora.core.sent import Tamperer
from fedlora.errors import HyperparameterError
from fedlora.server.private_options import Privacy
from fedlora.server.state import RunState
from fedlora.simulation.records import RoundRecord
from fedlora.simulation.traffic import Traffic


def check_private(privacy: Privacy, clients: Iterable[str], participation: float, adversary: Tamperer | None) -> None:
    """Raise `HyperparameterError` if the engine would play other rounds than the ledger charges."""
    if participation != 1.0:
        raise HyperparameterError(
            f"participation = {participation:g} draws clients by a public seed, but privacy relies on a secret draw: "
            f"leave participation out and set Privacy(sampling={participation:g})."
        )
    apart = sorted(set(clients) ^ set(privacy.clients))
    if apart:
        who = "is not among the clients given" if apart[0] in privacy.clients else "is not in Privacy(clients=...)"
        raise HyperparameterError(
            f"the clients given and the {len(privacy.clients)} of Privacy(clients=...) differ in {len(apart)}: "
            f"{apart[0]!r} {who}. The round draws from those, and the mean divides by their number: name "
            f"the same clients in both."
        )
    if adversary is not None:
        raise HyperparameterError("an adversary's acts are reported, but a private round reports on no single client.")


def private_record(state: RunState, server_rank: float) -> RoundRecord:
    """The record of a private round, without times: its duration would reveal who was drawn."""
    return RoundRecord(state.round, state, {}, {}, {}, {}, {}, Traffic(), server_rank, ())
