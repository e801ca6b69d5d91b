"""Which run a file belongs to: a digest of configuration, seed and all that it reads, in each file that a resume reads.

Checkpoints carry it in their metadata, beside their round. Each line of metrics.jsonl ends a chain of digests that
begins with it. What another run left is known by it, however its files are called.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from fedlora.runs.config import RunConfig
from fedlora.runs.unused import has_no_effect

# No round depends on these. run.rounds has a rule of its own (`resuming`), and torch's threads and the prompts'
# template are compared as they were, in the manifest. privacy.budget is of the population, and the ledger has its own.
OF_THE_MACHINE = frozenset(("run.workers", "run.threads", "data.template", "privacy.budget"))
AT_THE_END = frozenset(("run.readouts", "run.track", "evaluate.clients_at_end"))  # a finished run gets what it lacks
ON_THE_WAY = frozenset((  # of rounds still to be played; of those that are done nothing can be made up
    "run.checkpoint_every", "run.keep_checkpoints", "run.keep_uploads", "evaluate.every",
))  # fmt: skip
HARMLESS = OF_THE_MACHINE | AT_THE_END | ON_THE_WAY


def identity(config: RunConfig, facts: Mapping[str, Any], secret: str = "") -> str:
    """64 hexadecimal digits, the same for each start of one run, and for it at any place and of any length.

    Args:
        facts: a manifest's model, code, data and threads. secret: of a private run, so that nobody can confirm a
            guess of its data by this digest.
    """
    lasting = {}
    for table, keys in config.model_dump(mode="json", exclude_defaults=True).items():
        for name, value in (keys or {}).items():
            key = f"{table}.{name}"
            if key not in HARMLESS and key != "run.rounds" and not has_no_effect(config, key):
                lasting[key] = placeless(value)
    if config.train.schedule != "constant" or config.privacy is not None:  # then each round depends on their number
        lasting["run.rounds"] = config.run.rounds
    told = [lasting, facts["model"]["sha256"], facts["code"], facts["data"], facts["threads"], secret]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def placeless(value: Any) -> Any:
    """The value with absolute paths alike: what lies there is compared by its digest. The order of clients counts."""
    if isinstance(value, Mapping):
        return [(name, placeless(item)) for name, item in value.items()]
    return ("a file",) if isinstance(value, str) and os.path.isabs(value) else value
