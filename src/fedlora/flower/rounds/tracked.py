"""What of a federation's round a tracker takes (run.track): TensorBoard, trackio, Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def numbers_of_round(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of rounds.jsonl by name; what is no number is left out.

    metrics/NAME of the server, sites/NAME the sites' weighted mean, site/SITE/NAME, loss the round's,
    loss/CLIENT, norm/CLIENT, weight/CLIENT, clients and seconds; with a robust rule weight_after/CLIENT.
    """
    found: dict[str, Any] = {f"metrics/{name}": value for name, value in (line.get("metrics") or {}).items()}
    found |= {f"sites/{name}": value for name, value in (line.get("site_mean") or {}).items()}
    for site, scores in (line.get("site_metrics") or {}).items():
        found |= {f"site/{site}/{name}": value for name, value in scores.items()}
    for word, key in (("loss", "losses"), ("norm", "norms"), ("weight", "weights")):
        found |= {f"{word}/{client}": value for client, value in (line.get(key) or {}).items()}
    for client, one in ((line.get("defence") or {}).get("clients") or {}).items():
        found[f"weight_after/{client}"] = one["after"]
    found |= {"loss": line.get("loss"), "clients": len(line["weights"]), "seconds": line["seconds"]}
    return {name: float(v) for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


__all__ = ["numbers_of_round"]
