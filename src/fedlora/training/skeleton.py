"""A base model without its weights: shapes, and what training keeps in memory, from its configuration alone.

transformers builds the model and peft its adapters on torch's meta device, whose tensors have shapes and no numbers. A
forward pass there says which tensors autograd would keep, whatever the architecture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlora.adapters.io import read_model
from fedlora.errors import ConfigError
from fedlora.training.hub_models import source
from fedlora.training.loading import dequantised
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, Task


@dataclass(frozen=True)
class Shapes:
    """modules: adapted matrix -> (d_out, d_in). heads: fully trained tensor -> how many numbers it holds."""

    modules: Mapping[str, tuple[int, int]]
    heads: Mapping[str, int]


class Skeleton:
    """A base model with LoRA, on the meta device.

    Raises:
        ConfigError: there is no such model, transformers or peft cannot build it, or a target does not fit.
    """

    def __init__(
        self, path: str | os.PathLike[str], task: Task, lora: LoRASettings, classes: int, *, checkpointing: bool = False
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

        kind: Any = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
        place = Path(path)
        path = dequantised(place) if place.suffix == ".gguf" and place.is_file() else path
        where = source(path)
        try:
            config = AutoConfig.from_pretrained(path, **where, **({"num_labels": classes} if classes else {}))
            with torch.device("meta"):
                self._base: nn.Module = kind.from_config(config, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(f"the model {os.fspath(path)!r} cannot be built: {str(error).splitlines()[0]}") from error
        self.parameters = sum(parameter.numel() for parameter in self._base.parameters())
        head: Any = self._base.get_output_embeddings() if task == "causal-lm" else None  # type: ignore[operator]
        self.vocabulary = 0 if head is None else len(head.weight)
        with torch.device("meta"):
            self._model = AdaptedModel(self._base, None, task, lora, checkpointing=checkpointing)
            adapter, _ = read_model(self._model.network, self._model.add(1), scaling=lora.unit)
        pairs = {name: lora.factors for name, lora in adapter.modules.items()}
        self.shapes = Shapes(
            {name: (len(B), A.shape[1]) for name, (B, A) in pairs.items()},
            {name: head.numel() for name, head in adapter.heads.items()},
        )

    def activations(self, examples: int, tokens: int) -> tuple[int, int]:
        """(all, the largest) of the bytes that autograd keeps of a forward pass in float32, the weights aside.

        Raises:
            ConfigError: the architecture cannot run without numbers.
        """
        weights = {_storage(parameter) for parameter in self._model.network.parameters()}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in weights:
                kept[_storage(tensor)] = tensor
            return tensor

        self._model.trainable()
        try:
            with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                ids = torch.zeros(examples, tokens, dtype=torch.long)
                labels = ids if self.vocabulary else ids[:, 0]
                mask = torch.ones(examples, 1, tokens, tokens, dtype=torch.bool)  # a smaller one would be looked into
                self._model.network.train()(input_ids=ids, attention_mask=mask, labels=labels)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"it cannot be run without numbers: {str(error).splitlines()[0]}") from error
        sizes: Sequence[int] = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
        return sum(sizes), max(sizes, default=0)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


__all__ = ["Shapes", "Skeleton"]
