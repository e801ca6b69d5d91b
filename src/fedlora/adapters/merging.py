"""Merge adapter folders into one, or change an adapter's rank: the Python functions behind the commands.

Four steps: `collected` says whether the adapters belong together, `Collection.combined` sums each module exactly, its
`cut` keeps the requested rank, and `write_result` narrows, checks, reports and writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fedlora.adapters.collection import Collection, Missing, collected
from fedlora.adapters.heads import HeadRule
from fedlora.adapters.merge_report import MergeReport
from fedlora.adapters.merge_result import Progress, Wanted, cut_parts, write_result
from fedlora.adapters.reader import AdapterFile
from fedlora.errors import ConfigError
from fedlora.linalg.own_modes import own_modes


@own_modes()
def merge(
    adapters: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    rank: int | str = "exact",
    weights: Sequence[float] | None = None,
    weights_from: Literal["num_examples"] | None = None,
    sum: bool = False,
    missing: Missing | None = None,
    heads: HeadRule = "average",
    dtype: str | None = None,
    max_error: float | None = None,
    same_base: bool = False,
    dry_run: bool = False,
    force: bool = False,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge PEFT adapters into one: the exact weighted mean of their updates, then its best adapter of the given rank.

    Args:
        adapters: PEFT directories. out: the directory to write.
        rank: a number, "exact" or "energy=0.99". All modules are padded to the largest rank, so that every reader gets
            the scale right.
        weights: one per adapter; default: equal. weights_from: take them from each adapter's upload.json. sum: use
            weights as they are, including negative ones; otherwise they are divided by their sum.
        missing: how to count an adapter that lacks a module; default "zero", but then adapters are refused that have
            no module in common, or the same modules under longer names.
        heads: for saved modules: the mean, the first adapter's, or none.
        dtype: float16, bfloat16, float32 or float64; default: the adapters' own.
        max_error: write nothing beyond this relative error. same_base: treat their base models as one, whatever their
            names. dry_run: write nothing. force: replace a folder that holds only an adapter. max_bytes: the largest
            weights file to open.

    Raises:
        AdapterFormatError: an adapter cannot be read, or does not add up with the others. ConfigError,
            HyperparameterError: settings are impossible or contradict each other, or the disk refuses.

    Example:
        >>> from fedlora.adapters import merge
        >>> report = merge(["adapter", "adapter"], "merged", rank=16, weights=[0.7, 0.3])
        >>> f"{report.error:.0e} lost of {len(report.modules)} modules"
        '0e+00 lost of 2 modules'
    """
    wanted = Wanted(Path(out), rank, heads, dtype, max_error, dry_run, force)
    if sum and missing == "renormalise":
        raise ConfigError("--sum uses weights as they are, but --missing renormalise rescales them: leave out one.")
    if isinstance(adapters, str | os.PathLike):
        raise ConfigError("adapters must be a list of directories; for a single one write [directory].")
    wanted.check(adapters)
    given = collected(
        adapters, weights, weights_from, missing, sum=sum, heads=heads, same_base=same_base, max_bytes=max_bytes
    )
    what = "weighted sum" if sum else "weighted mean"
    parts = cut_parts(given, wanted, progress)
    return write_result(given, wanted, parts, f"The {what} of the updates B A", f"the {what} of the adapters")


@own_modes()
def resize(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    rank: int | str,
    dtype: str | None = None,
    max_error: float | None = None,
    dry_run: bool = False,
    force: bool = False,
    max_bytes: int | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Write an adapter at another rank: the best approximation of its update. Arguments as in `merge`.

    A number sets the rank of every module. A module of lower rank is padded with slots that are zero in both factors,
    and a warning says so: they change nothing and cannot train.

    Example:
        >>> from fedlora.adapters import resize
        >>> resize("adapter", "smaller", rank=2).rank
        2
    """
    wanted = Wanted(Path(out), rank, "first", dtype, max_error, dry_run, force, padded=True)
    wanted.check([adapter])
    given = Collection.of([AdapterFile(adapter, max_bytes=max_bytes)])
    return write_result(given, wanted, cut_parts(given, wanted, progress), "The update B A", "the adapter's update")
