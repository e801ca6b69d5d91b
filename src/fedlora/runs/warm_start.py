"""A run's common start from a trained PEFT adapter (`model.adapter`), read and checked as a stranger's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedlora.adapters.base_names import Base, is_same_base
from fedlora.adapters.io import read_adapter
from fedlora.adapters.uploads import labels_of
from fedlora.adapters.writer import AdapterSpec
from fedlora.core.lora import Adapter, LoRA
from fedlora.errors import ConfigError, counted
from fedlora.runs.config import RunConfig
from fedlora.training.load import hub_name
from fedlora.training.targets import in_words


def warm_start(config: RunConfig, fresh: Adapter, labels: Sequence[str]) -> Adapter:
    """The start that `model.adapter` names, in the run's unit.

    Its update is exact. Where its rank is below that of `fresh`, the common start without it, the further slots are
    those of `fresh` (B = 0); a larger rank stays, and the method decides what a client of fewer gets.

    Raises:
        AdapterFormatError: it is not a PEFT directory of W0 + s B A. ConfigError: it adapts other modules, or has other
            shapes, heads, classes or another base model than the run.
    """
    assert config.model.adapter is not None
    folder = Path(config.model.adapter)
    given, spec = read_adapter(folder, scaling=config.lora.unit)
    where = f"model.adapter = {folder.name!r}"
    _check_base(config, spec, where)
    check_fits(fresh, given, where)
    own = labels_of(folder)
    if own and labels and list(own) != list(labels):
        raise ConfigError(
            f"{where} was trained for the classes {', '.join(own)}, in this order, and the data have "
            f"{', '.join(labels)}. Set data.label_names to its own, or start without it."
        )
    modules = {name: _extended(lora, fresh.modules[name]) for name, lora in given.modules.items()}
    return Adapter(modules, given.heads)


def _check_base(config: RunConfig, spec: AdapterSpec, where: str) -> None:
    place = str(config.model.location())
    ours = {Base(name, config.model.revision) for name in (config.model.name, place, hub_name(place)) if name}
    theirs = Base.of(spec.config)
    if not any(is_same_base(theirs, mine) or theirs.name == mine.name for mine in ours):
        raise ConfigError(
            f"{where} belongs to the base model {theirs}, and the run's is {config.model.name!r}. If they are the same "
            f"weights, write the run's name into base_model_name_or_path of its adapter_config.json."
        )


def check_fits(fresh: Adapter, given: Adapter, where: str) -> None:
    """Raises `ConfigError` unless a start fits a model: the same modules and heads, of the same sizes. fresh: the
    model's own start. where: the given one's name."""
    odd = sorted(set(fresh.modules) ^ set(given.modules))
    if odd:
        raise ConfigError(
            f"{where} and lora.target_modules differ in {counted(len(odd), 'module')}, such as {odd[0]!r}: it adapts "
            f"{in_words(given.modules)}, the run {in_words(fresh.modules)}. Name its modules in lora.target_modules."
        )
    for name, lora in given.modules.items():
        (B, A), (ours, mine) = lora.factors, fresh.modules[name].factors
        if (len(B), A.shape[1]) != (len(ours), mine.shape[1]):
            raise ConfigError(
                f"{where} is for a matrix of {len(B)} x {A.shape[1]} at {name!r}, and the model has one of {len(ours)} "
                f"x {mine.shape[1]}: it is of another model."
            )
    own, theirs = ({name: tuple(head.shape) for name, head in one.heads.items()} for one in (fresh, given))
    odd = sorted(name for name in {**own, **theirs} if own.get(name) != theirs.get(name))
    if odd:
        raise ConfigError(
            f"{where} and the run differ in the fully trained {odd[0]!r}: it has {theirs.get(odd[0]) or 'none'}, the "
            f"run's model {own.get(odd[0]) or 'none'}. Use an adapter with the same lora.modules_to_save and classes."
        )


def _extended(given: LoRA, fresh: LoRA) -> LoRA:
    (B, A), (zeros, rows) = given.factors, fresh.factors
    r = given.rank
    return LoRA(torch.cat([B, zeros[:, r:].to(B)], dim=1), torch.cat([A, rows[r:].to(A)]))
