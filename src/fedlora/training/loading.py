"""Loads a base model and its tokenizer from a directory, a GGUF file or a hub id.

Weights are safetensors. PyTorch's own files (pytorch_model.bin) are read only if there are no others, and as tensors
alone: torch refuses a pickle that holds anything else (weights_only), so no code of the file runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from fedlora.core.folders import replacing_folder
from fedlora.doing import doing
from fedlora.errors import ConfigError, counted
from fedlora.seeds import derive_seed
from fedlora.training.content import file_digest, readable
from fedlora.training.hub_models import source
from fedlora.training.settings import DType, Task

SPREAD = "balanced"  # transformers' name for a device_map: a model's layers over all GPUs
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else transformers asks the hub to convert a model
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


@doing("loading the base model")
def load_base(
    path: str | os.PathLike[str],
    task: Task,
    labels: Sequence[str],
    *,
    seed: int,
    device: str,
    dropout: float | None,
    four_bit: bool,
    dtype: DType = "float32",
) -> tuple[Any, Any]:
    """The model, on its device, and its tokenizer; arguments as in `AdaptedModel.load`. Raises `ConfigError`."""
    if task == "classification" and len(labels) < 2:  # for one class, transformers would silently build a regression
        raise ConfigError(
            f"a classification needs the names of at least two classes, as labels; got {list(labels)}. With one class "
            f"there is nothing to learn."
        )
    place = Path(path)
    if place.suffix == ".gguf" and place.is_file():
        place = path = dequantised(place)
    if place.is_dir() and not any((place / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(  # transformers would make up an empty vocabulary
            f"the model {os.fspath(path)!r} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there."
        )
    more = {"dtype": getattr(torch, dtype), **_placed(four_bit, device)}
    network, tokenizer, odd = _read(path, task, labels, seed, dropout, more)
    if odd:
        raise ConfigError(_other_head(path, labels, odd))
    if task == "causal-lm" and tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {os.fspath(path)!r} has no end-of-text token, which responses need.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if network.config.get_text_config().pad_token_id is None:
        network.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if not four_bit and device != SPREAD:  # transformers has already placed it
        try:
            network.to(device)
        except RuntimeError as error:  # too little memory
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the model cannot be put on device {device!r}: {reason}") from error
    return network, tokenizer


def _read(
    path: str | os.PathLike[str],
    task: Task,
    labels: Sequence[str],
    seed: int,
    dropout: float | None,
    more: dict[str, Any],
) -> tuple[Any, Any, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """The model, its tokenizer, and the tensors whose shapes differ between files and model: name, the files' shape,
    the model's."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        GenerationConfig,
    )

    kind, classes = AutoModelForCausalLM, {}
    if task == "classification":
        kind, classes = AutoModelForSequenceClassification, {"num_labels": len(labels)}
    where = source(path)
    otherwise = f"the model {os.fspath(path)!r} cannot be loaded"
    with readable(otherwise, " Give a directory with config.json, tokenizer and model.safetensors, or a hub id."):
        tokenizer = AutoTokenizer.from_pretrained(path, **where)
        config = AutoConfig.from_pretrained(path, **where, **classes)
        set_dropout(config, dropout)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(seed, "head"))
                network, found = kind.from_pretrained(
                    path, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **where, **more
                )
        except UnpicklingError as error:
            raise ConfigError(
                f"{otherwise}: its pytorch_model.bin holds more than tensors, which could run code, and is not opened. "
                f"Convert it to safetensors on a machine where you trust it."
            ) from error
    if task == "causal-lm":  # greedy must stay greedy, whatever the model's own generation settings
        network.generation_config = GenerationConfig()
    else:
        network.config.id2label = dict(enumerate(labels))
        network.config.label2id = {name: k for k, name in enumerate(labels)}
    return network, tokenizer, [(n, tuple(a), tuple(b)) for n, a, b in sorted(found["mismatched_keys"])]


def set_dropout(config: Any, dropout: float | None) -> None:
    """Replace every dropout rate in a model's configuration; None leaves them. Raises `ValueError` if it has none."""
    rates = [name for name in config.to_dict() if "dropout" in name or name.endswith("pdrop")]
    if dropout and not rates:
        raise ValueError(f"model.dropout = {dropout:g} has no effect: its config.json has no dropout. Leave it out.")
    for name in rates if dropout is not None else ():
        setattr(config, name, dropout)


def _other_head(
    path: str | os.PathLike[str], labels: Sequence[str], odd: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> str:
    """The message for weights that do not have the shapes of a classifier with these labels."""
    from transformers import AutoConfig

    model, listed = os.fspath(path), ", ".join(map(repr, labels[:5])) + ", ..." * (len(labels) > 5)
    heads = {name: stored[0] for name, stored, wanted in odd if wanted[:1] == (len(labels),)}
    if not heads:
        name, stored, wanted = odd[0]
        return (
            f"the model {model!r} cannot be loaded: {name!r} has the shape {stored} in its weights, but {wanted} by "
            f"its config.json. Use the config.json that belongs to the weights."
        )
    name = next((name for name in heads if name.endswith("weight")), next(iter(heads)))
    rows, own = heads[name], list(AutoConfig.from_pretrained(path, **source(path)).id2label.values())
    named = f" ({', '.join(map(repr, own[:5]))}{', ...' * (len(own) > 5)})" if len(own) == rows else ""
    theirs = (
        f"If its classes are the data's, name all {rows} in its order (data.labels of a run, --labels of a command). "
        if rows > len(labels)
        else ""
    )
    return (
        f"the model {model!r} cannot be loaded for the data's {len(labels)} classes ({listed}): it was fine-tuned "
        f"before, and its own head {name!r} has {rows} rows{named}. {theirs}For a new head use a model without one: "
        f"the pre-trained model it was made from, or its layers alone. In Python, "
        f"transformers.AutoModel.from_pretrained({model!r}).save_pretrained('DIR') writes these, and "
        f"transformers.AutoTokenizer.from_pretrained({model!r}).save_pretrained('DIR') its tokenizer beside them."
    )


def check_device(device: str, four_bit: bool) -> None:
    """Raises `ConfigError` if this machine cannot hold a model there, or not in 4 bits. Leaves GPUs alone: workers
    begin to use them."""
    if device == SPREAD and not torch.cuda.is_available():
        raise ConfigError(f"model.device = {SPREAD!r} spreads the model over GPUs, but torch sees none.")
    if four_bit and (device.partition(":")[0] not in (SPREAD, "cuda") or find_spec("bitsandbytes") is None):
        raise ConfigError(
            f"model.four_bit needs a GPU and the library bitsandbytes (pip install bitsandbytes); the device is "
            f"{device!r}."
        )
    if device == SPREAD:
        return
    try:
        place = torch.device(device)
        if place.type != "cuda":
            torch.zeros((), device=place).item()  # fails on "meta" too, which holds no numbers
        elif (place.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"torch sees {counted(torch.cuda.device_count(), 'GPU')}.")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the model cannot be put on device {device!r}: {reason}") from error


def _placed(four_bit: bool, device: str) -> dict[str, Any]:
    """Arguments for `from_pretrained` to load a base in 4 bits, or over all GPUs. Raises as `check_device`."""
    check_device(device, four_bit)
    spread = {"device_map": SPREAD} if device == SPREAD else {}
    if not four_bit:
        return spread
    from transformers import BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": nf4, "device_map": {"": device}, **spread}


@doing("unpacking the GGUF model, once")
def dequantised(file: Path) -> Path:
    """A GGUF language model as a float32 model directory, created once and kept in the cache ($FEDLORA_CACHE)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    cache = Path(os.environ.get("FEDLORA_CACHE", Path.home() / ".cache" / "fedlora"))
    target = cache / f"{file.stem}-{file_digest(file)[:16]}"
    if target.is_dir():
        return target
    with readable(f"the model {file.name} cannot be read as GGUF"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    try:
        with replacing_folder(target) as building:
            model.save_pretrained(building)
            tokenizer.save_pretrained(building)
    except ConfigError as error:
        if not target.is_dir():  # otherwise another process was faster
            raise ConfigError(
                f"the dequantised model {error} Free some space, or name another folder in FEDLORA_CACHE."
            ) from error
    return target


def longest_input(network: nn.Module, positions: int | None) -> int | None:
    """The most tokens a network can read, from its position tables and its configuration; None if it has no such
    table."""
    tables = [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    return min([*tables, *([] if positions is None else [positions])]) if tables else None


def positions_of(config: Any) -> int | None:
    """The longest sequence by a model's configuration; None if it does not say."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    return found if isinstance(found, int) else None


def longest_of_files(model: Path) -> int | None:
    """`longest_input` for a model that is not loaded: builds its layers without numbers. Raises `ConfigError`."""
    from transformers import AutoConfig, AutoModel

    with readable(f"the configuration of the model {str(model)!r} cannot be read"), torch.device("meta"):
        config = AutoConfig.from_pretrained(model)
        return longest_input(AutoModel.from_config(config), positions_of(config))


__all__ = [
    "check_device", "dequantised", "load_base", "longest_input", "longest_of_files", "positions_of", "set_dropout",
]  # fmt: skip
