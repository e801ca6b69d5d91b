"""Every key of an experiment's file: from the classes that read it, as `config_keys` does."""

from __future__ import annotations

import re

from pydantic import BaseModel

from fedlora.experiments.spec import Experiment, Profile, Tune
from generate.config_keys import page, table_of

# Keys that hold further tables, by the names that these have in a file; "" is the file itself.
EXPERIMENT: dict[str, type[BaseModel]] = {"": Experiment, "tune": Tune, "profiles.NAME": Profile}


def experiment_page() -> str:
    """As Markdown, in the order of the file; its headings stand below that of the page."""
    text = page(table_of(name, section) for name, section in EXPERIMENT.items())
    return re.sub(r"^## ", "### ", text, flags=re.M)
