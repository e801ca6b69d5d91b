"""What a private run writes: what `fedlora.privacy.released` lets out of its manifest, metrics and summary.

A name that is not on the list is not written. Where readers of these files expect a table it stays, empty: an empty
table says nothing. Held-out examples are public in a private run: `private_checks` refuses others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.privacy.released import filtered, items


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
