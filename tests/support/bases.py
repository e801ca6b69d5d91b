"""A tiny base model and an adapter of it in two folders, and ways to spoil them, for export and `validate --model`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from peft import LoraConfig
from torch import Tensor

from support.command_line import Said
from support.peft_models import trained
from support.tiny_models import llama


def small(folder: Path, dtype: torch.dtype = torch.float32, build: Any = llama, **fields: Any) -> tuple[Path, Path]:
    """(adapter, base), with random numbers in all that trains."""
    build().to(dtype).save_pretrained(folder / "base")
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | fields
    trained(build, LoraConfig(**options)).save_pretrained(folder / "adapter", save_embedding_layers=False)
    return folder / "adapter", folder / "base"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """The weights of an adapter or a model, changed. They are read first: a mapped file must not be written over."""
    (file,) = folder.glob("*model.safetensors")
    tensors = safetensors.torch.load(file.read_bytes())
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def reconfigure(folder: Path, **more: Any) -> None:
    path = folder / ("adapter_config.json" if (folder / "adapter_config.json").exists() else "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def refused(main: Callable[..., Said], adapter: Path, base: Path, why: str) -> None:
    """By `export` and by `validate --model`, in one line, with nothing written."""
    for command in (["export", "--format", "merged", adapter, "-o", adapter.parent / "full"], ["validate", adapter]):
        done = main(*command, "--model", base)
        assert done.code == 2 and done.err.count("\n") == 1 and re.search(why, done.err), done.err
    assert not (adapter.parent / "full").exists()
