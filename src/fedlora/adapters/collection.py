"""Several adapters of one base model: do they belong together, and what is the weighted sum of each module?"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch

from fedlora.adapters.base_names import Base, check_same_base, public_name
from fedlora.adapters.heads import labels_by
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import Combined, combine
from fedlora.adapters.uploads import FILE, check_one_each, read_facts
from fedlora.adapters.writer import AdapterSpec, spec_of
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError, counted

_LARGEST = 1e12  # of a weight: a larger one is a typo, and sums could overflow


@dataclass(frozen=True, eq=False)
class Collection:
    """Adapters of one base model, and their weights as used. notes: what the user should know."""

    files: Sequence[AdapterFile]
    weights: tuple[float, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def modules(self) -> Sequence[str]:
        """Every module that any of them has."""
        return sorted({module for file in self.files for module in file.modules})

    def dtype(self) -> torch.dtype:
        """The type that holds all their factors."""
        return reduce(torch.promote_types, (file.dtype() for file in self.files))

    def combined(self, module: str, dtype: torch.dtype | None = None) -> Combined:
        """One module of the weighted sum; who lacks it adds nothing. Scales go into the weights, so that 16-bit factors
        are not rounded again."""
        held = [(f, w) for f, w in zip(self.files, self.weights, strict=True) if module in f.ranks]
        loras, scales = zip(*(file.unscaled(module) for file, _ in held), strict=True)
        return combine(module, loras, [w * scale for (_, w), scale in zip(held, scales, strict=True)], dtype)

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
    adapters: Sequence[str | os.PathLike[str]],
    weights: Sequence[float] | str | None = None,
    missing: str | None = None,
    *,
    sum: bool = False,
    heads: str = "average",
    same_base: bool = False,
    max_bytes: int | None = None,
) -> Collection:
    """The adapters and weights, checked to belong together. Arguments as in `merge`.

    Raises:
        AdapterFormatError: an adapter cannot be read; different bases, matrices or classes; without `missing`,
            different modules. ConfigError: impossible weights.
    """
    one_of("--missing", missing, ("zero",))
    if isinstance(weights, str):
        one_of("--weights", weights, ("num_examples",))
    if not adapters:
        raise AdapterFormatError("at least 1 adapter is needed; got 0.")
    files = [AdapterFile(directory, max_bytes=max_bytes) for directory in adapters]
    facts = [read_facts(file.directory) for file in files]
    if isinstance(weights, str):
        if lacking := [str(file.directory) for file, one in zip(files, facts, strict=True) if not one.there]:
            raise AdapterFormatError(
                f"{lacking[0]} has no {FILE}, so its number of examples is unknown ({len(lacking)} of {len(files)} "
                f"have none): give the weights as numbers."
            )
        check_one_each(one.client for one in facts)
        weights = [one.examples for one in facts]
    used = used_weights(len(files), weights, sum=sum)
    notes = check_same_base((Base.of(file.config) for file in files), declared=same_base)
    _check_shapes(files)
    if missing is None:
        _check_modules(files)
    labels_by(files, heads)  # refused now, not after the sum
    if idle := [str(file.directory) for file, weight in zip(files, used, strict=True) if not weight]:
        more = f" and {len(idle) - 8} more" if len(idle) > 8 else ""
        names = ", ".join(quoted(name, 80) for name in idle[:8])
        notes.append(f"weight 0, so not part of the result: {names}{more}")
    return Collection(files, used, tuple(notes))


def used_weights(count: int, weights: Sequence[float] | None = None, *, sum: bool = False) -> tuple[float, ...]:
    """The weights of `count` adapters as used: divided by their sum for a mean, unchanged for a sum. None: all equal.
    Raises `ConfigError` for weights that make neither.
    """
    given = (1.0,) * count if weights is None else tuple(weights)
    if len(given) != count:
        raise ConfigError(f"got {counted(len(given), 'weight')} for {counted(count, 'adapter')}.")
    if any(isinstance(w, bool) or not isinstance(w, int | float) or not -_LARGEST <= w <= _LARGEST for w in given):
        raise ConfigError(f"weights must be numbers of up to {_LARGEST:g} in size; got {quoted(list(given))}.")
    if not sum and any(w < 0 for w in given):
        raise ConfigError(
            f"weights of a mean cannot be negative; got {list(given)}. --sum (sum=True) uses them as they are."
        )
    if not any(given):
        raise ConfigError("weights must not all be zero.")
    total = 1.0 if sum else math.fsum(given)
    return tuple(w / total for w in given)


def _check_shapes(files: Sequence[AdapterFile]) -> None:
    first: dict[str, AdapterFile] = {}
    for file in files:
        for module, shape in file.shapes.items():
            other = first.setdefault(module, file)
            if other.shapes[module] != shape:
                raise AdapterFormatError(
                    f"module {quoted(module)} is a matrix of {other.shapes[module]} in {other.directory} and of "
                    f"{shape} in {file.directory}: different models."
                )


def _check_modules(files: Sequence[AdapterFile]) -> None:
    """Raise `AdapterFormatError` for adapters of different modules: other layers of one model, or the same layers as
    another class of model names them, which would count twice."""
    for other in files[1:]:
        if odd := sorted(set(files[0].modules) ^ set(other.modules)):
            raise AdapterFormatError(
                f"{quoted(odd[0], 80)} is only in one of {files[0].directory} and {other.directory} "
                f"({counted(len(odd), 'such module')}). If they are of one model, --missing zero counts a module "
                f"that an adapter lacks as an update of zero."
            )


def one_of(option: str, value: object, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}; got {str(value)[:80]!r}.")
