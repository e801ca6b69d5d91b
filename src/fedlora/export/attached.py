"""An adapter attached to its base model by peft: the judgement of `validate --model`, and the start of `export`.

transformers builds the base, peft adds the layers. peft gets no pattern of the file: each module that the file has
factors for is named in full, with its rank and alpha. What peft then asks for must be what the file holds, name by name
and shape by shape, because peft silently passes over whatever does not fit.
"""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch import nn
from transformers.utils import logging

from fedlora.adapters.base_names import Base, is_same_base
from fedlora.adapters.reader import PREFIX, AdapterFile
from fedlora.adapters.uploads import labels_of
from fedlora.core.text import quoted
from fedlora.data.hub import readable
from fedlora.errors import AdapterFormatError, ConfigError, counted

_AUTO = {
    "CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "FEATURE_EXTRACTION": "AutoModel",
}  # fmt: skip
_NOT_BUILT = "transformers cannot build the base model in"
WAY_OUT = "Merge it with peft's merge_and_unload, in the program that has the model"


@dataclass(frozen=True)
class Attached:
    """kind: the class of transformers that has all of the adapter's modules. config: the base's, with the adapter's
    classes. changed: the names of the tensors that the adapter changes or brings."""

    kind: Any
    config: Any
    changed: tuple[str, ...]


def check(file: AdapterFile, base: Path) -> Attached:
    """Whether peft loads all of the adapter on this base, by names and shapes only; no weights are read.

    Raises:
        AdapterFormatError: it does not fit. ConfigError: transformers cannot build the base.
    """
    config = _config_of(file, base)
    heads = {name: tuple(file.stored_head(name).shape) for name in file.heads}
    for kind in (kinds := _kinds(file, config)):
        with quiet(), readable(f"{_NOT_BUILT} {base}"), torch.device("meta"):
            model = kind._from_config(copy.deepcopy(config))
        names = {name for name, _ in model.named_modules()}
        if kind is kinds[-1] or names >= set(file.modules):
            break
    where = f"{file.directory}: the base model ({kind.__name__})"
    lacking = sorted(set(file.modules) - names)
    if lacking:
        raise AdapterFormatError(
            f"{where} has no module {quoted(lacking[0], 120)} ({counted(len(lacking), 'such name')}): the adapter is "
            f"for another model. {WAY_OUT}."
        )
    state = model.state_dict()
    for name, shape in heads.items():
        if name not in state or tuple(state[name].shape) != shape:
            has = tuple(state[name].shape) if name in state else "no such tensor"
            raise AdapterFormatError(
                f"{where} has {has} where the adapter has {quoted(name, 120)} of shape {shape}: the vocabulary or the "
                f"labels changed. Save such a base model, and use that."
            )
    _refuse_tied(file, model)
    attach(model, file)
    return Attached(kind, config, tuple(sorted({f"{module}.weight" for module in file.modules} | set(heads))))


def other_base(file: AdapterFile, base: str, place: Path) -> list[str]:
    """A note if the adapter names another base model than the one given: another folder that is there, or a name whose
    last part is another. base: its name on the hub, or as typed. place: of its files."""
    named = file.base_model
    if not named or named == base or os.path.realpath(named) == os.path.realpath(place):
        return []
    given = os.path.realpath(place) if place == Path(base) else base.partition("@")[0]
    if not os.path.isdir(named) and is_same_base(Base(Path(named).name), Base(Path(given).name)):
        return []
    return [f"{file.directory} names {quoted(named, 120)}, and --model is {quoted(base, 120)}"]


def attach(model: Any, file: AdapterFile) -> PeftModel:
    """The model with the adapter's empty layers, on the device that it is on.

    Raises:
        AdapterFormatError: peft asks for other tensors, or other shapes, than the file holds.
    """
    with quiet():
        beside = get_peft_model(model, _in_full(file))
        asked = get_peft_model_state_dict(beside, save_embedding_layers=False)
    shapes = {key: tuple(entry.shape) for key, entry in file.stored.items()}
    wanted = {key: tuple(tensor.shape) for key, tensor in asked.items()}
    odd = sorted(key for key in shapes.keys() | wanted.keys() if shapes.get(key) != wanted.get(key))
    if odd:
        raise AdapterFormatError(
            f"{file.directory}: {quoted(odd[0].removeprefix(PREFIX), 120)} is {shapes.get(odd[0], 'absent')} in the "
            f"file and {wanted.get(odd[0], 'absent')} in peft with {type(model).__name__} "
            f"({counted(len(odd), 'such tensor')}). {WAY_OUT}."
        )
    return beside


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the reports, progress bars and warnings of transformers and peft: we judge and report ourselves."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _in_full(file: AdapterFile) -> LoraConfig:
    """peft's config of the file, with every module, rank and alpha named in full: a stranger's pattern never reaches
    `re`. The initialisation does not matter, because the file's numbers replace it."""
    config, rslora = file.config, bool(file.config.get("use_rslora"))
    r = file.config["r"]
    alphas = {module: file.scales[module] * (math.sqrt(k) if rslora else k) for module, k in file.ranks.items()}
    return LoraConfig(
        r=r, lora_alpha=config["lora_alpha"], use_rslora=rslora, use_dora=bool(config.get("use_dora")),
        target_modules=list(file.modules), modules_to_save=list(config.get("modules_to_save") or ()) or None,
        rank_pattern={f"^{re.escape(module)}": k for module, k in file.ranks.items() if k != r},
        alpha_pattern={f"^{re.escape(m)}": a for m, a in alphas.items() if not math.isclose(a, config["lora_alpha"])},
        fan_in_fan_out=bool(config.get("fan_in_fan_out")), task_type=config.get("task_type"), inference_mode=True,
    )  # fmt: skip


def _config_of(file: AdapterFile, base: Path) -> Any:
    """The base's config, for as many classes as the adapter's head has, with their names."""
    with readable(f"{_NOT_BUILT} {base}"):
        config = transformers.AutoConfig.from_pretrained(base)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"the base model {base} is quantised: the sum would be of rounded weights. Give the model from which it "
            f"was quantised."
        )
    labels = labels_of(file.directory)
    if file.config.get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
        shapes = [file.stored_head(name).shape for name in file.heads]
        rows = {shape[0] for shape in shapes if len(shape) == 2}
        if labels and len(labels) in rows:
            config.id2label, config.label2id = dict(enumerate(labels)), {name: k for k, name in enumerate(labels)}
        elif len(rows) == 1:
            config.num_labels = rows.pop()
    return config


def _kinds(file: AdapterFile, config: Any) -> list[Any]:
    """The classes to try: by the adapter's task, else the base's own, a language model, the bare model."""
    task = file.config.get("task_type")
    asked = [_AUTO[task]] if task in _AUTO else ["AutoModelForCausalLM", "AutoModel"]
    found = [] if task in _AUTO else [getattr(transformers, name, None) for name in config.architectures or ()]
    for name in asked:
        try:
            found.append(getattr(transformers, name)._model_mapping[type(config)])
        except KeyError:
            continue
    kinds = [kind for kind in found if kind is not None and hasattr(kind, "_from_config")]
    if not kinds:
        raise ConfigError(f"transformers has no class of type {config.model_type} for task {task}. {WAY_OUT}.")
    return kinds


def _refuse_tied(file: AdapterFile, model: nn.Module) -> None:
    """Raises `AdapterFormatError` if the adapter changes a weight that the model uses in two places."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    touched = {f"{module}.weight" for module in file.modules} | set(file.heads)
    for group in names.values():
        if len(group) > 1 and (both := touched.intersection(group)):
            raise AdapterFormatError(
                f"{file.directory}: it changes {quoted(min(both))}, which this base ties to "
                f"{quoted(next(name for name in group if name != min(both)))}: merged, both would change. Save the "
                f"base with tie_word_embeddings = false, and use that."
            )
