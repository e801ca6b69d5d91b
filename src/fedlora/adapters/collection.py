"""Several adapter files as one collection: their modules, which file holds each, and their weighted sum.

It works module by module, so memory holds one module of each file. `reader` has already refused whatever is not linear
in the update; the rest adds up. For tensors other than pairs, see `beside`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch

from fedlora.adapters import allocation
from fedlora.adapters.base_names import Base, check_same_base, public_name
from fedlora.adapters.io import AdapterSpec, spec_of
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import Combined, combine
from fedlora.core.messages import Missing
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError

# Fields that describe the file's other content or its base; all adapters must agree on them.
_AGREED = ("layer_replication", "target_parameters", "fan_in_fan_out", "trainable_token_indices")
TIED = ("base", "tokens")  # kinds of tensors that peft stores once per tied name
_NOTHING: tuple[Any, ...] = (None, False, "", "none", [], {}, ())
_LARGEST, _SMALLEST = 1e12, 1e-12  # bounds on a weight, and relative to the largest: beyond these it is a typo


@dataclass(frozen=True, eq=False)
class Collection:
    """Adapters of one base model, and their weights.

    weights: as used. sum: the weights belong to a sum and need not add up to 1. notes: assumptions made.
    """

    files: Sequence[AdapterFile]
    weights: tuple[float, ...]
    sum: bool = False
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        files: Sequence[AdapterFile],
        weights: Sequence[float] | None = None,
        *,
        sum: bool = False,
        same_base: bool = False,
        tokens: bool = True,
    ) -> Collection:
        """weights: None: all count alike. same_base: treat the base models as one, whatever their names. tokens:
        trained tokens are merged, so all must agree on them.

        Raises:
            AdapterFormatError: different bases, or contradicting configs. ConfigError: impossible weights.
        """
        used = used_weights(len(files), weights, sum=sum)
        notes = check_same_base((base_of(file) for file in files), declared=same_base)
        for field in _AGREED if tokens else _AGREED[:-1]:
            values = {str(file.directory): file.config.get(field) or None for file in files}
            if len({repr(value) for value in values.values()}) > 1:
                told = ", ".join(f"{where}: {quoted(value, 80)}" for where, value in values.items())[:600]
                way = " --heads drop leaves out all fully trained tensors." if field == _AGREED[-1] else ""
                raise AdapterFormatError(f"the adapters differ in {field}, so they do not add up: {told}.{way}")
        held: dict[str, list[allocation.Pair]] = {}
        for file in files:
            for path in file.layouts:
                held.setdefault(path, []).append(file.pair(path))
        allocation.check_work(held.values(), files[0].limits)
        return cls(files, used, sum, notes)

    @cached_property
    def modules(self) -> Sequence[str]:
        """Every module that any of them has; experts of one tensor are listed together."""
        return sorted({module for file in self.files for module in file.modules}, key=_in_order)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Path -> layout, over all files. Raises `AdapterFormatError` if two files store a path differently."""
        found: dict[str, Layout] = {}
        for file in self.files:
            for path, layout in file.layouts.items():
                # Files may name nested parameters by different patterns: the path already identifies them.
                layout = Layout() if layout.kind == "adalora" else replace(layout, pattern="")
                if found.setdefault(path, layout) != layout:
                    raise AdapterFormatError(
                        f"{file.directory}: module {quoted(path)} is stored as {layout}, in another adapter as "
                        f"{found[path]}."
                    )
        return ReadOnly(found)

    @cached_property
    def same(self) -> Mapping[str, Sequence[str]]:
        """Name of a possibly tied tensor -> all its names, found by comparing one row in the middle: rows for a grown
        vocabulary are at the end, and nobody trained the copies."""
        by_row: dict[tuple[Any, ...], dict[str, None]] = {}
        for file in self.files:
            for head in file.heads:
                if file.kind(head) in TIED and len(shape := file.stored_head(head).shape) == 2 and all(shape):
                    row = file.row(head, shape[0] // 2).tolist()
                    if any(row):
                        by_row.setdefault((file.kind(head), shape, *row), {})[head] = None
        return ReadOnly({head: [*names] for names in by_row.values() for head in names})

    def outputs(self, module: str) -> int:
        """d_out of a module that some adapter has."""
        return next(file.pair(module)[0].shape[0] for file in self.files if module in file.ranks)

    def check_common(self) -> None:
        """Raise `AdapterFormatError` if some adapters share no module with the others."""
        joined, waiting = set(self.files[0].modules), list(self.files[1:])
        while waiting:
            near = [file for file in waiting if not joined.isdisjoint(file.ranks)]
            if not near:
                one, other = self.files[0], waiting[0]
                raise AdapterFormatError(
                    f"{one.directory} and {other.directory} have no module in common: the first has "
                    f"{_some(one.modules)}, the other {_some(other.modules)}. They belong to different models, or "
                    f"train different layers of one model. In the second case choose how to count a module that an "
                    f"adapter lacks: --missing zero or --missing renormalise."
                )
            waiting = [file for file in waiting if file not in near]
            joined.update(*(file.ranks for file in near))

    def spec(self, saved: Sequence[str] = ()) -> AdapterSpec:
        """The first adapter's spec, with every module's layout, these saved modules, and scaling 1.

        A field that some files lack is kept only if it has an effect, so that old peft versions can read the result.
        """
        first = spec_of(self.files[0].config, 1.0, self.layouts)
        biases = {file.config.get("bias") or "none" for file in self.files}
        more: dict[str, Any] = {
            "modules_to_save": list(saved) or None,
            "bias": "all" if "all" in biases else "lora_only" if "lora_only" in biases else "none",
            "lora_bias": any(file.config.get("lora_bias") for file in self.files),
            "base_model_name_or_path": public_name(base_of(file) for file in self.files),
        }
        if len({bool(file.config.get("ensure_weight_tying")) for file in self.files}) > 1:
            more["ensure_weight_tying"] = False  # only some files tie, so the result names and stores each tied tensor
        fields: dict[str, Any] = {**first.config, **more}
        common = set.intersection(*(set(file.config) for file in self.files))
        kept = {key: value for key, value in fields.items() if key in common or value not in _NOTHING}
        return replace(first, config=ReadOnly(kept), fields=frozenset(common))

    def holders(self, module: str, missing: Missing) -> list[tuple[AdapterFile, float]]:
        """The files that have a module, with their weights in its sum.

        Raises:
            ConfigError: `missing` is "renormalise", and the files that have it have weight 0.
        """
        held = [(file, w) for file, w in zip(self.files, self.weights, strict=True) if module in file.ranks]
        total = math.fsum(w for _, w in held) if missing == "renormalise" else 1.0
        if not total:
            raise ConfigError(f"module {quoted(module)} is only in adapters of weight 0.")
        return [(file, w / total) for file, w in held]

    def effective(self, held: Iterable[tuple[AdapterFile, float]]) -> tuple[float, ...]:
        """Each adapter's weight; 0 if it is not a holder."""
        by_file = {id(file): w for file, w in held}
        return tuple(by_file.get(id(file), 0.0) for file in self.files)

    def combined(self, module: str, missing: Missing, dtype: torch.dtype = torch.float32) -> Combined:
        """One module of the weighted sum, in energy order, in `dtype` or wider."""
        held = self.holders(module, missing)
        needed = allocation.bytes_to_merge([file.pair(module) for file, _ in held])
        allocation.check(needed, f"merging {quoted(module)}", self.files[0].limits)
        loras, scales = zip(*(file.unscaled(module) for file, _ in held), strict=True)
        shapes = {(len(B), A.shape[1]) for B, A in (lora.factors for lora in loras)}
        if len(shapes) > 1:
            where = ", ".join(str(file.directory) for file, _ in held)
            raise AdapterFormatError(
                f"module {quoted(module)} has different shapes {sorted(shapes)} in {where}: these are different models."
            )
        weights = [w * scale for (_, w), scale in zip(held, scales, strict=True)]
        return combine(module, loras, weights, reduce(torch.promote_types, (f.wide(module) for f, _ in held), dtype))


def base_of(file: AdapterFile) -> Base:
    """The base model that an adapter's config names."""
    revision = file.config.get("revision")
    return Base(file.base_model, str(revision) if revision else None)


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(quoted(name, 80) for name in names[:2])}{', ...' if len(names) > 2 else ''}"


def _in_order(module: str) -> tuple[str, int]:
    path = stored_path(module)
    return path, int(module[len(path) + 1 : -1]) if module != path else 0


def used_weights(count: int, weights: Sequence[float] | None = None, *, sum: bool = False) -> tuple[float, ...]:
    """The weights of `count` adapters as used: divided by their sum for a mean, unchanged for a sum.

    Args:
        weights: one each; None: all equal. sum: weights may be negative.

    Raises:
        ConfigError: wrong number of weights; a weight is not a number, or absurdly small beside the others; in a mean,
            a weight is negative.

    Example:
        >>> used_weights(2, [1, 3]), used_weights(2, [1, -1], sum=True)
        ((0.25, 0.75), (1.0, -1.0))
    """
    given = (1.0,) * count if weights is None else _numbers(weights)
    if len(given) != count:
        raise ConfigError(f"there are {len(given)} weights for {count} adapters.")
    if not all(math.isfinite(w) for w in given):
        raise ConfigError(f"weights must be finite numbers; got {list(given)}.")
    if not sum and any(w < 0 for w in given):
        raise ConfigError(
            f"weights of a mean cannot be negative; got {list(given)}. --sum (sum=True) uses them as they are."
        )
    sizes = [abs(w) for w in given if w]
    if not sizes:
        raise ConfigError(f"not all weights may be zero; got {list(given)}.")
    if max(sizes) > _LARGEST or min(sizes) < _SMALLEST:
        raise ConfigError(f"weights must be from {_SMALLEST:g} to {_LARGEST:g} in size, or 0; got {list(given)}.")
    if min(sizes) < _SMALLEST * max(sizes):
        raise ConfigError(
            f"the weights are too far apart: {min(sizes):g} beside {max(sizes):g} would count for nothing. Leave "
            f"that adapter out, or give it weight 0."
        )
    total = 1.0 if sum else math.fsum(given)
    return tuple(w / total for w in given)


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"weights must be numbers; got {str(value)[:80]!r}.")
    try:
        return tuple(map(float, values))
    except OverflowError as error:  # an integer too large for a float
        raise ConfigError(f"weights must be from {_SMALLEST:g} to {_LARGEST:g} in size, or 0.") from error
