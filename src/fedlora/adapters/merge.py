"""Several adapters' files taken together: which modules and tensors they have, whose each is, and their weighted mean.

Module by module, so memory holds one module of each file. What is not linear in the update has been refused by
`reader`; what is left adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedlora.adapters.io import AdapterSpec, spec_of
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import ModuleReport, RankRule, merge_module
from fedlora.adapters.writer import pad_rank
from fedlora.core.lora import LoRA
from fedlora.core.messages import Missing
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.weighted_mean import weighted_mean

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank takes

HeadRule = Literal["average", "holders", "first", "drop"]

# Fields that say what else is in the file or which base it is of: all adapters must agree on them.
_AGREED = ("trainable_token_indices", "layer_replication", "target_parameters", "fan_in_fan_out")


@dataclass(frozen=True)
class Collection:
    """Adapters of one base model, with weights that sum to 1."""

    files: Sequence[AdapterFile]
    weights: Sequence[float]

    @classmethod
    def of(cls, files: Sequence[AdapterFile], weights: Sequence[float]) -> Collection:
        """Raises `AdapterFormatError` for adapters of different bases or with contradicting configs, and `ConfigError`
        for impossible weights."""
        if len(weights) != len(files):
            raise ConfigError(f"there are {len(weights)} weights for {len(files)} adapters.")
        if not all(math.isfinite(w) and w >= 0 for w in weights) or not any(weights):
            raise ConfigError(f"weights are finite, not negative, and not all zero; got {list(weights)}.")
        bases = {str(file.directory): file.base for file in files}
        if len(set(bases.values())) > 1:
            raise AdapterFormatError(f"the adapters are of different base models, so they do not add up: {bases}.")
        for field in _AGREED:
            values = {str(file.directory): file.config.get(field) or None for file in files}
            if len({repr(value) for value in values.values()}) > 1:
                raise AdapterFormatError(f"the adapters differ in {field}, so they do not add up: {values}.")
        total = math.fsum(weights)
        return cls(files, [w / total for w in weights])

    @property
    def modules(self) -> list[str]:
        """Every module that one of them has; the experts of one tensor side by side."""
        names = {module: None for file in self.files for module in file.modules}
        return sorted(names, key=_in_order)

    @property
    def layouts(self) -> dict[str, Layout]:
        """Path -> layout, over all files. Raises `AdapterFormatError` where two store one path differently."""
        found: dict[str, Layout] = {}
        for file in self.files:
            for path, layout in file.layouts.items():
                layout = Layout() if layout.kind == "adalora" else layout
                if found.setdefault(path, layout) != layout:
                    raise AdapterFormatError(
                        f"{file.directory}: module {path!r} is stored as {layout}, in another adapter as {found[path]}."
                    )
        return found

    def spec(self) -> AdapterSpec:
        """The first adapter's, with every module's layout, every saved module, and scaling 1."""
        first = spec_of(self.files[0].config, 1.0, self.layouts)
        saved = {name for file in self.files for name in file.config.get("modules_to_save") or []}
        biases = {file.config.get("bias", "none") for file in self.files}
        bias = "all" if "all" in biases else "lora_only" if "lora_only" in biases else "none"
        lora_bias = any(file.config.get("lora_bias") for file in self.files)
        more = {"modules_to_save": sorted(saved) or None, "bias": bias, "lora_bias": lora_bias}
        return replace(first, config={**first.config, **more})

    def holders(self, module: str, missing: Missing) -> list[tuple[AdapterFile, float]]:
        """The files that have a module, with their weights in its sum.

        Raises:
            ConfigError: `missing` is "renormalise", and those that have it weigh nothing.
        """
        held = [(file, w) for file, w in zip(self.files, self.weights, strict=True) if module in file.ranks]
        total = math.fsum(w for _, w in held) if missing == "renormalise" else 1.0
        if not total:
            raise ConfigError(f"module {module!r} is held only by adapters of weight 0.")
        return [(file, w / total) for file, w in held]

    def merged(self, module: str, rule: RankRule, missing: Missing) -> tuple[LoRA, ModuleReport]:
        """One module of the weighted mean, at the rank that `rule` gives."""
        held = self.holders(module, missing)
        loras = [file.lora(module) for file, _ in held]
        shapes = {(len(B), A.shape[1]) for B, A in (lora.factors for lora in loras)}
        if len(shapes) > 1:
            where = ", ".join(str(file.directory) for file, _ in held)
            raise AdapterFormatError(
                f"module {module!r} has different shapes {sorted(shapes)} in {where}: other models."
            )
        return merge_module(module, loras, [w for _, w in held], rule)

    def extras(self, rule: HeadRule) -> dict[str, Tensor]:
        """The tensors beside the pairs: added biases as the update that they are part of, the others by `rule`.

        average: the weighted mean of what all of them have. holders: of those that have it. first: the first's. drop:
        none of them.

        Raises:
            AdapterFormatError: with "average", a tensor that some lack; shapes that differ; whole numbers that differ.
        """
        if rule not in get_args(HeadRule):
            raise ConfigError(f"--heads is one of {', '.join(get_args(HeadRule))}; got {rule!r}.")
        found = {}
        for path in sorted({path for file in self.files for path in file.heads}):
            held = [(f, w) for f, w in zip(self.files, self.weights, strict=True) if path in f.heads]
            kind = held[0][0].kind(path)
            if kind == "added":  # part of the update: one that lacks it adds zero
                found[path] = _mean(path, held, divide=False)
            elif rule == "drop" or (rule == "first" and path not in self.files[0].heads):
                continue
            elif rule == "first":
                found[path] = self.files[0].head(path)
            elif len(held) < len(self.files) and rule == "average":
                lacks = next(file for file in self.files if path not in file.heads)
                raise AdapterFormatError(
                    f"{lacks.directory} has no {path!r}, which others trained in full, and what it is in the base "
                    f"model is not known here. --heads holders averages over those that have it, first takes the first "
                    f"adapter's, drop leaves all of them out."
                )
            else:
                found[path] = _mean(path, held, divide=True)
        return found


def _mean(path: str, held: Iterable[tuple[AdapterFile, float]], *, divide: bool) -> Tensor:
    """The weighted mean of a tensor over its holders; `divide`: by their own weight, else by everybody's."""
    held = list(held)
    tensors, weights = [file.head(path) for file, _ in held], [w for _, w in held]
    shapes = {str(file.directory): tuple(t.shape) for (file, _), t in zip(held, tensors, strict=True)}
    if len(set(shapes.values())) > 1:
        raise AdapterFormatError(f"{path!r} has different shapes, so there is no mean: {shapes}.")
    if not all(t.is_floating_point() for t in tensors):
        if all(torch.equal(t, tensors[0]) for t in tensors):
            return tensors[0]
        raise AdapterFormatError(f"{path!r} holds whole numbers that differ, so there is no mean; see --heads.")
    total = math.fsum(weights) if divide else 1.0
    if not total:
        raise ConfigError(f"{path!r} is held only by adapters of weight 0.")
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return weighted_mean(wide, [w / total for w in weights])


def _in_order(module: str) -> tuple[str, int]:
    path = stored_path(module)
    return path, int(module[len(path) + 1 : -1]) if module != path else 0


def modules_of(found: Mapping[str, object]) -> list[str]:
    """Names in the order in which modules are listed."""
    return sorted(found, key=_in_order)


def for_vllm(found: Sequence[tuple[LoRA, ModuleReport]], given: Collection) -> list[tuple[LoRA, ModuleReport]]:
    """One rank for all modules, of those that vLLM takes."""
    special = sorted({layout.kind for layout in given.layouts.values()} - {"linear"})
    if special:
        raise ConfigError(f"vLLM serves LoRA of linear layers; these adapters also have {', '.join(special)} layers.")
    largest = max(lora.rank for lora, _ in found)
    rank = next((r for r in VLLM_RANKS if r >= largest), None)
    if rank is None:
        raise ConfigError(f"vLLM takes ranks up to {VLLM_RANKS[-1]}, and the merge has {largest}: give --rank as well.")
    return [(pad_rank(lora, rank), report) for lora, report in found]
