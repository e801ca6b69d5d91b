"""Several adapters' files taken together: which modules and tensors they have, whose each is, and their weighted sum.

Module by module, so memory holds one module of each file. What is not linear in the update has been refused by
`reader`; what is left adds up.
"""

from __future__ import annotations

import math
from collections.abc import Collection as Names
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlora.adapters import allocation
from fedlora.adapters.base_names import Base, check_same_base, public_name
from fedlora.adapters.io import AdapterSpec, spec_of
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.module_names import plain
from fedlora.adapters.narrowing import common_type, narrowed
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import Combined, ModuleReport, RankRule, combine
from fedlora.adapters.weighting import Weighting, weighting
from fedlora.core.echo import quoted
from fedlora.core.lora import LoRA
from fedlora.core.messages import Missing
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.linalg.weighted_mean import weighted_mean

HeadRule = Literal["average", "holders", "first", "drop"]

# Fields that say what else is in the file or which base it is of: all adapters must agree on them.
_AGREED = ("trainable_token_indices", "layer_replication", "target_parameters", "fan_in_fan_out")
_LEFT_OUT_AS = {"trainable_token_indices": "tokens", "target_parameters": "experts"}  # of those, by which --drop
_NOTHING: tuple[Any, ...] = (None, False, "", "none", [], {}, ())


@dataclass(frozen=True, eq=False)
class Beside:
    """The tensors beside the pairs of a result, by the base model's names of them.

    saved: modules_to_save as they need it. weights: path -> each adapter's, as used. left: path -> its kind, of those
    that `--heads` leaves out. rounding: path -> by how much writing moves it, relative to its own size, of those that
    it moves.
    """

    tensors: Mapping[str, Tensor]
    saved: Sequence[str]
    weights: Mapping[str, tuple[float, ...]]
    left: Mapping[str, str]
    rounding: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Collection:
    """Adapters of one base model, and how much each counts. notes: what was taken for granted, in words."""

    files: Sequence[AdapterFile]
    counts: Weighting
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        files: Sequence[AdapterFile],
        weights: Sequence[float] | Weighting,
        *,
        same_base: bool = False,
        same_weights: bool = False,
        drop: Names[str] = (),
    ) -> Collection:
        """weights: of a mean, or a `Weighting`. same_base: their base models are one, whatever they are called.
        same_weights: so say the digests of their weights. drop: what will be left out (`kinds.without`), in which they
        may differ.

        Raises:
            AdapterFormatError: different bases, contradicting configs. ConfigError: impossible weights.
        """
        counts = weights if isinstance(weights, Weighting) else weighting(len(files), weights)
        if len(counts.default) != len(files):
            raise ConfigError(f"there are {len(counts.default)} weights for {len(files)} adapters.")
        notes = check_same_base((base_of(file) for file in files), declared=same_base, digests=same_weights)
        for field in _AGREED:
            out = _LEFT_OUT_AS.get(field)
            if out in drop:
                continue
            values = {str(file.directory): file.config.get(field) or None for file in files}
            if len({repr(value) for value in values.values()}) > 1:
                told = ", ".join(f"{where}: {quoted(value, 80)}" for where, value in values.items())[:600]
                raise AdapterFormatError(
                    f"the adapters differ in {field}, so they do not add up: {told}."
                    + (f" --drop {out} leaves those out." if out else "")
                )
        held: dict[str, list[allocation.Pair]] = {}
        for file in files:
            for path in file.layouts:
                held.setdefault(path, []).append(file.pair(path))
        allocation.check_work(held.values(), files[0].limits)
        return cls(files, counts, notes)

    @property
    def weights(self) -> tuple[float, ...]:
        """Of all modules that no key of a weight map fits."""
        return self.counts.of("")

    @cached_property
    def modules(self) -> Sequence[str]:
        """Every module that one of them has; the experts of one tensor side by side."""
        return modules_of({module: None for file in self.files for module in file.modules})

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Path -> layout, over all files. Raises `AdapterFormatError` where two store one path differently."""
        found: dict[str, Layout] = {}
        for file in self.files:
            for path, layout in file.layouts.items():
                # Which of nested parameters a pattern names is each file's own affair: the path says what is meant.
                layout = Layout() if layout.kind == "adalora" else replace(layout, pattern="")
                if found.setdefault(path, layout) != layout:
                    raise AdapterFormatError(
                        f"{file.directory}: module {quoted(path)} is stored as {layout}, in another adapter as "
                        f"{found[path]}."
                    )
        return ReadOnly(found)

    @cached_property
    def _has(self) -> Mapping[int, frozenset[str]]:
        """Of each file, by its id, the tensors beside the pairs."""
        return {id(file): frozenset(file.heads) for file in self.files}

    def check_common(self, left: Sequence[str]) -> None:
        """Raises `AdapterFormatError` where some of the adapters share none of the modules `left` with the others."""
        of = {id(file): [module for module in left if module in file.ranks] for file in self.files}
        joined, waiting = set(of[id(self.files[0])]), list(self.files[1:])
        while waiting:
            near = [file for file in waiting if not joined.isdisjoint(of[id(file)])]
            if not near:
                one, other = self.files[0], waiting[0]
                raise AdapterFormatError(
                    f"{one.directory} and {other.directory} have no module in common: the first has "
                    f"{_some(of[id(one)])}, the other {_some(of[id(other)])}. They are of different models, or train "
                    f"different layers of one; then say what a module that one lacks counts as: --missing zero or "
                    f"--missing renormalise."
                )
            waiting = [file for file in waiting if file not in near]
            joined.update(*(of[id(file)] for file in near))

    def spec(self, saved: Sequence[str] = ()) -> AdapterSpec:
        """The first adapter's, with every module's layout, these saved modules, and scaling 1.

        A field that not all of them have is kept only where it says something: what an old peft read still reads it.
        """
        first = spec_of(self.files[0].config, 1.0, self.layouts)
        biases = {file.config.get("bias") or "none" for file in self.files}
        bias = "all" if "all" in biases else "lora_only" if "lora_only" in biases else "none"
        lora_bias = any(file.config.get("lora_bias") for file in self.files)
        base = public_name(base_of(file) for file in self.files)
        more = {"modules_to_save": list(saved) or None, "bias": bias, "lora_bias": lora_bias}
        more |= {"base_model_name_or_path": base}
        if len({bool(file.config.get("ensure_weight_tying")) for file in self.files}) > 1:
            more["ensure_weight_tying"] = False  # what some tie others do not: each of the tied is named and stored
        fields: dict[str, Any] = {**first.config, **more}
        common = set.intersection(*(set(file.config) for file in self.files))
        kept = {key: value for key, value in fields.items() if key in common or value not in _NOTHING}
        return replace(first, config=ReadOnly(kept), fields=frozenset(common))

    def holders(self, module: str, missing: Missing) -> list[tuple[AdapterFile, float]]:
        """The files that have a module, with their weights in its sum.

        Raises:
            ConfigError: `missing` is "renormalise", and those that have it weigh nothing.
        """
        weights = self.counts.of(module)
        held = [(file, w) for file, w in zip(self.files, weights, strict=True) if module in file.ranks]
        total = math.fsum(w for _, w in held) if missing == "renormalise" else 1.0
        if not total:
            raise ConfigError(f"module {quoted(module)} is held only by adapters of weight 0.")
        return [(file, w / total) for file, w in held]

    def effective(self, module: str, missing: Missing) -> tuple[float, ...]:
        """Each adapter's weight in one module; 0 for one that lacks it."""
        held = {id(file): w for file, w in self.holders(module, missing)}
        return tuple(held.get(id(file), 0.0) for file in self.files)

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
                f"module {quoted(module)} has different shapes {sorted(shapes)} in {where}: other models."
            )
        weights = [w * scale for (_, w), scale in zip(held, scales, strict=True)]
        return combine(module, loras, weights, reduce(torch.promote_types, (f.wide(module) for f, _ in held), dtype))

    def merged(
        self, module: str, rule: RankRule, missing: Missing, dtype: torch.dtype = torch.float32
    ) -> tuple[LoRA, ModuleReport]:
        """One module of the weighted sum, at the rank that `rule` gives."""
        found = self.combined(module, missing, dtype)
        return found.cut(rule.keep(found.product))

    def heads_of(self, kinds: Names[str]) -> list[str]:
        """Paths of the tensors beside the pairs that are of these kinds (`config.extra_kind`), over all files."""
        return sorted({path for file in self.files for path in file.heads if file.kind(path) in kinds})

    def extras(
        self, rule: HeadRule, left: Names[str] | None = None, dtype: torch.dtype | None = None,
        missing: Missing = "zero",
    ) -> Beside:  # fmt: skip
        """The tensors beside the pairs: added biases as the update that they are part of, the others by `rule`.

        average: the weighted mean of what all of them have. holders: of those that trained it. first: the first's.
        drop: none of them. left: the modules and paths that stay; None: all. dtype: of floating-point ones; None: their
        own. missing: as of the modules, for added biases.

        Raises:
            AdapterFormatError: with "average", a tensor that some lack; one that some hold whole and others update;
                shapes that differ; whole numbers that differ; different tensors under weights that do not add up to 1,
                for they are no updates.
        """
        if rule not in get_args(HeadRule):
            raise ConfigError(f"--heads is one of {', '.join(get_args(HeadRule))}; got {str(rule)[:80]!r}.")
        stay = {*self.modules, *(path for has in self._has.values() for path in has)} if left is None else set(left)
        self._check_rule(rule, stay)
        self._check_embeddings(stay)
        found, used, gone, rounding = {}, {}, {}, {}
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        for path in sorted(stay.difference(self.modules)):
            kind, held = self._held(path, rule)
            needed = allocation.bytes_to_average([file.stored_head(path) for file, _ in held])
            allocation.check(needed, f"averaging {quoted(path)}", self.files[0].limits)
            if kind == "added":  # part of the update: one that lacks it adds zero
                module = path.removesuffix(".lora_B.bias")
                held = [(file, w) for file, w in self.holders(module, missing) if path in self._has[id(file)]]
                mean = _sum(path, held, wide)
            elif not held:
                gone[path] = kind
                continue
            elif rule == "first":
                held = [(self.files[0], 1.0)]
                mean = self.files[0].head(path)
            else:
                mean = _mean(path, held, wide, signed=self.counts.sum)
                total = math.fsum(w for _, w in held)
                held = [(file, w / total) for file, w in held] if total else []  # else they are all the same tensor
            if held:
                by_file = {id(file): w for file, w in held}
                used[path] = tuple(by_file.get(id(file), 0.0) for file in self.files)
            own, _ = common_type(file.stored_head(path).dtype for file in self.files if path in self._has[id(file)])
            found[path] = narrowed(mean, dtype or own, f"tensor {quoted(path)}")
            moved = _moved(mean, found[path])
            if moved:
                rounding[path] = moved
        return Beside(found, self._saved_names(rule, found), used, gone, rounding)

    def _held(self, path: str, rule: str) -> tuple[str, list[tuple[AdapterFile, float]]]:
        """What a tensor beside the pairs is, and the adapters, with their weights, that the rule takes it from. A copy
        of a base weight has a part in the mean of all, and where nobody trained that weight."""
        every = [(f, w) for f, w in zip(self.files, self.counts.of(path), strict=True) if path in self._has[id(f)]]
        trained = [(file, w) for file, w in every if file.kind(path) != "base"]
        held = every if rule != "holders" else trained or every
        if rule == "first":
            held = [(file, w) for file, w in every if file is self.files[0]]
        kinds = {file.kind(path) for file, _ in held or every}
        kind = next(kind for kind in ("added", "head", "bias", "tokens", "base") if kind in kinds)
        return kind, every if kind == "added" else [] if rule == "drop" else held

    def _check_rule(self, rule: str, stay: AbstractSet[str]) -> None:
        """Raises `AdapterFormatError` where `rule` gives some tensor no meaning, with the rules that do."""
        why = self._obstacle(rule, stay)
        if why is None:
            return
        ways = {
            "holders": "--heads holders averages over those that trained it",
            "first": "--heads first takes what the first adapter trained whole",
            "drop": "--heads drop leaves out all that was trained whole",
        }
        true = [way for other, way in ways.items() if self._obstacle(other, stay) is None]
        raise AdapterFormatError(f"{why} {', '.join(true)}.")

    def _check_embeddings(self, stay: Names[str]) -> None:
        """Raises `AdapterFormatError` where one has LoRA of an embedding, another lora_bias: peft takes one of them."""
        tables = [path for path, layout in self.layouts.items() if layout.kind == "embedding" and path in stay]
        biases = [path for path in self.heads_of(["added"]) if path in stay]
        if tables and biases:
            raise AdapterFormatError(
                f"{quoted(tables[0])} is an embedding, for which peft takes no lora_bias, and another adapter has "
                f"{quoted(biases[0])}: --drop lora_bias or --drop embeddings leaves one of them out."
            )

    def _obstacle(self, rule: str, stay: AbstractSet[str]) -> str | None:
        """Why a rule gives some tensor no meaning, by names alone; None where it gives all of them one."""
        updated: dict[str, list[AdapterFile]] = {}  # a layer, or the bias of one -> whose pairs change it
        for file in self.files:
            for path in file.layouts:
                if not stay.isdisjoint(self.layouts[path].modules(path)):
                    updated.setdefault(plain(path), []).append(file)
            for path in file.heads:
                if file.kind(path) == "added" and path in stay:
                    updated.setdefault(f"{plain(path.removesuffix('.lora_B.bias'))}.bias", []).append(file)
        for path in sorted(stay - set(self.modules)):
            kind, held = self._held(path, rule)
            if kind in ("added", "tokens") or not held:
                continue
            whole = [file for file, _ in held]
            around = [path[:k] for k, letter in enumerate(path) if letter == "."] if kind == "head" else [path]
            for name, file in [(layer, file) for layer in around for file in updated.get(layer, ())]:
                if kind == "head" or (kind == "bias" and file not in whole):
                    trained = next(other for other in whole if other.kind(path) == kind)
                    return (
                        f"{file.directory} has an update of {quoted(name)}, which {trained.directory} trained whole. "
                        f"What that changed is not known without the base model, so no adapter says the sum of the two."
                    )
            lacks = next((file for file in self.files if path not in self._has[id(file)]), None)
            if rule == "average" and kind != "base" and lacks is not None:
                return (
                    f"{lacks.directory} has no {quoted(path)}, which others trained whole, and what it is in the base "
                    f"model is not known here."
                )
        return None

    def _saved_names(self, rule: str, kept: Names[str]) -> list[str]:
        """modules_to_save of the adapters that the rule takes whole tensors from, but for what is left out."""
        takes = self.files[:1] if rule == "first" else self.files
        names = {name for file in takes for name in file.config.get("modules_to_save") or ()}
        heads = {path for file in takes for path in file.heads if file.kind(path) == "head"}
        gone, stays = heads.difference(kept), heads.intersection(kept)
        names |= {path.rpartition(".")[0] for path in stays if not any(f"{name}." in path for name in names)}  # tied

        def left_out(name: str) -> bool:
            return any(f"{name}." in path for path in gone) and not any(f"{name}." in path for path in stays)

        return sorted(name for name in names if not left_out(name))


def base_of(file: AdapterFile) -> Base:
    """The base model that an adapter's config names."""
    revision = file.config.get("revision")
    return Base(file.base_model, str(revision) if revision else None)


def modules_of(found: Mapping[str, object]) -> list[str]:
    """Names in the order in which modules are listed."""
    return sorted(found, key=_in_order)


def _sum(path: str, held: Sequence[tuple[AdapterFile, float]], wide: torch.dtype) -> Tensor:
    tensors = _alike(path, held)
    return weighted_mean([_widened(t, wide) for t in tensors], [w for _, w in held])


def _mean(path: str, held: Sequence[tuple[AdapterFile, float]], wide: torch.dtype, *, signed: bool) -> Tensor:
    """The weighted mean of a tensor over its holders, computed in `wide` or wider."""
    tensors, weights = _alike(path, held), [w for _, w in held]
    if all(torch.equal(t, tensors[0]) for t in tensors[1:]):
        return tensors[0]
    if not all(t.is_floating_point() for t in tensors):
        raise AdapterFormatError(f"{quoted(path)} holds whole numbers that differ, so there is no mean; see --heads.")
    total = math.fsum(weights)
    if signed and abs(total - 1) > 1e-9:
        raise AdapterFormatError(
            f"{quoted(path)} was trained in full and is no update, so weights that add up to {total:g} have no meaning "
            f"for it: --heads first takes the first adapter's, drop leaves it out."
        )
    if not total:
        raise ConfigError(f"{quoted(path)} is held only by adapters of weight 0.")
    return weighted_mean([_widened(t, wide) for t in tensors], [w / total for w in weights])


def _moved(before: Tensor, after: Tensor) -> float:
    """By how much another type moves a tensor, relative to its size."""
    if before.dtype == after.dtype or torch.promote_types(before.dtype, after.dtype) == after.dtype:
        return 0.0
    wide = before.double()
    size = float(torch.linalg.vector_norm(wide))
    return float(torch.linalg.vector_norm(after.double() - wide)) / size if size else 0.0


def _alike(path: str, held: Sequence[tuple[AdapterFile, float]]) -> list[Tensor]:
    found = {str(file.directory): file.head(path) for file, _ in held}
    shapes = {where: tuple(t.shape) for where, t in found.items()}
    if len(set(shapes.values())) > 1:
        raise AdapterFormatError(f"{quoted(path)} has different shapes, so there is no mean: {str(shapes)[:400]}.")
    return [found[str(file.directory)] for file, _ in held]


def _widened(tensor: Tensor, wide: torch.dtype) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, wide))


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(quoted(name, 80) for name in names[:2])}{', ...' if len(names) > 2 else ''}" or "none"


def _in_order(module: str) -> tuple[str, int]:
    path = stored_path(module)
    return path, int(module[len(path) + 1 : -1]) if module != path else 0
