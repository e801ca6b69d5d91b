"""A user's own PEFT model and `transformers.Trainer` in a federated round: the model gets the round's adapter, and the
trainer trains it as its script says. `fedlora.hf` is the door to this.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from fedlora.adapters.io import load_into_model, read_model
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError
from fedlora.training.models import rank_fields, trainable
from fedlora.training.round_folder import Part
from fedlora.training.targets import in_words

_MEANWHILE = "fedlora"  # an adapter's name, while the script's own one is replaced

# ---------------------------------------------------------------------------------------------------- a trainer's round


def check_trainer(trainer: Any, adapter: Adapter) -> None:
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


def seed_round(trainer: Any, number: int) -> None:
    """Let a later round than the first, number 0, draw other batches."""
    from transformers import set_seed

    if number:
        set_seed(trainer.args.seed + number)
        if trainer.args.data_seed is not None:
            trainer.accelerator.dataloader_config.data_seed = trainer.args.data_seed + number


def examples_of(trainer: Any) -> int:
    try:
        return len(trainer.train_dataset)
    except TypeError:  # a stream
        return seen_by(trainer)


def seen_by(trainer: Any) -> int:
    """The examples of the last `train()`."""
    args = trainer.args
    return int(trainer.state.global_step * args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


# --------------------------------------------------------------------------------------------------- the model's round


def install(model: Any, adapter: Adapter, scaling: float, trains: list[Part]) -> bool:
    """Set the model to the round's base and adapter, at its ranks and scaling. Returns whether the adapter's parameters
    are new ones, as they must be if ranks or scaling differ."""
    name = active(model)
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


def active(model: Any) -> str:
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


def scale_of(model: Any) -> float:
    scales = _scales(model, active(model))
    if len(scales) != 1:
        raise ConfigError(f"the model's layers have the scales {sorted(scales)}: give HFTrainer(scaling=...).")
    return scales.pop()


__all__ = [
    "active", "check_trainer", "examples_of", "install", "scale_of", "seed_round", "seen_by",
]  # fmt: skip
