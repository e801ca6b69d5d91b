"""The files of a full model: its weights by their headers, its config, and what lies beside them.

A base model may come from a stranger as an adapter may: the index and the headers are checked against each other, no
link is followed out of the folder (the hub's cache excepted), and what is no part of the model is named, not copied.
Tensors are read here, one by one and of files that have not changed: transformers is handed them (`model.py`) and opens
none of these files itself. Knows file names and shapes; knows no transformers.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from fedlora.adapters.limits import Limits
from fedlora.adapters.reader import CONFIG_FILE as ADAPTER_CONFIG
from fedlora.adapters.untrusted_files import FLOATS, Stored, StrangersFile, header_of, read_json, tensor_of
from fedlora.core.echo import shown
from fedlora.errors import AdapterFormatError, ConfigError

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_LIMITS = Limits(total=2**45, tensors=1_000_000, header=2**28, json=2**28, values=16_000_000)
_LARGEST_FILE = 2**28  # of those beside the weights: tokenizers have some 20 MB
_LARGEST_WEIGHTS = 2**34  # of a further module, such as a dense layer of a sentence encoder
_MOST_FILES = 10_000
_PIECE = 2**23
# Endings of what is copied; anything else may hold weights of the unchanged model, or a program.
_COPIED = frozenset((
    ".json", ".txt", ".md", ".model", ".jinja", ".jsonl", ".py", ".tiktoken", ".vocab", ".spm", ".bpe", ".codes",
    ".yaml", ".yml", ".rst",
))  # fmt: skip
_COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", ".gitattributes", "VERSION")
_NAME = re.compile(r"[A-Za-z0-9_.@()+, -]{1,200}")
# What names and types tell of quantised weights: (part of a tensor's name, kind).
_QUANTISED = (
    (".absmax", "bitsandbytes 4 bit"), (".quant_state.", "bitsandbytes 4 bit"), (".SCB", "bitsandbytes 8 bit"),
    (".qweight", "GPTQ or AWQ"), (".qzeros", "GPTQ or AWQ"), (".g_idx", "GPTQ"),
    (".weight_packed", "compressed-tensors"), ("_scale_inv", "fp8"), (".weight_scale", "fp8 or int8"),
    (".input_scale", "fp8"), (".codebooks", "AQLM"), ("proj_blocks", "mxfp4"),
    (".weight_format", "bitsandbytes 8 bit"),
)  # fmt: skip


@dataclass(frozen=True)
class SideFile:
    """A file beside the weights that belongs to the model. name: within its folder. source: where its bytes are."""

    name: str
    source: Path


class BaseFiles:
    """The safetensors files of a model directory, by their headers.

    Raises:
        ConfigError: there are none, they contradict their index, or their weights are quantised.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self._read()
        except (AdapterFormatError, OSError) as error:
            raise ConfigError(f"the base model in {directory} cannot be read: {error}") from error

    def _read(self) -> None:
        directory = self.directory
        if os.path.lexists(directory / ADAPTER_CONFIG):
            raise ConfigError(f"{directory} is no model directory but an adapter's: it has {ADAPTER_CONFIG}.")
        self.home = directory.resolve(strict=True)
        self.config: Mapping[str, Any] = (
            read_json(directory / CONFIG, Limits()) if os.path.lexists(directory / CONFIG) else {}
        )
        self._refuse_quantised_config()
        single = os.path.lexists(directory / SINGLE)
        weight_map = None if single else self._weight_map()
        self.shards: Sequence[str] = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
        self._of: dict[str, str] = {}
        self._stored: dict[str, Stored] = {}
        self._files = {shard: StrangersFile(directory / shard) for shard in self.shards}
        for shard in self.shards:
            for name, stored in header_of(self._files[shard], _LIMITS).items():
                if name in self._of:
                    raise ConfigError(f"{directory}: {self._of[name]} and {shard} both hold {name!r}.")
                self._of[name], self._stored[name] = shard, stored
        if weight_map is not None and weight_map != self._of:
            odd = sorted(n for n in {*weight_map, *self._of} if weight_map.get(n) != self._of.get(n))
            raise ConfigError(
                f"{directory}: {INDEX} and the files contradict each other: {odd[0][:200]!r} is in "
                f"{self._of.get(odd[0]) or 'none'}, by the index in {weight_map.get(odd[0]) or 'none'} "
                f"({len(odd)} such tensors)."
            )
        self._refuse_quantised_tensors()

    def _weight_map(self) -> dict[str, str]:
        """Tensor -> its file, as the index has it; all files are there, and in the directory itself."""
        if not os.path.lexists(self.directory / INDEX):
            raise ConfigError(
                f"{self.directory} is no model directory: it has no complete safetensors weights ({SINGLE}, or {INDEX} "
                f"and its files)."
            )
        found = read_json(self.directory / INDEX, _LIMITS).get("weight_map")
        if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
            raise ConfigError(f"{self.directory / INDEX} is damaged: its weight_map must name a file for each tensor.")
        for shard in set(found.values()):
            if not _NAME.fullmatch(shard) or not shard.endswith(".safetensors"):
                raise ConfigError(f"{self.directory / INDEX} names {shard[:200]!r}, which is no file of weights.")
            if not os.path.lexists(self.directory / shard):
                raise ConfigError(
                    f"{self.directory} is no model directory: it has no complete safetensors weights; {shard} is "
                    f"missing."
                )
        return found

    def _refuse_quantised_config(self) -> None:
        described = self.config.get("quantization_config")
        if described:
            method = described.get("quant_method") if isinstance(described, Mapping) else None
            if method is None and isinstance(described, Mapping):
                method = next(
                    (f"bitsandbytes ({k})" for k in ("load_in_4bit", "load_in_8bit") if described.get(k)), None
                )
            raise self._quantised(f"by its config.json, {str(method or 'of an unknown kind')[:80]}")

    def _refuse_quantised_tensors(self) -> None:
        for name, stored in self._stored.items():
            for part, kind in _QUANTISED:
                if name.endswith(part) or (part.endswith(".") and part in name):
                    raise self._quantised(f"{kind}, by its tensor {name!r}")
            if name.endswith(".weight") and stored.dtype not in FLOATS:
                raise self._quantised(f"its {name!r} is of type {stored.dtype}")

    def _quantised(self, why: str) -> ConfigError:
        return ConfigError(
            f"the base model in {self.directory} is quantised ({why}): its weights cannot take an update. "
            f"Apply to the model that it was quantised from, and quantise the result."
        )

    @property
    def repository(self) -> str | None:
        """The hub's name of a model in the hub's cache, models--ORGANISATION--NAME/snapshots/REVISION."""
        folder = self.home.parent.parent.name
        told = self.home.parent.name == "snapshots" and folder.startswith("models--")
        return folder.removeprefix("models--").replace("--", "/") if told else None

    def digests(self) -> dict[str, str]:
        """File of weights -> its SHA-256. Reads all of them."""
        return {shard: self._files[shard].sha256() for shard in self.shards}

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor by its name, as the headers have it."""
        return self._stored

    def tensor(self, name: str) -> Tensor:
        """One tensor, of a file that is still the one that was opened. Raises `ConfigError` where it is not."""
        try:
            return tensor_of(self._files[self._of[name]], self._stored[name])
        except AdapterFormatError as error:
            raise ConfigError(f"the base model in {self.directory} cannot be read: {error}") from error

    @property
    def largest_file(self) -> int:
        """Bytes of the largest file of weights: about as large the result's files become."""
        return max(file.size for file in self._files.values())

    def side_files(self) -> tuple[list[SideFile], list[str]]:
        """What lies beside the weights and belongs to the model, and what is left out, each with its reason.

        Raises:
            ConfigError: a link leads out of the folder.
        """
        kept: list[SideFile] = []
        left: list[str] = []
        own = {*self.shards, INDEX}
        self._sort_folder(self.directory, "", own, kept, left)
        for name in self._module_folders():
            self._sort_folder(self.directory / name, f"{name}/", set(), kept, left)
        return kept, left

    def _sort_folder(self, folder: Path, prefix: str, own: set[str], kept: list[SideFile], left: list[str]) -> None:
        entries = sorted(os.listdir(folder))
        if len(entries) > _MOST_FILES:
            raise ConfigError(f"{folder} has {len(entries):,} entries; a model's folder has a few dozen.")
        folders = set(self._module_folders()) if not prefix else set()
        for name in entries:
            if name in own or name in folders:
                continue
            why, source = self._judged(folder / name, name, inside=bool(prefix))
            if why is not None:
                left.append(f"{shown(prefix + name)} ({why})")
            elif source is not None:
                kept.append(SideFile(prefix + name, source))

    def _judged(self, path: Path, name: str, *, inside: bool) -> tuple[str | None, Path | None]:
        """(why a file is left out, None) or (None, where its bytes are)."""
        if not _NAME.fullmatch(name):
            return "an odd name", None
        source = self._within(path)
        if source is None:
            return "a link to nothing", None
        facts = source.stat()
        if stat.S_ISDIR(facts.st_mode):
            return "a folder", None
        if not stat.S_ISREG(facts.st_mode):
            return "no ordinary file", None
        ending = PurePath(name).suffix.lower()
        wanted = ending in _COPIED or name.startswith(_COPIED_NAMES) or (inside and ending == ".safetensors")
        if not wanted:
            return "may hold other weights" if not inside else "no file of this module", None
        if facts.st_size > _most(name):
            return f"{facts.st_size:,} bytes", None
        return None, source

    def _within(self, path: Path) -> Path | None:
        """Where a path ends; None where nowhere. Raises `ConfigError` where that is not in the model's folder."""
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        cache = self.home.parent.parent / "blobs" if self.repository else None
        if self.home in target.parents or (cache is not None and target.parent == cache):
            return target
        raise ConfigError(f"{shown(str(path))} is a link to another place; a model's files lie in its directory.")

    def _module_folders(self) -> list[str]:
        """Folders of sentence-transformers' further modules, by modules.json: poolings and dense layers."""
        described = self.directory / "modules.json"
        if not os.path.lexists(described) or self._within(described) is None:
            return []
        try:
            source = StrangersFile(self._within(described) or described)
            paths = [module["path"] for module in json.loads(source.read(0, min(source.size, 2**20)))]
        except (ValueError, TypeError, KeyError, RecursionError, AdapterFormatError):
            return []
        names = [p for p in paths if isinstance(p, str) and _NAME.fullmatch(p) and p.strip(".")]
        return sorted({p for p in names if (self._within(self.directory / p) or described).is_dir()})


def copy_side_file(file: SideFile, to: Path) -> None:
    """The bytes of a file beside the weights, which is still an ordinary one, and of bounded size."""
    try:
        source = StrangersFile(file.source)
    except AdapterFormatError as error:
        raise ConfigError(f"the base model cannot be read: {error}") from error
    if source.size > _most(file.name):
        raise ConfigError(f"{shown(file.name)} has grown to {source.size:,} bytes since it was looked at.")
    to.parent.mkdir(exist_ok=True)
    with to.open("xb") as target:
        for begin in range(0, source.size, _PIECE):
            target.write(source.read(begin, min(_PIECE, source.size - begin)))


def _most(name: str) -> int:
    """Bytes that a file of that name may have."""
    return _LARGEST_WEIGHTS if name.endswith(".safetensors") else _LARGEST_FILE
