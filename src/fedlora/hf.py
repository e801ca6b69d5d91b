"""Keep your trainer: one line federates a script with a `transformers.Trainer`, or with a loop on a PEFT model.

    trainer = SFTTrainer(model, args=..., train_dataset=..., peft_config=LoraConfig(...))
    federate(trainer)
    trainer.train()

Run alone, the script does what it did before. Started by a federation as `train.command`, it trains the round's adapter
and hands it back. `HFTrainer` lets the engine play several trainers in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fedlora.adapters.io import AdapterSpec, read_model
from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.trainer import Trained
from fedlora.errors import ConfigError
from fedlora.training.own_trainers import (
    Between,
    active,
    check_trainer,
    examples_of,
    install,
    scale_of,
    seen_by,
    train_round,
)
from fedlora.training.round_folder import RoundFacts, RoundFolder, trained_parts

T = TypeVar("T")
_OPTIMIZER = "optimizer.pt"  # in the round's folder keep/


def federate(trainer: T, *, optimizer: Between = "reset", examples: int | None = None) -> T:
    """Make a script a client of a federation, if one started it; otherwise do nothing. Returns its argument.

    With a trainer, the model becomes the round's here, and `trainer.train()` hands it back when it ends. With a PEFT
    model, `model.save_pretrained(...)` hands it back; call `federate` before you make the optimiser. The rank and the
    scaling are the round's, everything else is the script's. Round k uses the script's seed + k - 1, so that rounds
    draw different batches.

    Args:
        trainer: a `transformers.Trainer` on a PEFT LoRA model, or such a model.
        optimizer: "reset": optimiser and learning rate schedule begin anew in each round, as in the papers. "keep":
            both go on where the last round of this client ended, and the schedule spans all rounds; trainers only.
        examples: how many this client trains on, its weight in the mean; default: the length of the training data. A
            loop must give it.

    Raises:
        ConfigError: the model has no LoRA that fits the round, or a setting of the trainer cannot work in a federation.

    Example:
        >>> import torch, peft, transformers
        >>> network = transformers.AutoModelForSequenceClassification.from_pretrained("model")
        >>> model = peft.get_peft_model(network, peft.LoraConfig(target_modules=["query"]))
        >>> federate(model, examples=40) is model  # no federation started this process
        True
    """
    if optimizer not in ("reset", "keep"):
        raise ConfigError(f"optimizer must be 'reset' or 'keep'; got {optimizer!r}.")
    folder = RoundFolder.named()
    if folder is None:
        return trainer
    facts, adapter = folder.read()
    if isinstance(trainer, nn.Module):
        if optimizer == "keep" or examples is None:
            raise ConfigError(
                "federate(model) of a loop needs examples=len(your data), and optimizer='keep' is for trainers only: "
                "a loop may store its own optimiser in the folder keep/ of the round."
            )
        _check_classes(trainer, facts.labels)
        install(trainer, adapter, facts.scaling, facts.trains)
        _hand_back_on_saving(trainer, folder, facts, examples)
    else:
        _hand_back_after_training(trainer, folder, facts, adapter, optimizer, examples)
    ranks = sorted(set(adapter.ranks.values()))
    print(f"fedlora: round {facts.round} of {facts.client!r}, rank {ranks}, scaling {facts.scaling:g}", file=sys.stderr)
    return trainer


class HFTrainer:
    """Trains each client by its own `transformers.Trainer`, in this process. Implements `core.trainer.Trainer`.

    Args:
        trainers: client -> its trainer, with its data; their models may be one and the same PEFT model.
        optimizer: as in `federate`. What is kept is in memory: a resumed run begins with new optimisers.
        rounds: how many will be played, for a kept schedule. scaling: of the federation's adapters; default: that of
            the first model.

    Raises:
        ConfigError: as `federate`, or a trainer with an optimiser object of its own.

    Example:
        >>> import torch, peft, transformers
        >>> network = transformers.AutoModelForSequenceClassification.from_pretrained("model")
        >>> model = peft.get_peft_model(network, peft.LoraConfig(target_modules=["query"]))
        >>> args = transformers.TrainingArguments("out", report_to="none", max_steps=1)
        >>> trainer = HFTrainer({"site-1": transformers.Trainer(model, args, train_dataset=[])})
        >>> start_adapter, spec = trainer.seed_adapter()
        >>> spec.scaling
        1.0
    """

    def __init__(
        self,
        trainers: Mapping[str, Any],
        *,
        optimizer: Between = "reset",
        rounds: int = 1,
        scaling: float | None = None,
    ) -> None:
        self._trainers, self._optimizer, self._rounds = dict(trainers), optimizer, rounds
        for client, trainer in self._trainers.items():
            if trainer.optimizer is not None:
                raise ConfigError(
                    f"the trainer of {client!r} has an optimiser object (optimizers=...), which is tied to the first "
                    f"round's parameters. Give optimizer_cls_and_kwargs, or name it in args.optim."
                )
        self._scaling = scaling or scale_of(next(iter(self._trainers.values())).model)
        self._kept: dict[str, dict[str, Any]] = {}

    def seed_adapter(self) -> tuple[Adapter, AdapterSpec]:
        """The common start: the first model's adapter as it is now, and its spec."""
        model = next(iter(self._trainers.values())).model
        adapter, spec = read_model(model, active(model), scaling=self._scaling)
        return Adapter(adapter.map(lambda t: t.cpu()).modules, adapter.map(lambda t: t.cpu()).heads), spec

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """Train the client's round by its trainer.

        Raises:
            ConfigError: no trainer for the client.
        """
        from transformers import set_seed

        client = download.client.id
        if client not in self._trainers:
            raise ConfigError(f"client {client!r} has no trainer; there are {sorted(self._trainers)[:5]}.")
        trainer = self._trainers[client]
        check_trainer(trainer, adapter)
        install(trainer.model, adapter, self._scaling, trained_parts(download.roles))
        trainer.optimizer = trainer.lr_scheduler = None
        before = self._kept.get(client, {}) if self._optimizer == "keep" else None
        if not download.round:  # later rounds set their own
            set_seed(trainer.args.seed)
        rounds = max(self._rounds, download.round + 1)
        output, kept = train_round(trainer, trainer.train, download.round, rounds, before)
        self._kept[client] = kept
        made, _ = read_model(trainer.model, active(trainer.model), scaling=self._scaling)
        seen = seen_by(trainer)
        return Trained(made.map(lambda t: t.cpu()), examples_of(trainer), float(output.training_loss), position + seen)


# --------------------------------------------------------------------------------------------- a script as the program


def _check_classes(model: nn.Module, labels: Sequence[str]) -> None:
    """Raise `ConfigError` if the model numbers its classes in another order than the federation, which would average
    heads of different meanings. A model that does not name its classes (transformers' LABEL_0, ...) is told the order.
    """
    named = dict(getattr(getattr(model, "config", None), "id2label", None) or {})
    own = [str(named[number]) for number in sorted(named)]
    if not labels or own == list(labels):
        return
    order = ", ".join(f"{number} = {name!r}" for number, name in enumerate(labels))
    if own != [f"LABEL_{number}" for number in range(len(own))]:
        raise ConfigError(
            f"this model numbers its classes {own}, and the federation {list(labels)}: heads of different meanings "
            f"would be averaged. Number your labels as the federation does ({order}), in id2label and in the data."
        )
    print(f"fedlora: the federation's classes are {order}; this model names none (id2label)", file=sys.stderr)


def _hand_back_after_training(
    trainer: Any, folder: RoundFolder, facts: RoundFacts, adapter: Adapter, optimizer: Between, examples: int | None
) -> None:
    if not all(hasattr(trainer, name) for name in ("model", "args", "train")):
        raise ConfigError(
            f"federate takes a transformers.Trainer or a PEFT model; got a {type(trainer).__name__}. For a loop of "
            f"your own: federate(model, examples=len(data))."
        )
    check_trainer(trainer, adapter)
    _check_classes(trainer.model, facts.labels)
    rebuilt = install(trainer.model, adapter, facts.scaling, facts.trains)
    if rebuilt and trainer.optimizer is not None:
        raise ConfigError(
            f"the trainer has an optimiser object (optimizers=...) for parameters of another rank or scaling than this "
            f"round's (rank {sorted(set(adapter.ranks.values()))}, scaling {facts.scaling:g}). Give r and lora_alpha "
            f"in LoraConfig as the federation has them, or optimizer_cls_and_kwargs instead of the object."
        )
    inner, file = trainer.train, folder.keep / _OPTIMIZER

    def train(*args: Any, **kwargs: Any) -> Any:
        if any(args[:1]) or kwargs.get("resume_from_checkpoint"):
            raise ConfigError(
                "trainer.train(resume_from_checkpoint=...) would replace the round's adapter by a checkpoint of "
                "another round. In a federation, call trainer.train() without it."
            )
        before = None if optimizer == "reset" else torch.load(file, weights_only=True) if file.exists() else {}
        output, kept = train_round(trainer, lambda: inner(*args, **kwargs), facts.round - 1, facts.rounds, before)
        if trainer.is_world_process_zero():
            if before is not None:
                torch.save(kept, file)
            made, spec = read_model(trainer.model, active(trainer.model), scaling=facts.scaling)
            count = examples_of(trainer) if examples is None else examples
            folder.write_result(facts, made, spec, count, output.training_loss)
        return output

    trainer.train = train


def _hand_back_on_saving(model: Any, folder: RoundFolder, facts: RoundFacts, examples: int) -> None:
    losses: list[torch.Tensor] = []

    def listen(module: nn.Module, inputs: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if module.training and loss is not None:
            losses.append(loss.detach().float().mean())

    model.register_forward_hook(listen)
    if facts.round > 1:
        torch.manual_seed(torch.initial_seed() + facts.round - 1)
    inner = model.save_pretrained

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        saved = inner(*args, **kwargs)
        if not losses:
            raise ConfigError(
                "the model returned no loss in training mode, so this round's loss is unknown: pass labels to the "
                "model, so that its output has one, or write result/ and result.json of the round yourself."
            )
        made, spec = read_model(model, active(model), scaling=facts.scaling)
        folder.write_result(facts, made, spec, examples, float(torch.stack(losses).mean()))
        return saved

    model.save_pretrained = save_pretrained


__all__ = ["HFTrainer", "federate"]
