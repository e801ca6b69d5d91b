"""Merge adapter folders into one, or change an adapter's rank: the Python functions behind the commands.

Four steps: `Collection.of` says whether the adapters belong together, `combine` sums each module exactly, `cut` keeps
the requested rank, and `write_result` narrows, checks, reports and writes. The result is held in memory until then, so
that nothing is written unless everything is right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlora.adapters.base_names import Base, check_same_base, public_name
from fedlora.adapters.card import merge_card
from fedlora.adapters.heads import HeadRule, Heads, heads_by
from fedlora.adapters.merge_report import MergeReport, ModuleReport, Weighed
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import Combined, RankRule, combine, name_of, narrowed_pair, overall, parse_type
from fedlora.adapters.uploads import FILE, check_uploads, labels_of, read_facts, write_labels
from fedlora.adapters.writer import ADAPTER_FOLDER, AdapterSpec, fill_adapter, pad_rank, spec_of
from fedlora.core.folders import check_target, replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.own_modes import own_modes

Adapters = Sequence[str | os.PathLike[str]]
Missing = Literal["renormalise", "zero"]  # how a module averages over adapters that lack it
Progress = Callable[[Sequence[str], str], Iterable[str]]  # (steps, activity) -> the steps
Part = tuple[LoRA, ModuleReport]  # one module of a result
_LARGEST, _SMALLEST = 1e12, 1e-12  # bounds on a weight, and relative to the largest: beyond these it is a typo
_MUCH_ROUNDING = 0.02  # bfloat16 rounds numbers in its range by 0.003


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
    parts = given.parts(wanted, progress)
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
    return write_result(given, wanted, given.parts(wanted, progress), "The update B A", "the adapter's update")


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

    def check(self, inputs: Adapters) -> None:
        """Raise `ConfigError` if the result may not be written; call it before long work."""
        check_target(self.out, force=self.force, kind=ADAPTER_FOLDER, inputs=inputs)

    @property
    def rule(self) -> RankRule:
        return RankRule.parse(self.rank)


# ------------------------------------------------------------------------------------------------ which belong together


@dataclass(frozen=True, eq=False)
class Collection:
    """Adapters of one base model, and their weights as used. notes: what the user should know."""

    files: Sequence[AdapterFile]
    weights: tuple[float, ...]
    missing: Missing = "zero"
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        files: Sequence[AdapterFile],
        weights: Sequence[float] | None = None,
        *,
        sum: bool = False,
        same_base: bool = False,
        missing: Missing | None = "zero",
    ) -> Collection:
        """weights: None: all count alike. sum: use them as they are. same_base: treat the base models as one, whatever
        their names. missing: None: refuse adapters whose modules look like the others' under other names.

        Raises:
            AdapterFormatError: different bases or matrices. ConfigError: impossible weights.
        """
        used = used_weights(len(files), weights, sum=sum)
        notes = check_same_base((Base.of(file.config) for file in files), declared=same_base)
        first: dict[str, AdapterFile] = {}
        for file in files:
            for module, shape in file.shapes.items():
                other = first.setdefault(module, file)
                if other.shapes[module] != shape:
                    raise AdapterFormatError(
                        f"module {quoted(module)} is a matrix of {other.shapes[module]} in {other.directory} and of "
                        f"{shape} in {file.directory}: different models."
                    )
        if missing is None:
            _check_names(files)
        return cls(files, used, missing or "zero", tuple(notes))

    @cached_property
    def modules(self) -> Sequence[str]:
        """Every module that any of them has."""
        return sorted({module for file in self.files for module in file.modules})

    def dtype(self) -> torch.dtype:
        """The type that holds all their factors."""
        return reduce(torch.promote_types, (file.dtype() for file in self.files))

    def weights_of(self, module: str) -> tuple[float, ...]:
        """Each adapter's weight in a module's sum; 0 for those that lack it.

        Raises:
            ConfigError: `missing` is "renormalise", and the adapters that have it have weight 0.
        """
        held = tuple(w if module in file.ranks else 0.0 for file, w in zip(self.files, self.weights, strict=True))
        total = math.fsum(held) if self.missing == "renormalise" else 1.0
        if not total:
            raise ConfigError(f"module {quoted(module)} is only in adapters of weight 0.")
        return tuple(w / total for w in held)

    def combined(self, module: str, dtype: torch.dtype | None = None) -> Combined:
        """One module of the weighted sum. Scales go into the weights, so that 16-bit factors are not rounded again."""
        held = [(f, w) for f, w in zip(self.files, self.weights_of(module), strict=True) if module in f.ranks]
        loras, scales = zip(*(file.unscaled(module) for file, _ in held), strict=True)
        return combine(module, loras, [w * scale for (_, w), scale in zip(held, scales, strict=True)], dtype)

    def parts(self, wanted: Wanted, progress: Progress | None = None) -> dict[str, Part]:
        """Module -> its cut sum in the result's type, and its report."""
        wide, dtype = self.type_for(wanted, wide=True), self.type_for(wanted)
        steps = progress(self.modules, "merging") if progress else self.modules
        return {name: in_type(self.combined(name, wide).cut(wanted.rule), dtype) for name in steps}

    def type_for(self, wanted: Wanted, *, wide: bool = False) -> torch.dtype:
        """The result's type. wide: of its numbers before they are narrowed, at least float32."""
        dtype = parse_type(wanted.dtype) if wanted.dtype else self.dtype()
        return torch.promote_types(dtype, torch.float32) if wide else dtype

    def spec(self, heads: bool) -> AdapterSpec:
        """The first adapter's spec, with the base's public name and all saved modules."""
        first = spec_of(self.files[0].config, 1.0)
        saved = dict.fromkeys(name for file in self.files for name in file.config.get("modules_to_save") or ())
        more: dict[str, Any] = {
            "base_model_name_or_path": public_name(Base.of(file.config) for file in self.files),
            "modules_to_save": list(saved) if heads else None,
        }
        return AdapterSpec(ReadOnly({**first.config, **more}))


def collected(
    adapters: Adapters,
    weights: Sequence[float] | None = None,
    weights_from: str | None = None,
    missing: str | None = None,
    *,
    sum: bool = False,
    heads: str = "average",
    same_base: bool = False,
    max_bytes: int | None = None,
) -> Collection:
    """The adapters and weights, checked to belong together. Arguments as in `merge`."""
    one_of("--missing", missing, get_args(Missing))
    one_of("--weights-from", weights_from, ("num_examples",))
    if weights is not None and weights_from is not None:
        raise ConfigError("give --weights or --weights-from, not both.")
    if not adapters:
        raise AdapterFormatError("at least 1 adapter is needed; got 0.")
    files = [AdapterFile(directory, max_bytes=max_bytes) for directory in adapters]
    said = check_uploads([file.directory for file in files], counted=weights_from is not None, labels=heads != "drop")
    if weights_from is not None:
        weights = _examples_of(files)
    known: Any = missing
    given = Collection.of(files, weights, sum=sum, same_base=same_base, missing=known)
    idle = [str(file.directory) for file, weight in zip(files, given.weights, strict=True) if not weight]
    if idle:
        more = f" and {len(idle) - 8} more" if len(idle) > 8 else ""
        names = ", ".join(quoted(name, 80) for name in idle[:8])
        said.append(f"weight 0, so not part of the result: {names}{more}")
    return replace(given, notes=(*said, *given.notes))


def used_weights(count: int, weights: Sequence[float] | None = None, *, sum: bool = False) -> tuple[float, ...]:
    """The weights of `count` adapters as used: divided by their sum for a mean, unchanged for a sum.

    Args:
        weights: one each; None: all equal. sum: weights may be negative.

    Raises:
        ConfigError: wrong number of weights; one is not a finite number, or absurdly small beside the others, or
            negative in a mean.

    Example:
        >>> used_weights(2, [1, 3]), used_weights(2, [1, -1], sum=True)
        ((0.25, 0.75), (1.0, -1.0))
    """
    given = (1.0,) * count if weights is None else tuple(weights)
    if len(given) != count:
        raise ConfigError(f"there are {len(given)} weights for {count} adapters.")
    if any(isinstance(w, bool) or not isinstance(w, int | float) or not -_LARGEST <= w <= _LARGEST for w in given):
        raise ConfigError(f"weights must be numbers of up to {_LARGEST:g} in size; got {quoted(list(given))}.")
    if not sum and any(w < 0 for w in given):
        raise ConfigError(
            f"weights of a mean cannot be negative; got {list(given)}. --sum (sum=True) uses them as they are."
        )
    sizes = [abs(w) for w in given if w]
    if not sizes or min(sizes) < _SMALLEST * max(1.0, *sizes):
        raise ConfigError(
            f"weights must not all be zero, and none may be below {_SMALLEST:g} or that small beside the largest; got "
            f"{list(given)}. Give an adapter that does not count weight 0."
        )
    total = 1.0 if sum else math.fsum(given)
    return tuple(w / total for w in given)


def _examples_of(files: Sequence[AdapterFile]) -> list[float]:
    facts = [read_facts(file.directory) for file in files]
    lacking = [str(one.directory) for one in facts if not one.there]
    if lacking:
        raise AdapterFormatError(
            f"{lacking[0]} has no {FILE}, so its number of examples is unknown ({len(lacking)} of {len(files)} "
            f"have none): give --weights instead."
        )
    return [one.examples for one in facts]


def _check_names(files: Sequence[AdapterFile]) -> None:
    """Raise `AdapterFormatError` for two adapters that have no module in common, or most of whose lone modules are the
    other's under longer names: a wrapper or another class of model has renamed them, and each would count twice."""
    for k, one in enumerate(files):
        for other in files[k + 1 :]:
            mine, theirs = (set(a.modules) - set(b.modules) for a, b in ((one, other), (other, one)))
            alike = _alike(one, mine, other, theirs)
            if len(alike) * 2 > min(len(one.modules), len(other.modules)):
                first, second = alike[0]
                raise AdapterFormatError(
                    f"{one.directory} and {other.directory} name the same modules differently, {quoted(first, 80)} and "
                    f"{quoted(second, 80)} ({len(alike)} such pairs), so each would count as two. Load both with the "
                    f"same class of model and save them again; --missing zero merges them as different modules."
                )
    _check_common(files)


def _alike(one: AdapterFile, mine: set[str], other: AdapterFile, theirs: set[str]) -> list[tuple[str, str]]:
    """Pairs of modules of one shape whose names are equal but for segments that one of the two has in addition."""

    def form(file: AdapterFile, module: str) -> tuple[Any, ...]:
        parts = module.split(".")
        return file.shapes[module], parts[-1], tuple(part for part in parts if part.isdigit())

    by_form = {form(other, module): module for module in theirs}
    found = []
    for module in sorted(mine):
        match = by_form.get(form(one, module))
        if match is not None:
            short, long = sorted((module.split("."), match.split(".")), key=len)
            rest = iter(long)
            if all(part in rest for part in short):
                found.append((module, match))
    return found


def _check_common(files: Sequence[AdapterFile]) -> None:
    joined, waiting = set(files[0].modules), list(files[1:])
    while waiting:
        near = [file for file in waiting if not joined.isdisjoint(file.ranks)]
        if not near:
            one, other = files[0], waiting[0]
            raise AdapterFormatError(
                f"{one.directory} and {other.directory} have no module in common: the first has "
                f"{_some(one.modules)}, the other {_some(other.modules)}. They belong to different models, or "
                f"train different layers of one model. In the second case choose how to count a module that an "
                f"adapter lacks: --missing zero or --missing renormalise."
            )
        waiting = [file for file in waiting if file not in near]
        joined.update(*(file.ranks for file in near))


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(quoted(name, 80) for name in names[:2])}{', ...' if len(names) > 2 else ''}"


def one_of(option: str, value: object, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}; got {str(value)[:80]!r}.")


# ----------------------------------------------------------------------------------------------------------- the result


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
    dtype, reports = given.type_for(wanted), tuple(report for _, report in parts.values())
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
                    f"--dtype float32 is wide enough")  # fmt: skip
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
    wider = "float32" if dtype.itemsize < 4 else "float64"
    if not lost <= most:
        raise ConfigError(
            f"the result is off {of} by {lost:.2g} of its size ({cut:.2g} by the cut to rank {wanted.rank}, or by "
            f"terms that nearly cancel; {rounding:.2g} by writing {name_of(dtype)}): more than --max-error {most:g}; "
            f"nothing was written. A higher rank cuts less, --rank exact nothing; --dtype {wider} rounds less."
        )
    for path, moved in heads.rounding.items():
        raise ConfigError(
            f"writing {name_of(heads.tensors[path].dtype)} moves {quoted(path, 80)} by {moved:.2g} of its size. It is "
            f"a whole weight, and only the base model shows how much training changed it, so --max-error {most:g} "
            f"cannot be guaranteed: --dtype float32 loses less, --heads drop leaves it out."
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
