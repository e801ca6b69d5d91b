"""Settings for a client's training: the tables [lora] and [train] in a run's file, and their Python equivalents.

Each key is a field below, with its default. Training, runs and federation agreements all use these models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedlora.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Task = Literal["sequence-classification", "causal-lm"]
Targets = Sequence[str] | str
DType = Literal["float32", "bfloat16"]
Optimizer = Literal["adam", "adamw", "sgd"]
Schedule = Literal["constant", "linear", "cosine"]


class Section(BaseModel):
    """A table of settings. Values are taken literally: true and "3" are not numbers, 1 and "yes" not booleans, 3.0 no
    integer; a tuple is a list. An error is a `ConfigError` if Python constructs the table, and pydantic's own error
    inside a larger table, whose reader words it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    if not TYPE_CHECKING:  # the fields are the arguments

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}; got {e['input']!r}" for e in error.errors()]
                raise ConfigError(f"{type(self).__name__}: {'; '.join(wrong)}.") from error

        __init__.__pydantic_base_init__ = True  # pydantic builds nested tables without this

    @field_validator("*", mode="before")
    @classmethod
    def _as_of_toml(cls, value: object) -> object:
        return list(value) if isinstance(value, tuple) else value


class LoRASettings(Section):
    """The LoRA settings that all clients share. A client of rank r trains W0 + s B A.

    scaling: s for every rank, so alpha = scaling * r. lora_alpha: instead of scaling, one alpha for all ranks, so s =
    alpha / r. use_rslora: with alpha, s = alpha / sqrt(r). target_modules: names or ends of module paths; a string is
    one regular expression that matches whole paths; "all-linear". lora_dropout: dropout before A, in training.
    modules_to_save: modules that are trained in full and travel beside the factors, such as a classifier with another
    name than the model's own.

    Example:
        >>> LoRASettings(target_modules=["query", "value"], lora_alpha=16.0).scale(4)
        4.0
    """

    target_modules: list[str] | str = ["query", "value"]
    scaling: Annotated[float, Field(gt=0)] | None = 2.0
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    use_rslora: bool = False
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    modules_to_save: list[str] = []

    @property
    def unit(self) -> float:
        """The unit in which adapters travel: Delta W = unit * B A for everybody. With a fixed alpha, B A is Delta W."""
        return 1.0 if self.scaling is None else self.scaling

    def scale(self, r: int) -> float:
        """The factor of B A when a client of rank r trains: alpha / r, or alpha / sqrt(r)."""
        if self.lora_alpha is None:
            return self.unit
        return self.lora_alpha / math.sqrt(r) if self.use_rslora else self.lora_alpha / r

    @field_validator("target_modules")
    @classmethod
    def _words(cls, targets: Targets) -> Targets:
        if not targets or not all(targets):
            raise ValueError('there must be at least one target, such as ["query"] or "all-linear", and none empty')
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(
                    f"the string {targets!r} is no regular expression for whole module paths: {error}. Write names as "
                    f'a list: ["query", "value"]'
                ) from error
        return targets

    @model_validator(mode="before")
    @classmethod
    def _alpha_instead(cls, raw: Any) -> Any:
        """A given alpha replaces the default scaling."""
        alone = isinstance(raw, dict) and raw.get("lora_alpha") is not None and "scaling" not in raw
        return {**raw, "scaling": None} if alone else raw

    @model_validator(mode="after")
    def _one_scale(self) -> LoRASettings:
        if self.lora_alpha is not None and self.scaling is not None:
            raise ValueError(
                f"lora.lora_alpha = {self.lora_alpha:g} and lora.scaling = {self.scaling:g} contradict each other: "
                f"scaling is alpha / r for every rank. Keep one of them"
            )
        if self.lora_alpha is None and (self.scaling is None or self.use_rslora):
            raise ValueError("give lora.lora_alpha, or lora.scaling without lora.use_rslora, which divides lora_alpha")
        return self


class TrainSection(Section):
    """One client's round. The optimiser is new each round, as in all reference codes.

    learning_rate: of the optimiser. optimizer: "adam", "adamw" or "sgd". weight_decay: weight decay of the optimiser.
    max_steps: optimiser steps per round; -1: train `num_train_epochs` instead. num_train_epochs: passes over the
    client's data, if max_steps = -1. batch_size: examples at a time. gradient_accumulation_steps: how many such batches
    one step sums, so a step takes batch_size times as many examples. max_grad_norm: the largest gradient norm; 0 for
    none. lr_scheduler_type: how the learning rate changes from round to round; it is constant within one.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    optimizer: Optimizer = "adam"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_steps: Annotated[int, Field(ge=-1)] = 10
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Positive = 16
    gradient_accumulation_steps: Positive = 1
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    lr_scheduler_type: Schedule = "constant"

    @field_validator("max_steps")
    @classmethod
    def _some(cls, steps: int) -> int:
        if steps == 0:
            raise ValueError("must be at least 1, or -1: train num_train_epochs instead")
        return steps

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> TrainSection:
        if self.num_train_epochs != 1.0 and self.max_steps != -1:
            raise ValueError(
                f"train.num_train_epochs = {self.num_train_epochs:g} needs train.max_steps = -1; it is {self.max_steps}"
            )
        return self

    @property
    def step_size(self) -> int:
        """The examples of one optimiser step."""
        return self.batch_size * self.gradient_accumulation_steps


class TrainSettings(TrainSection):
    """`TrainSection`, plus what other tables of a run say about one client's round.

    rounds: in the whole run, for the schedule. max_length: tokens per example. bf16: compute in bfloat16.
    chat_template: for a language model's prompts, as in `encode.encode`.

    Example:
        >>> TrainSettings(learning_rate=1e-3, max_steps=20, batch_size=16).optimizer
        'adam'
    """

    rounds: Positive = 1
    max_length: Positive = 128
    bf16: bool = False
    chat_template: str | None = None
