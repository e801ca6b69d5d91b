"""A PEFT adapter on disk, opened without reading its tensors: which modules it has, and each of them when asked for.

Reading module by module keeps memory at one module, however many adapters are merged. Everything that would change the
update, or that does not fit the config, is refused by name before a number is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters.config import (
    check_config,
    check_scaling,
    extra_kind,
    is_adalora,
    module_rank,
    parameter_names,
    pattern_budget,
    relative_scaling,
)
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.untrusted_files import FLOATS, Limits, Stored, read_header, read_json, read_tensor
from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.errors import AdapterFormatError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB])|([ABE]))")


class AdapterFile:
    """A PEFT LoRA directory; AdaLoRA is read as LoRA.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: of the updates that `lora` gives: with the default 1.0, B @ A is the update itself.
        limits: what the files may claim. allow_unknown: fields of the config to take as harmless.

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
    ) -> None:
        check_scaling(scaling)
        self.directory = Path(directory)
        self.scaling = scaling
        self._cached: tuple[str, Tensor, Tensor] | None = None
        try:
            with pattern_budget():
                self._read(limits or Limits(), allow_unknown)
        except AdapterFormatError as error:
            if str(self.directory) in str(error):
                raise
            raise AdapterFormatError(f"{self.directory}: {error}") from error

    def _read(self, limits: Limits, allow_unknown: Collection[str]) -> None:
        config, weights = _files(self.directory)
        self.config: Mapping[str, Any] = ReadOnly(read_json(config, limits))
        check_config(self.config, where=str(config), allow=allow_unknown)
        self._header = read_header(weights, limits)
        self._factors: dict[str, dict[str, str]] = {}
        self._heads: dict[str, str] = {}
        for key in sorted(self._header):
            self._sort(key)
        if not self._factors:
            raise AdapterFormatError(f"{self.directory}: holds no lora_A / lora_B pair.")
        self.layouts: Mapping[str, Layout] = ReadOnly(
            {path: self._layout(path, pair) for path, pair in self._factors.items()}
        )
        ranks = {path: self._rank(path) for path in self._factors}
        self._scales = {path: self._scaled_by(path, self.scaling) for path in self._factors}
        self.ranks: Mapping[str, int] = ReadOnly(
            {name: ranks[path] for path, layout in self.layouts.items() for name in layout.modules(path)}
        )

    def _sort(self, key: str) -> None:
        if not key.startswith(PREFIX):
            raise AdapterFormatError(
                f"{self.directory}: key {key!r} does not start with {PREFIX!r}: not a PEFT LoRA file."
            )
        path = key.removeprefix(PREFIX)
        found, dtype = _FACTOR.fullmatch(path), self._header[key].dtype
        if found:
            if dtype not in FLOATS:
                raise AdapterFormatError(
                    f"{self.directory}: {key!r} is of type {dtype}; updates are floating-point numbers "
                    f"({', '.join(FLOATS)})."
                )
            self._factors.setdefault(found[1], {})[found[2] or found[3] or found[4]] = key
        elif extra_kind(path, self.config) is not None:
            self._heads[path] = key
        else:
            raise AdapterFormatError(
                f"{self.directory}: key {key!r} is neither a LoRA factor nor anything that its config says is saved "
                f"(modules_to_save = {self.config.get('modules_to_save') or []}, bias = "
                f"{self.config.get('bias', 'none')!r}, lora_bias = {bool(self.config.get('lora_bias'))})."
            )

    def _layout(self, path: str, pair: Mapping[str, str]) -> Layout:
        """What kind of layer a pair adapts, by its names and shapes."""
        needed = {"A", "B", "E"} if is_adalora(self.config) else {"A", "B"}
        if set(pair) != needed:
            odd = sorted(needed ^ set(pair))[0]
            what = "lacks" if odd in needed else "has, without being AdaLoRA's,"
            raise AdapterFormatError(f"{self.directory}: module {path!r} {what} lora_{odd}.")
        styles = {key.removeprefix(f"{PREFIX}{path}.").replace(f"lora_{f}", "").replace(f"embedding_{f}", "embedding")
                  for f, key in pair.items()}  # fmt: skip
        styles = {"embedding" if "embedding" in style else style for style in styles}
        if len(styles) > 1 or (is_adalora(self.config) and styles != {""}) or (styles == {""} and "E" not in pair):
            raise AdapterFormatError(f"{self.directory}: the factors of module {path!r} are not of one kind of layer.")
        if "embedding" in styles:
            return Layout("embedding")
        if is_adalora(self.config):
            return Layout("adalora")
        A = self._shape(pair["A"])
        if len(A) > 2:
            return Layout("conv", kernel=A[2:])
        parameter = self._parameter(path)
        if parameter is None:
            return Layout()
        return Layout("parameter", experts=A[0] // module_rank(self.config, parameter), pattern=parameter)

    def _parameter(self, path: str) -> str | None:
        """The bare parameter that a pair adapts; None for a layer."""
        if not self.config.get("target_parameters"):
            return None
        module = path.replace(".base_layer", "")
        nested = sorted((other for other in self._factors if other.replace(".base_layer", "") == module), key=len)
        names = parameter_names(module, [self._shape(self._factors[p]["A"])[0] for p in nested], self.config)
        return names[nested.index(path)] if names is not None else None

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
                f"{self.directory}: module {path!r} is no LoRA of a {layout.kind} layer: {needed} are needed; "
                f"got B {B} and A {A}."
            )
        says = r if layout.kind == "adalora" else module_rank(self.config, layout.pattern or path)
        if r != says:
            raise AdapterFormatError(f"{self.directory}: module {path!r} has rank {r}, but its config says {says}.")
        if B[0] == 0 or 0 in A[1:] or (r == 0 and layout.kind != "adalora"):
            raise AdapterFormatError(f"{self.directory}: module {path!r} is empty: B {B}, A {A}.")
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
        """Paths of the tensors beside the pairs, sorted: fully trained ones, and biases (`config.extra_kind`)."""
        return tuple(sorted(self._heads))

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor by its key, as the header has it."""
        return self._header

    def kind(self, head: str) -> str:
        """What a tensor beside the pairs is: `config.extra_kind`."""
        return extra_kind(head, self.config) or "head"

    def scale(self, module: str) -> float:
        """The module's own alpha / r (or alpha / sqrt(r)), as the config has it."""
        path = stored_path(module) if module not in self.layouts else module
        return self._scaled_by(path, 1.0)

    def _scaled_by(self, path: str, scaling: float) -> float:
        return relative_scaling(self.config, self.layouts[path].pattern or path, scaling)

    def lora(self, module: str) -> LoRA:
        """One module's pair, in units of `scaling`.

        Raises:
            AdapterFormatError: it cannot be read, or holds NaN or Inf.
        """
        path = module if module in self.layouts else stored_path(module)
        layout = self.layouts[path]
        if self._cached is None or self._cached[0] != path:  # experts share their tensors: read once
            self._cached = (path, *self._pair(path))
        _, B, A = self._cached
        if layout.kind != "parameter":
            self._cached = None
        expert = layout.modules(path).index(module)
        pair = layout.unpacked(B, A, expert)
        return scaled(pair, self._scales[path])

    def _pair(self, path: str) -> tuple[Tensor, Tensor]:
        keys = self._factors[path]
        B, A = self._tensor(keys["B"]), self._tensor(keys["A"])
        if "E" in keys:
            A = (A.to(torch.promote_types(A.dtype, torch.float32)) * self._tensor(keys["E"])).to(torch.float32)
            B = B.to(torch.float32)
            if not len(A):
                B, A = B.new_zeros(len(B), 1), A.new_zeros(1, A.shape[1])
        return B, A

    def head(self, path: str) -> Tensor:
        """One tensor beside the pairs; an added bias in units of `scaling`, as the update that it is part of."""
        tensor = self._tensor(self._heads[path])
        if self.kind(path) == "added":
            factor = self._scales[path.removesuffix(".lora_B.bias")]
            if factor != 1:
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
        return tensor

    def size(self) -> int:
        """Bytes of the weights file."""
        return (self.directory / WEIGHTS_FILE).stat().st_size

    def _tensor(self, key: str) -> Tensor:
        tensor = read_tensor(self.directory / WEIGHTS_FILE, self._header[key])
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterFormatError(f"{self.directory / WEIGHTS_FILE}: {key!r} holds NaN or Inf.")
        return tensor


def scaled(lora: LoRA, factor: float) -> LoRA:
    """B times `factor`; narrow types become float32 first, since rounding B again would move the update."""
    if factor == 1:
        return lora
    B, A = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in lora.factors)
    return LoRA(B * factor, A)


def _files(directory: Path) -> tuple[Path, Path]:
    """The config and the weights; a pickle is refused by name."""
    config, weights = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not os.path.lexists(config):
        raise AdapterFormatError(f"{directory} is no PEFT adapter: it has no {CONFIG_FILE}.")
    if not os.path.lexists(weights):
        if (directory / "adapter_model.bin").exists():
            raise AdapterFormatError(
                f"{directory} has only adapter_model.bin, a pickle, which can run code when it is read. "
                f"Save it again with a current peft, which writes {WEIGHTS_FILE}."
            )
        raise AdapterFormatError(f"{directory} is no PEFT adapter: it has no {WEIGHTS_FILE}.")
    return config, weights
