"""A base model without its weights: shapes, and what training keeps in memory, from its configuration alone.

transformers builds the model and peft its adapters on torch's meta device, whose tensors have shapes and no numbers. A
forward pass there says which tensors autograd would keep, whatever the architecture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlora.adapters.io import read_model
from fedlora.errors import ConfigError
from fedlora.training.bfloat16 import has_instructions
from fedlora.training.content import readable
from fedlora.training.hub_models import source
from fedlora.training.loading import dequantised, longest_input, positions_of, set_dropout
from fedlora.training.local import micro_batch
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import DType, LoRASettings, Task, TrainSection
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


@dataclass(frozen=True)
class Memory:
    """Bytes of one process on its device at the peak, estimated. weights: the base's, with copies in the type that
    computes. adapters: of all distinct ranks, with gradient and optimiser. activations: of one micro-batch, or the
    logits of an evaluation, if these are more.

    What torch, its libraries, the data and the server's state take is not in it, nor freed memory that the allocator
    keeps. Beside measured runs on a CPU (`tests/training/test_skeleton.py`) it was right within a factor of 2.
    """

    weights: int
    adapters: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.activations


class Skeleton:
    """A base model with LoRA, on the meta device, and its tokenizer.

    Args:
        path, revision: as `content.model_place`. classes: their number; 0 for a language model.

    Raises:
        ConfigError: there is no such model, transformers or peft cannot build it, or a target does not fit.
    """

    def __init__(
        self, path: str | os.PathLike[str], task: Task, lora: LoRASettings, classes: int, *,
        revision: str | None = None, dropout: float | None = None, checkpointing: bool = False,
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
                self._base: nn.Module = kind.from_config(config, dtype=torch.float32)
        self.longest = longest_input(self._base, positions_of(config))
        self._kept: dict[tuple[int, int], tuple[int, int]] = {}  # (examples, tokens) -> what `activations` found
        self.parameters = sum(parameter.numel() for parameter in self._base.parameters())
        head: Any = self._base.get_output_embeddings() if task == "causal-lm" else None
        self.vocabulary = 0 if head is None else len(head.weight)
        adapted(self._base, lora.targets)  # stricter than peft
        with torch.device("meta"):
            self._model = AdaptedModel(self._base, None, task, lora, checkpointing=checkpointing)
            adapter, _ = read_model(self._model.network, self._model.add(1), scaling=lora.unit)
        pairs = {name: lora.factors for name, lora in adapter.modules.items()}
        self.shapes = Shapes(
            {name: (len(B), A.shape[1]) for name, (B, A) in pairs.items()},
            {name: tuple(head.shape) for name, head in adapter.heads.items()},
        )

    def memory(
        self, ranks: Collection[Mapping[str, int]], train: TrainSection, tokens: int, *, device: str, dtype: DType,
        bf16: bool, four_bit: bool, scored: int,
    ) -> Memory:  # fmt: skip
        """What a process takes on the device at its peak, if each text has `tokens` tokens or all that the model reads.

        Args:
            ranks: each distinct client's, by module. scored: texts in a batch of the evaluation.
        """
        batch = micro_batch(train.batch_size, train.accumulation, torch.device(device.partition(":")[0]))
        tokens = min(tokens, self.longest or tokens)
        kept, largest = self.activations(batch, tokens)
        by_hand = device == "cpu" and not has_instructions()
        if bf16 and not by_hand:  # norms and losses stay float32
            kept, largest = kept * 3 // 4, largest * 3 // 4
        weight = 0.6 if four_bit else {"float32": 4, "bfloat16": 2}[dtype]
        copies = (4 if by_hand else 2) if bf16 and dtype == "float32" else 0  # as products see them, for the backward
        sizes = [sum(r * sum(self.shapes.modules[name]) for name, r in each.items()) for each in ranks]
        heads = self.shapes.head_numbers
        trained = max(sizes) + heads
        state = {"adam": 8, "adamw": 8, "sgd": 0}[train.optimizer]
        logits = 2 * 4 * scored * tokens * self.vocabulary
        return Memory(
            weights=int(self.parameters * (weight + copies)),
            adapters=4 * (sum(sizes) + heads * len(sizes)) + trained * (4 + state),
            activations=max(kept + 2 * largest, logits),
        )

    def activations(self, examples: int, tokens: int) -> tuple[int, int]:
        """(all, the largest) of the bytes that autograd keeps of a forward pass in float32, the weights aside.

        Raises:
            ConfigError: the architecture cannot run without numbers.
        """
        if (examples, tokens) in self._kept:
            return self._kept[examples, tokens]
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
        self._kept[examples, tokens] = sum(sizes), max(sizes, default=0)
        return self._kept[examples, tokens]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


__all__ = ["Memory", "Shapes", "Skeleton"]
