"""What adapters hold besides LoRA of linear layers, by the names under which it can be left out; what vLLM takes.

vLLM, as its source stood in September 2026 (vllm/lora: peft_helper.py, lora_model.py, utils.py): it reads r,
lora_alpha and use_rslora, one scale for all modules, and no patterns; LoRA of linear layers, lm_head, embed_tokens; a
saved `score` or `classifier` (since pull request 53555, August 2026; before, modules_to_save had to be empty). It
raises on every other tensor. Biases were dropped in 2025; trained tokens are asked for and not there (pull request
55796); experts of target_parameters are read in another orientation than peft's (pull request 52198). Read, not run.
"""

from __future__ import annotations

import re
from collections.abc import Collection as Names
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedlora.adapters.collection import Collection
from fedlora.adapters.layouts import stored_path
from fedlora.core.echo import quoted
from fedlora.errors import ConfigError

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what its max_lora_rank takes

# Name for --drop -> (what, the kinds of tensors beside the pairs, the kinds of layers)
KINDS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "heads": ("fully trained modules (modules_to_save)", ("head",), ()),
    "bias": ("trained biases (bias = all or lora_only)", ("bias",), ()),
    "lora_bias": ("biases of the update (lora_bias)", ("added",), ()),
    "tokens": ("trained tokens (trainable_token_indices)", ("tokens",), ()),
    "base": ("copies of base weights", ("base",), ()),
    "embeddings": ("LoRA of embeddings", (), ("embedding",)),
    "convolutions": ("LoRA of convolutions", (), ("conv",)),
    "experts": ("LoRA of bare parameters (experts)", (), ("parameter",)),
}
_SERVED_HEAD = re.compile(r"(.+\.)?(score|classifier)\.(weight|bias)")
_SERVED_BASE = re.compile(r"(.+\.)?(embed_tokens|lm_head)\.(weight|bias)")


@dataclass(frozen=True)
class Left:
    """What is left of a merge after things were dropped. dropped: kind -> what went, by name."""

    modules: Sequence[str]
    tensors: Sequence[str]
    dropped: Mapping[str, Sequence[str]]
    notes: Sequence[str] = field(default=())


def without(given: Collection, drop: Names[str]) -> Left:
    """The modules and tensors that stay. Raises `ConfigError`: an unknown kind, one that is not there, nothing left."""
    dropped: dict[str, list[str]] = {}
    for name in dict.fromkeys(drop):
        if name not in KINDS:
            raise ConfigError(f"--drop takes {', '.join(KINDS)}; got {name[:80]!r}.")
        dropped[name] = _of_kind(given, name)
        if not dropped[name]:
            raise ConfigError(f"--drop {name}: the adapters have no {KINDS[name][0]}.")
    gone = {name for names in dropped.values() for name in names}
    modules = [module for module in given.modules if module not in gone]
    if not modules:
        raise ConfigError(f"nothing is left to write without {', '.join(dropped)}.")
    tensors = sorted({path for file in given.files for path in file.heads} - gone)
    return Left(modules, tensors, dropped)


def check_vllm(given: Collection, left: Left) -> Left:
    """What is left, if vLLM takes it.

    Raises:
        ConfigError: it does not, with the names under which it can be left out.
    """
    if given.files[0].config.get("layer_replication"):
        raise ConfigError("vLLM knows no layer_replication: write the adapter into its base (fedlora apply) instead.")
    refused: dict[str, str] = {}
    for name in KINDS:
        here = [x for x in _of_kind(given, name) if not _served(name, x)]
        stays = set(left.modules) | set(left.tensors)
        here = [x for x in here if x in stays]
        if here:
            refused[name] = here[0]
    if refused:
        what = "; ".join(f"{KINDS[name][0]}, such as {quoted(x)}" for name, x in refused.items())
        way = " ".join(f"--drop {name}" for name in refused)
        raise ConfigError(
            f"vLLM does not take {what}. {way} leaves that out, and the result is then another model; or serve the "
            f"whole: fedlora apply writes an adapter into its base."
        )
    notes = []
    if any(_SERVED_HEAD.fullmatch(path) for path in left.tensors):
        notes.append("vLLM takes saved score and classifier modules since August 2026; older ones need --drop heads")
    if any(_SERVED_BASE.fullmatch(path) for path in left.tensors):
        notes.append("vLLM ignores the copies of base weights beside an embedding or lm_head: right if they are equal")
    return Left(left.modules, left.tensors, left.dropped, [*left.notes, *notes])


def vllm_rank(largest: int) -> int:
    """The least max_lora_rank that serves this one. Raises `ConfigError` where there is none."""
    rank = next((r for r in VLLM_RANKS if r >= largest), None)
    if rank is None:
        raise ConfigError(
            f"vLLM takes ranks up to {VLLM_RANKS[-1]}, and this would have {largest}: give --rank {VLLM_RANKS[-1]} or "
            f"less."
        )
    return rank


def _of_kind(given: Collection, name: str) -> list[str]:
    _, tensors, layers = KINDS[name]
    if tensors:
        return given.heads_of(tensors)
    layouts = given.layouts
    return [m for m in given.modules if layouts[m if m in layouts else stored_path(m)].kind in layers]


def _served(name: str, x: str) -> bool:
    if name == "heads":
        return _SERVED_HEAD.fullmatch(x) is not None
    if name == "base":
        return _SERVED_BASE.fullmatch(x) is not None
    return name == "embeddings" and x.rpartition(".")[2] == "embed_tokens"
