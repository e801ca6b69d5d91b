"""Whether a private federation can keep its guarantee, and what it has spent. Rows for `fedlora doctor FED`."""

from __future__ import annotations

import stat
from pathlib import Path

from fedlora.adapters.io import read_adapter
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.private_federation import check_affordable, planned
from fedlora.flower.rounds.private_words import has_released, private_folder
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.privacy import check_policy, promise
from fedlora.flower.terms.settings import FederationSettings
from fedlora.privacy.accounting import epsilon_up
from fedlora.privacy.ledger import Ledger


def privacy_rows(
    there: FederationFolder, settings: FederationSettings, policy: Policy
) -> list[tuple[str, str, bool | None]]:
    """The rows; none for a federation that is not private.

    Raises:
        ConfigError: the guarantee cannot be kept. LedgerError.
    """
    terms = settings.privacy
    if terms is None:
        return []
    check_policy(policy, terms)
    start, _ = read_adapter(there.start, scaling=settings.lora.unit)
    server = settings.server.build(settings.method.build(), settings.run.seed)
    private, plan = planned(settings, server, start)
    if not has_released(there):
        check_affordable(settings, private, plan)
    spent = Ledger(Path(terms.ledger), terms.population).describe(terms.delta)
    said = f"{terms.ledger}: epsilon {epsilon_up(spent['epsilon'])} in {spent['events']} releases"
    secret = private_folder(there)
    rows: list[tuple[str, str, bool | None]] = [
        ("privacy", promise(terms, settings.run.rounds), True),
        ("ledger", said if spent["events"] else f"{terms.ledger}: nothing is charged yet", True),
    ]
    if secret.is_dir() and secret.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        rows.append(("private log", f"others can read it: chmod 700 {secret}", False))
    return rows


__all__ = ["privacy_rows"]
