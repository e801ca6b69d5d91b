"""A base model without its weights: what is trained and how long texts may be, from its configuration alone.

transformers builds the model and peft its adapters on torch's meta device, whose tensors have shapes and no numbers.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fedlora.training.load import config_of, longest_input, positions_of, readable
from fedlora.training.settings import Targets, Task
from fedlora.training.targets import adapted


def bare_network(path: str | os.PathLike[str], task: Task) -> nn.Module:
    """The model on the meta device. Raises `ConfigError` if there is none, or transformers cannot build it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if task == "sequence-classification" else AutoModelForCausalLM
    config = config_of(path, None, classes=0, dropout=None)
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


__all__ = ["bare_network", "check_targets", "longest_of"]
