"""How the benchmarks measure: one process, one thread, the contestants interleaved, medians and spread.

Absolute times mean nothing on a shared machine; the ratios between contestants of one run do. Contestants are measured
in processor time, which on a quiet machine is the clock's, for they use one thread each.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import math
import os
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


def interleaved(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Name -> seconds of each repeat, one repeat of each in turn, after one that warms up."""
    return contest({name: Contestant([(1.0, work)]) for name, work in contestants.items()}, repeats)


def on_stderr(text: str) -> None:
    """One line of progress that the next one overwrites; none where nobody looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def memory_peak(*, anew: bool = False) -> float:
    """MB that this process had at its most. anew: from now on, with what was freed given back to the system first.

    Not `ru_maxrss`, which a process inherits from the one that started it.
    """
    if anew:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def median(times: Sequence[float]) -> float:
    return statistics.median(times)


def spread(times: Sequence[float]) -> float:
    """The inter-quartile range as a share of the median; of fewer than four the whole range; of one none (nan)."""
    if len(times) < 2:
        return math.nan
    low, high = min(times), max(times)
    if len(times) > 3:
        low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / statistics.median(times)


@dataclass(frozen=True)
class Ratio:
    """Of two contestants, repeat by repeat: the median, and its spread."""

    value: float
    spread: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> Ratio:
        each = [x / y for x, y in zip(over, under, strict=False)]
        return cls(median(each), spread(each))

    def __str__(self) -> str:
        digits = f"{self.value:.2f}" if self.value < 10 else f"{self.value:.0f}"
        return digits if math.isnan(self.spread) else f"{digits} ({self.spread:.0%})"


@dataclass(frozen=True)
class Goal:
    """A row of the page's first table.

    what: in the page's words. bound: "<= 1.5" or ">= 1.8". spread: nan where nothing was repeated.
    """

    what: str
    measured: float
    bound: str
    spread: float = math.nan
    form: str = ".2f"

    @classmethod
    def of(cls, what: str, ratio: Ratio, bound: str) -> Goal:
        return cls(what, ratio.value, bound, ratio.spread)

    @property
    def met(self) -> bool:
        sense, _, limit = self.bound.partition(" ")
        return self.measured <= float(limit) if sense == "<=" else self.measured >= float(limit)

    def as_row(self) -> list[str]:
        noise = "" if math.isnan(self.spread) else f"{self.spread:.0%}"
        verdict = "yes" if self.met else "**no**"
        return [self.what, format(self.measured, self.form), noise, self.bound, verdict]


GOAL_HEAD = ["", "measured", "spread", "goal", "met"]
Table = Sequence[Sequence[str]]  # its head first


def as_markdown(table: Table) -> str:
    """All columns but the first to the right."""
    head, *rows = table
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, rule, *rows))


def report(
    path: Path | None, began: float, *, tables: Mapping[str, Table], goals: Sequence[Goal] = (), figures: object = None
) -> None:
    """Print what was found, and store it where a path is given: `page.py` puts the tables into docs/evidence.

    began: `time.perf_counter()` of the start. figures: whatever else a reader may want to compute from.
    """
    for name, table in tables.items():
        print(f"\n{name}\n\n{as_markdown(table)}", flush=True)
    if goals:
        print(as_markdown([GOAL_HEAD, *(goal.as_row() for goal in goals)]), flush=True)
    if path is not None:
        found = {
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.perf_counter() - began),
            "tables": tables,
            "goals": [goal.as_row() for goal in goals],
            "figures": figures,
        }
        path.write_text(as_json(found) + "\n", encoding="utf-8")


def _processor() -> str:
    """Its model where the system tells, else its architecture."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {models[0]}" if models else platform.machine()


def _command() -> str:
    """As one types it in the repository; where the result goes is no part of it."""
    script, *rest = sys.argv
    if "--json" in rest:
        at = rest.index("--json")
        del rest[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(script).name}", *rest])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    root = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False
    )
    code = [str(root.parent / "src"), str(root), f":(exclude){root / 'results'}"]
    dirty = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain", "-uno", "--", *code],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() + (" with local changes" if dirty.stdout.strip() else ""),
        "command": _command(),
    }


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True)
