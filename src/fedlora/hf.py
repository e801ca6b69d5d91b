"""Keep your trainer: one line federates a script with a `transformers.Trainer`; a loop on a PEFT model needs two.

    trainer = SFTTrainer(model, args=..., train_dataset=..., peft_config=LoraConfig(...))
    federate(trainer)
    trainer.train()

Run alone, the script does what it did before. Started by a federation as `train.command`, it trains the round's adapter
and hands it back. `HFTrainer` lets the engine play several trainers in one process. A trainer keeps all its methods:
its model becomes the round's, and one `TrainerCallback` hands it back.
"""

from __future__ import annotations

import copy
import os
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
from fedlora.training.round_folder import Part, RoundFolder, trained_parts
from fedlora.training.targets import in_words

T = TypeVar("T")
_MEANWHILE = "fedlora"  # an adapter's name, while the script's own one is replaced
_SHARDING = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")  # set by `accelerate launch`


def federate(trainer: T, *, examples: int | None = None) -> T:
    """Make a script a client of a federation, if one started it; otherwise do nothing. Returns its argument.

    The model becomes the round's here. A trainer hands it back when `trainer.train()` ends; a loop calls `federate`
    with its PEFT model before it makes the optimiser, and `hand_back` at its end. The rank and the scaling are the
    round's, everything else is the script's. Optimiser and learning rate schedule begin anew in each round, as in the
    papers. Round k uses the script's seed + k - 1, so that rounds draw different batches. Of several processes that
    train one model together (torchrun, DDP), each calls this, and the first one hands back.

    Args:
        trainer: a `transformers.Trainer` on a PEFT LoRA model, or such a model.
        examples: how many a trainer's client trains on, its weight in the mean; default: the length of its data.

    Raises:
        ConfigError: the model has no LoRA that fits the round, or a setting of the trainer cannot work in a federation.

    Example:
        >>> import torch, peft, transformers
        >>> network = transformers.AutoModelForSequenceClassification.from_pretrained("model")
        >>> model = peft.get_peft_model(network, peft.LoraConfig(target_modules=["query"]))
        >>> federate(model) is model  # no federation started this process
        True
    """
    folder = RoundFolder.named()
    if folder is None:
        return trainer
    facts, adapter = folder.read()
    given: Any = trainer
    loop = isinstance(given, nn.Module)
    if not loop and not all(hasattr(given, name) for name in ("model", "args", "train")):
        raise ConfigError(
            f"federate takes a transformers.Trainer or a PEFT model; got a {type(given).__name__}. For a loop of your "
            f"own: federate(model), and hand_back(model, examples=len(data), loss=...) at its end."
        )
    _check_sharding(given)
    model = _peft_model(given if loop else given.model)
    _check_classes(model, facts.labels)
    if not loop:
        _check_trainer(given, facts.moves_base or bool(adapter.base))
    rebuilt = _install(model, adapter, facts.scaling, facts.trains)
    if loop:
        if facts.round > 1:
            torch.manual_seed(torch.initial_seed() + facts.round - 1)
    else:
        if rebuilt and given.optimizer is not None:
            raise ConfigError(
                f"the trainer has an optimiser object (optimizers=...) for parameters of another rank or scaling than "
                f"this round's (rank {sorted(set(adapter.ranks.values()))}, scaling {facts.scaling:g}). Give r and "
                f"lora_alpha in LoraConfig as the federation has them, or optimizer_cls_and_kwargs instead."
            )
        _seed_round(given, facts.round - 1)
        given.add_callback(_callback(given, examples))
    if _is_first():
        ranks = sorted(set(adapter.ranks.values()))
        print(f"fedlora: round {facts.round} of {facts.client!r}, rank {ranks}, scaling {facts.scaling:g}",
              file=sys.stderr)  # fmt: skip
    return trainer


def hand_back(model: nn.Module, *, examples: int, loss: float) -> None:
    """Give a loop's trained model back to the federation that started it; otherwise do nothing. Of several processes
    that train one model together, the first one gives it.

    Args:
        model: the one given to `federate`, trained. examples: how many this client trains on, its weight in the mean.
        loss: the round's mean training loss, for the records.

    Raises:
        ConfigError: the model is sharded. AdapterFormatError: adapter or loss is not finite: training diverged.

    Example:
        >>> import peft, transformers
        >>> network = transformers.AutoModelForSequenceClassification.from_pretrained("model")
        >>> model = peft.get_peft_model(network, peft.LoraConfig(target_modules=["query"]))
        >>> hand_back(model, examples=40, loss=0.7)  # no federation started this process
    """
    folder = RoundFolder.named()
    if folder is None or not _is_first():
        return
    _check_sharding(model)
    facts, _ = folder.read()
    whole = _peft_model(model)
    made, spec = read_model(whole, _active(whole), scaling=facts.scaling)
    folder.write_result(facts, made.map(lambda t: t.cpu()), spec, examples, loss)


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
        self._scaling = scaling or _scale_of(_peft_model(next(iter(self._trainers.values())).model))

    def seed_adapter(self) -> tuple[Adapter, AdapterSpec]:
        """The common start: the first model's adapter as it is now, and its spec."""
        model = _peft_model(next(iter(self._trainers.values())).model)
        adapter, spec = read_model(model, _active(model), scaling=self._scaling)
        whole = adapter.map(lambda t: t.cpu())
        return Adapter(whole.modules, whole.heads), spec

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """Train the client's round by its trainer.

        Raises:
            ConfigError: no trainer for the client.
        """
        client = download.client.id
        if client not in self._trainers:
            raise ConfigError(f"client {client!r} has no trainer; there are {sorted(self._trainers)[:5]}.")
        trainer = self._trainers[client]
        model = _peft_model(trainer.model)
        _check_trainer(trainer, download.roles.moves_base or bool(adapter.base))
        _install(model, adapter, self._scaling, trained_parts(download.roles))
        trainer.optimizer = trainer.lr_scheduler = None
        _seed_round(trainer, download.round)
        output = trainer.train()
        made, _ = read_model(model, _active(model), scaling=self._scaling)
        return Trained(
            made.map(lambda t: t.cpu()), _examples_of(trainer), float(output.training_loss),
            position + _seen_by(trainer),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ a trainer


def _callback(trainer: Any, examples: int | None) -> Any:
    """What hands the model back at the end of training; after the best checkpoint is loaded, if that is asked for."""
    from transformers import TrainerCallback

    class HandBack(TrainerCallback):  # type: ignore[misc] # transformers has no types here
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                raise ConfigError(
                    "trainer.train(resume_from_checkpoint=...) replaces the round's adapter by a checkpoint of another "
                    "round. In a federation, call trainer.train() without it."
                )

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            loss = next(line["train_loss"] for line in reversed(state.log_history) if "train_loss" in line)
            count = _examples_of(trainer) if examples is None else examples
            hand_back(trainer.model, examples=count, loss=loss)
            trainer.accelerator.wait_for_everyone()

    return HandBack()


def _check_trainer(trainer: Any, moves_base: bool) -> None:
    """Raise `ConfigError` for trainers that cannot play a round."""
    if trainer.model_init is not None:
        raise ConfigError("model_init makes a new model in train(), without the round's adapter: pass model instead.")
    if moves_base and hasattr(trainer, "ref_model") and trainer.ref_model is None:
        raise ConfigError(
            f"{type(trainer).__name__} compares with its own base model, and this federation's method moves the base "
            f"weights (as fedex-lora and flora do): the reference would move with them. Pass a ref_model, or use "
            f"another method."
        )


def _check_sharding(given: Any) -> None:
    """Raise `ConfigError` if processes hold parts of the adapter, which then nobody can read whole."""
    module = given if isinstance(given, nn.Module) else given.model
    sharded = any(type(p).__name__ == "DTensor" for p in module.parameters()) or any(
        type(m).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for m in module.modules()
    )
    asked = any(getattr(given, name, False) for name in ("is_fsdp_enabled", "is_deepspeed_enabled"))
    if sharded or asked or any(os.environ.get(name, "").lower() in ("1", "true") for name in _SHARDING):
        raise ConfigError(
            "FSDP and DeepSpeed shard the adapter over the processes, and fedlora cannot read it: train without them. "
            "Several processes with whole copies of the model (torchrun, DDP) work."
        )


def _seed_round(trainer: Any, number: int) -> None:
    """Let each round, of which the first is number 0, draw its own batches. Before `train`, which makes the sampler."""
    from transformers import set_seed

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


def _is_first() -> bool:
    """Whether this is the first of the processes that train one model together, or the only one."""
    return os.environ.get("RANK", "0") == "0"


# ------------------------------------------------------------------------------------------------------------ the model


def _peft_model(model: Any) -> Any:
    """The PEFT model without what torch puts around it. Raises `ConfigError` if there is none."""
    from peft import PeftModel

    while hasattr(model, "_orig_mod") or isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or model.module
    if not isinstance(model, PeftModel):
        raise ConfigError(
            f"federate needs a PEFT LoRA model; the script trains a {type(model).__name__}. Wrap it with "
            f"peft.get_peft_model(model, LoraConfig(...)), or give the trainer peft_config=LoraConfig(...)."
        )
    if any("_orig_mod" in name.split(".") for name, _ in model.named_modules()):
        raise ConfigError(
            "parts of the model are wrapped by torch.compile, so its modules have other names than the federation's: "
            "call federate first and compile then, or compile the whole model, or module.compile(), which keeps names."
        )
    return model


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
    if _is_first():
        print(f"fedlora: the federation's classes are {order}; this model names none (id2label)", file=sys.stderr)


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
    if scaling not in _scales(model, name) and _is_first():
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


__all__ = ["HFTrainer", "federate", "hand_back"]
