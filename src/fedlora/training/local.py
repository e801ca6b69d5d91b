"""Local training: what one client does in a round, with torch, transformers and peft.

A client's work is a function of its download, its own data, the run's seed, the round, and its position in the data.
So running one client alone reproduces its round, and resuming needs nothing else stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.trainer import Trained
from fedlora.data.text import TextData
from fedlora.doing import stepped
from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed
from fedlora.training.encoding import Cut, Encoded, Example, check_length, collate, cut_of, encode, scored
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import ClassWeights, TrainSettings


class RoundTrainer(ABC):
    """The part common to all trainers on one shared model: data stream, seeds, steps, trainable parameters.

    A subclass provides a client's examples and the loss.
    """

    def __init__(self, model: AdaptedModel, settings: TrainSettings, *, seed: int) -> None:
        self._model = model
        self._settings = settings
        self._seed = seed

    @abstractmethod
    def examples(self, client: str) -> Sequence[Any]:
        """A client's examples. Raises `ConfigError` if it has none."""

    @abstractmethod
    def losses(self, client: str, picked: list[Any]) -> Iterator[Tensor]:
        """The mean loss over `picked`, as one summand for each micro-batch."""

    def ready(self) -> nn.Module:
        """The network, ready for training; called once a round, after its adapter is in place."""
        return self._model.network.train()

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """Train `adapter`, starting at example `position` of the client's data stream.

        Returns the complete adapter, its mean training loss per example (NaN where it diverged), and the new position.

        Raises:
            ConfigError: the client has no data.
        """
        client, s = download.client.id, self._settings
        data = self.examples(client)
        roles = download.roles
        self._model.activate(adapter)
        parameters = self._model.trainable(B=roles.B != "frozen", A=roles.A != "frozen", heads=roles.heads != "frozen")
        device = self._model.device
        self.ready()
        batch, steps = self._batches(client)
        order = self.order(client, position)
        optimizer = optimizer_for(parameters, s, download.round)
        total, seen = 0.0, 0
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(derive_seed(self._seed, "train", download.round, client))
            for _ in stepped(range(steps), "training"):
                for loss in self.losses(client, [data[next(order)] for _ in range(batch)]):
                    loss.backward()  # type: ignore[no-untyped-call]
                    total += float(loss.detach()) * batch
                seen += batch
                if s.clip:
                    nn.utils.clip_grad_norm_(parameters, s.clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return Trained(self._model.read(), len(data), total / seen, position + seen)

    def _batches(self, client: str) -> tuple[int, int]:
        """A client's (examples per step, steps per round)."""
        size, s = len(self.examples(client)), self._settings
        batch = min(s.batch_size, size)
        return batch, s.steps or math.ceil(s.epochs * size / batch)

    def examples_a_round(self, client: str) -> int:
        """How far one round moves a client's position in its data."""
        return math.prod(self._batches(client))

    def order(self, client: str, position: int) -> Iterator[int]:
        """Endless indices of a client's examples, from `position` on."""
        return _stream(len(self.examples(client)), position, self._seed, client)


def without_data(client: str, data: Mapping[str, Any]) -> str:
    """The message for a client without examples: its list is empty, or its name is unknown."""
    if client in data:
        return f"client {client!r} has no training data: its list of examples is empty. Give it some, or leave it out."
    names = sorted(data)
    return f"client {client!r} has no training data; there are data for {names[:5]}" + (
        f" and {len(names) - 5} more." if len(names) > 5 else "."
    )


class LocalTrainer(RoundTrainer):
    """Trains any client of a run on the one shared model. Implements `core.trainer.Trainer`.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> lora = LoRASettings(targets=["query"])
        >>> model = AdaptedModel.load("model", "classification", lora, labels=data.label_names)
        >>> trainer = LocalTrainer(model, {"site-1": data}, TrainSettings(steps=1), seed=0)
        >>> server = Server(build("glora"))
        >>> begun = start(server, model.seed_adapter(4, seed=0)[0])
        >>> next(simulate(server, [Client("site-1", 4)], trainer, begun, rounds=1)).round
        1
    """

    def __init__(
        self, model: AdaptedModel, data: Mapping[str, TextData], settings: TrainSettings, *, seed: int
    ) -> None:
        super().__init__(model, settings, seed=seed)
        for part in data.values():
            model.check_classes(part.label_names)
        self._data: dict[str, Encoded] = {
            client: encode(
                part, model.tokenizer, max_length=settings.max_length, loss_on=settings.loss_on,
                template=settings.template, long_responses=settings.long_responses,
            )
            for client, part in data.items()
        }  # fmt: skip
        for examples in self._data.values():
            check_length(examples, model.longest)
        self._class_weights = {client: weigh_classes(part, settings.class_weights) for client, part in data.items()}

    def cut(self) -> dict[str, Cut]:
        """Client -> how much of its data did not fit into max_length."""
        return {client: cut_of(data) for client, data in self._data.items()}

    def examples(self, client: str) -> Encoded:
        """A client's encoded examples. Raises `ConfigError` if it has none."""
        data = self._data.get(client)
        if not data:
            raise ConfigError(without_data(client, self._data))
        return data

    def losses(self, client: str, picked: list[Example]) -> Iterator[Tensor]:
        s, network, device = self._settings, self._model.network, self._model.device
        weights = self._class_weights[client]
        labels = sum(scored(example, weights) for example in picked)
        micro = micro_batch(len(picked), s.accumulation, device)
        if micro < len(picked):
            picked.sort(key=lambda example: len(example["input_ids"]))
        for k in range(0, len(picked), micro):
            part = picked[k : k + micro]
            inputs = collate(part, self._model.tokenizer, device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=s.bf16):
                loss = _mean_loss(network, inputs, weights) * (sum(scored(e, weights) for e in part) / labels)
            yield loss


def weigh_classes(data: TextData, weights: ClassWeights | None) -> tuple[float, ...] | None:
    """One client's weight for each class, by index; None if classes are not weighted.

    The loss of a batch is sum_i w(y_i) l_i / sum_i w(y_i), as in torch's CrossEntropyLoss(weight=w).

    Args:
        data: the client's training data: n examples, n_c of class c, k classes that occur.
        weights: "balanced": w_c = n / (k n_c), scikit-learn's formula, from this client's own counts, which it need not
            disclose to anybody. Each of *its* classes then counts equally for it; the federation's classes do not, if
            some clients lack some. A class that it lacks has weight 0, which no example uses.

    Raises:
        ConfigError: the data have no classes.
    """
    if weights is None:
        return None
    if data.labels is None:
        raise ConfigError(
            "train.class_weights needs classes, and instruction data has none; leave it out for a causal-lm."
        )
    counts = Counter(data.labels)
    return tuple(len(data) / (len(counts) * counts[c]) if counts[c] else 0.0 for c in range(len(data.label_names)))


def _mean_loss(network: nn.Module, inputs: dict[str, Tensor], weights: Sequence[float] | None) -> Tensor:
    """The batch's mean cross entropy; with class weights the weighted mean, as in torch's CrossEntropyLoss(weight)."""
    if weights is None:
        loss: Tensor = network(**inputs).loss
        return loss
    logits = network(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    weight = torch.tensor(weights, device=logits.device)
    return nn.functional.cross_entropy(logits.float(), inputs["labels"], weight)


def _stream(size: int, position: int, seed: int, client: str) -> Iterator[int]:
    """Indices of a client's examples from `position` on: a new permutation each epoch, continuing across rounds."""
    epoch, offset = divmod(position, size)
    while True:
        yield from epoch_order(size, epoch, seed, client)[offset:]
        epoch, offset = epoch + 1, 0


def epoch_order(size: int, epoch: int, seed: int, client: str) -> list[int]:
    """The indices of a client's examples in the order of that epoch."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", client, epoch))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def micro_batch(size: int, accumulation: int | Literal["auto"], device: torch.device) -> int:
    """How many of `size` examples go through the network at once."""
    if accumulation == "auto":
        return max(4, math.ceil(size / 4)) if device.type == "cpu" else size
    return math.ceil(size / accumulation)


def optimizer_for(parameters: list[nn.Parameter], s: TrainSettings, round: int) -> torch.optim.Optimizer:
    """A new optimiser, at the learning rate for `round`."""
    share = round / s.rounds
    if s.schedule != "constant" and share >= 1:
        raise ConfigError(
            f"the learning rate follows a {s.schedule!r} schedule over rounds = {s.rounds}, and this is round "
            f"{round + 1}: the schedule has ended. Set the number of rounds in TrainSettings(rounds=...)."
        )
    scale = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[s.schedule]
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    return kinds[s.optimizer](parameters, lr=s.lr * scale, weight_decay=s.weight_decay)  # type: ignore[call-arg]


__all__ = ["LocalTrainer", "RoundTrainer", "epoch_order", "micro_batch", "optimizer_for", "weigh_classes"]
