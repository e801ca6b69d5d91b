"""Keys that are set without effect beside the others: each is an error, none is ignored.

A key counts as set if it differs from its default: a resolved configuration (config.json, run.toml) names every key,
and must read back as the same run. What only data, model or machine show is in `checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedlora.data.demo import PACKAGED
from fedlora.errors import ConfigError
from fedlora.training.metrics import generates
from fedlora.training.settings import TrainSection

if TYPE_CHECKING:
    from fedlora.runs.config import RunConfig

Reasons = Iterator[tuple[str, str]]  # key, why it has no effect

_OF_OWN_LOOP = ("lora.dropout", "model.dropout", "model.checkpointing")
_DEALING = ("count", "partition", "alpha", "min_size")  # how one file becomes clients
_COLUMNS = {
    "classification": ("text", "pair", "label", "labels"),
    "causal-lm": ("prompt", "response", "messages"),
}
_OF_LANGUAGE_MODELS = ("data.template", "evaluate.max_new_tokens", "evaluate.samples")
_MEASURING = (
    "evaluate.metric", "evaluate.batch_size", "evaluate.target", "evaluate.samples", "evaluate.max_new_tokens",
    "data.max_test",
)  # fmt: skip


def check_used(config: RunConfig) -> None:
    """Raises `ConfigError` if a key is set without effect, with a line for each."""
    if idle := unused(config):
        raise ConfigError("; ".join(dict.fromkeys(idle)) + ". Leave it out.")


def unused(config: RunConfig) -> list[str]:
    """A line for each key that is set without effect: its value, the reason, the way out."""
    return [f"{key} = {_shown(_value(config, key))} has no effect: {why}" for key, why in _found(config).items()]


def has_no_effect(config: RunConfig, key: str) -> bool:
    """Whether `unused` reports that key ("clients.count")."""
    return key in _found(config)


def _found(config: RunConfig) -> dict[str, str]:
    """Each such key with its first reason."""
    found: dict[str, str] = {}
    for reasons in (_of_data, _of_model, _of_clients, _of_training, _of_measuring):
        for key, why in reasons(config):
            table, name = key.split(".")
            section: BaseModel = getattr(config, table)
            if getattr(section, name) != type(section).model_fields[name].default:
                found.setdefault(key, why)
    train, said = config.train, config.train.model_fields_set
    if train.command is None and train.steps and "epochs" in said and len(said) < len(type(train).model_fields):
        found["train.epochs"] = _OF_STEPS.format(train.steps)
    return found


_OF_STEPS = "train.steps = {} takes precedence. Set train.steps = 0 for epochs"


def _of_data(config: RunConfig) -> Reasons:
    d, task = config.data, config.model.task
    files = d.task is None and (d.train != "demo" or isinstance(d.validation, str) or isinstance(d.test, str))
    source = f"data.task = {d.task!r}" if d.task else "data.train = 'demo'"
    for kind, columns in _COLUMNS.items():
        for column in columns:
            labels = column == "labels"
            if kind != task:
                what = "the classes" if labels else "a column"
                yield f"data.{column}", f"it is {what} of {kind} files, and model.task = {task!r}"
            elif not files:
                yield f"data.{column}", f"{source} has its own {'classes' if labels else 'columns'}"
    if task == "classification":
        for key in _OF_LANGUAGE_MODELS:
            yield key, f"it is for language models, and model.task = {task!r}"
    if d.task is None or d.task == "superni":
        yield "data.revision", "it is for GLUE from the hub (data.task); other data say it in their hf:// address"
    if d.task != "superni":
        for name in ("tasks", "unseen", "task_lists"):
            yield f"data.{name}", "it is for data.task = 'superni'"


def _of_model(config: RunConfig) -> Reasons:
    model = config.model
    if model.path in PACKAGED or Path(model.path).is_absolute():
        yield "model.revision", f"it is for a hub id, and model.path = {model.path!r} is on this machine"


def _of_clients(config: RunConfig) -> Reasons:
    d, c = config.data, config.clients
    own = "each file of data.clients is a client" if d.clients else "each task of superni is a client"
    if d.clients or d.task == "superni":
        for name in _DEALING:
            yield f"clients.{name}", f"{own}, so nothing is dealt out"
    elif c.partition == "iid":
        for name in ("alpha", "min_size"):
            yield f"clients.{name}", "it is for clients.partition = 'dirichlet'"
    elif config.model.task == "causal-lm":
        yield "clients.min_size", "it is for a partition by label, but instructions have none"
    if c.ranks is not None and len(set(c.types())) == 1:
        yield "clients.profile", "it distributes ranks, and clients.ranks has one for all"
    if not config.attack.on:
        for key in ("share", "clients", "strength", "noise"):
            yield f"attack.{key}", "attack.kind = 'none' attacks nothing"
    yield from config.defence.idle()


def _of_training(config: RunConfig) -> Reasons:
    if config.train.command is not None:
        for key in (*(f"train.{name}" for name in TrainSection.model_fields), *_OF_OWN_LOOP):
            yield key, "the program of train.command trains, and sets this itself"
        return
    yield "train.time_limit", "it is for train.command, which is not set"
    if config.train.steps:
        yield "train.epochs", _OF_STEPS.format(config.train.steps)


def _of_measuring(config: RunConfig) -> Reasons:
    d, e = config.data, config.evaluate
    if d.test == 0 and config.clients.own_test is None:
        yield "evaluate.clients_at_end", "clients are measured on the test set, but data.test = 0 leaves none"
        if d.validation == 0 and not (d.task == "superni" and d.unseen):  # whose unseen tasks are always measured
            for key in _MEASURING:
                yield key, "data.validation = 0 and data.test = 0 leave nothing to measure on"
    if d.validation == 0:
        yield "evaluate.every", "data.validation = 0 leaves nothing to measure on between rounds"
    if not generates(e.metric) and not e.samples:
        yield "evaluate.max_new_tokens", f"evaluate.metric = {e.metric!r} generates no text, and evaluate.samples = 0"


def _value(config: RunConfig, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(config, table), name)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
