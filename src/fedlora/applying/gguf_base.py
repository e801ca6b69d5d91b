"""What llama.cpp has of a base model: the names of its tensors, and the order of its rows.

Read in llama.cpp's source in November 2026 (conversion/, src/llama-adapter.cpp). The types of model listed here are
those whose conversion to GGUF renames tensors and, for some, reorders the rows of q and k, but changes no update. The
package gguf has the names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.adapters.module_names import plain
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.judge import Judged
from fedlora.core.echo import quoted
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
    embeddings are the output layer too."""

    arch: str
    blocks: int
    heads: tuple[int, int]
    tied: bool

    def tensor(self, path: str) -> str:
        """The base's tensor that a pair at `path` updates.

        Raises:
            AdapterFormatError: llama.cpp has no such tensor, or would not add the update to it.
        """
        import gguf

        arch = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch), None)
        if arch is None:
            raise ConfigError(f"the installed gguf does not know architecture {self.arch}: pip install --upgrade gguf.")
        found = gguf.get_tensor_name_map(arch, self.blocks).get_name(plain(path))
        if found is None:
            raise AdapterFormatError(
                f"llama.cpp has no tensor for {quoted(path)} in a model of architecture {self.arch} with "
                f"{self.blocks} blocks. {_WAY}"
            )
        if self.tied and found == "output":
            raise AdapterFormatError(
                f"it changes {quoted(path)}, but this base has one tensor for embeddings and output, and llama.cpp "
                f"adds no update to one use of it. {_WAY}"
            )
        return f"{found}.weight"

    def ordered(self, name: str, B: Tensor) -> Tensor:
        """B (d_out, r) with its rows as llama.cpp orders those of the tensor `name`."""
        which = {"attn_q": 0, "attn_k": 1}.get(name.split(".")[-2])
        if which is None or self.arch not in _REORDERED:
            return B
        return B[torch.arange(len(B)).reshape(self.heads[which], 2, -1).transpose(1, 2).reshape(-1)]


def base_of(verdict: Judged) -> GGUFBase:
    """The base model against which the adapter was judged.

    Raises:
        ConfigError: its type is not one of those listed here.
    """
    config = verdict.built.config
    arch = _ARCHITECTURES.get(config.model_type)
    if arch is None:
        raise ConfigError(
            f"the base model {verdict.base.directory} is of type {quoted(str(config.model_type), 60)}; fedlora writes "
            f"GGUF adapters for {', '.join(_ARCHITECTURES)}. {_WAY}."
        )
    heads = (config.num_attention_heads, config.num_key_value_heads)
    tied = bool(config.tie_word_embeddings) or "lm_head.weight" not in verdict.base.stored
    return GGUFBase(arch, config.num_hidden_layers, heads, tied)


def check_fits(file: AdapterFile, base: GGUFBase) -> dict[str, str]:
    """Module of the adapter -> the base's tensor that it updates.

    Raises:
        AdapterFormatError: llama.cpp could not add one of the pairs to this base.
    """
    found = {}
    for path, layout in file.layouts.items():
        if layout.kind not in ("linear", "adalora"):
            raise AdapterFormatError(
                f"a GGUF adapter of fedlora has LoRA of linear layers only, not of kind {layout.kind}, such as "
                f"{quoted(path)}. {_WAY}"
            )
        found[path] = base.tensor(path)
    return found
