"""How the benchmarks measure: one process, one thread, the contestants interleaved, medians and spread.

Absolute times mean nothing on a shared machine; the ratios between contestants of one run do.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def interleaved(
    contestants: Mapping[str, Callable[[], object]], repeats: int, slow: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Name -> seconds of each repeat, one repeat of each in turn. `slow` gives some of them fewer repeats."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for name, work in contestants.items():
        if (slow or {}).get(name, repeats) > 1:
            work()  # warm up: allocations, lazy imports
    for k in range(repeats):
        for name, work in contestants.items():
            if k < (slow or {}).get(name, repeats):
                began = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - began)
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> float:
    """The inter-quartile range as a share of the median; 0 for fewer than four repeats."""
    if len(times) < 4:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / statistics.median(times)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    root = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    dirty = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    )
    return {
        "processor": platform.machine(),
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() + (" with local changes" if dirty.stdout.strip() else ""),
        "command": " ".join(["python", *sys.argv]),
    }


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True)
