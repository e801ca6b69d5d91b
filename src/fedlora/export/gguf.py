"""Writes an adapter as a GGUF file, which llama.cpp adds to its base model (`--lora`).

llama.cpp computes W + alpha / r lora_b lora_a for each pair, with one alpha for the whole file and the tensor's own r.
It takes nothing else that was trained: a saved head, a trained bias or token is named and refused.

Read in llama.cpp's source in November 2026 (conversion/, src/llama-adapter.cpp). The types of model listed here are
those whose conversion to GGUF renames tensors and, for some, reorders the rows of q and k, but changes no update. The
package gguf has the names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import TYPES, name_of, narrowed_pair
from fedlora.adapters.writer import base_line
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.core.lora import LoRA
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError, counted
from fedlora.export.attached import check

NAME, CARD = "adapter.gguf", "README.md"
GGUF_TYPES = {name: TYPES[name] for name in ("float16", "bfloat16", "float32")}
_EQUAL = 2.0**-23  # alpha is a float32, and llama.cpp divides in float32
# transformers' model_type -> llama.cpp's name of the architecture.
_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3",
}  # fmt: skip
_REORDERED = ("llama",)  # architectures whose q and k have the two halves of each head's rows interleaved
_WAY = "`fedlora export --format merged` writes the full model, which llama.cpp's converter takes"


@dataclass(frozen=True)
class WrittenGGUF:
    """What was written. arch: llama.cpp's name of the base's architecture. names: module -> the base's tensor. alpha:
    the file's. folded: modules whose own scale went into lora_b. rounding: the relative change of the updates by
    writing `dtype`."""

    arch: str
    names: Mapping[str, str]
    alpha: float
    folded: tuple[str, ...]
    dtype: str
    rounding: float


def write_gguf(
    file: AdapterFile,
    base: Path,
    out: Path,
    dtype: str | None = None,
    *,
    force: bool = False,
) -> WrittenGGUF:
    """Write `out`/adapter.gguf and a card.

    Args:
        dtype: of the factors, from `GGUF_TYPES`; None: as they are stored, or float32 if that is wider or a scale went
            into them. force: replace a folder of these two files.

    Raises:
        AdapterFormatError: the adapter does not fit the base, or llama.cpp would not add all of it. ConfigError: the
            base or the target is impossible.
    """
    if dtype is not None and dtype not in GGUF_TYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(GGUF_TYPES)}; got {dtype[:40]!r}.")
    place: dict[str, Any] = {"force": force, "kind": _KIND, "inputs": [file.directory, base]}
    check_target(out, **place)
    if file.heads:
        raise AdapterFormatError(
            f"{file.directory}: llama.cpp takes no tensors trained beside the pairs, and the adapter has "
            f"{len(file.heads)}, such as {file.heads[0]!r}. {_WAY}; `fedlora merge ADAPTER --heads drop` leaves them "
            f"out, but the result is then another model."
        )
    config = check(file, base).config
    if config.model_type not in _ARCHITECTURES:
        raise ConfigError(
            f"the base model {base} is of type {quoted(str(config.model_type), 60)}; fedlora writes GGUF adapters for "
            f"{', '.join(_ARCHITECTURES)}. {_WAY}."
        )
    arch = _ARCHITECTURES[config.model_type]
    names = _names(file, arch, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if arch in _REORDERED else {}
    alpha, folded = _alpha(file)
    wide = file.dtype()
    wide = torch.float32 if folded or wide == torch.float64 else wide
    stored = GGUF_TYPES[dtype] if dtype else wide
    tensors, rounding = _tensors(file, names, heads, alpha, folded, stored)
    with replacing_folder(out, **place) as building:
        _write(building / NAME, arch, alpha, tensors)
        files.write(building / CARD, _card(file, arch, len(names)))
    return WrittenGGUF(arch, names, alpha, folded, name_of(stored), rounding)


# -------------------------------------------------------------------------------------------------------------- inside


def _names(file: AdapterFile, arch: str, blocks: int) -> dict[str, str]:
    """Module -> the tensor of llama.cpp's base that its pair updates.

    Raises:
        AdapterFormatError: llama.cpp has no such tensor. ConfigError: the package gguf is too old.
    """
    import gguf

    key = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), None)
    if key is None:
        raise ConfigError(f"the installed gguf does not know architecture {arch}: pip install --upgrade gguf.")
    table = gguf.get_tensor_name_map(key, blocks)
    found = {path: table.get_name(path) for path in file.modules}
    if lost := [path for path, name in found.items() if name is None]:
        raise AdapterFormatError(
            f"{file.directory}: llama.cpp has no tensor for {quoted(lost[0])} in a model of architecture {arch} with "
            f"{blocks} blocks. {_WAY}."
        )
    return {path: f"{name}.weight" for path, name in found.items()}


def _alpha(file: AdapterFile) -> tuple[float, tuple[str, ...]]:
    """The alpha that is right for most modules, and the modules for which it is not."""
    each = {path: file.scales[path] * file.ranks[path] for path in file.modules}
    rounded = torch.tensor(list(each.values()), dtype=torch.float32).tolist()
    alpha: float = Counter(rounded).most_common(1)[0][0]
    return alpha, tuple(path for path, own in each.items() if not math.isclose(own, alpha, rel_tol=_EQUAL))


def _tensors(
    file: AdapterFile,
    names: Mapping[str, str],
    heads: Mapping[str, int],
    alpha: float,
    folded: tuple[str, ...],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], float]:
    """Name -> tensor of the GGUF file, and the relative rounding over all modules. heads: of the tensors whose rows
    llama.cpp reorders."""
    found, sizes, moves = {}, [], []
    for path, name in names.items():
        pair, scale = file.unscaled(path)
        if path in folded:
            B, A = pair.map(lambda t: t.double()).factors
            pair = LoRA(B * (scale * pair.rank / alpha), A)
        pair, moved = narrowed_pair(pair, dtype, path)
        B, A = pair.factors
        sizes.append(pair.norm())
        moves.append(moved)
        found[f"{name}.lora_a"] = A
        count = heads.get(name.split(".")[-2])  # rows 0, h/2, 1, h/2 + 1, ... of each head of h rows
        order = torch.arange(len(B)).reshape(count, 2, -1).transpose(1, 2).reshape(-1) if count else slice(None)
        found[f"{name}.lora_b"] = B[order]
    return found, math.hypot(*moves) / (math.hypot(*sizes) or 1.0)


def _write(path: Path, arch: str, alpha: float, tensors: Mapping[str, Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:  # numpy has no such type
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _card(file: AdapterFile, arch: str, modules: int) -> str:
    return (
        f"---\n{base_line(file.base_model)}library_name: gguf\ntags:\n- lora\n- fedlora\n---\n\n"
        f"# A LoRA adapter for llama.cpp\n\n{counted(modules, 'module')} of a base model of architecture {arch}. "
        f"`llama-cli -m BASE.gguf --lora {NAME}` adds them to that model.\n"
    )


_KIND = FolderKind("an adapter for llama.cpp", NAME, r"adapter\.gguf|README\.md")
