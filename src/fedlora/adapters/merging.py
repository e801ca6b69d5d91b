"""Merge adapter folders into one, or change an adapter's rank: the Python functions behind the commands.

Four steps: `collected` says whether the adapters belong together, `Collection.combined` sums each module exactly, its
`cut` keeps the requested rank, and `write_result` checks, reports and writes, also what a method made of them. The
result is held in memory until then, so that nothing is written unless everything is right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from fedlora.adapters.collection import Collection, collected, one_of
from fedlora.adapters.heads import HeadRule, heads_by, labels_by
from fedlora.adapters.merge_report import MergeReport, ModuleReport, merge_card
from fedlora.adapters.truncation import RankRule, name_of, narrowed_pair, overall, parse_type
from fedlora.adapters.uploads import write_labels
from fedlora.adapters.writer import ADAPTER_FOLDER, fill_adapter, pad_rank
from fedlora.core.folders import check_target, replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.text import quoted
from fedlora.doing import stepped
from fedlora.errors import ConfigError
from fedlora.linalg.own_modes import own_modes

Part = tuple[LoRA, ModuleReport]  # one module of a result


@own_modes()
def merge(
    adapters: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    rank: int | str = "exact",
    weights: Sequence[float] | Literal["num_examples"] | None = None,
    sum: bool = False,
    missing: Literal["zero"] | None = None,
    heads: HeadRule = "average",
    dtype: str | None = None,
    max_error: float | None = None,
    same_base: bool = False,
    dry_run: bool = False,
    force: bool = False,
    max_bytes: int | None = None,
) -> MergeReport:
    """Merge PEFT adapters into one: the exact weighted mean of their updates, then its best adapter of the given rank.

    Args:
        adapters: PEFT directories. out: the directory to write; needed unless dry_run.
        rank: a number, "exact" or "energy=0.99". All modules are padded to the largest rank, so that every reader gets
            the scale right.
        weights: one per adapter; default: equal; "num_examples": those of each adapter's upload.json. sum: use weights
            as they are, including negative ones; otherwise they are divided by their sum.
        missing: "zero": an adapter that lacks a module counts as an update of zero; without it, all must have the same
            modules.
        heads: for saved modules: the mean, the first adapter's, or none.
        dtype: float16, bfloat16, float32 or float64; default: the adapters' own.
        max_error: write nothing beyond this relative error. same_base: treat their base models as one, whatever their
            names. dry_run: write nothing. force: replace any folder that holds only an adapter. max_bytes: the largest
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
    wanted = Wanted(out, rank, heads, dtype, max_error, dry_run, force)
    if isinstance(adapters, str | os.PathLike):
        raise ConfigError("adapters must be a list of directories; for a single one write [directory].")
    wanted.check(adapters)
    given = collected(adapters, weights, missing, sum=sum, heads=heads, same_base=same_base, max_bytes=max_bytes)
    what = f"the weighted {'sum' if sum else 'mean'} of the adapters"
    return write_result(given, wanted, _cut_parts(given, wanted), what)


@own_modes()
def resize(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    rank: int | str,
    dtype: str | None = None,
    max_error: float | None = None,
    dry_run: bool = False,
    force: bool = False,
    max_bytes: int | None = None,
) -> MergeReport:
    """Write an adapter at another rank: the best approximation of its update. Arguments as in `merge`.

    A number sets the rank of every module. A module of lower rank is padded with slots that are zero in both factors,
    and a warning says so: they change nothing and cannot train.

    Example:
        >>> from fedlora.adapters import resize
        >>> resize("adapter", "smaller", rank=2).rank
        2
    """
    wanted = Wanted(out, rank, "first", dtype, max_error, dry_run, force, padded=True)
    wanted.check([adapter])
    given = collected([adapter], heads="first", max_bytes=max_bytes)
    return write_result(given, wanted, _cut_parts(given, wanted), "the adapter's update")


@dataclass(frozen=True)
class Wanted:
    """The desired result, however it is made. Fields as in `merge`. padded: every module gets the requested rank."""

    out: str | os.PathLike[str] | None
    rank: str | int = "exact"
    heads: str = "average"
    dtype: str | None = None
    max_error: float | None = None
    dry_run: bool = False
    force: bool = False
    padded: bool = False

    def __post_init__(self) -> None:
        if self.out is None and not self.dry_run:
            raise ConfigError("give -o DIRECTORY to write to, or --dry-run to write nothing.")
        RankRule.parse(self.rank)
        one_of("--heads", self.heads, get_args(HeadRule))
        if self.dtype is not None:
            parse_type(self.dtype)
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            raise ConfigError(f"--max-error must be a number from 0; got {self.max_error}.")

    def check(self, inputs: Sequence[str | os.PathLike[str]]) -> None:
        """Raise `ConfigError` if the result may not be written; call it before long work."""
        if self.out is not None:
            check_target(self.out, force=self.force, kind=ADAPTER_FOLDER, inputs=inputs)

    @property
    def rule(self) -> RankRule:
        return RankRule.parse(self.rank)

    def type_for(self, given: Collection, *, wide: bool = False) -> torch.dtype:
        """The result's type. wide: of its numbers before they are narrowed, at least float32."""
        dtype = parse_type(self.dtype) if self.dtype else given.dtype()
        return torch.promote_types(dtype, torch.float32) if wide else dtype


def _cut_parts(given: Collection, wanted: Wanted) -> dict[str, Part]:
    """Module -> its cut sum in the result's type, and its report."""
    wide, dtype = wanted.type_for(given, wide=True), wanted.type_for(given)
    steps = stepped(given.modules, "merging")
    return {name: in_type(given.combined(name, wide).cut(wanted.rule), dtype) for name in steps}


def in_type(part: Part, dtype: torch.dtype) -> Part:
    """The pair in the result's type, of rank 1 at least, and what rounding to it costs."""
    lora, report = part
    pair, moved = narrowed_pair(pad_rank(lora, 1), dtype, report.module)
    return pair, replace(report, rounding=moved / (report.norm or 1.0))


def write_result(
    given: Collection,
    wanted: Wanted,
    parts: Mapping[str, Part],
    of: str,
    *,
    by: str = "svd",
    rule: str = "",
    counts: tuple[float, ...] = (),
    notes: Sequence[str] = (),
) -> MergeReport:
    """Check and write a result, whoever made its parts; return the report.

    Args:
        parts: in the result's type. of: what errors are relative to, in words. by: the method. rule,
            counts: as in the report. notes: for the user, more of them.
    """
    dtype, reports = wanted.type_for(given), tuple(report for _, report in parts.values())
    heads = heads_by(given.files, given.weights, wanted.heads, dtype if wanted.dtype else None)
    error, rounding = (overall(reports, [getattr(r, what) for r in reports]) for what in ("error", "rounding"))
    _check_error(wanted, of, error, rounding, dtype)
    rank, remark = _rank(wanted, reports)
    warnings = [*notes, *given.notes, *remark, *_zeros(given, reports)]
    adapter = Adapter({name: pad_rank(lora, rank) for name, (lora, _) in parts.items()}, heads.tensors)
    report = MergeReport(
        out=os.fspath(wanted.out or ""), written=not wanted.dry_run, of=of,
        adapters=tuple(str(file.directory) for file in given.files), weights=given.weights, beside=tuple(heads.tensors),
        rank=rank, dtype=name_of(dtype), error=error, rounding=rounding, beside_rounding=heads.rounding,
        modules=reports, dropped=heads.left, warnings=tuple(warnings), rule=rule, counts=counts,
        lacking=tuple(r.module for r in reports if any(r.module not in file.ranks for file in given.files)),
        bytes=sum(tensor.nbytes for tensor in adapter.tensors()),
        bytes_before=sum(stored.size for file in given.files for stored in file.stored.values()),
    )  # fmt: skip
    if wanted.out is not None and not wanted.dry_run:
        spec = given.spec(heads=bool(heads.tensors))
        inputs = [file.directory.resolve().name for file in given.files]
        card = merge_card(report, inputs, spec.base_model, str(wanted.rank), by)
        sources = [file.directory for file in given.files]
        with replacing_folder(wanted.out, force=wanted.force, kind=ADAPTER_FOLDER, inputs=sources) as building:
            fill_adapter(building, adapter, spec, card)
            if labels := labels_by(given.files, wanted.heads):
                write_labels(building, labels)
    return report


def _check_error(wanted: Wanted, of: str, cut: float, rounding: float, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if the update's loss exceeds --max-error, naming its parts and how to reduce each."""
    most, lost = wanted.max_error, math.hypot(cut, rounding)
    if most is not None and not lost <= most:
        wider = "float32" if dtype.itemsize < 4 else "float64"
        raise ConfigError(
            f"the result is off {of} by {lost:.2g} of its size ({cut:.2g} by the cut to rank {wanted.rank}, or by "
            f"terms that nearly cancel; {rounding:.2g} by writing {name_of(dtype)}): more than --max-error {most:g}; "
            f"nothing was written. A higher rank cuts less, --rank exact nothing; --dtype {wider} rounds less."
        )


def _rank(wanted: Wanted, reports: Sequence[ModuleReport]) -> tuple[int, list[str]]:
    """The rank to which all modules are padded, and a note if it is not the one asked for."""
    own, rule = max(1, *(report.kept for report in reports)), wanted.rule
    if rule.kind != "rank" or rule.value <= own:
        return own, []
    if wanted.padded:
        return int(rule.value), [
            f"rank {rule.value:.0f} is more than the update has ({own}): the additional slots are zero in both "
            f"factors; they change nothing and cannot train"
        ]
    return own, [f"you asked for rank {rule.value:.0f}, but the update has only {own}: nothing is cut"]


def _zeros(given: Collection, reports: Sequence[ModuleReport]) -> list[str]:
    """Notes on updates that are zero: of an adapter, which only shrinks a mean, or of the result, if they cancel."""
    idle = [file for file in given.files if not file.check()]
    notes = [f"the update of {quoted(str(file.directory), 80)} is zero in every module, yet it counts" for file in idle]
    return notes if any(report.norm for report in reports) else [*notes, "the result is zero in every module"]
