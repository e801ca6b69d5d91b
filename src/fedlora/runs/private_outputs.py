"""What a private run writes: the parts of configuration, manifest, metrics and summary that
`fedlora.privacy.releases` allows. Held-out examples are public in a private run: `checks` refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.privacy.releases import filtered
from fedlora.runs.config import RunConfig
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
    told = filtered("manifest.json", facts)
    nothing: dict[str, Any] = {"train": {}, "own_test": {}, "categories": {}, "label_counts": None}
    return {**told, "data": {**nothing, **told["data"]}}


def private_line(line: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A line for metrics.jsonl. privacy: the spending so far."""
    return filtered("metrics.jsonl", {**line, "privacy": privacy})


def private_summary(summary: Mapping[str, Any], privacy: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A summary.json. place: its name in the list of releases."""
    return filtered(place, {**summary, "privacy": privacy})
