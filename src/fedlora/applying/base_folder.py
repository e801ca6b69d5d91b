"""The files of a full model: weights (by their headers), config, and other files beside them.

A base model may come from a stranger, just like an adapter: headers are checked to the last byte, links that lead out
of the folder are refused (except into the hub's cache), and files that do not belong to the model are listed, not
copied. We read the tensors here, one by one and only from unchanged files, and hand them to transformers (`model.py`),
which opens no file itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from fedlora.adapters.reader import CONFIG_FILE as ADAPTER_CONFIG
from fedlora.adapters.untrusted_files import FLOATS, Stored, TensorFile, json_object
from fedlora.core.text import quoted, shown
from fedlora.data.hub_folders import repository_of
from fedlora.errors import AdapterFormatError, ConfigError
from fedlora.given_files import opened, read_given

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_LARGEST_SHARD, _LARGEST_INDEX = 2**45, 2**28  # bytes
_LARGEST_FILE = 2**28  # bytes in a file beside the weights; tokenizers have about 20 MB
_LARGEST_WEIGHTS = 2**34  # bytes in an extra module's weights, such as a sentence encoder's dense layer
_MOST_FILES = 10_000
_PIECE = 2**23
# Endings of files to copy; any other may hold weights of the unchanged model, or a program.
_COPIED = frozenset((
    ".json", ".txt", ".md", ".model", ".jinja", ".jsonl", ".py", ".tiktoken", ".vocab", ".spm", ".bpe", ".codes",
    ".yaml", ".yml", ".rst",
))  # fmt: skip
_COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", ".gitattributes", "VERSION")
_PICKLED = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_NAME = re.compile(r"[A-Za-z0-9_.@()+, -]{1,200}")


@dataclass(frozen=True)
class SideFile:
    """A file beside the weights that belongs to the model. name: relative to the folder. source: its actual file."""

    name: str
    source: Path


class BaseFiles:
    """A model directory's safetensors files, by their headers. Their headers outrank the index.

    stored: every tensor by name. config: from config.json; empty if there is none. home: the real directory.

    Raises:
        ConfigError: there are no such files, two hold one name, or the weights are quantised.
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
            raise ConfigError(f"{directory} is not a model directory but an adapter's: it has {ADAPTER_CONFIG}.")
        self.home = directory.resolve(strict=True)
        found = os.path.lexists(directory / CONFIG)
        self.config: Mapping[str, Any] = json_object(directory / CONFIG) if found else {}
        self._files = {shard: TensorFile(directory / shard, _LARGEST_SHARD) for shard in self._shards()}
        self._of: dict[str, str] = {}
        self.stored: dict[str, Stored] = {}
        for shard, file in self._files.items():
            for name, stored in file.tensors.items():
                if name in self._of:
                    raise ConfigError(f"{directory}: {self._of[name]} and {shard} both hold {name!r}.")
                self._of[name], self.stored[name] = shard, stored
        self._refuse_quantised()

    def _shards(self) -> Sequence[str]:
        """The weights files' names, all in the directory itself."""
        if os.path.lexists(self.directory / SINGLE):
            return [SINGLE]
        index = self.directory / INDEX
        listed = json_object(index, _LARGEST_INDEX) if os.path.lexists(index) else {}
        found = listed.get("weight_map")
        names = sorted(set(map(str, found.values()))) if isinstance(found, dict) else []
        for shard in names:
            if not _NAME.fullmatch(shard) or not shard.endswith(".safetensors"):
                raise ConfigError(f"{self.directory / INDEX} names {quoted(shard)}, which is not a file of weights.")
        if not names and any(map(_PICKLED.fullmatch, os.listdir(self.directory))):
            raise ConfigError(
                f"{self.directory} has its weights as pickles, which can run code when read, and not as safetensors. "
                f"If you trust it, load it with transformers and save it again: "
                f"save_pretrained(NEW, safe_serialization=True)."
            )
        missing = next((shard for shard in names if not os.path.lexists(self.directory / shard)), None)
        if missing or not names:
            raise ConfigError(
                f"{self.directory} is not a model directory: it lacks the safetensors weights ({SINGLE}, or {INDEX} "
                f"whose weight_map names files{f'; {missing} is missing' if missing else ''})."
            )
        return names

    def _refuse_quantised(self) -> None:
        described, why = self.config.get("quantization_config"), ""
        if described:
            fields = described if isinstance(described, Mapping) else {}
            method = fields.get("quant_method") or next((f"bitsandbytes, {k}" for k in fields if "load_in" in k), "?")
            why = f"by its config.json, {str(method)[:80]}"
        for name, stored in self.stored.items():
            if name.endswith(".weight") and stored.dtype not in FLOATS:
                why = why or f"its {name!r} is of type {stored.dtype}"
        if why:
            raise ConfigError(
                f"the base model in {self.directory} is quantised ({why}): its weights cannot take an update. "
                f"Give the model it was quantised from, and quantise the result: the sum is then of that model's "
                f"weights, from which those that an adapter was trained beside may differ by rounding."
            )

    def tensor(self, name: str) -> Tensor:
        """One tensor. Raises `ConfigError` if its file has changed since it was opened."""
        try:
            return self._files[self._of[name]].tensor(name)
        except AdapterFormatError as error:
            raise ConfigError(f"the base model in {self.directory} cannot be read: {error}") from error

    def side_files(self) -> tuple[list[SideFile], list[str]]:
        """The model's other files, and the entries left out, each with its reason.

        Raises:
            ConfigError: a link leads out of the folder.
        """
        kept: list[SideFile] = []
        left: list[str] = []
        folders = self._module_folders()
        for folder in ("", *(f"{name}/" for name in folders)):
            entries = sorted(os.listdir(self.directory / folder))
            if len(entries) > _MOST_FILES:
                raise ConfigError(
                    f"{self.directory / folder} has {len(entries):,} entries; a model's folder has a few dozen."
                )
            for name in entries:
                if folder or name not in (*self._files, INDEX, *folders):
                    source, why = self._judged(self.directory / folder / name, inside=bool(folder))
                    if source is None:
                        left.append(f"{shown(folder + name)} ({why})")
                    else:
                        kept.append(SideFile(folder + name, source))
        return kept, left

    def _judged(self, path: Path, *, inside: bool) -> tuple[Path | None, str]:
        """A file's actual location; or None, and why it is left out. inside: in an extra module's folder."""
        source = self._within(path) if _NAME.fullmatch(path.name) else None
        if source is None:
            return None, "a link to nothing" if _NAME.fullmatch(path.name) else "an odd name"
        facts, ending = source.stat(), PurePath(path.name).suffix.lower()
        if not stat.S_ISREG(facts.st_mode):
            return None, "a folder" if stat.S_ISDIR(facts.st_mode) else "not an ordinary file"
        if not (ending in _COPIED or path.name.startswith(_COPIED_NAMES) or (inside and ending == ".safetensors")):
            return None, "not a file of this module" if inside else "may hold other weights"
        return (None, f"{facts.st_size:,} bytes") if facts.st_size > _most(path.name) else (source, "")

    def _within(self, path: Path) -> Path | None:
        """A path's target; None if it does not exist. Raises `ConfigError` if it is outside the model's folder."""
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        cache = self.home.parent.parent / "blobs" if repository_of(self.home) else None
        if self.home in target.parents or (cache is not None and target.parent == cache):
            return target
        raise ConfigError(f"{shown(str(path))} is a link to another place; a model's files lie in its directory.")

    def _module_folders(self) -> list[str]:
        """Folders of sentence-transformers' extra modules (poolings, dense layers), from modules.json."""
        described = self._within(self.directory / "modules.json")
        try:
            modules = json.loads(read_given(described, 2**20)) if described else []
            names = [module["path"] for module in modules if isinstance(module["path"], str)]
        except (ValueError, TypeError, KeyError, RecursionError, OSError):
            return []
        names = [name for name in names if _NAME.fullmatch(name) and name.strip(".")]
        return sorted({name for name in names if (inside := self._within(self.directory / name)) and inside.is_dir()})


def copy_side_file(file: SideFile, to: Path) -> None:
    """Copy a side file, checking again that it is ordinary and of bounded size."""
    try:
        with opened(file.source) as source:
            size = source.seek(0, 2)
            if size > _most(file.name):
                raise ConfigError(f"{shown(file.name)} has grown to {size:,} bytes since it was checked.")
            source.seek(0)
            to.parent.mkdir(exist_ok=True)
            with to.open("xb") as target:
                shutil.copyfileobj(source, target, _PIECE)
    except OSError as error:
        raise ConfigError(
            f"the base model's {shown(file.name)} cannot be copied: {error.strerror or error}."
        ) from error


def _most(name: str) -> int:
    """The most bytes that a file of this name may have."""
    return _LARGEST_WEIGHTS if name.endswith(".safetensors") else _LARGEST_FILE
