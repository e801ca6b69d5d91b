"""A PEFT adapter on disk, opened without reading its tensors: which modules it has, and each of them when asked for.

Reading module by module keeps memory at one module, however many adapters are merged. Everything that would change the
update, or that does not fit the config, is refused by name before a number is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedlora.errors import AdapterFormatError, ShapeError
from fedlora.lora import LoRA
from fedlora.peft_config import check_config, check_scaling, is_head, module_rank, relative_scaling

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


class AdapterFile:
    """A PEFT LoRA directory.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        scaling: of the updates that `lora` gives: with the default 1.0, B @ A is the update itself.

    Raises:
        AdapterFormatError: missing, damaged or pickled files; a feature that is not W0 + s B A; keys or shapes that do
            not fit the config.
    """

    def __init__(self, directory: str | os.PathLike[str], *, scaling: float = 1.0) -> None:
        check_scaling(scaling)
        self.directory = Path(directory)
        self.scaling = scaling
        self.config: Mapping[str, Any] = MappingProxyType(_read_config(self.directory))
        check_config(self.config, where=str(self.directory / CONFIG_FILE))
        self._open = _opened(self.directory)
        self._factors: dict[str, dict[str, str]] = {}
        self._heads: dict[str, str] = {}
        for key in sorted(self._open.keys()):
            self._sort(key)
        if not self._factors:
            raise AdapterFormatError(f"{self.directory}: holds no lora_A / lora_B pair.")
        for name, pair in self._factors.items():
            if set(pair) != {"A", "B"}:
                raise AdapterFormatError(f"{self.directory}: module {name!r} lacks lora_{'B' if 'A' in pair else 'A'}.")
        self.ranks: Mapping[str, int] = MappingProxyType({name: self._rank(name) for name in self._factors})

    def _sort(self, key: str) -> None:
        if not key.startswith(PREFIX):
            raise AdapterFormatError(
                f"{self.directory}: key {key!r} does not start with {PREFIX!r}: not a PEFT LoRA file."
            )
        path = key.removeprefix(PREFIX)
        found = re.fullmatch(r"(.+)\.lora_([AB])\.weight", path)
        if found:
            self._factors.setdefault(found[1], {})[found[2]] = key
        elif is_head(path, self.config):
            self._heads[path] = key
        else:
            raise AdapterFormatError(
                f"{self.directory}: key {key!r} is neither a LoRA factor of a linear layer nor one of modules_to_save "
                f"{self.config.get('modules_to_save') or []}. Embedding, convolution and magnitude tensors are not "
                f"supported yet."
            )

    def _rank(self, name: str) -> int:
        """The rank of a module by the shapes in the header, which must be what the config says."""
        shapes = {f: tuple(self._open.get_slice(key).get_shape()) for f, key in self._factors[name].items()}
        B, A = shapes["B"], shapes["A"]
        if len(B) != 2 or len(A) != 2 or B[1] != A[0]:
            raise AdapterFormatError(
                f"module {name!r} is no LoRA of a linear layer: B (d_out, r) and A (r, d_in) are needed; got B {B} "
                f"and A {A}."
            )
        r = module_rank(self.config, name)
        if B[1] != r:
            raise AdapterFormatError(f"{self.directory}: module {name!r} has rank {B[1]}, but its config says {r}.")
        return r

    @property
    def base_model(self) -> str | None:
        """The base model that the config names."""
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the adapted modules, sorted."""
        return tuple(sorted(self._factors))

    @property
    def heads(self) -> tuple[str, ...]:
        """Paths of the fully trained tensors, sorted."""
        return tuple(sorted(self._heads))

    def lora(self, module: str) -> LoRA:
        """One module's pair, in units of `scaling`."""
        keys = self._factors[module]
        try:
            pair = LoRA(self._tensor(keys["B"]), self._tensor(keys["A"]))
        except ShapeError as error:
            raise AdapterFormatError(f"module {module!r} is no LoRA of a linear layer: {error}") from error
        return scaled(pair, relative_scaling(self.config, module, self.scaling))

    def head(self, path: str) -> Tensor:
        """One fully trained tensor."""
        return self._tensor(self._heads[path])

    def size(self) -> int:
        """Bytes of the weights file."""
        return (self.directory / WEIGHTS_FILE).stat().st_size

    def _tensor(self, key: str) -> Tensor:
        try:
            tensor: Tensor = self._open.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise AdapterFormatError(f"{self.directory / WEIGHTS_FILE}: {key!r} cannot be read: {error}.") from error
        return tensor


def scaled(lora: LoRA, factor: float) -> LoRA:
    """B times `factor`; narrow types become float32 first, since rounding B again would move the update."""
    if factor == 1:
        return lora
    B, A = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in lora.factors)
    return LoRA(B * factor, A)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise AdapterFormatError(f"{directory} is no PEFT adapter: it has no {CONFIG_FILE}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AdapterFormatError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{path} holds no JSON object.")
    return config


def _opened(directory: Path) -> Any:
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        if (directory / "adapter_model.bin").exists():
            raise AdapterFormatError(
                f"{directory} has only adapter_model.bin, a pickle, which can run code when it is read. "
                f"Save it again with a current peft, which writes {WEIGHTS_FILE}."
            )
        raise AdapterFormatError(f"{directory} is no PEFT adapter: it has no {WEIGHTS_FILE}.")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise AdapterFormatError(f"{path} is damaged or no safetensors file: {error}.") from error
