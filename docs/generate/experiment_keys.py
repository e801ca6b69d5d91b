"""Every key of an experiment's file and of the claims': from the classes that read them, as `config_keys` does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from fedlora.experiments.claims import Claim, Claims, Family, Gate, HeadOf
from fedlora.experiments.spec import Budgets, Experiment, Peace, Profile, Tune
from generate.config_keys import Table, page, table_of

# Keys that hold further tables, by the names that these have in a file; "" is the file itself.
EXPERIMENT: dict[str, type[BaseModel]] = {
    "": Experiment, "tune": Tune, "profiles.NAME": Profile, "peace": Peace, "budgets": Budgets,
}  # fmt: skip
CLAIMS: dict[str, type[BaseModel]] = {
    "": Claims, "families.NAME": Family, "gates.EXPERIMENT": Gate, "gates.EXPERIMENT.head_of": HeadOf,
    "claims.NAME": Claim,
}  # fmt: skip


def tables(of: dict[str, type[BaseModel]]) -> Iterator[Table]:
    """In the order of the file."""
    for name, section in of.items():
        yield table_of(name, section)


def _below(text: str) -> str:
    """Its headings stand below the two of the page that has both."""
    return re.sub(r"^## ", "### ", text, flags=re.M)


def experiment_page() -> str:
    """As Markdown."""
    return _below(page(tables(EXPERIMENT)))


def claims_page() -> str:
    """As Markdown."""
    return _below(page(tables(CLAIMS)))
