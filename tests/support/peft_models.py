"""Adapters that peft itself makes and saves, and oracles of what they add to a model."""

from __future__ import annotations

import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from transformers.pytorch_utils import Conv1D

from fedlora.adapters.reader import PREFIX
from support.tiny_models import logits


def trained(build, config, seed=1):
    """A peft model whose trainable tensors (factors and heads) hold random numbers."""
    model = get_peft_model(build(), config).eval()
    randomise(model, seed)
    return model


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def saved(model, directory):
    model.save_pretrained(directory)
    return directory


def peft_layers(model, name="default"):
    return {
        path.removeprefix(PREFIX): module
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer) and name in module.lora_A
    }


def peft_updates(model, name="default"):
    """Module -> what peft itself adds to the weight, as (d_out, d_in)."""
    updates = {path: layer.get_delta_weight(name).detach() for path, layer in peft_layers(model, name).items()}
    return {path: u.T if peft_layers(model)[path].fan_in_fan_out else u for path, u in updates.items()}


def dense_logits(build, updates, heads):
    """Logits of base + update, added by hand to the weights of a fresh copy of the base model."""
    model = build()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, update in updates.items():
            parameters[f"{name}.weight"].add_(update.T if isinstance(model.get_submodule(name), Conv1D) else update)
        for name, head in heads.items():
            parameters[name].copy_(head)
    return logits(model)
