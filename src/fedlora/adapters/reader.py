"""A PEFT adapter on disk, opened without reading its tensors: which modules it has, and each of them when asked for.

Reading module by module keeps memory at one module, however many adapters are merged. Everything that would change the
update, or that does not fit the config, is refused by name before a number is read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters import allocation, foreign_formats
from fedlora.adapters.config import (
    LARGEST_SCALE,
    check_config,
    check_scaling,
    extra_kind,
    is_adalora,
    parameter_names,
    relative_scaling,
)
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.limits import Limits
from fedlora.adapters.loadable import adalora_ranks, check_layers, check_parameters, check_saved, check_tokens
from fedlora.adapters.narrowing import common_type
from fedlora.adapters.open_targets import check_kinds, check_without_base
from fedlora.adapters.resolved import (
    Parameters,
    Resolved,
    asked_as,
    candidates,
    check_names,
    plain,
    resolve,
)
from fedlora.adapters.untrusted_files import (
    FLOATS,
    Stored,
    StrangersFile,
    header_of,
    json_of,
    largest,
    largest_of_each,
    tensor_of,
)
from fedlora.core.echo import quoted
from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError, escaped

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Beyond this, sums of squares in float32 come near its end (3e38), and no model's weight is anywhere near.
_LARGEST_NUMBER = 1e15
_FACTOR = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB])|([ABE]))")


class AdapterFile:
    """A PEFT LoRA directory; AdaLoRA is read as LoRA.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: of the updates that `lora` gives: with the default 1.0, B @ A is the update itself.
        limits: what the files may claim. allow_unknown: fields of the config to take as harmless.
        with_base: a base model is going to be asked (`apply`), so what depends on it is left open.

    `notes` are lines for a reader, on what could not be told without the base model; `left_to_base` the modules in
    question, by path, each with the name by which peft asks for it.

    Raises:
        AdapterFormatError: missing, damaged or pickled files; a feature that is not W0 + s B A; keys or shapes that do
            not fit the config.

    Example:
        >>> file = AdapterFile("adapter", scaling=2.0)  # nothing but names and shapes is read yet
        >>> file.lora("q")
        LoRA(B=(6, 4) float32, A=(4, 5) float32)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        scaling: float = 1.0,
        limits: Limits | None = None,
        allow_unknown: Collection[str] = (),
        with_base: bool = False,
    ) -> None:
        check_scaling(scaling)
        self.directory = Path(directory)
        self.scaling = scaling
        self._cached: tuple[str, Tensor, Tensor] | None = None
        try:
            self._read(limits or Limits(), allow_unknown, with_base)
        except AdapterFormatError as error:
            if escaped(str(self.directory)) in str(error):
                raise
            raise AdapterFormatError(f"{self.directory}: {error}") from error

    def _read(self, limits: Limits, allow_unknown: Collection[str], with_base: bool) -> None:
        self.limits = limits
        config, weights = _files(self.directory)
        config_file = StrangersFile(config)
        self.config: Mapping[str, Any] = ReadOnly(json_of(config_file, limits))
        foreign_formats.check_config(self.config)
        check_config(self.config, where=str(config), allow=allow_unknown)
        self._weights = StrangersFile(weights)
        self._header = header_of(self._weights, limits)
        foreign_formats.check_keys(self._header)
        asked = sum(len(self.config.get(field) or ()) for field in ("modules_to_save", "target_parameters"))
        limits.check(
            "questions", asked * len(self._header), f"{asked:,} names for {len(self._header):,} tensors are too many"
        )
        self._factors: dict[str, dict[str, str]] = {}
        self._heads: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        for key in sorted(self._header):
            self._sort(key)
        if not self._factors:
            raise AdapterFormatError(f"{self.directory}: holds no lora_A / lora_B pair.")
        for path, pair in self._factors.items():
            self._check_complete(path, pair)
        parameters = Parameters(self.config)
        check_names(self._factors, parameters)
        self._said = self._resolved(parameters)
        self._parameters = self._named_parameters(parameters)
        self._check_targets()
        self.layouts: Mapping[str, Layout] = ReadOnly(
            {path: self._layout(path, pair) for path, pair in self._factors.items()}
        )
        self.notes = self._open_targets(with_base)
        experts = max(layout.experts for layout in self.layouts.values())
        limits.check("experts", experts, f"a tensor has {experts:,} experts")
        count = sum(max(layout.experts, 1) for layout in self.layouts.values())
        limits.check("modules", count, f"the adapter has {count:,} modules")
        if is_adalora(self.config):
            self._allotted = adalora_ranks(self.config, self._names.values())
        ranks = {path: self._rank(path) for path in self._factors}
        check_layers(self.config, {path: layout.kind for path, layout in self.layouts.items()}, ranks)
        self._scales = {path: self._scaled_by(path, self.scaling) for path in self._factors}
        self._check_scales()
        for path in self._heads:
            self._check_added(path)
        check_saved(self.config, self._kinds)
        check_tokens(self.config, self._token_rows())
        self.ranks: Mapping[str, int] = ReadOnly(
            {name: ranks[path] for path, layout in self.layouts.items() for name in layout.modules(path)}
        )
        config_file.unchanged()  # the two belong together

    def _check_scales(self) -> None:
        """What rank_pattern and alpha_pattern make of single modules."""
        for path, relative in self._scales.items():
            scale = relative * self.scaling
            if not (scale <= LARGEST_SCALE and 1e-30 < relative < 1e30):
                raise AdapterFormatError(
                    f"{self.directory}: module {quoted(path)} has alpha / r = {scale:.3g}, which is no scale that an "
                    f"adapter is trained with."
                )

    def _token_rows(self) -> dict[str, tuple[int, ...]]:
        """Path of a module whose tokens were trained -> shape of its rows."""
        rows = {path: self._shape(key) for path, key in self._heads.items() if self._kinds[path] == "tokens"}
        return {
            plain(path.removesuffix(".token_adapter.trainable_tokens_delta")): shape for path, shape in rows.items()
        }

    def _check_added(self, path: str) -> None:
        """An added bias belongs to a pair, and has its outputs."""
        if self._kinds[path] != "added":
            return
        module, stored = path.removesuffix(".lora_B.bias"), self._header[self._heads[path]]
        if module not in self._factors:
            raise AdapterFormatError(f"{self.directory}: {quoted(path)} belongs to no pair of factors.")
        d_out = self._shape(self._factors[module]["B"])[0]
        if stored.dtype not in FLOATS or stored.shape != (d_out,):
            raise AdapterFormatError(
                f"{self.directory}: {quoted(path)} has shape {stored.shape} and type {stored.dtype}; its module has "
                f"{d_out} outputs."
            )

    def _sort(self, key: str) -> None:
        if not key.startswith(PREFIX):
            raise AdapterFormatError(
                f"{self.directory}: key {quoted(key)} does not start with {PREFIX!r}: not a PEFT LoRA file."
            )
        path = key.removeprefix(PREFIX)
        if path.startswith(PREFIX):
            raise AdapterFormatError(
                f"{self.directory}: key {quoted(key)} has the prefix twice, as of a model that peft wrapped twice: "
                f"peft would load none of it. Save the inner model, or take one prefix off every key."
            )
        found, dtype = _FACTOR.fullmatch(path), self._header[key].dtype
        if found:
            if dtype not in FLOATS:
                raise AdapterFormatError(
                    f"{self.directory}: {quoted(key)} is of type {dtype}; updates are floating-point numbers "
                    f"({', '.join(FLOATS)})."
                )
            pair, factor = self._factors.setdefault(found[1], {}), found[2] or found[3] or found[4]
            if factor in pair:
                raise AdapterFormatError(
                    f"{self.directory}: {quoted(pair[factor])} and {quoted(key)} are both lora_{factor} of one module."
                )
            pair[factor] = key
        elif (kind := extra_kind(path, self.config)) is not None:
            if _is_put_aside(path, self.config):
                return
            name = path if kind in ("added", "tokens") else plain(path)
            if name in self._heads:
                raise AdapterFormatError(f"{self._heads[name]!r} and {key!r} are one tensor of the base model.")
            self._heads[name], self._kinds[name] = key, kind
        else:
            raise AdapterFormatError(
                f"{self.directory}: key {quoted(key)} is neither a LoRA factor nor anything that its config says is "
                f"saved (modules_to_save = {quoted(self.config.get('modules_to_save') or [])}, bias = "
                f"{quoted(self.config.get('bias', 'none'))}, lora_bias = {bool(self.config.get('lora_bias'))})."
            )

    def _check_complete(self, path: str, pair: Mapping[str, str]) -> None:
        needed = {"A", "B", "E"} if is_adalora(self.config) else {"A", "B"}
        if set(pair) != needed:
            odd = sorted(needed ^ set(pair))[0]
            what = "lacks" if odd in needed else "has, without being AdaLoRA's,"
            raise AdapterFormatError(f"{self.directory}: module {quoted(path)} {what} lora_{odd}.")

    def _layout(self, path: str, pair: Mapping[str, str]) -> Layout:
        """What kind of layer a pair adapts, by its names and shapes."""
        styles = {key.removeprefix(f"{PREFIX}{path}.").replace(f"lora_{f}", "").replace(f"embedding_{f}", "embedding")
                  for f, key in pair.items()}  # fmt: skip
        styles = {"embedding" if "embedding" in style else style for style in styles}
        if len(styles) > 1 or (is_adalora(self.config) and styles != {""}) or (styles == {""} and "E" not in pair):
            raise AdapterFormatError(
                f"{self.directory}: the factors of module {quoted(path)} are not of one kind of layer."
            )
        if "embedding" in styles:
            return Layout("embedding")
        if is_adalora(self.config):
            return Layout("adalora")
        A = self._shape(pair["A"])
        if len(A) > 2:
            return Layout("conv", kernel=A[2:])
        parameter = self._parameters.get(path)
        if parameter is None:
            return Layout()
        return Layout("parameter", experts=(A or (0,))[0] // self._said.rank(parameter), pattern=parameter)

    def _resolved(self, parameters: Parameters) -> Resolved:
        """All that the config says of the names in the file, asked at once."""
        self._names = {path: asked_as(path, self._factors, parameters) for path in self._factors}
        return resolve(
            self.config,
            list(self._names.values()),
            candidates(dict.fromkeys(map(plain, self._factors)), parameters),
            patterns=not is_adalora(self.config),
            seconds=self.limits.pattern_seconds,
        )

    def _asked(self, path: str) -> str:
        """The name by which peft asks the patterns about a pair."""
        return self._parameters.get(path) or self._names[path]

    def _named_parameters(self, parameters: Parameters) -> dict[str, str]:
        """Path -> the bare parameter that its pair adapts, of those that adapt no layer."""
        nested: dict[str, list[str]] = {}
        for path in sorted(self._factors, key=len) if self.config.get("target_parameters") else ():
            nested.setdefault(plain(path), []).append(path)
        found: dict[str, str] = {}
        layers = [module for module, paths in nested.items() if self._said.targeted.get(self._names[paths[0]])]
        check_parameters({module: parameters.of(module) for module in layers})
        for module, paths in nested.items():
            if self._said.targeted.get(self._names[paths[0]]):
                continue
            shapes = [self._shape(self._factors[path]["A"]) for path in paths]
            rows = [shape[0] if shape else 0 for shape in shapes]
            names = parameter_names(module, rows, parameters.of(module, len(paths)), self._said)
            found |= zip(paths, names, strict=True) if names is not None else ()
        return found

    def _check_targets(self) -> None:
        """peft leaves out, without a word, the factors of modules that are no targets of the config."""
        for path, name in self._names.items():
            if path not in self._parameters and self._said.targeted[name] is False:
                raise AdapterFormatError(
                    f"{self.directory}: holds factors of {quoted(path)}, which its config does not target: peft would "
                    f"leave them out (target_modules = {quoted(self.config.get('target_modules'), 80)}; see "
                    f"exclude_modules, layers_to_transform and modules_to_save too)."
                )

    def _open_targets(self, with_base: bool) -> tuple[str, ...]:
        """What of the targets only the base model decides, in a line for a reader."""
        self.left_to_base: Mapping[str, str] = ReadOnly(
            {
                path: name
                for path, name in self._names.items()
                if path not in self._parameters and self._said.targeted[name] is None
            }
        )
        kinds = {name: self.layouts[path].kind for path, name in self.left_to_base.items()}
        check_kinds(self.config, kinds)
        return () if with_base else check_without_base(self.config, kinds)

    def _rank(self, path: str) -> int:
        """The rank of a stored pair by the shapes in the header, which must be what the config says."""
        layout, pair = self.layouts[path], self._factors[path]
        B, A = self._shape(pair["B"]), self._shape(pair["A"])
        r = layout.rank(B, A)
        if r is None or (layout.kind == "adalora" and self._shape(pair["E"]) != (r, 1)):
            needed = {
                "conv": "B (c_out, r, 1, ...) and A (r, c_in, k, ...); grouped convolutions are not supported",
                "parameter": f"B (d_out, r E) and A (r E, d_in) of E = {layout.experts}",
            }.get(layout.kind, "B (d_out, r) and A (r, d_in)")
            raise AdapterFormatError(
                f"{self.directory}: module {quoted(path)} is no LoRA of a {layout.kind} layer: {needed} are needed; "
                f"got B {B} and A {A}."
            )
        asked = self._asked(path)
        says = self._allotted[asked] if layout.kind == "adalora" else self._said.rank(asked)
        if r != says:
            raise AdapterFormatError(
                f"{self.directory}: module {quoted(path)} has rank {r}, but its config says {says}."
            )
        if B[0] == 0 or 0 in A[1:] or (r == 0 and layout.kind != "adalora"):
            raise AdapterFormatError(f"{self.directory}: module {quoted(path)} is empty: B {B}, A {A}.")
        return max(r, 1)  # AdaLoRA may prune a module away: a zero update

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._header[key].shape

    @property
    def base_model(self) -> str | None:
        """The base model that the config names."""
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    @property
    def base(self) -> str:
        """The base model and its revision, in words."""
        revision = self.config.get("revision")
        return f"{self.base_model or 'not named'}{f' at revision {revision}' if revision else ''}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted matrices: paths of layers, sorted, and PATH[e] for each expert of a parameter."""
        return tuple(name for path in sorted(self.layouts) for name in self.layouts[path].modules(path))

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the tensors beside the pairs, sorted: fully trained ones, and biases (`config.extra_kind`), by their
        names in the base model, whatever is wrapped around them; added biases and token rows by their paths."""
        return tuple(sorted(self._heads))

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor by its key, as the header has it."""
        return self._header

    def update_shape(self, path: str) -> tuple[int, int]:
        """(d_out, d_in) of the update stored at a path, by the header; of one matrix, where there are several."""
        pair = self._factors[path]
        return self._shape(pair["B"])[0], math.prod(self._shape(pair["A"])[1:])

    def kind(self, head: str) -> str:
        """What a tensor beside the pairs is: `config.extra_kind`."""
        return self._kinds.get(head, "head")

    def scale(self, module: str) -> float:
        """The module's own alpha / r (or alpha / sqrt(r)), as the config has it."""
        path = stored_path(module) if module not in self.layouts else module
        return self._scaled_by(path, 1.0)

    def _scaled_by(self, path: str, scaling: float) -> float:
        return relative_scaling(self._said, self._asked(path), scaling)

    def lora(self, module: str) -> LoRA:
        """One module's pair, in units of `scaling`, in the types that it is stored in; in float32, if they are narrower
        and not of that unit.

        Raises:
            AdapterFormatError: it cannot be read, or holds NaN or Inf.
        """
        pair, scale = self.unscaled(module)
        return scaled(pair.map(lambda t: t.to(self.wide(module)) if t.dtype == torch.float64 else t), scale)

    def wide(self, module: str) -> torch.dtype:
        """float32, or float64 where a factor is stored so: what a result that is made of the module has digits for."""
        return torch.promote_types(common_type(each.dtype for each in self.pair(module))[0], torch.float32)

    def unscaled(self, module: str) -> tuple[LoRA, float]:
        """One module's pair with the numbers of the file, and by how much its product counts in units of `scaling`. In
        a sum the scale goes into the weights, which are float64: in B, float32 would round it.

        Raises:
            AdapterFormatError: as `lora`.
        """
        path = module if module in self.layouts else stored_path(module)
        layout = self.layouts[path]
        if self._cached is None or self._cached[0] != path:  # experts share their tensors: read once
            self._cached = (path, *self._pair(path))
        _, B, A = self._cached
        if layout.kind != "parameter":
            self._cached = None
        return layout.unpacked(B, A, layout.expert(path, module)), self._scales[path]

    def pair(self, module: str) -> tuple[Stored, ...]:
        """The stored B and A of a module, by the header; of AdaLoRA also E."""
        keys = self._factors[module if module in self.layouts else stored_path(module)]
        return tuple(self._header[keys[factor]] for factor in ("B", "A", "E") if factor in keys)

    def check(self) -> None:
        """Read every number once, in pieces of a few MB, so that large files take time and no memory.

        Raises:
            AdapterFormatError: a number that is NaN, Inf or absurdly large, or an update that would be.
        """
        found = largest_of_each(self._weights, self._header)
        for key, size in found.items():
            self._check_size(key, size)
        for path, keys in self._factors.items():
            self._check_update(path, [found[key] for key in keys.values()])

    def _check_size(self, key: str, size: float) -> None:
        if not size < math.inf:
            raise AdapterFormatError(f"{self.directory / WEIGHTS_FILE}: {quoted(key)} holds NaN or Inf.")
        if size > _LARGEST_NUMBER:
            raise AdapterFormatError(
                f"{self.directory / WEIGHTS_FILE}: {quoted(key)} holds a number of size {size:.3g}; up to "
                f"{_LARGEST_NUMBER:g} are taken, so that what is computed of them stays finite."
            )

    def _check_update(self, path: str, sizes: Sequence[float]) -> None:
        """By the sizes of its factors, an update cannot be larger than their product times the rank and the scale."""
        rank = self._shape(self._factors[path]["A"])[0]
        most = max(rank, 1) * math.prod(sizes) * max(self._scales[path], 1) * max(self.scaling, 1)
        if not most <= _LARGEST_NUMBER:
            raise AdapterFormatError(
                f"{self.directory}: the update of module {quoted(path)} may be as large as {most:.3g} by its factors; "
                f"up to {_LARGEST_NUMBER:g} are taken, so that it stays finite."
            )

    def _pair(self, path: str) -> tuple[Tensor, Tensor]:
        keys = self._factors[path]
        allocation.check(
            allocation.bytes_to_read(self._header[key] for key in keys.values()),
            f"{self.directory}: reading module {quoted(path)}",
            self.limits,
        )
        read = {factor: self._tensor(key) for factor, key in keys.items()}
        self._check_update(path, [size for _, size in read.values()])
        (B, _), (A, _) = read["B"], read["A"]
        if "E" in keys:
            E = read["E"][0]
            B, A = B.double(), A.double() * E.double()  # exact but for float64's own factors
            if not len(A):
                B, A = B.new_zeros(len(B), 1), A.new_zeros(1, A.shape[1])
        return B, A

    def head(self, path: str) -> Tensor:
        """One tensor beside the pairs; an added bias in units of `scaling`, as the update that it is part of."""
        key = self._heads[path]
        allocation.check(
            allocation.bytes_to_read([self._header[key]]), f"{self.directory}: reading {quoted(path)}", self.limits
        )
        tensor, _ = self._tensor(key)
        if self.kind(path) == "added":
            factor = self._scales[path.removesuffix(".lora_B.bias")]
            if factor != 1:
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
        return tensor

    def stored_head(self, path: str) -> Stored:
        """A tensor beside the pairs, by the header."""
        return self._header[self._heads[path]]

    def size(self) -> int:
        """Bytes of the weights file."""
        return self._weights.size

    def tensor_bytes(self) -> int:
        """Bytes of all tensors: the file without its header."""
        return sum(stored.size for stored in self._header.values())

    def sha256(self) -> str:
        """Of the weights file, which is still the one that was opened."""
        return self._weights.sha256()

    def _tensor(self, key: str) -> tuple[Tensor, float]:
        """A tensor, and the largest size of a number in it (0 where they are no floating-point numbers)."""
        stored = self._header[key]
        tensor = tensor_of(self._weights, stored)
        size = largest(tensor) if stored.dtype in FLOATS else 0.0
        self._check_size(key, size)
        return tensor, size


def scaled(lora: LoRA, factor: float) -> LoRA:
    """B times `factor`; narrow types become float32 first, since rounding B again would move the update."""
    if factor == 1:
        return lora
    B, A = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in lora.factors)
    return LoRA(B * factor, A)


def _is_put_aside(path: str, config: Mapping[str, Any]) -> bool:
    """Whether a bias is one of those that peft's wrapper of a saved module holds by itself under bias = all: of the
    original that lies idle, or a second time the saved one's. peft reads neither."""
    inside = {"original_module", "modules_to_save"} & set(path.split("."))
    return bool(inside) and config.get("bias") == "all" and path.endswith(".bias")


def _files(directory: Path) -> tuple[Path, Path]:
    """The config and the weights; what is no adapter of peft is refused by the name of what it is."""
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    for path in (config, weights):
        if not os.path.lexists(path):
            foreign_formats.check_folder(directory)
            raise AdapterFormatError(f"{directory} is no PEFT adapter: it has no {path.name}.")
    return config, weights
