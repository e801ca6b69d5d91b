"""What a private run writes: what `fedlora.privacy.released` lets out of its manifest, metrics and summary.

A name that is not on the list is not written. Where readers of these files expect a table it stays, empty: an empty
table says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.privacy.released import filtered

_LINE: Mapping[str, Any] = {
    "losses": {}, "weights": {}, "refused": {}, "metrics": {}, "seconds": {}, "bytes": {}, "server_rank": None,
    "padded_error": None, "gauge_drift": None, "gauge_drift_as_sent": None,
}  # fmt: skip
_SUMMARY: Mapping[str, Any] = {
    "clients_at_end": {}, "clients_at_end_common": {}, "confusion": None, "probes": {"last": {}, "best": {}},
    "seconds": {}, "bytes": {}, "server_rank": None, "padded_error": None, "gauge_drift": None,
    "gauge_drift_as_sent": None, "refused": None, "diagnostics": {}, "stopped_early": None, "best_round": None,
    "validation": {"last": {}, "best": {}}, "test": {"last": {}, "best": {}},
}  # fmt: skip


def public_manifest(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest without what is known of clients' data: counts, classes, digests, how much was cut or is copied."""
    told = filtered("manifest.json", facts)
    data = {**told.get("data", {}), "train": {client: {} for client in facts["clients"]}, "label_counts": None}
    return {**told, "data": data, "cut": {}, "copies": {}}


def private_line(line: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl. privacy: what has been spent."""
    return {**_LINE, **filtered("metrics.jsonl", {**line, "privacy": privacy})}


def private_summary(summary: Mapping[str, Any], privacy: Mapping[str, Any]) -> dict[str, Any]:
    """A summary.json."""
    return {**_SUMMARY, **filtered("summary.json", {**summary, "privacy": privacy})}
