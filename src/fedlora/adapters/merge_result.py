"""Writes a merge's result, whatever the source of its modules: cut, narrow, check, report.

One module is in memory at a time. Nothing is written until everything has been computed and checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import torch

from fedlora.adapters.beside import Beside, HeadRule, averaged
from fedlora.adapters.collection import Collection
from fedlora.adapters.labels import labels_of, write_labels
from fedlora.adapters.merge_card import merge_card
from fedlora.adapters.merge_report import MergeReport
from fedlora.adapters.merge_request import Place, Progress, Result, Source
from fedlora.adapters.narrowing import common_type, name_of, narrowed_pair, parse_type
from fedlora.adapters.truncation import (
    ModuleReport,
    RankRule,
    total_error,
    total_rounding,
)
from fedlora.adapters.writer import AdapterWriter, pad_rank
from fedlora.core.messages import Missing
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError

_MUCH_ROUNDING = 0.02  # bfloat16 rounds numbers in its range by 0.003
_LEFT_AS = {"head": "heads", "bias": "bias", "tokens": "tokens", "base": "base"}  # kind -> its name in reports


def write_result(
    given: Collection,
    place: Place,
    wanted: Result,
    source: Source,
    missing: Missing,
    said: Sequence[str] = (),
    progress: Progress | None = None,
) -> MergeReport:
    """Cut, narrow, check and write what `source` yields; return the report. said: warnings so far."""
    progress = progress or (lambda steps, what: steps)
    rule, heads = RankRule.parse(wanted.rank), cast("HeadRule", wanted.heads)
    stored = sorted({each.dtype for file in given.files for path in file.layouts for each in file.pair(path)})
    dtype, remark = common_type(stored)
    dtype = parse_type(wanted.dtype) if wanted.dtype else dtype
    notes = [*said, *given.notes, *([remark] if remark and not wanted.dtype else []), *_far_apart(given, dtype)]
    extras = averaged(given, heads, dtype if wanted.dtype else None, missing, added=dtype)
    notes += _of_first(wanted, given, extras)
    labels, more = _labels(wanted, given, extras)
    notes += more
    spec = given.spec(extras.saved)
    with ExitStack() as stack:
        building = None if wanted.dry_run else stack.enter_context(place.building())
        limits = given.files[0].limits
        writer = None
        if building is not None:
            writer = stack.enter_context(AdapterWriter(building, spec, limits=limits))
        reports, width = _cut_each(source, rule, dtype, writer, progress)
        _check_error(wanted, source, reports, extras, dtype)
        rank, more = _rank(wanted, rule, reports)
        size = rank * width * dtype.itemsize
        if size > limits.total:
            raise ConfigError(f"the result would have {size:,} bytes: choose a lower --rank.")
        notes += more
        if total_rounding(reports) > _MUCH_ROUNDING:
            notes.append(f"{name_of(dtype)} is too narrow for these numbers: writing it moves the update by "
                         f"{total_rounding(reports):.1%}; --dtype float32 is wide enough")  # fmt: skip
        if not any(report.norm for report in reports):
            notes.append(_why_zero(given, missing))
        size += sum(t.numel() * t.element_size() for t in extras.tensors.values())
        done = _report(given, place, wanted, source, missing, extras, reports, rank, dtype, notes, size)
        if building is not None and writer is not None:
            writer.finish(extras.tensors, merge_card(given, done, source.made, str(wanted.rank)), rank=rank)
            if labels:
                write_labels(building, labels)
    return done


# -------------------------------------------------------------------------------------------------------- ranks, losses


def _cut_each(
    source: Source, rule: RankRule, dtype: torch.dtype, writer: AdapterWriter | None, progress: Progress
) -> tuple[list[ModuleReport], int]:
    """Cut and narrow every module, and pass it to the writer, if any; the reports, and the numbers in one slot of all
    modules together."""
    reports, width = [], 0
    for module in progress(source.modules, "merging"):
        lora, report = source.cut(module, rule)
        lora, moved = narrowed_pair(pad_rank(lora, 1), dtype, module)
        reports.append(replace(report, rounding=moved / report.norm if report.norm else 0.0))
        width += len(lora.factors[0]) + lora.factors[1].shape[1]
        if writer is not None:
            writer.add(module, lora)
    return reports, width


def _check_error(
    wanted: Result, source: Source, reports: Sequence[ModuleReport], extras: Beside, dtype: torch.dtype
) -> None:
    """Raise `ConfigError` if the loss exceeds --max-error, naming its parts and how to reduce each."""
    most = wanted.max_error
    if most is None:
        return
    cut, rounding = total_error(reports), total_rounding(reports)
    lost = math.hypot(cut, rounding)
    if not lost <= most:
        parts, ways = [], []
        if cut and source.mean is not None:
            parts.append(f"{cut:.2g} by the method and rank {wanted.rank}")
            ways.append("Another method, or a higher rank, may be nearer.")
        elif cut and wanted.rank == "exact":
            parts.append(f"{cut:.2g} by terms that nearly cancel, beyond what float64 can hold")
            ways.append("Check the weights: the sum of these adapters is hardly larger than its rounding error.")
        elif cut:
            parts.append(f"{cut:.2g} by the cut to rank {wanted.rank}")
            ways.append("A higher rank or --rank energy=0.99 cuts less; --rank exact cuts nothing.")
        if rounding:
            parts.append(f"{rounding:.2g} by writing {name_of(dtype)}")
            ways.append(f"--dtype {_wider(dtype)} rounds less.")
        raise ConfigError(
            f"the result is off {source.of} by {lost:.2g} of its size ({', '.join(parts)}): more than --max-error "
            f"{most:g}; nothing was written. {' '.join(ways)}"
        )
    for path, moved in extras.rounding.items():
        if path.endswith(".lora_B.bias") and moved <= most:
            continue  # part of the update, so its own size is the right measure
        narrow = extras.tensors[path].dtype
        raise ConfigError(
            f"writing {name_of(narrow)} moves {quoted(path, 80)} by {moved:.2g} of its size. It is a whole weight, "
            f"and only the base model shows how much training changed it, so --max-error {most:g} "
            f"cannot be guaranteed: --dtype {_wider(narrow)} loses less, --heads drop leaves it out."
        )


def _wider(dtype: torch.dtype) -> str:
    return "float32" if dtype.itemsize < 4 else "float64"


def _rank(wanted: Result, rule: RankRule, reports: Sequence[ModuleReport]) -> tuple[int, list[str]]:
    """The rank to which all modules are padded, and notes for the user."""
    own = max(1, *(report.kept for report in reports))
    if wanted.least > own:
        return wanted.least, [
            f"rank {wanted.least} is more than the update has ({own}): the additional slots are zero in both factors; "
            f"they change nothing and cannot train"
        ]
    if rule.kind == "rank" and rule.value > own:
        return own, [f"you asked for rank {rule.value:.0f}, but the update has only {own}: nothing is cut"]
    return own, []


# ------------------------------------------------------------------------------------------------------------- reports


def _report(
    given: Collection, place: Place, wanted: Result, source: Source, missing: Missing, extras: Beside,
    reports: Sequence[ModuleReport], rank: int, dtype: torch.dtype, notes: Sequence[str], size: int,
) -> MergeReport:  # fmt: skip
    return MergeReport(
        out=str(place.out), written=not wanted.dry_run, adapters=tuple(str(file.directory) for file in given.files),
        weights=given.weights, module_weights=_other_weights(given, reports, missing, extras),
        beside=tuple(extras.tensors), rank=rank, dtype=name_of(dtype), error=total_error(reports),
        rounding=total_rounding(reports),
        beside_rounding=max(extras.rounding.values(), default=0.0), modules=tuple(reports),
        lacking=tuple(r.module for r in reports if any(r.module not in file.ranks for file in given.files)),
        dropped=_dropped(extras), warnings=tuple(notes), bytes=size,
        bytes_before=sum(file.tensor_bytes() for file in given.files), weighed=source.weighed,
    )  # fmt: skip


def _of_first(wanted: Result, given: Collection, extras: Beside) -> list[str]:
    """Notes on side effects of `--heads first`."""
    notes = []
    if wanted.heads == "first" and extras.left:
        notes.append(
            f"--heads first: the first adapter has no {quoted(next(iter(extras.left)), 80)}, so the result leaves "
            f"out what others trained there ({len(extras.left)} tensors)"
        )
    whole = [path for path in extras.tensors if not path.endswith(".lora_B.bias")]
    if wanted.heads == "first" and whole and given.sum:
        notes.append(
            f"--heads first under --sum: {len(whole)} tensors that were trained in full, such as "
            f"{quoted(whole[0], 80)}, are the first adapter's own, not a sum"
        )
    return notes


def _dropped(extras: Beside) -> dict[str, tuple[str, ...]]:
    """Tensors left out, by kind."""
    found: dict[str, list[str]] = {}
    for path, kind in extras.left.items():
        found.setdefault(_LEFT_AS[kind], []).append(path)
    return {kind: tuple(names) for kind, names in found.items()}


def _labels(wanted: Result, given: Collection, extras: Beside) -> tuple[tuple[str, ...], list[str]]:
    """The class names for the result's head, if the adapters that name them agree, and notes on why there are none."""
    rows = {tensor.shape[0] for tensor in extras.tensors.values() if tensor.ndim == 2}
    files = given.files[:1] if wanted.heads == "first" else given.files
    said = {file.directory: names for file in files if (names := labels_of(file.directory, file.limits))}
    if not rows or not said:
        return (), []
    first, names = next(iter(said.items()))
    other = next((where for where in said if said[where] != names), None)
    if other is not None and wanted.heads == "average" and len(names) in rows:
        raise AdapterFormatError(
            f"{first} and {other} number their classes differently, {quoted(list(names))} and "
            f"{quoted(list(said[other]))} in labels.json, so a mean of their heads would mix classes. --heads first "
            f"takes the first adapter's, --heads drop leaves them out."
        )
    if other is not None:
        return (), [f"{first} and {other} name their classes differently, so the result has no labels.json"]
    if len(names) not in rows:
        return (), [f"{len(names)} label names, but no trained head has as many rows, so the result has no labels.json"]
    return names, []


def _other_weights(
    given: Collection, reports: Sequence[ModuleReport], missing: Missing, extras: Beside
) -> dict[str, tuple[float, ...]]:
    """Weights of modules and other tensors that differ from the overall ones by more than rounding."""
    known = set(given.modules)
    found = {r.module: given.effective(given.holders(r.module, missing)) for r in reports if r.module in known}
    return {
        name: weights
        for name, weights in {**found, **extras.weights}.items()
        if any(not math.isclose(a, b, rel_tol=1e-9) for a, b in zip(weights, given.weights, strict=True))
    }


def _far_apart(given: Collection, dtype: torch.dtype) -> list[str]:
    """A note if some weights are so small that the computation's dtype rounds them away beside others."""
    wide = torch.promote_types(dtype, torch.float32)
    sizes = sorted(abs(w) for w in given.weights if w)
    if sizes[0] >= 10 * torch.finfo(wide).eps * sizes[-1]:
        return []
    keeps = "; --dtype float64 keeps it" if wide == torch.float32 else ""
    return [
        f"beside a weight of {sizes[-1]:g} one of {sizes[0]:g} is lost in the last digits of {name_of(wide)}{keeps}"
    ]


def _why_zero(given: Collection, missing: Missing) -> str:
    """Why the result has no update: the updates cancel, or all were zero."""
    for module in given.modules:
        if any(w and float(file.lora(module).norm()) for file, w in given.holders(module, missing)):
            return "the updates cancel: the result is zero"
    return "the update is zero (B A = 0 in every module), and so is the result"
