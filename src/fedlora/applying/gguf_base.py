"""What llama.cpp has of a base model: the names and shapes of its tensors, and the order of its rows.

Read in llama.cpp's source in November 2026 (conversion/, src/llama-adapter.cpp). The types of model listed here are
those whose conversion to GGUF renames tensors and, for some, reorders the rows of q and k, but changes no update. The
package gguf has the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters.module_names import plain
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.judge import Judged
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError

# transformers' model_type -> llama.cpp's name of the architecture.
_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip
_REORDERED = ("llama",)  # architectures whose q and k are stored with each head's even rows before its odd ones
_WAY = "`fedlora export --for merged` writes the full model, which llama.cpp's converter takes"


@dataclass(frozen=True)
class GGUFBase:
    """A base model as llama.cpp holds it. arch: llama.cpp's name. heads: of queries and of keys. tied: the token
    embeddings are the output layer too. shapes: name -> (d_out, d_in); empty if only the config is known."""

    arch: str
    blocks: int
    heads: tuple[int, int]
    tied: bool
    shapes: Mapping[str, tuple[int, ...]]

    def tensor(self, path: str, shape: tuple[int, int]) -> str:
        """The base's tensor that a pair at `path` updates.

        Args:
            shape: the update's, as (rows, columns) of the base's tensor.

        Raises:
            AdapterFormatError: llama.cpp has no such tensor, or would not add the update to it.
        """
        import gguf

        arch = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch), None)
        if arch is None:
            raise ConfigError(f"the installed gguf does not know architecture {self.arch}: pip install --upgrade gguf.")
        found = gguf.get_tensor_name_map(arch, self.blocks).get_name(plain(path))
        name = f"{found}.weight"
        if found is None or (self.shapes and name not in self.shapes and found != "output"):
            raise AdapterFormatError(
                f"llama.cpp has no tensor for {quoted(path)} in a model of architecture {self.arch} with "
                f"{self.blocks} blocks. {_WAY}"
            )
        if self.tied and found in ("output", "token_embd"):
            raise AdapterFormatError(
                f"it changes {quoted(path)}, but this base has one tensor for embeddings and output, and llama.cpp "
                f"adds no update to one use of it. {_WAY}"
            )
        if self.shapes and self.shapes[name] != shape:
            raise AdapterFormatError(
                f"its update of {quoted(path)} is {shape}, but the base's {name} is {self.shapes[name]}: it belongs "
                f"to another model"
            )
        return name

    def ordered(self, name: str, B: Tensor) -> Tensor:
        """B (d_out, r) with its rows as llama.cpp orders those of the tensor `name`."""
        which = {"attn_q": 0, "attn_k": 1}.get(name.split(".")[-2])
        if which is None or self.arch not in _REORDERED:
            return B
        return B[torch.arange(len(B)).reshape(self.heads[which], 2, -1).transpose(1, 2).reshape(-1)]


def base_of_folder(verdict: Judged) -> GGUFBase:
    """The base model in a folder for transformers, against which the adapter was judged.

    Raises:
        ConfigError: its type is not one of those listed here.
    """
    config = verdict.built.config
    arch = _known(_ARCHITECTURES.get(config.model_type), config.model_type, verdict.base.directory)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    tied = bool(config.tie_word_embeddings) or "lm_head.weight" not in verdict.base.stored
    return GGUFBase(arch, config.num_hidden_layers, heads, tied, {})


def base_of_file(path: Path) -> GGUFBase:
    """The base model in a GGUF file: reads names and shapes, no numbers.

    Raises:
        ConfigError: it cannot be read, or its architecture is not one of those listed here.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        said = {name: field.parts[field.data[0]] for name, field in reader.fields.items() if len(field.data) == 1}
        name = bytes(said["general.architecture"]).decode()
        arch = _known(name if name in _ARCHITECTURES.values() else None, name, path)
        queries = int(said[f"{arch}.attention.head_count"][0])
        heads = (queries, int(said.get(f"{arch}.attention.head_count_kv", [queries])[0]))
        shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
        return GGUFBase(arch, int(said[f"{arch}.block_count"][0]), heads, "output.weight" not in shapes, shapes)
    except (ValueError, KeyError, IndexError, OSError, OverflowError) as error:
        raise ConfigError(f"the base model {path} cannot be read as GGUF: {error}.") from error


def check_fits(file: AdapterFile, base: GGUFBase) -> dict[str, str]:
    """Module of the adapter -> the base's tensor that it updates.

    Raises:
        AdapterFormatError: llama.cpp could not add one of the pairs to this base.
    """
    found = {}
    for path, layout in file.layouts.items():
        if layout.kind not in ("linear", "adalora", "embedding"):
            raise AdapterFormatError(
                f"llama.cpp takes no LoRA of a {layout.kind} layer, such as {quoted(path)}. {_WAY}"
            )
        rows, columns = file.update_shape(path)
        found[path] = base.tensor(path, (columns, rows) if layout.kind == "embedding" else (rows, columns))
    return found


def _known(arch: str | None, said: Any, where: Path) -> str:
    if arch is None:
        raise ConfigError(
            f"the base model {where} is of type {quoted(str(said), 60)}; fedlora writes GGUF adapters for "
            f"{', '.join(_ARCHITECTURES)}. {_WAY}."
        )
    return arch
