"""What may leave a private run's server: the allowed names of each file. What is not on the list is not written.

    filtered("metrics.jsonl", line)

A name is on the list because its value is public (configuration, code, base model, plan), is made of noised sums alone
(post-processing), is the ledger's, or is a released model's score on held-out examples that are no client's. Losses,
counts of examples, refusals, sizes, times and everything computed from uploads are not: a new field is a decision.

Readers of these files expect some tables that are not on the list. `EMPTY` gives them: constants, whatever happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Allowed = Mapping[str, Any]  # name -> True, or the names allowed in that table; "*" stands for every name


def _all(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


_SCORES = _all("validation", "test", "classes", "best_round", "stopped_early")
_OF_STATE = {"*": _all("rank", "components", "server_rank", "singular_values")}

RELEASED: Mapping[str, Allowed] = {
    "metrics.jsonl": _all("round", "server_rank", "privacy", "metrics"),
    "summary.json": {
        **_all("method", "rounds", "clients", "target", "metric", "server_rank", "exports", "privacy", "probes"),
        **_SCORES,
        "diagnostics": _OF_STATE,
    },
    "manifest.json": {
        **_all("config_digest", "run", "versions", "python", "commit", "device", "threads", "seed", "model", "clients"),
        **_all("method", "evaluation_target", "answer_ends", "cut_held_out", "privacy"),
        "data": _all("label_names", "chat_template", "validation", "test", "probes"),
    },
    "tracker": _all("server_rank", "privacy", "metrics", "test", "test_best"),
    # of a federation
    "server/summary.json": {
        **_all("federation", "method", "rounds", "of", "metric", "measured_by", "adapter", "versions", "settings"),
        **_all("privacy"),
        **_SCORES,
        "diagnostics": _OF_STATE,
    },
}

EMPTY: Mapping[str, Mapping[str, Any]] = {
    "metrics.jsonl": {"loss": None, "losses": {}, "examples": {}, "weights": {}, "refused": {}, "seconds": {},
                      "bytes": {}, "padded_error": None, "gauge_drift": None},
    "summary.json": {"clients_at_end": {}, "seconds": {}, "bytes": {}, "padded_error": None, "gauge_drift": None,
                     "refused": None},
    "manifest.json": {"cut": {}, "copies": {}},
    "server/summary.json": {"site_test": {}, "sites": {}, "seconds": None},
}  # fmt: skip


def filtered(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that may be written to that file, and the empty tables that its readers expect.

    Raises:
        KeyError: a file that is not on the list.

    Example:
        >>> from fedlora.privacy.releases import filtered
        >>> filtered("tracker", {"server_rank": 3.0, "losses": {"site-1": 0.5}, "something new": 1})
        {'server_rank': 3.0}
    """
    return {**EMPTY.get(place, {}), **_allowed(RELEASED[place], values)}


def _allowed(names: Allowed, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inside = names.get(key, names.get("*", False))
        if inside is True:
            found[key] = value
        elif inside and isinstance(value, Mapping):
            found[key] = _allowed(inside, value)
    return found
