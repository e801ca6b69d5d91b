"""Local training: what one client does in a round, with torch, transformers and peft.

A client's work is a function of its download, its own data, the run's seed, the round, and its position in the data.
So running one client alone reproduces its round, and resuming needs nothing else stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.trainer import Trained
from fedlora.data.text import TextData
from fedlora.doing import stepped
from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed
from fedlora.training.encode import Cut, Encoded, check_length, collate, cut_of, encode, scored
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import TrainSettings

Loss = Callable[[nn.Module, Any], Tensor]  # network and batch -> the batch's mean loss, a scalar
Collate = Callable[[list[Any]], Any]
_OF_TEXT = ("max_length", "chat_template")  # settings that a loss of your own does not use


class LocalTrainer:
    """Trains any client of a run on the one shared model. Implements `core.trainer.Trainer`.

    Args:
        data: client -> its text; with `loss`, any list or torch Dataset with a length.
        settings: steps or epochs, optimiser, batch size. seed: of data order, dropout and torch's other randomness.
        loss: for any network: of the network and a batch, the mean over the batch. Base layers with running statistics
            (batch norm) then stay in evaluation mode, since no client may change the base.
        collate: with `loss`, a list of examples -> a batch, which the trainer moves to the network's device.

    Raises:
        ConfigError: data or settings that do not fit the model. DataError: a text that cannot be encoded.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> lora = LoRASettings(target_modules=["query"])
        >>> model = AdaptedModel.load("model", "sequence-classification", lora, labels=data.label_names)
        >>> trainer = LocalTrainer(model, {"site-1": data}, TrainSettings(max_steps=1), seed=0)
        >>> server = Server(build("glora"))
        >>> begun = start(server, model.seed_adapter(4, seed=0)[0])
        >>> next(simulate(server, [Client("site-1", 4)], trainer, begun, rounds=1)).round
        1
    """

    def __init__(
        self, model: AdaptedModel, data: Mapping[str, Any], settings: TrainSettings, *, seed: int,
        loss: Loss | None = None, collate: Collate = default_collate,
    ) -> None:  # fmt: skip
        self._model, self._settings, self._seed = model, settings, seed
        self._loss, self._collate = loss, collate
        self._data: dict[str, Any] = dict(data)
        if loss is not None:
            odd = [k for k in _OF_TEXT if getattr(settings, k) != TrainSettings.model_fields[k].default]
            if odd:
                raise ConfigError(f"TrainSettings.{odd[0]} is for text: with a loss of your own, leave it out.")
            return
        for client, part in data.items():
            if not isinstance(part, TextData):
                raise ConfigError(
                    f"the data of {client!r} are a {type(part).__name__}, not TextData: give loss=, a function of the "
                    f"network and a batch."
                )
            model.check_classes(part.label_names)
            found = encode(
                part.of(client), model.tokenizer, max_length=settings.max_length, template=settings.chat_template
            )
            check_length(found, model.longest)
            self._data[client] = found

    def cut(self) -> dict[str, Cut]:
        """Client -> how much of its text did not fit into max_length."""
        text = self._data if self._loss is None else {}
        return {client: cut_of(data) for client, data in text.items()}

    def examples(self, client: str) -> Sequence[Any]:
        """A client's examples, text encoded. Raises `ConfigError` if it has none."""
        data: Sequence[Any] = self._data.get(client, ())
        if len(data) == 0:
            names = sorted(name for name, some in self._data.items() if len(some))
            raise ConfigError(f"client {client!r} has no training data; there are data for {', '.join(names[:5])}, ...")
        return data

    def order(self, client: str, position: int) -> Iterator[int]:
        """Endless indices of a client's examples, from `position` on: a new permutation each epoch, continuing across
        rounds."""
        size = len(self.examples(client))
        epoch, offset = divmod(position, size)
        while True:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", client, epoch))
            yield from torch.randperm(size, generator=generator).tolist()[offset:]
            epoch, offset = epoch + 1, 0

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
        for module in self._model.network.train().modules():
            if self._loss is not None and isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        batch = min(s.step_size, len(data))
        steps = s.max_steps if s.max_steps > 0 else math.ceil(s.num_train_epochs * len(data) / batch)
        order = self.order(client, position)
        optimizer = optimizer_for(parameters, s, download.round)
        total, device = 0.0, self._model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self._seed, "train", download.round, client))
            for _ in stepped(range(steps), "training"):
                picked = [data[next(order)] for _ in range(batch)]
                for loss in self._losses(picked) if self._loss is None else self._own_loss(self._loss, picked):
                    torch.autograd.backward(loss)
                    total += float(loss.detach()) * batch
                if s.max_grad_norm:
                    nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return Trained(self._model.read(), len(data), total / (steps * batch), position + steps * batch)

    def _losses(self, picked: Encoded) -> Iterator[Tensor]:
        """The mean loss over `picked` text, as one summand for each part that goes through the network at once. Parts
        hold examples of alike length: less padding, and the gradient of the whole, up to rounding."""
        s, network, device = self._settings, self._model.network, self._model.device
        labels = sum(map(scored, picked))
        micro = micro_batch(min(s.batch_size, len(picked)), device)
        if micro < len(picked):
            picked.sort(key=lambda example: len(example["input_ids"]))
        for k in range(0, len(picked), micro):
            part = picked[k : k + micro]
            inputs = collate(part, self._model.tokenizer, device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=s.bf16):
                loss = network(**inputs).loss * (sum(map(scored, part)) / labels)
            yield loss

    def _own_loss(self, loss: Loss, picked: list[Any]) -> Iterator[Tensor]:
        """The caller's mean loss over the examples of a step, as one summand for each batch."""
        device, network, size = self._model.device, self._model.network, self._settings.batch_size
        for k in range(0, len(picked), size):
            part = picked[k : k + size]
            moved = tree_map(lambda x: x.to(device) if hasattr(x, "to") else x, self._collate(part))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._settings.bf16):
                found = loss(network, moved)
            yield found * (len(part) / len(picked))


def micro_batch(size: int, device: torch.device) -> int:
    """How many of a batch's `size` examples go through the network at once: on a CPU a quarter, at least four, to pad
    less; on a GPU all, since many small ones leave it idle."""
    return min(size, max(4, math.ceil(size / 4))) if device.type == "cpu" else size


def optimizer_for(parameters: list[nn.Parameter], s: TrainSettings, round: int) -> torch.optim.Optimizer:
    """A new optimiser, at the learning rate for `round`."""
    share = round / s.rounds
    if s.lr_scheduler_type != "constant" and share >= 1:
        raise ConfigError(
            f"the {s.lr_scheduler_type!r} schedule covers rounds = {s.rounds}, and this is round {round + 1}: set the "
            f"number of rounds in TrainSettings(rounds=...)."
        )
    scale = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[s.lr_scheduler_type]
    kinds: dict[str, Callable[..., torch.optim.Optimizer]]
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[s.optimizer](parameters, lr=s.learning_rate * scale, weight_decay=s.weight_decay)
