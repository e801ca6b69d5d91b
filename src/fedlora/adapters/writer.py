"""Writes a PEFT adapter module by module, so that memory holds one module, however large the adapter.

The tensors go to a nameless scratch file first, for their ranks are known only when they come; the directory appears at
the end, its config last. What is given up before that leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.adapters.config import alpha_for, check_scaling, extras_for, saved_modules_for, targets_for
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.reader import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from fedlora.adapters.untrusted_files import type_name
from fedlora.core import files
from fedlora.core.lora import LoRA
from fedlora.errors import AdapterFormatError


@dataclass(frozen=True)
class AdapterSpec:
    """What a PEFT adapter says besides its numbers. Opaque to the core; `write_adapter` puts it back.

    config: the fields of adapter_config.json, without rank and alpha, which follow from the adapter.
    scaling: the update is scaling * B @ A for the adapter that this spec came with. layouts: path -> how the pair is
    stored, of those that are no linear layers.

    Example:
        >>> spec = AdapterSpec({"peft_type": "LORA", "target_modules": ["q", "v"]}, scaling=2.0)
        >>> write_adapter("from-nothing", Adapter(seed_adapter.modules), spec)
        >>> read_adapter("from-nothing", scaling=2.0)[1].scaling
        2.0
    """

    config: Mapping[str, Any]
    scaling: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def base_model(self) -> str | None:
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    def path_of(self, module: str) -> str:
        """Where a module's pair is stored: its own path, or its tensor's for an expert."""
        return module if module in self.layouts or stored_path(module) not in self.layouts else stored_path(module)


class AdapterWriter:
    """with AdapterWriter(directory, spec) as writer: writer.add(module, lora) ...; writer.finish(heads, card)

    Raises:
        AdapterFormatError: values that are not finite, a module of rank 0, an expert that is missing at the end.

    Example:
        >>> file = AdapterFile("adapter")
        >>> _, spec = read_adapter("adapter")
        >>> with AdapterWriter("doubled", spec) as writer:
        ...     for name in file.modules:
        ...         writer.add(name, LoRA(2 * file.lora(name).B, file.lora(name).A))
        ...     writer.finish({})
    """

    def __init__(self, directory: str | os.PathLike[str], spec: AdapterSpec) -> None:
        check_scaling(spec.scaling)
        self._directory, self._spec = Path(directory), spec
        home = next(p for p in self._directory.absolute().parents if p.is_dir())
        self._scratch = tempfile.TemporaryFile(dir=home)  # noqa: SIM115 - closed by __exit__
        self._header: dict[str, dict[str, Any]] = {}
        self._modules: list[str] = []
        self._ranks: dict[str, int] = {}
        self._waiting: dict[str, dict[str, LoRA]] = {}  # experts, until all pairs of their module are there

    def __enter__(self) -> AdapterWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.close()

    def add(self, module: str, lora: LoRA) -> None:
        """One module's pair."""
        if lora.rank == 0:
            raise AdapterFormatError(f"module {module!r} has rank 0, which PEFT cannot hold; pad it with `pad_rank`.")
        self._modules.append(module)
        path = self._spec.path_of(module)
        layout = self._spec.layouts.get(path, Layout())
        if layout.kind == "parameter":
            self._waiting.setdefault(path, {})[module] = lora
            return
        self._ranks[path] = lora.rank
        self._put_pair(path, layout, [lora])

    def finish(self, heads: Mapping[str, Tensor], card: str = "") -> None:
        """Write the directory, with the tensors beside the pairs. `card`: the text of README.md."""
        if not self._modules:
            raise AdapterFormatError(f"the adapter has no modules; nothing was written to {self._directory}.")
        self._put_experts()
        for name, head in heads.items():
            self._put(PREFIX + name, head)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write_weights(self._directory / WEIGHTS_FILE)
        files.write(self._directory / "README.md", card or _plain_card(self._spec))
        config = json.dumps(self._config(list(heads)), indent=2, sort_keys=True)
        files.write(self._directory / CONFIG_FILE, config + "\n")

    def _put_experts(self) -> None:
        """Those that were waiting. PEFT nests the parameters of one module in an order that a file does not tell, so
        all of a module's are given one rank, and one pattern that means them all."""
        ranks: dict[str, int] = {}
        for path, pairs in self._waiting.items():
            owner = path.replace(".base_layer", "")
            ranks[owner] = max([ranks.get(owner, 0), *(pair.rank for pair in pairs.values())])
        for path, pairs in self._waiting.items():
            layout = self._spec.layouts[path]
            lacking = [name for name in layout.modules(path) if name not in pairs]
            if lacking:
                raise AdapterFormatError(f"the adapter lacks {lacking[0]!r}, an expert of {path!r}.")
            rank = self._ranks[path] = ranks[path.replace(".base_layer", "")]
            self._put_pair(path, layout, [pad_rank(pairs[name], rank) for name in layout.modules(path)])

    def _put_pair(self, path: str, layout: Layout, pairs: Sequence[LoRA]) -> None:
        for key, tensor in zip(layout.keys(path), layout.packed(pairs), strict=True):
            self._put(PREFIX + key, tensor)

    def _put(self, key: str, tensor: Tensor) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterFormatError(f"{key} holds NaN or Inf; nothing was written to {self._directory}.")
        stored = tensor.detach().cpu().contiguous()
        begin = self._scratch.tell()
        if stored.numel():
            self._scratch.write(stored.reshape(-1).view(torch.uint8).numpy().data)
        offsets = [begin, self._scratch.tell()]
        self._header[key] = {"dtype": type_name(stored.dtype), "shape": list(stored.shape), "data_offsets": offsets}

    def _write_weights(self, path: Path) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **dict(sorted(self._header.items()))}).encode()
        header += b" " * (-len(header) % 8)  # the format wants the data to begin at a multiple of 8
        with files.replacing(path) as file:
            file.write(struct.pack("<Q", len(header)) + header)
            self._scratch.seek(0)
            shutil.copyfileobj(self._scratch, file, 1 << 20)

    def _config(self, heads: Sequence[str]) -> dict[str, Any]:
        spec = self._spec
        common = Counter(self._ranks.values()).most_common(1)[0][0]
        other = {self._pattern(path): r for path, r in self._ranks.items() if r != common}
        return {
            **spec.config,
            **targets_for(spec.config, self._modules, spec.layouts),
            **saved_modules_for(spec.config, heads),
            "peft_type": "LORA",
            "r": common,
            "lora_alpha": alpha_for(spec.scaling, common),
            "rank_pattern": other,
            "alpha_pattern": {key: alpha_for(spec.scaling, r) for key, r in other.items()},
            "use_rslora": False,
            "init_lora_weights": True,
            **extras_for(spec.config, heads),
            "inference_mode": True,
        }

    def _pattern(self, path: str) -> str:
        """A pattern that means this path and nothing else."""
        if self._spec.layouts.get(path, Layout()).kind == "parameter":
            return rf"^{re.escape(path.replace('.base_layer', ''))}\.[^.]+"
        return f"^{re.escape(path)}"


def pad_rank(lora: LoRA, rank: int) -> LoRA:
    """The same update with zero slots up to `rank`: for export only, since such slots cannot train."""
    B, A = lora.factors
    grow = max(rank - lora.rank, 0)
    return LoRA(pad(B, (0, grow)), pad(A, (0, 0, 0, grow)))


def _plain_card(spec: AdapterSpec) -> str:
    named = spec.base_model and not os.path.isabs(spec.base_model)  # a path of this machine names nothing
    base = f"base_model: {spec.base_model}\n" if named else ""
    return f"---\nlibrary_name: peft\n{base}tags:\n- lora\n- fedlora\n---\n\nA LoRA adapter written by fedlora.\n"
