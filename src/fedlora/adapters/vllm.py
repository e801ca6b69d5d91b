"""What vLLM accepts in an adapter, by its source in September 2026 (vllm/lora: peft_helper.py, lora_model.py).

It reads r, lora_alpha and use_rslora, one scale for all modules, and no patterns; LoRA on linear layers, lm_head and
embed_tokens; a saved `score` or `classifier` (since August 2026; before, modules_to_save had to be empty). It raises on
any other tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedlora.adapters.collection import Collection
from fedlora.core.echo import quoted
from fedlora.errors import ConfigError

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # accepted values for max_lora_rank
_TENSORS = {
    "head": "fully trained modules", "bias": "trained biases", "added": "biases of the update (lora_bias)",
    "tokens": "trained tokens", "base": "copies of base weights",
}  # fmt: skip
_LAYERS = {"embedding": "LoRA of embeddings", "conv": "LoRA of convolutions", "parameter": "LoRA of bare parameters"}
_SERVED_HEAD = re.compile(r"(.+\.)?(score|classifier)\.(weight|bias)")
_SERVED_BASE = re.compile(r"(.+\.)?(embed_tokens|lm_head)\.(weight|bias)")


def check_vllm(given: Collection, beside: Iterable[tuple[str, str]]) -> list[str]:
    """Notes on a result for vLLM. beside: (name, kind) of its tensors other than pairs.

    Raises:
        ConfigError: vLLM does not accept it; the message says which parts.
    """
    way = "`fedlora export --for merged` writes an adapter into its base, which vLLM serves as a model."
    if given.files[0].config.get("layer_replication"):
        raise ConfigError(f"vLLM does not support layer_replication: {way}")
    beside = list(beside)
    refused: dict[str, str] = {}
    for name, kind in beside:
        served = _SERVED_HEAD if kind == "head" else _SERVED_BASE if kind == "base" else None
        if served is None or not served.fullmatch(name):
            refused.setdefault(_TENSORS[kind], name)
    whole = bool(refused) and _TENSORS["added"] not in refused
    for path, layout in given.layouts.items():
        if layout.kind in _LAYERS and not (layout.kind == "embedding" and path.rpartition(".")[2] == "embed_tokens"):
            refused.setdefault(_LAYERS[layout.kind], path)
            whole = False
    if refused:
        what = "; ".join(f"{what}, such as {quoted(name)}" for what, name in refused.items())
        less = " --drop leaves that out, but the result is then another model." if whole else ""
        raise ConfigError(f"vLLM does not take {what}.{less} To serve the whole: {way}")
    notes = []
    if any(kind == "head" for _, kind in beside):
        notes.append("vLLM before August 2026 refuses saved score and classifier modules: --drop leaves them out")
    if any(kind == "base" for _, kind in beside):
        notes.append(
            "vLLM ignores the copies of base weights beside an embedding or lm_head: this is right only if they are "
            "equal"
        )
    return notes


def vllm_rank(largest: int) -> int:
    """The smallest max_lora_rank that serves this rank. Raises `ConfigError` if there is none."""
    rank = next((r for r in VLLM_RANKS if r >= largest), None)
    if rank is None:
        raise ConfigError(
            f"vLLM accepts ranks up to {VLLM_RANKS[-1]}, but this adapter has {largest}: `fedlora resize "
            f"--rank {VLLM_RANKS[-1]}` cuts it."
        )
    return rank
