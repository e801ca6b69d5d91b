"""The methods, one paper a file. `METHODS` is the whole list; `build` makes one by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from fedlora.errors import HyperparameterError
from fedlora.method import Method
from fedlora.methods.fedex_lora import FedExLoRA
from fedlora.methods.fedit import FedIT
from fedlora.methods.fedrot_lora import FedRotLoRA
from fedlora.methods.fedsa_lora import FedSALoRA
from fedlora.methods.ffa_lora import FFALoRA
from fedlora.methods.flexlora import FlexLoRA
from fedlora.methods.flora import FLoRA
from fedlora.methods.glora import GLoRA
from fedlora.methods.hetlora import HetLoRA
from fedlora.methods.lora_fair import LoRAFAIR
from fedlora.methods.padded_average import PaddedAverage
from fedlora.methods.rolora import RoLoRA
from fedlora.methods.svd import SVD

METHODS: Mapping[str, type[Method[Any]]] = MappingProxyType(
    {
        "fedex-lora": FedExLoRA,
        "fedit": FedIT,
        "fedrot-lora": FedRotLoRA,
        "fedsa-lora": FedSALoRA,
        "ffa-lora": FFALoRA,
        "flexlora": FlexLoRA,
        "flora": FLoRA,
        "glora": GLoRA,
        "hetlora": HetLoRA,
        "lora-fair": LoRAFAIR,
        "padded-average": PaddedAverage,
        "rolora": RoLoRA,
        "svd": SVD,
    }
)


def build(name: str, *, preset: str | None = None, **hparams: object) -> Method[Any]:
    """The method `name` with its hyper-parameters; `preset` sets several at once, `hparams` win over it.

    Raises:
        HyperparameterError: unknown name, preset or hyper-parameter (naming the nearest), or an impossible value.
    """
    if name not in METHODS:
        raise HyperparameterError(f"no method is called {name!r}{_nearest(name, METHODS)} Known: {', '.join(METHODS)}.")
    cls: Any = METHODS[name]
    if preset is not None:
        presets: Mapping[str, Mapping[str, object]] = getattr(cls, "PRESETS", {})
        if preset not in presets:
            known = f"known presets: {', '.join(presets)}" if presets else "it has none"
            raise HyperparameterError(f"{name} has no preset {preset!r}; {known}.")
        hparams = {**presets[preset], **hparams}
    known_fields = [f.name for f in fields(cls)]
    for key in hparams:
        if key not in known_fields:
            listed = ", ".join(known_fields) or "none"
            raise HyperparameterError(
                f"{name} has no hyper-parameter {key!r}{_nearest(key, known_fields)} It has: {listed}."
            )
    try:
        method: Method[Any] = cls(**hparams)
    except TypeError as error:
        raise HyperparameterError(f"{name}: a hyper-parameter has a wrong type: {error}. Got {hparams}.") from error
    return method


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


__all__ = ["METHODS", "build"]
