"""The full model with an adapter in it, for serving without peft.

    W <- round(W0 + s B A)        by peft, one layer at a time in float64, each rounded once to the written type

What rounding lost of the update is measured layer by layer and told. Before the folder appears, the written model is
loaded as any user would load it, and must answer random tokens as the base with the adapter attached did.
"""

from __future__ import annotations

import gc
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import set_peft_model_state_dict
from torch import Tensor

from fedlora.adapters.reader import WEIGHTS_FILE, AdapterFile
from fedlora.adapters.truncation import name_of
from fedlora.adapters.writer import base_line
from fedlora.core import files
from fedlora.core.folders import FolderKind, check_target, replacing_folder
from fedlora.core.text import quoted
from fedlora.data.hub import readable
from fedlora.doing import stepped
from fedlora.errors import AdapterFormatError, ConfigError, counted
from fedlora.export.attached import WAY_OUT, Attached, attach, check, quiet

_SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # of a tokenizer and of generation


@dataclass(frozen=True)
class Cost:
    """What rounding to the written type lost. loss: as a share of the update's norm, over all layers. vanished: layers
    in which nothing is left of the update."""

    loss: float
    vanished: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """attached: what changed. cost: of rounding. apart: how far the answers of the written model are from those of the
    base with the adapter attached, over how far the adapter moved them."""

    attached: Attached
    cost: Cost
    apart: float


def export_merged(
    file: AdapterFile,
    base: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    *,
    force: bool = False,
) -> Merged:
    """Write the base model with the adapter in it to `out`, with the base's tokenizer and a card.

    Args:
        dtype: of all floating-point tensors; None: the base's own. force: replace any folder that holds a model only.

    Raises:
        AdapterFormatError: the adapter does not fit the base, a number is too large for `dtype`, or the written model
            answers otherwise. ConfigError: the base cannot be read, or `out` cannot be written.
    """
    side = [path for path in sorted(base.iterdir()) if path.suffix in _SIDE_FILES and ".index." not in path.name]
    place: dict[str, Any] = {"force": force, "kind": _kind(side), "inputs": [file.directory, base]}
    check_target(out, **place)
    found = check(file, base)
    model = _loaded(found, file, base, dtype)
    ids = _tokens(model)
    before = _answers(model, ids)
    beside = attach(model, file)
    file.check()
    with quiet():
        set_peft_model_state_dict(beside, safetensors.torch.load_file(file.directory / WEIGHTS_FILE))
    wanted = _answers(beside, ids)
    cost = _merge(beside, dtype)
    types = {model.dtype, dtype or model.dtype}  # of the answers before and after
    full = beside.unload()  # each layer is merged already: this takes peft's layers off
    if dtype is not None:
        full = full.to(dtype)
    if name := _not_finite(full):
        raise AdapterFormatError(
            f"{file.directory}: {name!r} would hold NaN or a number beyond {torch.finfo(full.dtype).max:.6g}, the "
            f"largest of {name_of(full.dtype)}: write with --dtype float32, or find out where it comes from."
        )
    with replacing_folder(out, **place) as building:
        with quiet():
            full.save_pretrained(building)
        del full, model, beside
        gc.collect()  # modules refer to each other, and the next line loads the model again
        for path in side:
            if not (building / path.name).exists():
                shutil.copyfile(path, building / path.name)
        files.write(building / "README.md", _card(file, base, found))
        with quiet():
            again = found.kind.from_pretrained(building, dtype="auto").eval()
        apart = _compare(file, before, wanted, _answers(again, ids), cost, types)
    return Merged(found, cost, apart)


def _kind(side: Sequence[Path]) -> FolderKind:
    """The folder that `export_merged` writes for a base with these files beside its weights."""
    shards = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
    names = "|".join(re.escape(path.name) for path in side)
    return FolderKind("a full model", "config.json", f"{shards}|config.json|generation_config.json|README.md|{names}")


def _loaded(found: Attached, file: AdapterFile, base: Path, dtype: torch.dtype | None) -> Any:
    """The base with its weights, in the class that has all of the adapter's modules, and in `dtype` if that is wider
    than its own: a narrow type would blur the answers that are compared."""
    with quiet(), readable(f"transformers cannot load the base model in {base}"):
        model, info = found.kind.from_pretrained(
            base, config=found.config, dtype="auto", use_safetensors=True, output_loading_info=True
        )
    lacking = sorted(set(info["missing_keys"]) - set(file.heads))
    if lacking:
        raise AdapterFormatError(
            f"{file.directory}: the model ({found.kind.__name__}) needs {quoted(lacking[0])} "
            f"({counted(len(lacking), 'such tensor')}), which neither the base in {base} nor the adapter has: "
            f"transformers would invent its numbers. {WAY_OUT}."
        )
    if odd := _not_finite(model):
        raise ConfigError(f"the base model in {base} holds NaN or Inf in {quoted(odd, 120)}, before any adapter.")
    return model.to(torch.promote_types(model.dtype, dtype or model.dtype)).eval()


@torch.no_grad()
def _merge(model: PeftModel, dtype: torch.dtype | None) -> Cost:
    """Merge each layer in float64, and round it once: what is lost is the rounding alone, also that of float32."""
    named = model.base_model.model.named_modules()
    layers = [(name, module) for name, module in named if isinstance(module, LoraLayer)]
    updates, losses, vanished = [], [], []
    for name, layer in stepped(layers, "merging"):
        weight: Tensor = layer.get_base_layer().weight
        stored = weight.dtype
        before = weight.detach().double()
        weight.data = before.clone()
        for part, factor in layer.named_parameters():
            if not part.startswith("base_layer."):
                factor.data = factor.data.double()
        layer.merge(safe_merge=True)
        merged = weight.detach()
        rounded = merged.to(dtype or stored)
        updates.append(float((merged - before).norm()))
        losses.append(float((rounded.double() - merged).norm()))
        if updates[-1] and bool((rounded == before.to(dtype or stored)).all()):
            vanished.append(name)
        weight.data = rounded
    whole = math.hypot(*updates)
    return Cost(math.hypot(*losses) / whole if whole else 0.0, tuple(vanished))


def _not_finite(model: Any) -> str | None:
    """The name of a tensor that holds NaN or Inf."""
    found = (name for name, t in model.state_dict().items() if t.is_floating_point() and not t.isfinite().all())
    return next(found, None)


def _tokens(model: Any) -> Tensor:
    """(1, n <= 16) random tokens, the same each time."""
    count = min(16, getattr(model.config, "max_position_embeddings", 16))
    vocabulary = model.get_input_embeddings().num_embeddings
    return torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0))


def _answers(model: Any, ids: Tensor) -> Tensor:
    more = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    with torch.inference_mode():
        found: Tensor = model(input_ids=ids, **more)[0]
    return found.double()


def _compare(
    file: AdapterFile, before: Tensor, wanted: Tensor, got: Tensor, cost: Cost, types: set[torch.dtype]
) -> float:
    """How far the written model's answers are off, as a share of the adapter's effect on them.

    In a narrow type each of some dozens of layers rounds its output, in the attached model as in the merged one, so
    answers differ by a few units of that type even if both are right. A layer merged wrongly, or not at all, moves them
    by as much as the adapter itself.
    """
    apart, effect = float((got - wanted).norm()), float((wanted - before).norm())
    noise = 64 * max(torch.finfo(dtype).eps for dtype in types) * float(wanted.norm())
    if not apart <= noise + (0.01 + 2 * cost.loss) * effect:
        raise AdapterFormatError(
            f"{file.directory}: the written model's answers to random tokens are {apart:.2e} off those of peft with "
            f"the adapter attached, which moves them by {effect:.2e}; rounding explains {noise:.1e}. Nothing is "
            f"written. {WAY_OUT}."
        )
    return apart / effect if effect else 0.0


def _card(file: AdapterFile, base: Path, found: Attached) -> str:
    """README.md for the hub, with the base's licence if its card has one."""
    own = base / "README.md"
    try:
        licence = ModelCard(own.read_text(encoding="utf-8")).data.get("license") if own.is_file() else None
    except Exception:  # a card without front matter, or with another's
        licence = None
    return f"""---
library_name: transformers
{f"license: {licence}{chr(10)}" if isinstance(licence, str) and licence.isprintable() else ""}\
{base_line(file.base_model)}tags:
- lora
- fedlora
---

# A full model with a LoRA adapter in it

A base model with an adapter of {counted(len(file.ranks), "module")} merged into its weights:
{counted(len(found.changed), "tensor")} changed.
`transformers.{found.kind.__name__}` loads it.
Measurements of the base model alone do not hold for it.
"""
