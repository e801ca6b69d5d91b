"""A merge's result, whoever made its modules: narrowed, checked, reported, written.

It is held in memory until then, so that nothing is written unless everything is right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from fedlora.adapters.card import merge_card
from fedlora.adapters.collection import Collection, one_of
from fedlora.adapters.heads import HeadRule, Heads, heads_by
from fedlora.adapters.merge_report import MergeReport, ModuleReport, Weighed
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import RankRule, name_of, narrowed_pair, overall, parse_type
from fedlora.adapters.uploads import labels_of, write_labels
from fedlora.adapters.writer import ADAPTER_FOLDER, fill_adapter, pad_rank
from fedlora.core.folders import check_target, replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError

Progress = Callable[[Sequence[str], str], Iterable[str]]  # (steps, activity) -> the steps
Part = tuple[LoRA, ModuleReport]  # one module of a result
_MUCH_ROUNDING = 0.02  # bfloat16 rounds numbers in its range by 0.003


@dataclass(frozen=True)
class Wanted:
    """The desired result, however it is made. Fields as in `merge`. padded: every module gets the requested rank."""

    out: Path
    rank: str | int = "exact"
    heads: str = "average"
    dtype: str | None = None
    max_error: float | None = None
    dry_run: bool = False
    force: bool = False
    padded: bool = False

    def __post_init__(self) -> None:
        RankRule.parse(self.rank)
        one_of("--heads", self.heads, get_args(HeadRule))
        if self.dtype is not None:
            parse_type(self.dtype)
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            raise ConfigError(f"--max-error must be a number from 0; got {self.max_error}.")

    def check(self, inputs: Sequence[str | os.PathLike[str]]) -> None:
        """Raise `ConfigError` if the result may not be written; call it before long work."""
        check_target(self.out, force=self.force, kind=ADAPTER_FOLDER, inputs=inputs)

    @property
    def rule(self) -> RankRule:
        return RankRule.parse(self.rank)

    def type_for(self, given: Collection, *, wide: bool = False) -> torch.dtype:
        """The result's type. wide: of its numbers before they are narrowed, at least float32."""
        dtype = parse_type(self.dtype) if self.dtype else given.dtype()
        return torch.promote_types(dtype, torch.float32) if wide else dtype


def cut_parts(given: Collection, wanted: Wanted, progress: Progress | None = None) -> dict[str, Part]:
    """Module -> its cut sum in the result's type, and its report."""
    wide, dtype = wanted.type_for(given, wide=True), wanted.type_for(given)
    steps = progress(given.modules, "merging") if progress else given.modules
    return {name: in_type(given.combined(name, wide).cut(wanted.rule), dtype) for name in steps}


def in_type(part: Part, dtype: torch.dtype) -> Part:
    """The pair in the result's type, of rank 1 at least, and what rounding to it costs."""
    lora, report = part
    pair, moved = narrowed_pair(pad_rank(lora, 1), dtype, report.module)
    return pair, replace(report, rounding=moved / report.norm if report.norm else 0.0)


def write_result(
    given: Collection,
    wanted: Wanted,
    parts: Mapping[str, Part],
    made: str,
    of: str,
    *,
    weighed: Weighed | None = None,
    notes: Sequence[str] = (),
) -> MergeReport:
    """Check and write a result, whoever made its parts; return the report.

    Args:
        parts: in the result's type. made: what the result is, in words, for its card. of: what errors are relative to.
        weighed: the robust rule's part. notes: for the user, more of them.
    """
    dtype, reports = wanted.type_for(given), tuple(report for _, report in parts.values())
    heads = heads_by(given.files, given.weights, wanted.heads, dtype if wanted.dtype else None)
    labels, more = _labels(wanted, given, heads)
    error, rounding = (overall(reports, [getattr(r, what) for r in reports]) for what in ("error", "rounding"))
    _check_error(wanted, of, error, rounding, heads, dtype)
    rank, remark = _rank(wanted, reports)
    said = [*notes, *given.notes, *more, *remark, *_zeros(given, reports)]
    if not wanted.dtype and len({file.dtype(m) for file in given.files for m in file.modules}) > 1:
        said.append(f"the factors are stored in different types; written as {name_of(dtype)}")
    if rounding > _MUCH_ROUNDING:
        said.append(f"{name_of(dtype)} is too narrow for these numbers: writing it moves the update by {rounding:.1%}; "
                    f"--dtype {_wider(dtype)} is wide enough")  # fmt: skip
    adapter = Adapter({name: pad_rank(lora, rank) for name, (lora, _) in parts.items()}, heads.tensors)
    report = MergeReport(
        out=str(wanted.out), written=not wanted.dry_run, adapters=tuple(str(file.directory) for file in given.files),
        weights=given.weights, module_weights=_other_weights(given, parts, wanted, heads),
        beside=tuple(heads.tensors), rank=rank, dtype=name_of(dtype), error=error, rounding=rounding,
        beside_rounding=max(heads.rounding.values(), default=0.0), modules=reports,
        lacking=tuple(r.module for r in reports if any(r.module not in file.ranks for file in given.files)),
        dropped=heads.left, warnings=tuple(said), bytes=sum(map(_bytes, adapter.tensors())),
        bytes_before=sum(stored.size for file in given.files for stored in file.stored.values()), weighed=weighed,
    )  # fmt: skip
    if not wanted.dry_run:
        spec = given.spec(heads=bool(heads.tensors))
        inputs = [(file.directory.resolve().name, file.sha256()) for file in given.files]
        card = merge_card(report, inputs, spec.base_model, made, str(wanted.rank))
        sources = [file.directory for file in given.files]
        with replacing_folder(wanted.out, force=wanted.force, kind=ADAPTER_FOLDER, inputs=sources) as building:
            fill_adapter(building, adapter, spec, card)
            if labels:
                write_labels(building, labels)
    return report


def _check_error(wanted: Wanted, of: str, cut: float, rounding: float, heads: Heads, dtype: torch.dtype) -> None:
    """Raise `ConfigError` if the loss exceeds --max-error, naming its parts and how to reduce each."""
    most, lost = wanted.max_error, math.hypot(cut, rounding)
    if most is None:
        return
    if not lost <= most:
        raise ConfigError(
            f"the result is off {of} by {lost:.2g} of its size ({cut:.2g} by the cut to rank {wanted.rank}, or by "
            f"terms that nearly cancel; {rounding:.2g} by writing {name_of(dtype)}): more than --max-error {most:g}; "
            f"nothing was written. A higher rank cuts less, --rank exact nothing; --dtype {_wider(dtype)} rounds less."
        )
    for path, moved in heads.rounding.items():
        raise ConfigError(
            f"writing {name_of(heads.tensors[path].dtype)} moves {quoted(path, 80)} by {moved:.2g} of its size. It is "
            f"a whole weight, and only the base model shows how much training changed it, so --max-error {most:g} "
            f"cannot be guaranteed: --dtype float32 loses less, --heads drop leaves it out."
        )


def _wider(dtype: torch.dtype) -> str:
    return "float32" if dtype.itemsize < 4 else "float64"


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
    """Notes on updates that are zero: of an adapter, which only shrinks a mean, or of the result."""
    idle = [file for file in given.files if not any(_some_update(file, module) for module in file.modules)]
    notes = [f"the update of {quoted(str(file.directory), 80)} is zero in every module, yet it counts" for file in idle]
    if any(report.norm for report in reports):
        return notes if len(given.files) > 1 else []
    every = len(idle) == len(given.files)
    return [*notes, "the update is zero, and so is the result" if every else "the updates cancel: the result is zero"]


def _some_update(file: AdapterFile, module: str) -> bool:
    B, A = file.unscaled(module)[0].factors
    return bool(B.any()) and bool(A.any())


def _labels(wanted: Wanted, given: Collection, heads: Heads) -> tuple[tuple[str, ...], list[str]]:
    """The class names for the result's head, if the adapters that name them agree, and notes on why there are none."""
    rows = {tensor.shape[0] for tensor in heads.tensors.values() if tensor.ndim == 2}
    files = given.files[:1] if wanted.heads == "first" else given.files
    said = {file.directory: names for file in files if (names := labels_of(file.directory))}
    if not rows or not said:
        return (), []
    first, names = next(iter(said.items()))
    other = next((where for where in said if said[where] != names), None)
    if other is not None:
        raise AdapterFormatError(
            f"{first} and {other} number their classes differently, {quoted(list(names))} and "
            f"{quoted(list(said[other]))} in labels.json, so a mean of their heads would mix classes. --heads first "
            f"takes the first adapter's, --heads drop leaves them out."
        )
    if len(names) not in rows:
        return (), [f"{len(names)} label names, but no trained head has as many rows, so the result has no labels.json"]
    return names, []


def _other_weights(
    given: Collection, parts: Mapping[str, Part], wanted: Wanted, heads: Heads
) -> dict[str, tuple[float, ...]]:
    """Weights of modules and heads that differ from the overall ones by more than rounding."""
    found = {name: given.weights_of(name) for name in parts if any(name in file.ranks for file in given.files)}
    if wanted.heads == "first":
        found |= dict.fromkeys(heads.tensors, (1.0, *(0.0 for _ in given.files[1:])))
    return {
        name: weights
        for name, weights in found.items()
        if any(not math.isclose(a, b, rel_tol=1e-9) for a, b in zip(weights, given.weights, strict=True))
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
