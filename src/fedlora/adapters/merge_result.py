"""Write the result of a merge: cut to a rank, narrowed to a type, checked, and told of, whatever its modules come from.

One module is in memory at a time. Nothing is written before everything has been computed and checked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from fedlora.adapters.collection import Beside, Collection, HeadRule
from fedlora.adapters.kinds import KINDS, VLLM_RANKS, Left, check_vllm, vllm_rank, without
from fedlora.adapters.labels import labels_of, write_labels
from fedlora.adapters.merge_card import CardFacts, merge_card
from fedlora.adapters.merge_report import ClientReport, MergeReport, Weighed
from fedlora.adapters.narrowing import common_type, name_of, narrowed_pair, parse_type
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import (
    Combined,
    ModuleReport,
    RankRule,
    against_mean,
    budget_ranks,
    total_error,
    total_rounding,
)
from fedlora.adapters.writer import MERGE, MERGE_FOLDER, AdapterSpec, AdapterWriter, pad_rank
from fedlora.core.echo import quoted
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.core.lora import LoRA
from fedlora.core.messages import Missing
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError, ConfigError

Progress = Callable[[Sequence[str], str], Iterable[str]]  # (steps, what is done) -> the steps
_MUCH_ROUNDING = 0.02  # bfloat16 has 0.003 of numbers that it holds
_MOST_PADDING = 2.0  # one rank for all modules, where that makes the file at most so much larger


@dataclass(frozen=True)
class Result:
    """What is asked of a result, whatever made it. All as `merge` has them."""

    rank: str | int = "exact"
    heads: str = "average"
    drop: Sequence[str] = ()
    dtype: str | None = None
    ranks: str | None = None
    serve: str | None = None
    max_error: float | None = None
    dry_run: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        RankRule.parse(self.rank)
        one_of("--heads", self.heads, get_args(HeadRule))
        one_of("--ranks", self.ranks, ("one", "each"))
        one_of("--for", self.serve, ("vllm",))
        if self.dtype is not None:
            parse_type(self.dtype)
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            raise ConfigError(f"--max-error is a number from 0; got {self.max_error}.")
        if self.serve == "vllm" and self.ranks == "each":
            raise ConfigError("vLLM knows no rank_pattern, so --for vllm writes one rank, and --ranks each several.")


@dataclass(frozen=True)
class Source:
    """Where the modules of a result come from. made: of what, in words, for the card; of: what a loss is relative to.
    combined: module -> its update. mean: compared with that, where it is not itself the mean. weighed: by a robust
    rule."""

    modules: Sequence[str]
    combined: Callable[[str], Combined]
    made: str
    of: str
    mean: Callable[[str], tuple[LoRA, ModuleReport]] | None = None
    weighed: Weighed | None = None


@dataclass(frozen=True)
class Parts:
    """What results of one merge have in common: modules, what lies beside the pairs, the type, names of classes."""

    modules: frozenset[str]
    spec: AdapterSpec
    extras: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a result goes. force: what is there is replaced, where it is wholly of `kind`. inputs: never replaced.
    by: what the result says of its writer."""

    out: Path
    kind: FolderKind = MERGE_FOLDER
    by: str = MERGE
    force: bool = False
    inputs: Sequence[str | os.PathLike[str]] = ()

    def check(self) -> None:
        """Raises `ConfigError` where nothing can or may be written: to ask before long work."""
        check_target(self.out, force=self.force, kind=self.kind, inputs=self.inputs)

    def building(self) -> AbstractContextManager[Path]:
        """A folder that becomes the result when the block ends well."""
        return replacing_folder(self.out, force=self.force, kind=self.kind, inputs=self.inputs)


def write_result(
    given: Collection,
    place: Place,
    wanted: Result,
    source: Source,
    missing: Missing,
    said: Sequence[str] = (),
    progress: Progress | None = None,
    also: Callable[[Path | None, Parts], tuple[Sequence[ClientReport], Sequence[str]]] | None = None,
) -> MergeReport:
    """What comes out of `source`, cut, narrowed, checked and written; the report of it. said: warnings so far. also:
    writes more into the folder before it appears, and tells of which clients and what to say; into None it only
    tells."""
    progress = progress or (lambda steps, what: steps)
    rule = RankRule.parse(wanted.rank)
    left = without(given, wanted.drop)
    left = check_vllm(given, left) if wanted.serve == "vllm" else left
    dtype, remark = common_type(_stored_types(given.files))
    dtype = parse_type(wanted.dtype) if wanted.dtype else dtype
    notes = [*said, *given.notes, *left.notes, *([remark] if remark and not wanted.dtype else [])]
    notes += _far_apart(given, dtype)
    stay = {*left.modules, *left.tensors}
    extras = given.extras(cast("HeadRule", wanted.heads), stay, dtype if wanted.dtype else None, missing)
    left, more = _left_by_rule(wanted, given, left, extras)
    notes += more
    labels, more = _labels(wanted, given, extras)
    notes += more
    out = set(given.modules) - set(left.modules)
    modules = [module for module in source.modules if module not in out]
    spec = _spec(given, left, extras)
    budget = _budget(modules, source, rule, progress)
    reports, widths, fulls = [], [], []
    limits = given.files[0].limits
    with ExitStack() as stack:
        building = None if wanted.dry_run else stack.enter_context(place.building())
        writer = (
            None
            if building is None
            else stack.enter_context(AdapterWriter(building, spec, by=place.by, limits=given.files[0].limits))
        )
        for k, module in enumerate(progress(modules, "merging")):
            lora, report, full = _cut(source, module, rule, budget[k] if budget else None)
            fulls.append(full)
            lora, moved = narrowed_pair(pad_rank(lora, 1), dtype, module)
            reports.append(replace(report, rounding=moved / report.norm if report.norm else 0.0))
            widths.append(len(lora.factors[0]) + lora.factors[1].shape[1])
            if writer is not None:
                writer.add(module, lora)
        _check_error(wanted, source, rule, reports, extras, dtype)
        kept = [max(report.kept, 1) for report in reports]
        rank, size, more = _one_rank(wanted, rule, kept, fulls, widths, dtype, limits.total)
        notes += more
        if total_rounding(reports) > _MUCH_ROUNDING:
            notes.append(f"{name_of(dtype)} is too narrow for these numbers: writing it moves the update by "
                         f"{total_rounding(reports):.1%}; --dtype float32 does not")  # fmt: skip
        if not any(report.norm for report in reports):
            notes.append(_why_zero(given, missing))
        size += math.fsum(t.numel() * t.element_size() for t in extras.tensors.values())
        done = _report(
            given, place.out, wanted, left, missing, extras, reports, rank, max(kept), dtype, notes, int(size)
        )
        done = replace(done, weighed=source.weighed)
        if building is not None and writer is not None:
            writer.finish(extras.tensors, merge_card(given, _facts(done, source.made, wanted)), rank=rank)
            if labels:
                write_labels(building, labels)
        if also is not None:
            clients, remarks = also(building, Parts(frozenset(modules), spec, extras.tensors, dtype, labels))
            done = replace(done, clients=tuple(clients), warnings=(*done.warnings, *remarks))
    return done


def one_of(option: str, value: object, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}; got {str(value)[:80]!r}.")


# -------------------------------------------------------------------------------------------------------- inside


def _cut(source: Source, module: str, rule: RankRule, rank: int | None) -> tuple[LoRA, ModuleReport, int]:
    """The pair, its report, and the rank that there was to cut."""
    found = source.combined(module)
    cut = found.cut(rule.keep(found.product) if rank is None else rank)
    return *(cut if source.mean is None else against_mean(*cut, source.mean(module))), found.product.rank


def _budget(modules: Sequence[str], source: Source, rule: RankRule, progress: Progress) -> list[int] | None:
    """Each module's rank under a budget, from a pass of its own: all sizes must be known before the first cut."""
    if rule.kind != "budget":
        return None
    reports, costs = [], []
    for module in progress(modules, "measuring"):
        found = source.combined(module)
        reports.append(found.report(found.product.rank))
        costs.append(found.product.d_out + found.product.d_in)
    return budget_ranks(reports, costs, rule.value)


def _check_error(
    wanted: Result, source: Source, rule: RankRule, reports: Sequence[ModuleReport], extras: Beside, dtype: torch.dtype
) -> None:
    """Raises `ConfigError` beyond --max-error: with the parts of the loss, and what makes each of them less."""
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
            parts.append(f"{cut:.2g} by terms that nearly cancel, of which float64 keeps no more")
            ways.append("Look at the weights: what remains of these adapters is about the rounding of their sum.")
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
            continue  # part of the update: its own size is the measure
        narrow = extras.tensors[path].dtype
        raise ConfigError(
            f"writing {name_of(narrow)} moves {quoted(path, 80)} by {moved:.2g} of its size. It is a whole weight, and "
            f"how much that is of what training changed is not known without the base model, so --max-error {most:g} "
            f"cannot be kept: --dtype {_wider(narrow)} loses less, or leave it out with --drop."
        )


def _wider(dtype: torch.dtype) -> str:
    return "float32" if dtype.itemsize < 4 else "float64"


def _one_rank(
    wanted: Result, rule: RankRule, kept: Sequence[int], fulls: Sequence[int], widths: Sequence[int],
    dtype: torch.dtype, most: int,
) -> tuple[int, float, list[str]]:  # fmt: skip
    """(the rank to pad all modules to, 0 for none; bytes of the pairs; what to say of it). most: bytes of a file."""
    largest = max(wanted.least, *kept)
    asked = largest
    if wanted.serve == "vllm":
        largest = vllm_rank(largest)
    each = math.fsum(r * w for r, w in zip(kept, widths, strict=True)) * dtype.itemsize
    one = largest * math.fsum(widths) * dtype.itemsize
    notes = []
    if wanted.least > max(kept):
        notes.append(
            f"rank {wanted.least} is more than the update has ({max(kept)}): the slots beyond are zero in both "
            f"factors; they change nothing, and cannot train"
        )
    elif rule.kind == "rank" and rule.value > max(kept):
        notes.append(f"rank {rule.value:.0f} was asked for, and the update has {max(kept)}: nothing is cut")
    if rule.kind == "budget" and all(r >= full for r, full in zip(kept, fulls, strict=True)):
        notes.append(f"budget={rule.value:g} is no less than the update takes (ranks to {max(kept)}): nothing is cut")
    if largest > asked:
        notes.append(
            f"vLLM takes ranks {', '.join(map(str, VLLM_RANKS))}: rank {asked} is written as {largest}, with slots "
            f"that are zero in both factors; they change nothing, and cannot train"
        )
    if wanted.ranks is not None or wanted.serve == "vllm" or wanted.least:
        pads = wanted.ranks != "each"
    else:
        pads = rule.kind != "budget" and one <= _MOST_PADDING * each
    if min(kept) == largest or pads:
        if one > most:
            raise ConfigError(f"the result would have {one:,.0f} bytes: --ranks each, or a lower --rank, is smaller.")
        return largest, one, notes
    notes.append(
        f"modules keep ranks from {min(kept)} to {max(kept)}: right in peft and in readers of r and lora_alpha (vLLM), "
        f"and wrong in those that divide lora_alpha by each tensor's rank (llama.cpp). --ranks one is right in all, at "
        f"{one / each:.1f} times the size"
    )
    return 0, each, notes


def _left_by_rule(wanted: Result, given: Collection, left: Left, extras: Beside) -> tuple[Left, list[str]]:
    """What is left out, with what `--heads` leaves out by itself; and what to say of heads that are not averaged."""
    gone: dict[str, list[str]] = {}
    for path, kind in extras.left.items():
        gone.setdefault(next(name for name, (_, kinds, _) in KINDS.items() if kind in kinds), []).append(path)
    dropped = {name: [*left.dropped.get(name, ()), *gone.get(name, ())] for name in (*left.dropped, *gone)}
    notes = []
    if wanted.heads == "first" and gone:
        notes.append(
            f"--heads first: the first adapter has no {quoted(next(iter(extras.left)), 80)}, so what others trained "
            f"there is left out ({len(extras.left)} tensors); --heads holders keeps it"
        )
    whole = [path for path in extras.tensors if not path.endswith(".lora_B.bias")]
    if wanted.heads == "first" and whole and given.counts.sum:
        notes.append(
            f"--heads first under --sum: {len(whole)} tensors that were trained in full, such as "
            f"{quoted(whole[0], 80)}, are the first adapter's whole, and no sum"
        )
    return replace(left, dropped=dropped), notes


def _labels(wanted: Result, given: Collection, extras: Beside) -> tuple[tuple[str, ...], list[str]]:
    """The names of the classes of the result's head, where those that name them agree, and why there are none."""
    rows = {tensor.shape[0] for tensor in extras.tensors.values() if tensor.ndim == 2}
    files = given.files[:1] if wanted.heads == "first" else given.files
    said = {file.directory: names for file in files if (names := labels_of(file.directory, file.limits))}
    if not rows or not said:
        return (), []
    first, names = next(iter(said.items()))
    other = next((where for where in said if said[where] != names), None)
    if other is not None and wanted.heads in ("average", "holders") and len(names) in rows:
        raise AdapterFormatError(
            f"{first} and {other} number their classes differently, {quoted(list(names))} and "
            f"{quoted(list(said[other]))} in labels.json, so a mean of their heads would mix them. --heads first takes "
            f"the first adapter's, --drop heads leaves them out."
        )
    if other is not None:
        return (), [f"{first} and {other} name their classes differently, so the result has no labels.json"]
    if len(names) not in rows:
        return (), [f"{len(names)} label names, and no trained head has as many rows, so the result has no labels.json"]
    return names, []


def _spec(given: Collection, left: Left, extras: Beside) -> AdapterSpec:
    """Without the modules that were left out among the targets: peft would make new ones in their place."""
    spec = given.spec(extras.saved)
    if all(not KINDS[name][2] for name in left.dropped):
        return spec
    targets: dict[str, Any] = {"target_modules": []}  # so that the writer names what there is
    if "experts" in left.dropped:
        targets["target_parameters"] = None
    return replace(spec, config=ReadOnly({**spec.config, **targets}))


def _report(
    given: Collection, out: Path, wanted: Result, left: Left, missing: Missing, extras: Beside,
    reports: Sequence[ModuleReport], rank: int, largest: int, dtype: torch.dtype, notes: Sequence[str], size: int,
) -> MergeReport:  # fmt: skip
    usual, others = given.weights, {}
    known = set(given.modules)
    for report in reports:
        weights = given.effective(report.module, missing) if report.module in known else usual
        if _differ(weights, usual):
            others[report.module] = weights
    others |= {path: weights for path, weights in extras.weights.items() if _differ(weights, usual)}
    lacking = tuple(r.module for r in reports if any(r.module not in file.ranks for file in given.files))
    return MergeReport(
        out=str(out), written=not wanted.dry_run, adapters=tuple(str(file.directory) for file in given.files),
        weights=usual, module_weights=others, beside=tuple(extras.tensors), rank=rank or largest,
        one_rank=bool(rank), dtype=name_of(dtype),
        error=total_error(reports), rounding=total_rounding(reports), modules=tuple(reports), lacking=lacking,
        beside_rounding=max(extras.rounding.values(), default=0.0),
        dropped={name: tuple(names) for name, names in left.dropped.items()}, warnings=tuple(notes), bytes=size,
        bytes_before=sum(file.tensor_bytes() for file in given.files),
    )  # fmt: skip


def _differ(one: Sequence[float], other: Sequence[float]) -> bool:
    """Beyond the last digits, which dividing by a sum of 0.999... changes."""
    return any(not math.isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other, strict=True))


def _facts(report: MergeReport, made: str, wanted: Result) -> CardFacts:
    return CardFacts(
        made, str(wanted.rank), report.weights, report.module_weights, report.rank if report.one_rank else 0,
        report.dtype, report.error, report.rounding, report.modules, report.dropped, report.weighed,
    )  # fmt: skip


def _far_apart(given: Collection, dtype: torch.dtype) -> list[str]:
    """Weights beside which others are lost in the last digits of the type that is computed in."""
    wide = torch.promote_types(dtype, torch.float32)
    for weights in (given.counts.default, *given.counts.by_module.values()):
        sizes = sorted(abs(w) for w in weights if w)
        if sizes and sizes[0] < 10 * torch.finfo(wide).eps * sizes[-1]:
            keeps = "; --dtype float64 keeps it" if wide == torch.float32 else ""
            return [
                f"beside a weight of {sizes[-1]:g} one of {sizes[0]:g} is lost in the last digits of {name_of(wide)}"
                f"{keeps}"
            ]
    return []


def _why_zero(given: Collection, missing: Missing) -> str:
    """What to say of a result without an update: nothing cancels where nothing was there."""
    for module in given.modules:
        if any(w and float(file.lora(module).norm()) for file, w in given.holders(module, missing)):
            return "the updates cancel: the result is zero"
    return "the update is zero (B A = 0 in every module), and so is the result"


def _stored_types(files: Iterable[AdapterFile]) -> list[str]:
    """The types of all LoRA factors, as safetensors calls them."""
    return sorted({stored.dtype for file in files for path in file.layouts for stored in file.pair(path)})
