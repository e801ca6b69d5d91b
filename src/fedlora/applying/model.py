"""The model in a base folder as transformers builds it, from a config we have checked and tensors we read.

transformers decides which class the adapter is for, how stored names map to names in memory, what is tied and what is
missing. It opens no file in the folder, runs none of its code and contacts no hub: it gets a config object and lazy
tensors. On the meta device that takes no memory; the judgement uses it so.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter
from transformers.utils import logging

from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.uploads import labels_of
from fedlora.applying.base_folder import BaseFiles
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, ConfigError, FedLoRAError

WAY_OUT = "Merge this adapter with peft's merge_and_unload, in the program that has the model"
_AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "FEATURE_EXTRACTION": "AutoModel",
}  # fmt: skip
_CLASSIFYING = ("SEQ_CLS", "TOKEN_CLS")
_LISTED = 8  # classes in one line
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
# Fields in a config.json that make transformers read other files or replace layers.
_NOT_FOLLOWED = ("transformers_weights", "fusion_config", "kernel_config", "distributed_config")
_COUNT = re.compile(r"layer|block|depth|stage|expert|head|level", re.IGNORECASE)
_SIZE = re.compile(r"size|vocab|position|dim|width|channel|length|embd|inner|d_", re.IGNORECASE)
_MOST_LABELS = 100_000  # transformers makes two entries for each
_MOST_PARTS = 200_000  # modules and parameters
_MOST, _LARGEST = 10_000, 2**24  # for counts; for sizes: the longest contexts have ten million positions


@dataclass(frozen=True)
class Built:
    """A base model on the meta device, in the class that the adapter is for.

    file: the adapter, under this transformers version's names. missing: names that the base's files lack. unexpected:
    stored names for which the class has no place. auto: the transformers class that loads the result, "" if the adapter
    brings no classifier. labels: its class names, if the adapter gives them. notes: for the user.
    """

    file: AdapterFile
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
    """Build the first candidate class that has all modules and tensors the adapter names.

    Raises:
        AdapterFormatError: no class has. ConfigError: transformers cannot load the base's config or tensors.
    """
    heads = {head: file.stored_head(head).shape for head in file.heads}
    rows = sorted({shape[0] for shape in heads.values() if len(shape) == 2})
    labels = labels_of(file.directory)
    task = file.config.get("task_type") or ("SEQ_CLS" if labels else None)
    classifies, notes = task in _CLASSIFYING and bool(rows), []
    if classifies and rows[-1] > _MOST_LABELS:
        raise AdapterFormatError(
            f"{file.directory}: its head has {rows[-1]:,} outputs; fedlora builds classifiers with at most "
            f"{_MOST_LABELS:,} outputs. {WAY_OUT}."
        )
    if classifies and labels and len(labels) not in rows:
        notes.append(f"the adapter names {len(labels)} classes, but its head has {rows} outputs: names are left out.")
        labels = ()
    brought = classifies and not any(head in base.stored for head in heads)
    needed = {*file.modules, *heads}
    first = None
    for kind in _classes(file, task, config_of(base)):
        for count in [len(labels)] if labels and brought else rows if brought else [None]:
            config = config_of(base, **({"num_labels": count} if count else {}))
            if classifies and labels and len(labels) == config.num_labels:
                config.id2label, config.label2id = dict(enumerate(labels)), {n: k for k, n in enumerate(labels)}
            model, missing, unexpected = load(kind, config, base)
            state = model.state_dict()
            lacking = sorted(needed - {name for name, _ in model.named_modules()} - set(state))
            told = [*notes, *_told(config)] if classifies and (labels or brought) else notes
            auto = _AUTO[str(task)] if classifies else ""
            found = Built(file, kind, config, model, missing, unexpected, auto, labels, tuple(told))
            if not lacking and all(tuple(state[head].shape) == shape for head, shape in heads.items()):
                return found
            first = first or (found, lacking)
    if first is None or first[1]:
        why = (
            f"transformers has no class of type {base.config.get('model_type')} for it"
            if first is None
            else _lacking(*first)
        )
        raise AdapterFormatError(f"{file.directory}: {why}. {WAY_OUT}.")
    return first[0]  # the judgement deals with its shapes


def load(kind: Any, config: Any, base: BaseFiles, *, meta: bool = True) -> tuple[Any, frozenset[str], tuple[str, ...]]:
    """(the model, missing names, unexpected names).

    Args:
        meta: shapes without numbers, in float64; otherwise all numbers, in the files' widest type.

    Raises:
        ConfigError: transformers cannot build it, or the files' shapes differ from the config's.
    """
    where = f"the base model in {base.directory}"
    how = {"device_map": {"": "meta"}, "dtype": torch.float64} if meta else {"dtype": widest(base)}
    lazy = {name: _Lazy(base, name, meta) for name in base.stored}
    with quiet(), _bounded(where), _translated(f"{where} cannot be built by transformers"):
        model, told = kind.from_pretrained(
            None, config=copy.deepcopy(config), state_dict=lazy,
            attn_implementation="eager", ignore_mismatched_sizes=True, output_loading_info=True, **how,
        )  # fmt: skip
        if meta:
            model.tie_weights(recompute_mapping=False)  # without numbers, it would leave tied duplicates untied
    for name, stored, wanted in sorted(told["mismatched_keys"]):
        raise ConfigError(f"{where} holds {name!r} as {tuple(stored)}, but its config.json says {tuple(wanted)}.")
    # transformers' own list lacks old buffers (BERT's position_ids, Llama's inv_freq), which it drops without a word.
    return model, frozenset(told["missing_keys"]), tuple(sorted(name for name, each in lazy.items() if not each.asked))


def config_of(base: BaseFiles, **other: Any) -> Any:
    """The config object for the base's config.json, with some fields replaced.

    Raises:
        ConfigError: transformers does not know the type, a field would load something else, a size is beyond any real
            model's, or transformers rejects a value.
    """
    fields, where = dict(base.config), f"the base model in {base.directory}"
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        why = "has no config.json that gives its model_type"
        if isinstance(kind, str):
            why = f"is of type {quoted(kind, 60)}, which transformers {transformers.__version__} does not know"
        if fields.get("auto_map"):
            why += "; its config.json names its own code (auto_map), and fedlora runs no stranger's code"
        raise ConfigError(f"{where} {why}. {WAY_OUT}.")
    _check_fields(fields, where)
    with quiet(), _translated(f"the config.json of {where} does not fit type {kind}"):
        return transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(fields) | other)


def widest(base: BaseFiles) -> torch.dtype:
    """The floating-point type that holds all of the base's numbers."""
    wide = None
    for kind in {_FLOATS[stored.dtype] for stored in base.stored.values() if stored.dtype in _FLOATS}:
        wide = kind if wide is None else torch.promote_types(wide, kind)
    return wide or torch.float32


def stored_type(base: BaseFiles, name: str) -> torch.dtype | None:
    """The stored floating-point type of a tensor; None if there is none."""
    return _FLOATS.get(base.stored[name].dtype) if name in base.stored else None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the reports, progress bars and warnings of transformers and peft; we judge and report them ourselves."""
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
    """A library's message, on one line."""
    return quoted((" ".join(str(error).split()) or type(error).__name__).rstrip("."), 300)


class _Lazy:
    """A stored tensor, read when transformers asks for it; never read on the meta device."""

    def __init__(self, base: BaseFiles, name: str, meta: bool) -> None:
        self._base, self._name, self._meta, self.asked = base, name, meta, False

    def __getitem__(self, everything: object) -> Tensor:
        self.asked = True
        if not self._meta:
            return self._base.tensor(self._name)
        stored = self._base.stored[self._name]
        return torch.empty(stored.shape, dtype=_FLOATS.get(stored.dtype, torch.int64), device="meta")


@contextmanager
def _bounded(where: str) -> Iterator[None]:
    """Bound the modules and parameters, whatever a config multiplies."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MOST_PARTS:
            raise ConfigError(f"{where} has more than {_MOST_PARTS:,} modules and parameters. {WAY_OUT}.")

    hooks = on_module(counted), on_parameter(counted)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn any exception that transformers raises for a stranger's config into one of ours."""
    try:
        yield
    except (FedLoRAError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {said(error)}. {WAY_OUT}.") from error


def _check_fields(value: Any, where: str, name: str = "") -> None:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if key in _NOT_FOLLOWED and inner:
            raise ConfigError(
                f"{where}: its config.json has {key} = {quoted(inner, 80)}, which fedlora does not support. {WAY_OUT}."
            )
        _check_fields(inner, where, str(key))
    for inner in value if isinstance(value, list) else ():
        _check_fields(inner, where, name)
    if isinstance(value, int):
        most = _LARGEST if _SIZE.search(name) else _MOST if _COUNT.search(name) else 2**63
        most = min(most, _MOST_LABELS) if "label" in name.lower() else most
        if abs(value) > most:
            raise ConfigError(
                f"{where}: its config.json has {quoted(name, 80)} = {value:,}; models have up to {most:,}."
            )


def _classes(file: AdapterFile, task: str | None, config: Any) -> list[Any]:
    """Candidate classes: by the adapter's task, by the class it was trained on, by the base's config, and the bare
    model. Only transformers' classes for this config; no module is imported by name."""
    auto = file.config.get("auto_mapping")
    named = [auto.get("base_model_class")] if isinstance(auto, Mapping) else []
    found = [_of_auto(_AUTO[task], config)] if task in _AUTO else []
    for name in (*named, *(config.architectures or ())):
        kind = None
        with suppress(Exception):  # importing another module's name may fail in any way
            kind = getattr(transformers, name)
        if getattr(kind, "config_class", None) is type(config):
            found.append(kind)
    found += [_of_auto("AutoModelForCausalLM", config)] if not found else []
    return list(dict.fromkeys(kind for kind in (*found, _of_auto("AutoModel", config)) if kind is not None))


def _of_auto(auto: str, config: Any) -> Any:
    mapping = getattr(transformers, auto)._model_mapping
    kind = mapping.get(type(config), None)  # its get requires a default
    return kind[0] if isinstance(kind, tuple) else kind


def _lacking(found: Built, lacking: list[str]) -> str:
    some = ", ".join(name for name, _ in list(found.model.named_parameters())[:3])
    return (
        f"{found} has no {quoted(lacking[0], 120)} ({len(lacking):,} such names): the adapter is for another model, "
        f"or for a class that only its program has. It has {some}, ..."
    )


def _told(config: Any) -> Iterator[str]:
    names = [quoted(str(name), 40) for name in config.id2label.values()]
    rest = f", ... ({len(names)})" if len(names) > _LISTED else ""
    yield f"config.json has its classes: {', '.join(names[:_LISTED])}{rest}."
