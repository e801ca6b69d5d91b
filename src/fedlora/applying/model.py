"""The model of a base folder as transformers builds it: of a config that was looked at first, from tensors that we read.

transformers decides which class an adapter is for, how stored names become names in memory, what is tied and what is
missing. It opens no file of the folder, runs no code of it, and asks no hub: it gets a config object and lazy tensors.
On the meta device all that costs no memory, which is how the judgement uses it.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter
from transformers.utils import logging

from fedlora.adapters.labels import labels_of
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.resolved import plain
from fedlora.adapters.untrusted_files import FLOATS
from fedlora.applying.base_folder import BaseFiles
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError, ConfigError, FedLoRAError

WAY_OUT = "Merge this adapter with peft's merge_and_unload, in the program that has the model"
_AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "FEATURE_EXTRACTION": "AutoModel",
}  # fmt: skip
CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS")
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Fields of a config.json that make transformers read other files, or exchange layers.
_REFUSED = ("transformers_weights", "fusion_config", "kernel_config", "distributed_config")
_COUNTS = re.compile(r"layer|block|depth|stage|expert|head|level", re.IGNORECASE)
_SIZES = re.compile(r"size|vocab|position|dim|width|channel|length|embd|inner|d_", re.IGNORECASE)
_LISTED = 8  # classes, in a line
_MOST, _LARGEST = 10_000, 2**24  # of what is counted; of a size: the longest contexts have ten million positions


@dataclass(frozen=True)
class Built:
    """A base model on the meta device, in the class that the adapter is for.

    missing: names that the base's files do not hold. unexpected: stored names that the class has no place for. auto: the
    class of transformers that loads the result, where the adapter brings a classifier. labels: its classes' own names.
    """

    kind: Any
    config: Any
    model: Any
    missing: frozenset[str]
    unexpected: tuple[str, ...]
    auto: str = ""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"the base model ({self.kind.__name__})"


def built(file: AdapterFile, base: BaseFiles) -> Built:
    """The first of the classes in question that has all modules which the adapter names.

    Raises:
        AdapterFormatError: none has. ConfigError: the base's config or tensors are none that transformers loads.
    """
    task, labels, notes = _task(file)
    described = _described(base)
    needed = _needed(file)
    first: tuple[Built, list[str]] | None = None
    for kind in _classes(file, task, described):
        for config in _configs(file, base, task, labels, described):
            model, missing, unexpected = load(kind, config, base, most=file.limits.tensors)
            names = {name for name, _ in model.named_modules()} | set(model.state_dict())
            lacking = sorted(needed - names)
            auto = _AUTO[task] if task in CLASSIFYING and _rows(file) else ""
            found = Built(kind, config, model, missing, unexpected, auto, labels, (*notes, *_classes_told(auto, config, labels, missing)))
            if not lacking and _heads_fit(file, model):
                return found
            first = first or (found, lacking)
    if first is None:
        raise ConfigError(f"the base model in {base.directory}: transformers has no class for its config.json. {WAY_OUT}.")
    if first[1]:
        some = ", ".join(name for name, _ in list(first[0].model.named_parameters())[:3])
        raise AdapterFormatError(
            f"{file.directory}: {first[0]} has no {quoted(first[1][0], 120)} ({len(first[1]):,} such names): the adapter "
            f"is of another model, or of a class that only its program has. It has {some}, ... {WAY_OUT}."
        )
    return first[0]  # shapes are the judgement's affair


def load(kind: Any, config: Any, base: BaseFiles, *, meta: bool = True, most: int) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """(the model, missing names, unexpected names).

    Args:
        meta: shapes without numbers, in float64; else all numbers, in the widest type that the files hold.
        most: modules and parameters that it may have.

    Raises:
        ConfigError: transformers cannot build it, or the files hold other shapes than the config says.
    """
    tensors = {name: _Lazy(base, name, meta) for name in base.stored}
    how = {"device_map": {"": "meta"}, "dtype": torch.float64} if meta else {"dtype": widest(base)}
    with quiet(), _bounded(most):
        try:
            model, told = kind.from_pretrained(
                None, config=copy.deepcopy(config), state_dict=tensors, attn_implementation="eager",
                ignore_mismatched_sizes=True, output_loading_info=True, **how,
            )  # fmt: skip
        except (FedLoRAError, MemoryError):
            raise
        except Exception as error:
            raise ConfigError(f"the base model in {base.directory} is none that transformers builds: {said(error)}. {WAY_OUT}.") from error
    for name, stored, wanted in sorted(told["mismatched_keys"]):
        raise ConfigError(
            f"the base model in {base.directory} contradicts itself: its {name!r} has shape {tuple(stored)}, and by "
            f"its config.json it has {tuple(wanted)}."
        )
    return model, frozenset(told["missing_keys"]), tuple(sorted(told["unexpected_keys"]))


def widest(base: BaseFiles) -> torch.dtype:
    """The floating-point type that holds all of the base's numbers."""
    found = {_DTYPES[stored.dtype] for stored in base.stored.values() if stored.dtype in FLOATS}
    wide = found.pop() if found else torch.float32
    for other in found:
        wide = torch.promote_types(wide, other)
    return wide


def stored_type(base: BaseFiles, name: str) -> torch.dtype | None:
    """The floating-point type in which a tensor of that name is stored; None where there is none."""
    stored = base.stored.get(name)
    return _DTYPES.get(stored.dtype) if stored is not None else None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the reports, bars and warnings of transformers and peft: what they say is judged, and said by us."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def said(error: BaseException) -> str:
    """What a library said, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return quoted(text.rstrip("."), 300)


class _Lazy:
    """A stored tensor that is read when transformers asks for it; on the meta device never."""

    def __init__(self, base: BaseFiles, name: str, meta: bool) -> None:
        self._base, self._name, self._meta = base, name, meta

    def __getitem__(self, everything: object) -> Tensor:
        if not self._meta:
            return self._base.tensor(self._name)
        stored = self._base.stored[self._name]
        return torch.empty(stored.shape, dtype=_DTYPES.get(stored.dtype, torch.int64), device="meta")


@contextmanager
def _bounded(most: int) -> Iterator[None]:
    """No more modules and parameters than `most`, whatever a config multiplies."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > 2 * most:
            raise ConfigError(
                f"the base model's config.json makes more than {2 * most:,} modules and parameters; --limit "
                f"tensors={10 * most} would take more."
            )

    hooks = on_module(counted), on_parameter(counted)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --------------------------------------------------------------------------------------------------------- the config


def config_of(base: BaseFiles) -> Any:
    """The config object of the base's config.json. Raises `ConfigError` where transformers makes none of it."""
    return _described(base)()


def _described(base: BaseFiles) -> Callable[..., Any]:
    """Makes a config object of the base's config.json, with some fields exchanged."""
    fields = dict(base.config)
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        why = (
            "it has no config.json" if not fields
            else f"its config.json names code of its own (auto_map) for the type {quoted(kind, 60)}, and no stranger's code is run"
            if fields.get("auto_map")
            else f"its config.json is of type {quoted(kind, 60)}, which transformers {transformers.__version__} does not know"
        )  # fmt: skip
        raise ConfigError(f"the base model in {base.directory}: {why}. {WAY_OUT}.")
    _check_fields(fields, base)

    def make(**other: Any) -> Any:
        try:
            with quiet():
                return transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(fields) | other)
        except Exception as error:
            raise ConfigError(f"the base model's config.json in {base.directory} is none of type {kind}: {said(error)}.") from error

    return make


def _check_fields(fields: Any, base: BaseFiles, name: str = "") -> None:
    """Raises `ConfigError` for fields that would load something else, and for sizes that no model has."""
    if isinstance(fields, Mapping):
        for key, value in fields.items():
            if key in _REFUSED and value:
                raise ConfigError(f"the base model's config.json has {key} = {quoted(value, 80)}, which is not followed here. {WAY_OUT}.")
            _check_fields(value, base, str(key))
    elif isinstance(fields, list):
        for value in fields:
            _check_fields(value, base, name)
    elif isinstance(fields, int) and not isinstance(fields, bool):
        most = _MOST if _COUNTS.search(name) and not _SIZES.search(name) else _LARGEST if _SIZES.search(name) else 2**63
        if abs(fields) > most:
            raise ConfigError(
                f"the base model's config.json in {base.directory} has {quoted(name, 80)} = {fields:,}, more than the "
                f"{most:,} that a model may have."
            )


def _task(file: AdapterFile) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """(the adapter's task, the names of its classes, notes)."""
    labels = labels_of(file.directory, file.limits)
    task = file.config.get("task_type") or ("SEQ_CLS" if labels else None)
    rows = _rows(file)
    if task in CLASSIFYING and labels and rows and len(labels) not in rows:
        note = (
            f"the adapter names {len(labels)} classes, and its head has other sizes ({', '.join(map(str, rows))}): the "
            f"names are left out."
        )
        return task, (), (note,)
    return task, labels if task in CLASSIFYING else (), ()


def _rows(file: AdapterFile) -> list[int]:
    """How many outputs the adapter's saved matrices have."""
    shapes = [file.stored_head(head).shape for head in file.heads if file.kind(head) == "head"]
    return sorted({shape[0] for shape in shapes if len(shape) == 2})


def _configs(file: AdapterFile, base: BaseFiles, task: str | None, labels: tuple[str, ...], make: Callable[..., Any]) -> Iterator[Any]:
    """The base's config; for a head that the base lacks, with as many classes as the head may have."""
    heads = [head for head in file.heads if file.kind(head) == "head"]
    rows = _rows(file)
    if task not in CLASSIFYING or not rows or any(head in base.stored for head in heads):
        own = make()
        yield make(**_named(labels)) if len(labels) == own.num_labels else own
        return
    for count in [len(labels)] if labels else rows:
        yield make(num_labels=count) if not labels else make(**_named(labels))


def _classes_told(auto: str, config: Any, labels: tuple[str, ...], missing: frozenset[str]) -> Iterator[str]:
    """A line on the classes that config.json gets."""
    names = list(config.id2label.values()) if auto and (labels or missing) else []
    if names:
        rest = f", ... ({len(names)})" if len(names) > _LISTED else ""
        yield f"config.json has its classes: {', '.join(quoted(str(n), 40) for n in names[:_LISTED])}{rest}."


def _named(labels: tuple[str, ...]) -> dict[str, Any]:
    if not labels:
        return {}
    return {"id2label": dict(enumerate(labels)), "label2id": {name: k for k, name in enumerate(labels)}}


def _heads_fit(file: AdapterFile, model: Any) -> bool:
    state = model.state_dict()
    return all(
        tuple(state[head].shape) == file.stored_head(head).shape
        for head in file.heads if file.kind(head) == "head" and head in state
    )  # fmt: skip


def _classes(file: AdapterFile, task: str | None, make: Callable[..., Any]) -> list[Any]:
    """The classes that the model may be of: by the adapter's task, by the class that it was trained on, by the base's
    own word, and the bare model. Only classes of transformers for this config; no module is imported by name."""
    config = make()
    auto = file.config.get("auto_mapping")
    named = [auto.get("base_model_class")] if isinstance(auto, Mapping) else []
    named += list(config.architectures or ())
    found = [_of_auto(_AUTO.get(task or ""), config)]
    for name in named:
        kind = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.config_class is type(config):
            found.append(kind)
    if file.config.get("task_type") is None and not task:
        found = [*found[1:], _of_auto("AutoModelForCausalLM", config)]
    found.append(_of_auto("AutoModel", config))
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def _of_auto(auto: str | None, config: Any) -> Any:
    mapping = getattr(transformers, auto)._model_mapping if auto else {}
    kind = mapping[type(config)] if type(config) in mapping else None
    return kind[0] if isinstance(kind, tuple) else kind


def _needed(file: AdapterFile) -> set[str]:
    """Names that the model must have: of modules with pairs and of tensors beside them."""
    modules = {plain(path) for path in file.layouts}
    heads = {head for head in file.heads if file.kind(head) in ("head", "bias", "base")}
    return modules | heads
