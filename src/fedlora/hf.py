"""Keep your trainer: one line federates a script with a `transformers.Trainer`; a loop on a PEFT model needs two.

    trainer = SFTTrainer(model, args=..., train_dataset=..., peft_config=LoraConfig(...))
    federate(trainer)
    trainer.train()

Run alone, the script does what it did before. Started by a federation as `train.command`, it trains the round's adapter
and hands it back. A trainer keeps all its methods: its model becomes the round's, and one `TrainerCallback` hands it
back.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback, set_seed

from fedlora.adapters.io import load_into_model, read_model
from fedlora.core.lora import Adapter, named_tensors
from fedlora.errors import ConfigError
from fedlora.training.models import rank_fields, trainable
from fedlora.training.round_folder import Part, RoundFolder
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
    own: Any = None if isinstance(trainer, nn.Module) else trainer
    if own is not None and not hasattr(own, "add_callback"):
        raise ConfigError(
            f"federate takes a transformers.Trainer or a PEFT model; got a {type(trainer).__name__}. For a loop of "
            f"your own: federate(model), and hand_back(model, examples=len(data), loss=...) at its end."
        )
    facts, adapter = folder.read()
    _check_sharding(trainer)
    model = _peft_model(trainer if own is None else own.model)
    _check_classes(model, facts.labels)
    if own is not None:
        _check_trainer(own, facts.moves_base or bool(adapter.base))
    _install(model, adapter, facts.scaling, facts.trains)
    if own is None:
        torch.manual_seed(torch.initial_seed() + facts.round - 1)
    else:
        set_seed(own.args.seed + facts.round - 1)  # before `train`, which makes the sampler
        if own.args.data_seed is not None:
            own.accelerator.dataloader_config.data_seed = own.args.data_seed + facts.round - 1
        own.add_callback(_HandBack(own, examples))
    ranks = sorted(set(adapter.ranks.values()))
    _say(f"round {facts.round} of {facts.client!r}, rank {ranks}, scaling {facts.scaling:g}")
    return trainer


def hand_back(model: nn.Module, *, examples: int, loss: float) -> None:
    """Give a loop's trained model back to the federation that started it; otherwise do nothing. Of several processes
    that train one model together, the first one gives it.

    Args:
        model: the one given to `federate`, trained. examples: how many this client trains on, its weight in the mean.
        loss: the round's mean training loss, for the records.

    Raises:
        ConfigError: the model is sharded, or nothing in it was trained. AdapterFormatError: adapter or loss is not
            finite: training diverged.

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
    facts, begun = folder.read()
    whole = _peft_model(model)
    made, spec = read_model(whole, _active(whole), scaling=facts.scaling)
    made = made.map(lambda t: t.cpu())
    was = dict(named_tensors(begun))
    if all(torch.equal(tensor, was[name].to(tensor.dtype)) for name, tensor in named_tensors(made)):
        raise ConfigError(
            "nothing was trained: the adapter is bit for bit as this round began. Make the optimiser after "
            "federate(...), which may give the model new parameters; a trainer takes optimizer_cls_and_kwargs."
        )
    folder.write_result(facts, made, spec, examples, loss)


class _HandBack(TrainerCallback):  # type: ignore[misc] # transformers has no types here
    """Hands the model back at the end of training; after the best checkpoint is loaded, if that is asked for."""

    def __init__(self, trainer: Any, examples: int | None) -> None:
        self._trainer, self._examples = trainer, examples

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:
            raise ConfigError(
                "trainer.train(resume_from_checkpoint=...) replaces the round's adapter by a checkpoint of another "
                "round. In a federation, call trainer.train() without it."
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loss = next(line["train_loss"] for line in reversed(state.log_history) if "train_loss" in line)
        count, data = self._examples, self._trainer.train_dataset
        if count is None:  # of a stream, those that it trained on
            batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            count = len(data) if hasattr(data, "__len__") else state.global_step * batch
        hand_back(self._trainer.model, examples=count, loss=loss)
        self._trainer.accelerator.wait_for_everyone()


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
    kinds = {type(part).__name__ for part in (*module.parameters(), *module.modules())}
    asked = any(getattr(given, name, False) for name in ("is_fsdp_enabled", "is_deepspeed_enabled"))
    asked = asked or any(os.environ.get(name, "").lower() in ("1", "true") for name in _SHARDING)
    if asked or kinds & {"DTensor", "FullyShardedDataParallel", "DeepSpeedEngine"}:
        raise ConfigError(
            "FSDP and DeepSpeed shard the adapter over the processes, and fedlora cannot read it: train without them. "
            "Several processes with whole copies of the model (torchrun, DDP) work."
        )


def _is_first() -> bool:
    """Whether this is the first of the processes that train one model together, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _say(line: str) -> None:
    if _is_first():
        print(f"fedlora: {line}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------ the model


def _peft_model(model: Any) -> Any:
    """The PEFT model without what torch puts around it. Raises `ConfigError` if there is none."""
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


def _check_classes(model: Any, labels: Sequence[str]) -> None:
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
    _say(f"the federation's classes are {order}; this model names none (id2label)")


def _install(model: Any, adapter: Adapter, scaling: float, trains: list[Part]) -> None:
    """Set the model to the round's base and adapter, with new parameters if its ranks or scaling differ."""
    name = _active(model)
    now, _ = read_model(model, name, scaling=scaling)
    odd = sorted({*now.modules, *now.heads} ^ {*adapter.modules, *adapter.heads})
    if odd:
        raise ConfigError(
            f"the script's model and the federation's adapter differ in {odd[0]!r} ({len(odd)} such). The script "
            f"adapts {in_words(now.modules)}, the federation {in_words(adapter.modules)}: give target_modules and "
            f"modules_to_save of LoraConfig the same names as lora.target_modules and lora.modules_to_save of the "
            f"federation."
        )
    scales = {float(m.scaling[name]) for m in model.modules() if name in getattr(m, "lora_A", {})}
    if now.ranks != adapter.ranks or scales != {scaling}:
        if scales != {scaling}:
            own = ", ".join(f"{scale:g}" for scale in sorted(scales))
            _say(f"alpha / r is {scaling:g} in this federation; {own} of LoraConfig is not used")
        _rebuild(model, name, adapter, scaling)
    load_into_model(model, adapter, name, scaling=scaling)
    trainable(model, name, B="B" in trains, A="A" in trains, heads="heads" in trains)


def _rebuild(model: Any, name: str, adapter: Adapter, scaling: float) -> None:
    """Replace the model's adapter by one of the round's ranks and scaling; all else as the script configured it."""
    config = copy.deepcopy(model.peft_config[name])
    for field, value in {**rank_fields(adapter.ranks, scaling), "use_rslora": False}.items():
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


__all__ = ["federate", "hand_back"]
