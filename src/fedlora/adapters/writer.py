"""Writes a PEFT adapter module by module, so that memory holds one module, however large the adapter.

The tensors first go to a nameless scratch file, because all ranks are known only at the end; then the directory appears
whole. An abandoned write leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora.adapters.card_text import base_line
from fedlora.adapters.config_fields import check_scaling
from fedlora.adapters.config_meaning import TOKENS
from fedlora.adapters.layouts import Layout, stored_path
from fedlora.adapters.limits import Limits
from fedlora.adapters.module_names import Parameters, asked_as, plain, wrapped
from fedlora.adapters.patterns import every_one_alone
from fedlora.adapters.reader import CONFIG_FILE, PREFIX, WEIGHTS_FILE, AdapterFile
from fedlora.adapters.untrusted_files import decoded, type_name
from fedlora.adapters.written_config import alpha_for, extras_for, saved_modules_for, targets_for
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.core.lora import LoRA
from fedlora.errors import AdapterFormatError, escaped
from fedlora.linalg.stored import stored_bytes

# What a missing field means to peft, where that affects the update; None for the others.
_UNSAID: Mapping[str, Any] = {
    "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "init_lora_weights": True, "bias": "none",
    "lora_bias": False, "inference_mode": True,
}  # fmt: skip
_FILES = rf"{re.escape(CONFIG_FILE)}|{re.escape(WEIGHTS_FILE)}|README\.md"
ADAPTER_FOLDER = FolderKind("an adapter", CONFIG_FILE, rf"{_FILES}|labels\.json")
UPLOAD_FOLDER = FolderKind("an upload", CONFIG_FILE, rf"{_FILES}|upload\.json")


@dataclass(frozen=True)
class AdapterSpec:
    """Everything in a PEFT adapter besides its numbers. Opaque to the core; `write_adapter` puts it back.

    config: the fields of adapter_config.json, without rank and alpha, which follow from the adapter.
    scaling: the update is scaling * B @ A for the adapter that this spec came with. layouts: path -> how the pair is
    stored, for all but linear layers. fields: the config's field names; None: unknown.

    Example:
        >>> spec = AdapterSpec({"peft_type": "LORA", "target_modules": ["q", "v"]}, scaling=2.0)
        >>> write_adapter("from-nothing", Adapter(seed_adapter.modules), spec)
        >>> read_adapter("from-nothing", scaling=2.0)[1].scaling
        2.0
    """

    config: Mapping[str, Any]
    scaling: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    fields: frozenset[str] | None = field(default=None, compare=False)

    @property
    def base_model(self) -> str | None:
        name: str | None = self.config.get("base_model_name_or_path")
        return name

    def path_of(self, module: str) -> str:
        """Where a module's pair is stored: its own path; for an expert, its tensor's."""
        return module if module in self.layouts or stored_path(module) not in self.layouts else stored_path(module)


class AdapterWriter:
    """with AdapterWriter(directory, spec) as writer: writer.add(module, lora) ...; writer.finish(heads, card)

    The directory must be new, empty, or contain only an adapter, which is replaced whole: never a mixture of two.
    limits: for reading the files back before they appear.

    Raises:
        AdapterFormatError: values are not finite, a module has rank 0, an expert is missing at the end, or
            `AdapterFile` refuses the result.
        ConfigError: the directory cannot be written, or holds other files.

    Example:
        >>> file = AdapterFile("adapter")
        >>> _, spec = read_adapter("adapter")
        >>> with AdapterWriter("doubled", spec) as writer:
        ...     for name in file.modules:
        ...         writer.add(name, LoRA(2 * file.lora(name).B, file.lora(name).A))
        ...     writer.finish({})
    """

    def __init__(self, directory: str | os.PathLike[str], spec: AdapterSpec, *, limits: Limits | None = None) -> None:
        check_scaling(spec.scaling)
        self._directory, self._spec, self._limits = Path(directory), spec, limits
        check_target(self._directory, force=True, kind=ADAPTER_FOLDER)
        self._scratch = self._new_scratch()
        self._header: dict[str, dict[str, Any]] = {}
        self._modules: list[str] = []
        self._ranks: dict[str, int] = {}
        self._waiting: dict[str, dict[str, LoRA]] = {}  # experts, until their module is complete

    def _new_scratch(self) -> IO[bytes]:
        home = next(p for p in self._directory.absolute().parents if p.is_dir())
        return tempfile.TemporaryFile(dir=home)  # closed by __exit__

    def __enter__(self) -> AdapterWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.close()

    def add(self, module: str, lora: LoRA) -> None:
        """Add one module's pair."""
        if lora.rank == 0:
            raise AdapterFormatError(
                f"module {module!r} has rank 0, which PEFT cannot represent; pad it with `pad_rank`."
            )
        self._modules.append(module)
        path = self._spec.path_of(module)
        layout = self._spec.layouts.get(path, Layout())
        if layout.kind == "parameter":
            self._waiting.setdefault(path, {})[module] = lora
            return
        self._ranks[path] = lora.rank
        self._put_pair(path, layout, [lora])

    def finish(self, heads: Mapping[str, Tensor], card: str = "", *, rank: int = 0) -> None:
        """Write the directory, with the tensors other than pairs. `card`: the text of README.md. rank: pad pairs of
        lower rank to this with zero slots."""
        if not self._modules:
            raise AdapterFormatError("the adapter has no modules; nothing was written.")
        self._put_experts(rank)
        self._widen(rank)
        stored = self._stored_names(heads)
        for name, head in heads.items():
            self._put(PREFIX + stored[name], head)
        config = json.dumps(self._config(list(stored.values())), indent=2, sort_keys=True)
        with replacing_folder(self._directory, force=True, kind=ADAPTER_FOLDER) as building:
            self._write_weights(building / WEIGHTS_FILE)
            files.write(building / "README.md", card or _plain_card(self._spec))
            files.write(building / CONFIG_FILE, config + "\n")
            self._check(building)

    def _stored_names(self, heads: Iterable[str]) -> dict[str, str]:
        """The names under which peft looks for base tensors, once it wraps modules for pairs and trained tokens."""
        wraps: dict[str, list[str]] = {}
        for path in self._ranks:
            wraps.setdefault(plain(path), []).append("base_layer")
        wraps |= {plain(h.removesuffix(TOKENS)): ["token_adapter", "base_layer"] for h in heads if h.endswith(TOKENS)}
        beside = (".lora_B.bias", TOKENS)  # these belong to the wrappers themselves
        return {head: head if head.endswith(beside) else wrapped(head, wraps) for head in heads}

    def _check(self, written: Path) -> None:
        """Read the result back as if it came from a stranger. Raises `AdapterFormatError` if that fails."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they concern the inputs' configs, and were shown for those
                AdapterFile(written, limits=self._limits, allow_unknown=self._spec.config).check()
        except AdapterFormatError as error:
            why = str(error).replace(f"{escaped(str(written))}: ", "").replace(escaped(str(written)), "it")
            raise AdapterFormatError(f"the result could not be loaded, so nothing was written: {why}") from error

    def _put_experts(self, least: int) -> None:
        """Write the waiting experts. The file does not record in which order PEFT nests one module's parameters, so
        all of a module's get one rank and share one pattern."""
        ranks: dict[str, int] = {}
        for path, pairs in self._waiting.items():
            owner = plain(path)
            ranks[owner] = max([ranks.get(owner, 0), *(pair.rank for pair in pairs.values())])
        for path, pairs in self._waiting.items():
            layout = self._spec.layouts[path]
            lacking = [name for name in layout.modules(path) if name not in pairs]
            if lacking:
                raise AdapterFormatError(f"the adapter lacks {lacking[0]!r}, an expert of {path!r}.")
            rank = self._ranks[path] = max(ranks[plain(path)], least)
            self._put_pair(path, layout, [pad_rank(pairs[name], rank) for name in layout.modules(path)])

    def _widen(self, rank: int) -> None:
        """Pad every pair to that rank with zero slots, in a new scratch file."""
        narrow = [path for path, r in self._ranks.items() if r < rank]
        if not narrow:
            return
        grow: dict[str, tuple[int, int]] = {}
        for path in narrow:
            key_B, key_A = self._spec.layouts.get(path, Layout()).keys(path)
            grow |= {PREFIX + key_B: (1, rank - self._ranks[path]), PREFIX + key_A: (0, rank - self._ranks[path])}
            self._ranks[path] = rank
        before, header = self._scratch, self._header
        self._scratch, self._header = self._new_scratch(), {}
        with before:
            for key, entry in header.items():
                begin, end = entry["data_offsets"]
                before.seek(begin)
                tensor = decoded(before.read(end - begin), entry["dtype"], entry["shape"])
                self._put(key, _padded(tensor, *grow[key]) if key in grow else tensor)

    def _put_pair(self, path: str, layout: Layout, pairs: Sequence[LoRA]) -> None:
        for key, tensor in zip(layout.keys(path), layout.packed(pairs), strict=True):
            self._put(PREFIX + key, tensor)

    def _put(self, key: str, tensor: Tensor) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterFormatError(f"{key} holds NaN or Inf; nothing was written.")
        begin = self._scratch.tell()
        self._scratch.write(stored_bytes(tensor))
        offsets = [begin, self._scratch.tell()]
        self._header[key] = {"dtype": type_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": offsets}

    def _write_weights(self, path: Path) -> None:
        header = json.dumps({"__metadata__": {"format": "pt"}, **dict(sorted(self._header.items()))}).encode()
        header += b" " * (-len(header) % 8)  # the format aligns the data to 8 bytes
        with files.replacing(path) as file:
            file.write(struct.pack("<Q", len(header)) + header)
            self._scratch.seek(0)
            shutil.copyfileobj(self._scratch, file, 1 << 20)

    def _config(self, heads: Sequence[str]) -> dict[str, Any]:
        """The spec's fields, plus those that follow from the tensors. A field that the source lacked is written only if
        it has an effect, because older peft versions refuse fields they do not know."""
        spec = self._spec
        largest = max(self._ranks.values())  # r: readers that ignore patterns then allocate enough
        other = {self._patterns[path]: r for path, r in self._ranks.items() if r != largest}
        needed = {"peft_type": "LORA", "r": largest, "lora_alpha": alpha_for(spec.scaling, largest)}
        saved = saved_modules_for(spec.config, heads)
        found = {
            **targets_for(
                spec.config,
                self._modules,
                spec.layouts,
                apart=saved.get("modules_to_save", True) is not None or not spec.config.get("modules_to_save"),
            ),
            **saved,
            "rank_pattern": other,
            "alpha_pattern": {key: alpha_for(spec.scaling, r) for key, r in other.items()},
            "use_rslora": False,
            "init_lora_weights": True,
            **extras_for(spec.config, heads),
            "inference_mode": True,
        }
        known = found.keys() if spec.fields is None else spec.fields | spec.config.keys()
        said = {key: value for key, value in found.items() if key in known or value != _UNSAID.get(key)}
        return {**spec.config, **said, **needed}

    @cached_property
    def _patterns(self) -> Mapping[str, str]:
        """For each path, the name by which peft matches it: bare if no such name matches two of them, since peft
        before 0.15 accepts only bare names for a whole path; otherwise escaped and anchored."""
        parameters = Parameters(self._spec.config)
        names = {path: self._spec.layouts.get(path, Layout()).pattern or asked_as(path, self._ranks, parameters)
                 for path in self._ranks}  # fmt: skip
        for path, name in names.items():
            if self._ranks[path] != self._ranks.get(name, self._ranks[path]):
                raise AdapterFormatError(
                    f"{path!r} has rank {self._ranks[path]} and {name!r} has {self._ranks[name]}, but peft gives "
                    f"both the same rank: choose one rank for all modules."
                )
        alone = every_one_alone(list(dict.fromkeys(names.values())))
        return {path: self._owner(path) or (name if alone else f"^{re.escape(name)}") for path, name in names.items()}

    def _owner(self, path: str) -> str | None:
        """A pattern for all of a module's parameters, if the layout does not say which one is stored at `path`."""
        layout = self._spec.layouts.get(path, Layout())
        unnamed = layout.kind == "parameter" and not layout.pattern
        return rf"^{re.escape(plain(path))}\.[^.]+" if unnamed else None


def pad_rank(lora: LoRA, rank: int) -> LoRA:
    """The same update padded to `rank` with zero slots: for export only, since such slots cannot train."""
    B, A = lora.factors
    grow = max(rank - lora.rank, 0)
    return LoRA(pad(B, (0, grow)), pad(A, (0, 0, 0, grow)))


def _padded(tensor: Tensor, dim: int, grow: int) -> Tensor:
    more = list(tensor.shape)
    more[dim] = grow
    return torch.cat([tensor, tensor.new_zeros(more)], dim=dim)


def _plain_card(spec: AdapterSpec) -> str:
    front = f"---\nlibrary_name: peft\n{base_line(spec.base_model)}tags:\n- lora\n- fedlora\n---\n"
    return f"{front}\nA LoRA adapter written by fedlora.\n"
