"""What a private run writes: what `fedlora.privacy.released` lets out of its configuration, manifest, metrics and
summary.

A name that is not on the list is not written. Where readers of these files expect a table it stays, empty: an empty
table says nothing. Held-out examples are public in a private run: `checks` refuses others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedlora.privacy.released import TIMELESS, fate_of, filtered, items
from fedlora.runs.config import RunConfig
from fedlora.runs.folder import RunFolder
from fedlora.runs.inputs import with_paths

WITHHELD = "withheld"


def shown_config(config: RunConfig) -> RunConfig:
    """What everybody may read of a configuration: itself; of a private run without the names of clients' files, which
    can say who somebody is and what is in there. The run's folder, its card and trackers have this one, and its digest;
    the whole one is in RUN/private."""
    if config.privacy is None:
        return config
    theirs = {f"data.clients.{client}": WITHHELD for client in config.data.clients}
    if config.data.train not in (None, "demo"):
        theirs["data.train"] = WITHHELD
    return with_paths(config, theirs)


def public_manifest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without what is known of clients' data: counts, classes, digests, how much was cut or is copied."""
    told = filtered("manifest.json", facts, public=True, blank=True)
    return {**told, "data": {**told["data"], "label_counts": None}}


def private_line(line: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl. privacy: what has been spent."""
    return filtered("metrics.jsonl", {**line, "privacy": privacy}, public=True, blank=True)


def private_summary(summary: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A summary.json. withheld: the names of this list that no private run tells, by file: what is null or empty under
    one of them was withheld, whatever there was."""
    withheld = {
        place: [item.name for item in items(place) if item.fate == "dropped"]
        for place in ("manifest.json", "metrics.jsonl", "summary.json")
    }
    told = {**summary, "privacy": privacy, "withheld": withheld}
    return filtered("summary.json", told, public=True, blank=True)


def without_times(folder: RunFolder, config: RunConfig) -> None:
    """Where clients are drawn secretly: all of the run that may leave says the same time of change, also the secret
    folders themselves. How long the run took tells how often a slow client was drawn."""
    if config.privacy is None or config.privacy.sampling == "all":
        return
    for entry in [*folder.path.iterdir(), folder.path]:
        inside = entry != folder.path and fate_of("folder", entry.name) in ("released", "if-public")
        for path in [*(entry.rglob("*") if inside else ()), entry]:
            os.utime(path, (TIMELESS, TIMELESS), follow_symlinks=False)
