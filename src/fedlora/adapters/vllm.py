"""What vLLM accepts in an adapter, by its source in September 2026 (vllm/lora: peft_helper.py, lora_model.py).

It reads r, lora_alpha and use_rslora, one scale for all modules, and no patterns; LoRA on linear layers, lm_head and
embed_tokens; a saved `score` or `classifier` (since August 2026; before, modules_to_save had to be empty). It ignores
copies of base weights beside an embedding or lm_head, and raises on any other tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fedlora.adapters.collection import Collection
from fedlora.core.text import quoted
from fedlora.errors import ConfigError

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # accepted values for max_lora_rank
_TENSORS = {
    "head": "fully trained modules", "bias": "trained biases", "added": "biases of the update (lora_bias)",
    "tokens": "trained tokens", "base": "copies of base weights",
}  # fmt: skip
_LAYERS = {"embedding": "LoRA of embeddings", "conv": "LoRA of convolutions", "parameter": "LoRA of bare parameters"}
_KEEPS = " --drop does not help: it leaves out nothing of the update."
_SERVED_HEAD = re.compile(r"(.+\.)?(score|classifier)\.(weight|bias)")


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
        if kind != "head" or not _SERVED_HEAD.fullmatch(name):
            refused.setdefault(_TENSORS[kind], name)
    whole = bool(refused) and _TENSORS["added"] not in refused
    for path, layout in given.layouts.items():
        if layout.kind in _LAYERS and not (layout.kind == "embedding" and path.rpartition(".")[2] == "embed_tokens"):
            refused.setdefault(_LAYERS[layout.kind], path)
            whole = False
    if refused:
        what = "; ".join(f"{what}, such as {quoted(name)}" for what, name in refused.items())
        other = ", unless vLLM's base has the same weights" if set(refused) == {_TENSORS["base"]} else ""
        less = f" --drop leaves out all but the pairs; the result is then another model{other}." if whole else _KEEPS
        raise ConfigError(f"vLLM does not take {what}.{less} To serve the whole: {way}")
    if any(kind == "head" for _, kind in beside):
        return ["vLLM before August 2026 refuses saved score and classifier modules: --drop leaves them out"]
    return []


def vllm_rank(largest: int) -> int:
    """The smallest max_lora_rank that serves this rank. Raises `ConfigError` if there is none."""
    rank = next((r for r in VLLM_RANKS if r >= largest), None)
    if rank is None:
        raise ConfigError(
            f"vLLM accepts ranks up to {VLLM_RANKS[-1]}, but this adapter has {largest}: `fedlora resize "
            f"--rank {VLLM_RANKS[-1]}` cuts it."
        )
    return rank
