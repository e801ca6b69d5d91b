"""Merge adapter folders into one, or change an adapter's rank: the Python functions behind the commands."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from fedlora.adapters.agreement import check_uploads
from fedlora.adapters.beside import HeadRule
from fedlora.adapters.collection import Collection
from fedlora.adapters.limits import Limits
from fedlora.adapters.merge_report import MergeReport
from fedlora.adapters.merge_request import Place, Progress, Result, Source, one_of
from fedlora.adapters.merge_result import write_result
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import RankRule
from fedlora.adapters.uploads import FILE, read_facts
from fedlora.core.messages import Missing
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.own_modes import own_modes

Adapters = Sequence[str | os.PathLike[str]]


@own_modes()
def merge(
    adapters: Adapters,
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
    allow_unknown: Sequence[str] = (),
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge PEFT adapters into one: the exact weighted mean of their updates, then its best adapter of the given rank.

    Args:
        adapters: PEFT directories. out: the directory to write.
        rank: a number, "exact" or "energy=0.99". All modules are padded to the largest rank, so that every reader gets
            the scale right.
        weights: one per adapter; default: equal. weights_from: take them from each adapter's upload.json. sum: use
            weights as they are, including negative ones; otherwise they are divided by their sum.
        missing: how to count an adapter that lacks a module; default "zero", but then adapters that have no module in
            common are refused.
        heads: for fully trained modules: the mean, the first adapter's, or none.
        dtype: float16, bfloat16, float32 or float64; default: the adapters' own.
        max_error: write nothing beyond this relative error. same_base: treat their base models as one, whatever their
            names. dry_run: write nothing. force: replace a folder that holds only an adapter.

    Raises:
        AdapterFormatError: an adapter cannot be read, or does not add up with the others. ConfigError,
            HyperparameterError: settings are impossible or contradict each other, or the disk refuses.

    Example:
        >>> from fedlora.adapters import merge
        >>> report = merge(["adapter", "adapter"], "merged", rank=16, weights=[0.7, 0.3])
        >>> f"{report.error:.0e} lost of {len(report.modules)} modules"
        '0e+00 lost of 2 modules'
    """
    wanted = Result(rank, heads, dtype, max_error, dry_run)
    if sum and missing == "renormalise":
        raise ConfigError("--sum uses weights as they are, but --missing renormalise rescales them: leave out one.")
    if isinstance(adapters, str | os.PathLike):
        raise ConfigError("adapters must be a list of directories; for a single one write [directory].")
    place = Place(Path(out), force, adapters)
    place.check()
    given, said = collected(
        adapters, weights, weights_from, missing, sum=sum, heads=heads, same_base=same_base,
        allow_unknown=allow_unknown, limits=limits,
    )  # fmt: skip
    absent = missing or "zero"
    what = "weighted sum" if sum else "weighted mean"
    source = Source(
        given.modules, lambda module: given.combined(module, absent, wanted.wide), f"The {what} of the updates B A",
        f"the {what} of the adapters",
    )  # fmt: skip
    return write_result(given, place, wanted, source, absent, said, progress)


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
    allow_unknown: Sequence[str] = (),
    limits: Limits | None = None,
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
    rule = RankRule.parse(rank)
    least = int(rule.value) if rule.kind == "rank" else 0
    wanted = Result(rank, "first", dtype, max_error, dry_run, least=least)
    place = Place(Path(out), force, [adapter])
    place.check()
    files, said = open_adapters([adapter], allow_unknown, limits)
    given = Collection.of(files)
    source = Source(
        given.modules, lambda module: given.combined(module, "zero", wanted.wide), "The update B A",
        "the adapter's update",
    )  # fmt: skip
    return write_result(given, place, wanted, source, "zero", said, progress)


def collected(
    adapters: Adapters,
    weights: Sequence[float] | None,
    weights_from: str | None,
    missing: str | None,
    *,
    sum: bool = False,
    heads: str = "average",
    same_base: bool = False,
    allow_unknown: Sequence[str] = (),
    limits: Limits | None = None,
) -> tuple[Collection, list[str]]:
    """The adapters and weights, checked to belong together, and warnings. Arguments as in `merge`."""
    one_of("--missing", missing, get_args(Missing))
    one_of("--weights-from", weights_from, ("num_examples",))
    if weights is not None and weights_from is not None:
        raise ConfigError("give --weights or --weights-from, not both.")
    files, said = open_adapters(adapters, allow_unknown, limits)
    said += check_uploads(files, counted=weights_from is not None, labels=heads != "drop")
    if weights_from is not None:
        weights = examples_of(files)
    given = Collection.of(files, weights, sum=sum, same_base=same_base, tokens=heads != "drop")
    if missing is None:
        given.check_common()
    idle = [str(file.directory) for file, weight in zip(files, given.weights, strict=True) if not weight]
    if idle:
        more = f" and {len(idle) - 8} more" if len(idle) > 8 else ""
        names = ", ".join(quoted(name, 80) for name in idle[:8])
        said.append(f"weight 0, so not part of the result: {names}{more}")
    return given, said


def open_adapters(
    directories: Adapters,
    allow_unknown: Sequence[str] = (),
    limits: Limits | None = None,
    *,
    with_base: bool = False,
    dora: bool = False,
) -> tuple[list[AdapterFile], list[str]]:
    """The adapters, checked but not read, and notes for the user. with_base, dora: as in `AdapterFile`.

    Raises:
        AdapterFormatError: an adapter cannot be read, or the list is empty.
    """
    if not directories:
        raise AdapterFormatError("at least 1 adapter is needed; got 0.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        files = [
            AdapterFile(directory, limits=limits, allow_unknown=allow_unknown, with_base=with_base, dora=dora)
            for directory in directories
        ]
    told = [f"{file.directory}: {note}" for file in files for note in file.notes]
    return files, [*(str(warning.message) for warning in caught), *told]


def examples_of(files: Sequence[AdapterFile]) -> list[float]:
    """num_examples from each adapter's upload.json. Raises `AdapterFormatError` if one has none."""
    facts = [read_facts(file.directory, file.limits) for file in files]
    lacking = [str(one.directory) for one in facts if not one.there]
    if lacking:
        raise AdapterFormatError(
            f"{lacking[0]} has no {FILE}, so its number of examples is unknown ({len(lacking)} of {len(files)} "
            f"have none): give --weights instead."
        )
    return [one.examples for one in facts]
