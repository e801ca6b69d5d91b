"""What a private run writes: the parts of configuration, manifest, metrics and summary that `fedlora.privacy.released`
permits.

A name that is not on the list is not written. A table that readers of these files expect stays, but empty, which
reveals nothing. Held-out examples are public in a private run: `checks` refuses others.
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
    """The public part of a configuration: all of it; for a private run, without the names of clients' files, which may
    identify people or reveal content. The run's folder, card and trackers get this version, and its digest; the
    complete one is in RUN/private."""
    if config.privacy is None:
        return config
    theirs = {f"data.clients.{client}": WITHHELD for client in config.data.clients}
    if config.data.train not in (None, "demo"):
        theirs["data.train"] = WITHHELD
    return with_paths(config, theirs)


def public_manifest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without facts about clients' data: counts, classes, digests, how much was cut or copied."""
    told = filtered("manifest.json", facts, public=True, blank=True)
    return {**told, "data": {**told["data"], "label_counts": None}}


def private_line(line: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A line for metrics.jsonl. privacy: the spending so far."""
    return filtered("metrics.jsonl", {**line, "privacy": privacy}, public=True, blank=True)


def private_summary(summary: Mapping[str, Any], privacy: Mapping[str, Any], *places: str) -> dict[str, Any]:
    """A summary.json. Its entry `withheld` lists, by file, the names that private runs never report: a null or empty
    value under one of them was withheld, whatever it was. places: the files in the list of releases, the summary last.
    """
    withheld = {place: [item.name for item in items(place) if item.fate == "dropped"] for place in places}
    told = {**summary, "privacy": privacy, "withheld": withheld}
    return filtered(places[-1], told, public=True, blank=True)


def without_times(folder: RunFolder, config: RunConfig) -> None:
    """With secretly drawn clients, give all releasable files and the secret folders the same modification time: a run's
    duration reveals how often a slow client was drawn."""
    if config.privacy is None or config.privacy.sampling == "all":
        return
    for entry in [*folder.path.iterdir(), folder.path]:
        inside = entry != folder.path and fate_of("folder", entry.name) in ("released", "if-public")
        for path in [*(entry.rglob("*") if inside else ()), entry]:
            os.utime(path, (TIMELESS, TIMELESS), follow_symlinks=False)
