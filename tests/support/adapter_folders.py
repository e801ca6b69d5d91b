"""Adapters of drawn numbers as PEFT directories, for commands that read files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedlora import Adapter, LoRA, read_adapter, write_adapter
from fedlora.adapters.writer import AdapterSpec
from support.federations import noise

SHAPES = {"bert.encoder.layer.0.attention.self.query": (32, 32), "bert.encoder.layer.1.output.dense": (32, 48)}
HEADS = {"classifier.weight": (3, 32), "classifier.bias": (3,)}


def lora(d_out: int, rank: int, d_in: int, *seed: str | int, dtype: torch.dtype = torch.float64) -> LoRA:
    return LoRA(noise((d_out, rank), *seed, "B", dtype=dtype), noise((rank, d_in), *seed, "A", dtype=dtype))


def saved(folder: Path, name: str, rank: int, *, modules: Sequence[str] = tuple(SHAPES), base: str = "tiny") -> Path:
    """A PEFT directory of float32 factors, with heads."""
    pairs = {m: lora(SHAPES[m][0], rank, SHAPES[m][1], name, m, dtype=torch.float32) for m in modules}
    heads = {h: noise(shape, name, h, dtype=torch.float32) for h, shape in HEADS.items()}
    config = {
        "base_model_name_or_path": base, "task_type": "SEQ_CLS", "target_modules": list(modules),
        "modules_to_save": ["classifier", "score"], "peft_type": "LORA",
    }  # fmt: skip
    write_adapter(folder / name, Adapter(pairs, heads), AdapterSpec(config, 2.0))
    return folder / name


def bare(folder: Path, ranks: Mapping[str, int], *, dtype: torch.dtype = torch.float32, scale: float = 1.0,
         beside: Mapping[str, Tensor] | None = None, seed: str = "", **config: object) -> Path:  # fmt: skip
    """A PEFT directory of 20 x 12 modules with no more fields than peft has ever needed, by hand; alpha = 2 r."""
    folder.mkdir(parents=True)
    tensors = {f"base_model.model.{name}": tensor for name, tensor in (beside or {}).items()}
    for module, rank in ranks.items():
        pair = lora(20, rank, 12, folder.name, module, seed)
        for letter, tensor in pair.tensors().items():
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = (tensor * scale).to(dtype).contiguous()
    common = max(ranks.values())
    patterns = {module: rank for module, rank in ranks.items() if rank != common}
    fields = {"peft_type": "LORA", "r": common, "lora_alpha": 2 * common, "target_modules": list(ranks)} | config
    if patterns:
        fields |= {"rank_pattern": patterns, "alpha_pattern": {m: 2 * r for m, r in patterns.items()}}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def updates(folder: Path) -> dict[str, Tensor]:
    adapter, _ = read_adapter(folder)
    return {name: lora.map(Tensor.double).delta() for name, lora in adapter.modules.items()}
