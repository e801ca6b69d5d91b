"""A base model without its weights: the shapes of what is trained, from its configuration alone.

transformers builds the model and peft its adapters on torch's meta device, whose tensors have shapes and no numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlora.adapters.io import read_model
from fedlora.training.content import readable
from fedlora.training.hub_models import source
from fedlora.training.loading import dequantised, longest_input, positions_of, set_dropout
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, Task
from fedlora.training.targets import adapted


@dataclass(frozen=True)
class Shapes:
    """modules: adapted matrix -> (d_out, d_in). heads: fully trained tensor -> its shape."""

    modules: Mapping[str, tuple[int, int]]
    heads: Mapping[str, tuple[int, ...]]

    @property
    def head_numbers(self) -> int:
        """How many numbers all heads hold together."""
        return sum(map(math.prod, self.heads.values()))


class Skeleton:
    """A base model with LoRA, on the meta device, and its tokenizer.

    Args:
        path, revision: as `content.model_place`. classes: their number; 0 for a language model.

    Raises:
        ConfigError: there is no such model, transformers or peft cannot build it, or a target does not fit.
    """

    def __init__(
        self, path: str | os.PathLike[str], task: Task, lora: LoRASettings, classes: int, *,
        revision: str | None = None, dropout: float | None = None,
    ) -> None:  # fmt: skip
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

        kind: Any = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
        place = Path(path)
        path = dequantised(place) if place.suffix == ".gguf" and place.is_file() else path
        where = source(path, revision)
        with readable(f"the model {os.fspath(path)!r} cannot be built"):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, **where)
            config = AutoConfig.from_pretrained(path, **where, **({"num_labels": classes} if classes else {}))
            set_dropout(config, dropout)
            with torch.device("meta"):
                base: nn.Module = kind.from_config(config, dtype=torch.float32)
        self.longest = longest_input(base, positions_of(config))
        adapted(base, lora.targets)  # stricter than peft
        with torch.device("meta"):
            model = AdaptedModel(base, None, task, lora)
            adapter, _ = read_model(model.network, model.add(1), scaling=lora.unit)
        pairs = {name: lora.factors for name, lora in adapter.modules.items()}
        self.shapes = Shapes(
            {name: (len(B), A.shape[1]) for name, (B, A) in pairs.items()},
            {name: tuple(head.shape) for name, head in adapter.heads.items()},
        )


__all__ = ["Shapes", "Skeleton"]
