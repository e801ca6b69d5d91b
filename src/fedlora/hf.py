"""Keep your trainer: one line federates a script with a `transformers.Trainer`, or with a loop on a PEFT model.

    trainer = SFTTrainer(model, args=..., train_dataset=..., peft_config=LoraConfig(...))
    federate(trainer)
    trainer.train()

Run alone, the script does what it did before. Started by a federation as `train.command`, it trains the round's adapter
and hands it back. `HFTrainer` lets the engine play several trainers in one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fedlora.adapters.io import AdapterSpec, load_into_model, read_model
from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.trainer import Trained
from fedlora.errors import ConfigError
from fedlora.training.models import rank_fields, trainable
from fedlora.training.round_folder import Part, RoundFacts, RoundFolder, trained_parts
from fedlora.training.targets import in_words

T = TypeVar("T")
_MEANWHILE = "fedlora"  # an adapter's name, while the script's own one is replaced


def federate(trainer: T, *, examples: int | None = None) -> T:
    """Make a script a client of a federation, if one started it; otherwise do nothing. Returns its argument.

    With a trainer, the model becomes the round's here, and `trainer.train()` hands it back when it ends. With a PEFT
    model, `model.save_pretrained(...)` hands it back; call `federate` before you make the optimiser. The rank and the
    scaling are the round's, everything else is the script's. Optimiser and learning rate schedule begin anew in each
    round, as in the papers. Round k uses the script's seed + k - 1, so that rounds draw different batches.

    Args:
        trainer: a `transformers.Trainer` on a PEFT LoRA model, or such a model.
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
    folder = RoundFolder.named()
    if folder is None:
        return trainer
    facts, adapter = folder.read()
    if isinstance(trainer, nn.Module):
        if examples is None:
            raise ConfigError("federate(model) of a loop needs examples=len(your data).")
        _check_classes(trainer, facts.labels)
        _install(trainer, adapter, facts.scaling, facts.trains)
        _hand_back_on_saving(trainer, folder, facts, examples)
    else:
        _hand_back_after_training(trainer, folder, facts, adapter, examples)
    ranks = sorted(set(adapter.ranks.values()))
    print(f"fedlora: round {facts.round} of {facts.client!r}, rank {ranks}, scaling {facts.scaling:g}", file=sys.stderr)
    return trainer


class HFTrainer:
    """Trains each client by its own `transformers.Trainer`, in this process. Implements `core.trainer.Trainer`.

    Args:
        trainers: client -> its trainer, with its data; their models may be one and the same PEFT model.
        scaling: of the federation's adapters; default: that of the first model.

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

    def __init__(self, trainers: Mapping[str, Any], *, scaling: float | None = None) -> None:
        self._trainers = dict(trainers)
        for client, trainer in self._trainers.items():
            if trainer.optimizer is not None:
                raise ConfigError(
                    f"the trainer of {client!r} has an optimiser object (optimizers=...), which is tied to the first "
                    f"round's parameters. Give optimizer_cls_and_kwargs, or name it in args.optim."
                )
        self._scaling = scaling or _scale_of(next(iter(self._trainers.values())).model)

    def seed_adapter(self) -> tuple[Adapter, AdapterSpec]:
        """The common start: the first model's adapter as it is now, and its spec."""
        model = next(iter(self._trainers.values())).model
        adapter, spec = read_model(model, _active(model), scaling=self._scaling)
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
        _check_trainer(trainer, adapter)
        _install(trainer.model, adapter, self._scaling, trained_parts(download.roles))
        trainer.optimizer = trainer.lr_scheduler = None
        if not download.round:  # later rounds set their own
            set_seed(trainer.args.seed)
        _seed_round(trainer, download.round)
        output = trainer.train()
        made, _ = read_model(trainer.model, _active(trainer.model), scaling=self._scaling)
        seen = _seen_by(trainer)
        return Trained(made.map(lambda t: t.cpu()), _examples_of(trainer), float(output.training_loss), position + seen)


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
    trainer: Any, folder: RoundFolder, facts: RoundFacts, adapter: Adapter, examples: int | None
) -> None:
    if not all(hasattr(trainer, name) for name in ("model", "args", "train")):
        raise ConfigError(
            f"federate takes a transformers.Trainer or a PEFT model; got a {type(trainer).__name__}. For a loop of "
            f"your own: federate(model, examples=len(data))."
        )
    _check_trainer(trainer, adapter)
    _check_classes(trainer.model, facts.labels)
    rebuilt = _install(trainer.model, adapter, facts.scaling, facts.trains)
    if rebuilt and trainer.optimizer is not None:
        raise ConfigError(
            f"the trainer has an optimiser object (optimizers=...) for parameters of another rank or scaling than this "
            f"round's (rank {sorted(set(adapter.ranks.values()))}, scaling {facts.scaling:g}). Give r and lora_alpha "
            f"in LoraConfig as the federation has them, or optimizer_cls_and_kwargs instead of the object."
        )
    inner = trainer.train

    def train(*args: Any, **kwargs: Any) -> Any:
        if any(args[:1]) or kwargs.get("resume_from_checkpoint"):
            raise ConfigError(
                "trainer.train(resume_from_checkpoint=...) would replace the round's adapter by a checkpoint of "
                "another round. In a federation, call trainer.train() without it."
            )
        _seed_round(trainer, facts.round - 1)
        output = inner(*args, **kwargs)
        if trainer.is_world_process_zero():
            made, spec = read_model(trainer.model, _active(trainer.model), scaling=facts.scaling)
            count = _examples_of(trainer) if examples is None else examples
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
        made, spec = read_model(model, _active(model), scaling=facts.scaling)
        folder.write_result(facts, made, spec, examples, float(torch.stack(losses).mean()))
        return saved

    model.save_pretrained = save_pretrained


# ------------------------------------------------------------------------------------------------------------ a trainer


def _check_trainer(trainer: Any, adapter: Adapter) -> None:
    """Raise `ConfigError` for trainers that cannot play a round."""
    if trainer.model_init is not None:
        raise ConfigError("model_init makes a new model in train(), without the round's adapter: pass model instead.")
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError("FSDP and DeepSpeed shard the adapter, and federate cannot read it: train without them.")
    if adapter.base and hasattr(trainer, "ref_model") and trainer.ref_model is None:
        raise ConfigError(
            f"{type(trainer).__name__} compares with its own base model, and this method moves the base weights "
            f"(fedex-lora, flora, ...): the reference would move with them. Pass a ref_model, or use another method."
        )


def _seed_round(trainer: Any, number: int) -> None:
    """Let a later round than the first, number 0, draw other batches."""
    from transformers import set_seed

    if number:
        set_seed(trainer.args.seed + number)
        if trainer.args.data_seed is not None:
            trainer.accelerator.dataloader_config.data_seed = trainer.args.data_seed + number


def _examples_of(trainer: Any) -> int:
    try:
        return len(trainer.train_dataset)
    except TypeError:  # a stream
        return _seen_by(trainer)


def _seen_by(trainer: Any) -> int:
    """The examples of the last `train()`."""
    args = trainer.args
    return int(trainer.state.global_step * args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


# ------------------------------------------------------------------------------------------------------------ the model


def _install(model: Any, adapter: Adapter, scaling: float, trains: list[Part]) -> bool:
    """Set the model to the round's base and adapter, at its ranks and scaling. Returns whether the adapter's parameters
    are new ones, as they must be if ranks or scaling differ."""
    name = _active(model)
    now, _ = read_model(model, name, scaling=scaling)
    rebuilt = now.ranks != adapter.ranks or any(scale != scaling for scale in _scales(model, name))
    if set(now.modules) != set(adapter.modules) or set(now.heads) != set(adapter.heads):
        odd = sorted({*now.modules, *now.heads} ^ {*adapter.modules, *adapter.heads})
        raise ConfigError(
            f"the script's model and the federation's adapter differ in {odd[0]!r} ({len(odd)} such). The script "
            f"adapts {in_words(now.modules)}, the federation {in_words(adapter.modules)}: give target_modules and "
            f"modules_to_save of LoraConfig the same names as lora.targets and lora.saved of the federation."
        )
    if rebuilt:
        _rebuild(model, name, adapter, scaling)
    load_into_model(model, adapter, name, scaling=scaling)
    trainable(model, name, B="B" in trains, A="A" in trains, heads="heads" in trains)
    return rebuilt


def _rebuild(model: Any, name: str, adapter: Adapter, scaling: float) -> None:
    """Replace the model's adapter by one of the round's ranks and scaling; all else as the script configured it."""
    config, distinct = copy.deepcopy(model.peft_config[name]), set(adapter.ranks.values())
    if scaling not in _scales(model, name):
        own = ", ".join(f"{scale:g}" for scale in sorted(_scales(model, name)))
        print(f"fedlora: alpha / r is {scaling:g} in this federation; {own} of LoraConfig is not used", file=sys.stderr)
    ranked = rank_fields(distinct.pop() if len(distinct) == 1 else adapter.ranks, scaling)
    for field, value in {**ranked, "use_rslora": False}.items():
        setattr(config, field, value)
    dtypes = {path: p.dtype for path, p in model.named_parameters() if f".{name}." in path}
    with torch.random.fork_rng(devices=[]):  # peft draws weights that are replaced at once
        for new, old in ((_MEANWHILE, name), (name, _MEANWHILE)):  # peft does not delete a model's only adapter
            model.add_adapter(new, config)
            model.set_adapter(new)
            model.delete_adapter(old)
    for path, parameter in model.named_parameters():
        if path in dtypes:
            parameter.data = parameter.data.to(dtypes[path])


def _active(model: Any) -> str:
    """The name of the adapter that trains. Raises `ConfigError`."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ConfigError(
            f"federate needs a PEFT LoRA model; the script trains a {type(model).__name__}. Wrap it with "
            f"peft.get_peft_model(model, LoraConfig(...)), or give the trainer peft_config=LoraConfig(...)."
        )
    names = list(model.active_adapters)
    if len(names) != 1:
        raise ConfigError(f"federate needs one active adapter; the model has {names}: call model.set_adapter(NAME).")
    return str(names[0])


def _scales(model: Any, name: str) -> set[float]:
    """alpha / r, or what stands for it, of the model's LoRA layers."""
    return {float(m.scaling[name]) for m in model.modules() if name in getattr(m, "lora_A", {})}


def _scale_of(model: Any) -> float:
    scales = _scales(model, _active(model))
    if len(scales) != 1:
        raise ConfigError(f"the model's layers have the scales {sorted(scales)}: give HFTrainer(scaling=...).")
    return scales.pop()


__all__ = ["HFTrainer", "federate"]
