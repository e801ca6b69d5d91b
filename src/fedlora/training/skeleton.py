"""A base model without its weights: what is trained and how long texts may be, from its configuration alone.

transformers builds the model and peft its adapters on torch's meta device, whose tensors have shapes and no numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedlora.adapters.io import read_model
from fedlora.training.load import config_of, longest_input, positions_of, readable, tokenizer_of
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, Targets, Task
from fedlora.training.targets import adapted


def bare_network(
    path: str | os.PathLike[str], task: Task, classes: int = 0, *, revision: str | None = None,
    dropout: float | None = None,
) -> nn.Module:  # fmt: skip
    """The model on the meta device. Raises `ConfigError` if there is none, or transformers cannot build it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
    config = config_of(path, revision, classes=classes, dropout=dropout)
    with readable(f"the model {os.fspath(path)!r} cannot be built"), torch.device("meta"):
        network: nn.Module = kind.from_config(config, dtype=torch.float32)
    return network


def check_targets(path: str | os.PathLike[str], task: Task, targets: Targets) -> None:
    """`targets.adapted` for the model at `path` before its weights are read. Raises `ConfigError`."""
    adapted(bare_network(path, task), targets)


def longest_of(path: str | os.PathLike[str], task: Task) -> int | None:
    """`longest_input` of a model whose weights are not read. Raises `ConfigError`."""
    network: Any = bare_network(path, task)
    return longest_input(network, positions_of(network.config))


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
        path, revision: as `load.model_place`. classes: their number; 0 for a language model.

    Raises:
        ConfigError: there is no such model, transformers or peft cannot build it, or a target does not fit.
    """

    def __init__(
        self, path: str | os.PathLike[str], task: Task, lora: LoRASettings, classes: int, *,
        revision: str | None = None, dropout: float | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer: Any = tokenizer_of(path, revision)
        network: Any = bare_network(path, task, classes, revision=revision, dropout=dropout)
        self.longest = longest_input(network, positions_of(network.config))
        with torch.device("meta"):
            model = AdaptedModel(network, lora, task=task)
            adapter, _ = read_model(model.network, model.add(1), scaling=lora.unit)
        pairs = {name: lora.factors for name, lora in adapter.modules.items()}
        self.shapes = Shapes(
            {name: (len(B), A.shape[1]) for name, (B, A) in pairs.items()},
            {name: tuple(head.shape) for name, head in adapter.heads.items()},
        )


__all__ = ["Shapes", "Skeleton", "bare_network", "check_targets", "longest_of"]
