"""Keys that are set and would do nothing, beside the ones that make them so: each is an error, none is ignored.

A key counts as set where it is not at its default: a resolved configuration (config.json, run.toml) names every key,
and must read back as the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedlora.runs.attack_section import attack_reasons

if TYPE_CHECKING:
    from fedlora.runs.config import RunConfig

_DEALING = ("count", "partition", "alpha", "min_size")  # how one file becomes clients
_COLUMNS = {"classification": ("text", "pair", "label", "labels"), "causal-lm": ("prompt", "response")}


def unused(config: RunConfig) -> list[str]:
    """A line for each key that is set and has no effect: what it is, why, what to do."""
    return [f"{key} = {_shown(_value(config, key))} has no effect: {why}" for key, why in _found(config)]


def has_no_effect(config: RunConfig, key: str) -> bool:
    """Whether `unused` names that key ("clients.count")."""
    return any(key == name for name, _ in _found(config))


def _found(config: RunConfig) -> Iterator[tuple[str, str]]:
    for key, why in _reasons(config):
        table, name = key.split(".")
        section: BaseModel = getattr(config, table)
        if getattr(section, name) != type(section).model_fields[name].default:
            yield key, why
    if "epochs" in config.train.model_fields_set and "steps" not in config.train.model_fields_set:
        yield "train.epochs", f"train.steps = {config.train.steps} goes before it. Set train.steps = 0 to train epochs"


def _reasons(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Every key that has no effect beside the others, set or not, and why."""
    d, c = config.data, config.clients
    # data
    files = d.task is None and (d.train != "demo" or isinstance(d.validation, str) or isinstance(d.test, str))
    for task, columns in _COLUMNS.items():
        for column in columns:
            if task != config.model.task:
                what = "the classes" if column == "labels" else "a column"
                yield f"data.{column}", f"it is {what} of {task} files, and model.task = {config.model.task!r}"
            elif not files:
                source = f"data.task = {d.task!r}" if d.task else "data.train = 'demo'"
                what = "classes" if column == "labels" else "columns"
                yield f"data.{column}", f"{source} has {what} of its own"
    if config.model.task == "classification":
        yield "data.loss_on", "it is for instructions, and model.task = 'classification'"
    if d.task != "superni":
        for name in ("tasks", "unseen", "task_lists"):
            yield f"data.{name}", "it is for data.task = 'superni'"
    # clients
    own = "each file of data.clients is a client" if d.clients else "each task of superni is a client"
    if d.clients or d.task == "superni":
        for name in _DEALING:
            yield f"clients.{name}", f"{own}, and nothing is dealt out"
    elif c.partition == "iid":
        for name in ("alpha", "min_size"):
            yield f"clients.{name}", "it is for clients.partition = 'dirichlet'"
    elif config.model.task == "causal-lm":
        yield "clients.min_size", "it is for a partition by label, and instructions have none"
    yield from attack_reasons(config.attack)
    # defence, training, evaluation
    yield from config.defence.idle()
    if config.train.steps:
        yield "train.epochs", f"train.steps = {config.train.steps} goes before it. Set train.steps = 0 to train epochs"
    if config.model.task == "classification":
        yield "evaluate.max_new_tokens", "it is for generated text, and model.task = 'classification'"
    if d.test == 0 and c.own_test is None:
        yield "evaluate.clients_at_end", "clients are measured on the test set, and data.test = 0 leaves none"
    if (
        d.test == 0 and c.own_test is None and d.validation == 0 and d.task != "superni"
    ):  # whose unseen tasks are measured in any case
        for name in ("metric", "batch_size"):
            yield f"evaluate.{name}", "data.validation = 0 and data.test = 0 leave nothing to measure on"
    if d.validation == 0:
        yield "evaluate.every", "data.validation = 0 leaves nothing to measure on between rounds"


def _value(config: RunConfig, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
