"""A PEFT LoRA folder, read without trust and without its base model: names and shapes at once, numbers on demand.

Every key must be a factor of a linear layer's LoRA or belong to modules_to_save. All else (embeddings, biases, trained
tokens, copies of base weights, other tools' formats) is refused by its key, with the way out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters.config import WAY_OUT, ByName, check_config, is_name
from fedlora.adapters.untrusted_files import FLOATS, Stored, TensorFile, json_object, largest
from fedlora.core.lora import LoRA
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_BY_NAME = (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
_MAGNITUDE = ".lora_magnitude_vector"
# Segments that no module of transformers has, and a wrapper adds: torch.compile, FSDP and checkpointing begin theirs
# with an underscore; the others are DDP's and peft's. The same layer under two names would count as two modules.
_WRAPPER = re.compile(r"^module\.|(?:^|\.)(?:_[^.]*|base_layer|base_model|original_module|modules_to_save)(?:\.|$)")


class AdapterFile:
    """A PEFT LoRA directory.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: the unit of the updates from `lora`: with the default 1.0, B @ A is the update itself.
        max_bytes: the largest weights file. dora: also read DoRA, for a reader that has the base model.

    `modules`: sorted names; `ranks`, `shapes` (d_out, d_in), `scales` by module; `heads`: sorted names of the tensors
    of saved modules.

    Raises:
        AdapterFormatError: missing, damaged or pickled files; a feature that is not W0 + s B A; keys or shapes that do
            not fit the config.

    Example:
        >>> file = AdapterFile("adapter", scaling=2.0)  # reads only names and shapes
        >>> file.lora("q")
        LoRA(B=(6, 4) float32, A=(4, 5) float32)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        scaling: float = 1.0,
        max_bytes: int | None = None,
        dora: bool = False,
    ) -> None:
        check_scaling(scaling)
        self.directory, self.scaling = Path(directory), scaling
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not os.path.lexists(self.directory / name):
                raise AdapterFormatError(f"{self.directory} is not a PEFT adapter: {_instead(self.directory, name)}.")
        self.config: Mapping[str, Any] = ReadOnly(json_object(self.directory / CONFIG_FILE))
        with self._named():
            check_config(self.config, dora=dora)
        self._file = TensorFile(self.directory / WEIGHTS_FILE, max_bytes)
        with self._named():
            self._read_names()

    def _read_names(self) -> None:
        """Sorts every key into factors, heads and magnitudes, and checks the shapes."""
        saved = [f"{name}." for name in self.config.get("modules_to_save") or ()]
        pairs: dict[str, dict[str, str]] = {}
        heads: dict[str, str] = {}
        magnitudes = set()
        for key, stored in self.stored.items():
            path = key.removeprefix(PREFIX)
            if path == key:
                raise AdapterFormatError(
                    f"tensor {quoted(key, 120)} is none of a peft adapter: its names begin with {PREFIX}."
                )
            if stored.dtype not in FLOATS:
                raise AdapterFormatError(
                    f"tensor {quoted(path, 120)} is of type {quoted(stored.dtype, 20)}; adapters hold "
                    f"{', '.join(FLOATS)}."
                )
            factor = _FACTOR.fullmatch(path)
            if factor:
                pairs.setdefault(factor[1], {})[factor[2]] = key
            elif path.endswith(_MAGNITUDE) and self.config.get("use_dora"):
                magnitudes.add(path.removesuffix(_MAGNITUDE))
            elif any(name in path for name in saved):  # as in peft: modules whose names end with one of these
                _check_name(path)
                heads[path] = key
            else:
                raise AdapterFormatError(
                    f"tensor {quoted(path, 120)} is neither a factor of a linear layer's LoRA nor in modules_to_save. "
                    f"If it is a copy of a base weight, save the adapter with save_embedding_layers=False. {WAY_OUT}."
                )
        if not pairs:
            raise AdapterFormatError("it holds no lora_A and lora_B.")
        for module in pairs:
            _check_name(module)
        self._pairs, self._heads = pairs, heads
        self.modules, self.heads = tuple(sorted(pairs)), tuple(sorted(heads))
        self.shapes: Mapping[str, tuple[int, int]] = ReadOnly({name: self._shape(name) for name in self.modules})
        self.ranks: Mapping[str, int] = ReadOnly({name: self._stored(name, "A").shape[0] for name in self.modules})
        ranks, alphas = (ByName(self.config[n], self.config.get(p)) for n, p in _BY_NAME)
        for name, r in self.ranks.items():
            if (configured := ranks.value(name)) != r:
                raise AdapterFormatError(
                    f"module {quoted(name)} has rank {r}, but its config says {configured}: rank_pattern must name "
                    f"such a module."
                )
        self._alphas = {name: alphas.value(name) for name in self.modules}
        self.scales: Mapping[str, float] = ReadOnly({name: self._scale(name, 1.0) for name in self.modules})
        for path in self.heads:
            ends = (path[: dot.start()] for dot in re.finditer(r"\.", path))
            if inside := next((end for end in ends if end in pairs), None):
                raise AdapterFormatError(f"module {quoted(inside)} has LoRA factors, and is also saved whole.")
        if self.config.get("use_dora") and magnitudes != set(pairs):
            raise AdapterFormatError("not every module has a lora_magnitude_vector, which DoRA needs.")

    def _scale(self, module: str, unit: float) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, over `unit`; exactly 1.0 if they are equal."""
        r, alpha = self.ranks[module], self._alphas[module]
        if self.config.get("use_rslora"):
            return alpha / math.sqrt(r) / unit
        return 1.0 if alpha == unit * r else alpha / r / unit  # in floats (s r) / r may differ from s

    def _shape(self, module: str) -> tuple[int, int]:
        if lost := [f"{module}.lora_{factor}.weight" for factor in "AB" if factor not in self._pairs[module]]:
            raise AdapterFormatError(
                f"tensor {quoted(lost[0], 120)} is missing, but its other factor is there: the file is damaged."
            )
        B, A = (self._stored(module, factor).shape for factor in "BA")
        if 0 in (*B, *A):
            raise AdapterFormatError(
                f"module {quoted(module)} is empty: B {B}, A {A}. DeepSpeed's ZeRO-3 saves parameters like this if it "
                f"has not gathered them: convert its checkpoint with zero_to_fp32.py."
            )
        if len(B) != 2 or len(A) != 2 or B[1] != A[0]:
            raise AdapterFormatError(
                f"module {quoted(module)} is no LoRA of a linear layer, B (d_out, r) and A (r, d_in): got B {B} and "
                f"A {A}. {WAY_OUT}."
            )
        return B[0], A[1]

    # ---- names and shapes --------------------------------------------------------------------------------------------

    @property
    def base_model(self) -> str | None:
        """The base model named in the config."""
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor's type and shape, by key."""
        return self._file.tensors

    def stored_head(self, path: str) -> Stored:
        """The type and shape of a saved module's tensor."""
        return self.stored[self._heads[path]]

    def dtype(self, module: str | None = None) -> torch.dtype:
        """The type that holds a module's factors, or all of them: float32 for float16 beside bfloat16."""
        names = self.modules if module is None else (module,)
        stored = {FLOATS[self._stored(name, factor).dtype] for name in names for factor in "BA"}
        return reduce(torch.promote_types, stored)

    def size(self) -> int:
        """Bytes of the weights file."""
        return self._file.size

    def _stored(self, module: str, factor: str) -> Stored:
        return self.stored[self._pairs[module][factor]]

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def unscaled(self, module: str) -> tuple[LoRA, float]:
        """One module's pair as stored, in the wider type if the two differ, and its scale in units of `scaling`.

        Raises:
            AdapterFormatError: it cannot be read, or holds NaN or Inf.
        """
        wide = self.dtype(module)
        B, A = (self.tensor(self._pairs[module][factor]).to(wide) for factor in "BA")
        return LoRA(B, A), self._scale(module, self.scaling)

    def lora(self, module: str) -> LoRA:
        """One module's pair in units of `scaling`: as stored, or in float32 if B must be scaled and is narrower."""
        return scaled(*self.unscaled(module))

    def head(self, path: str) -> Tensor:
        """One tensor of a saved module."""
        return self.tensor(self._heads[path])

    def tensor(self, key: str) -> Tensor:
        """The tensor stored under a key. Raises `AdapterFormatError` if it holds NaN or Inf."""
        tensor = self._file.tensor(key)
        with self._named():
            largest(key.removeprefix(PREFIX), tensor)
        return tensor

    def check(self) -> bool:
        """Read every number once, some megabytes at a time; whether any module's update can be other than zero.

        Raises:
            AdapterFormatError: a number is NaN or Inf.
        """
        some: set[str] = set()
        for key, piece in self._file.pieces():
            with self._named():
                if largest(key.removeprefix(PREFIX), piece):
                    some.add(key)
        return any(some.issuperset(pair.values()) for pair in self._pairs.values())

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Prefixes the directory to an error of its content; errors of a file name its path themselves."""
        try:
            yield
        except AdapterFormatError as error:
            raise AdapterFormatError(f"{self.directory}: {error}") from error


def scaled(lora: LoRA, factor: float) -> LoRA:
    """B times `factor`; narrow types become float32 first, since rounding B again would change the update."""
    if factor == 1:
        return lora
    B, A = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in lora.factors)
    return LoRA(B * factor, A)


def check_scaling(scaling: float) -> None:
    """Raise `AdapterFormatError` unless this is an alpha / r."""
    known = isinstance(scaling, int | float) and not isinstance(scaling, bool)
    if not known or not 0 < scaling < math.inf:
        raise AdapterFormatError(f"scaling is the adapter's alpha / r, a positive number; got {scaling!r}.")


def _check_name(module: str) -> None:
    if odd := _WRAPPER.search(module):
        raise AdapterFormatError(
            f"{quoted(module, 120)} is a name from inside a wrapper ({quoted(odd[0], 40)}: torch.compile, "
            f"FSDP, DDP or peft itself), and no module of the model. Unwrap the model, and save the adapter again."
        )
    if not is_name(module):
        raise AdapterFormatError(
            f"{quoted(module, 120)} is no name of a module: up to 16 words of letters, digits, - and _, with dots "
            f"between, 256 in all."
        )


def _instead(folder: Path, name: str) -> str:
    """What is there instead of this file, and what to do."""
    if not os.path.lexists(folder):
        return "there is no such folder"
    if not folder.is_dir():
        return f"it is no folder; give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}"
    if os.path.lexists(folder / "adapter_model.bin"):
        return (
            f"it has no {name}. adapter_model.bin is a pickle, which can run code when read; if you trust it, load it "
            f"with peft and save it again"
        )
    return f"it has no {name}"
