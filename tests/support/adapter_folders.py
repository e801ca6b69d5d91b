"""Adapters of drawn numbers as PEFT directories, for commands that read files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedlora import Adapter, LoRA, read_adapter, write_adapter
from fedlora.adapters.io import AdapterSpec
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


def updates(folder: Path) -> dict[str, Tensor]:
    adapter, _ = read_adapter(folder)
    return {name: lora.map(Tensor.double).delta() for name, lora in adapter.modules.items()}
