"""How the benchmarks measure: one process, one thread, the contestants interleaved, medians and spread.

Absolute times mean nothing on a shared machine; the ratios between contestants of one run do. Contestants are measured
in processor time, which on a quiet machine is the clock's, for they use one thread each.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def elapsed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def processor_seconds(work: Callable[[], object]) -> float:
    """Of this process in one call: what other programs do does not count."""
    began = time.process_time()
    work()
    return time.process_time() - began


@dataclass(frozen=True)
class Contestant:
    """Work in parts, each counted so many times. repeats: at most so many; where it is 1, without a warm-up."""

    parts: Sequence[tuple[float, Callable[[], object]]]
    repeats: int | None = None

    def seconds(self) -> float:
        return sum(times * processor_seconds(work) for times, work in self.parts)


def contest(
    contestants: Mapping[str, Contestant],
    repeats: int,
    limit: float = float("inf"),
    progress: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Name -> seconds of each repeat, one repeat of each in turn; none after a contestant has spent `limit` seconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    spent = dict.fromkeys(contestants, 0.0)
    for k in range(-1, repeats):  # -1: warm up, allocations and lazy imports
        for name, contestant in contestants.items():
            most = repeats if contestant.repeats is None else min(contestant.repeats, repeats)
            if k >= most or (k < 0 and most == 1) or (times[name] and spent[name] > limit):
                continue
            if progress is not None:
                progress(f"{name}, {'warm-up' if k < 0 else f'repeat {k + 1} of {most}'}")
            began = time.perf_counter()
            seconds = contestant.seconds()
            spent[name] += time.perf_counter() - began
            if k >= 0:
                times[name].append(seconds)
    return times


def interleaved(
    contestants: Mapping[str, Callable[[], object]], repeats: int, slow: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Name -> seconds of each repeat, one repeat of each in turn. `slow` gives some of them fewer repeats."""
    fewer = slow or {}
    return contest({name: Contestant([(1.0, work)], fewer.get(name)) for name, work in contestants.items()}, repeats)


def on_stderr(text: str) -> None:
    """One line of progress that the next one overwrites; none where nobody looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def median(times: list[float]) -> float:
    return statistics.median(times)


def spread(times: list[float]) -> float:
    """The inter-quartile range as a share of the median; 0 for fewer than four repeats."""
    if len(times) < 4:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / statistics.median(times)


def _processor() -> str:
    """Its model where the system tells, else its architecture."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {models[0]}" if models else platform.machine()


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
        "processor": _processor(),
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() + (" with local changes" if dirty.stdout.strip() else ""),
        "command": " ".join(["python", *sys.argv]),
    }


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True)
