"""Loads a base model and its tokenizer from a directory, a GGUF file or a hub id.

Weights are safetensors. PyTorch's own files (pytorch_model.bin) are read only if there are no others, and as tensors
alone: torch refuses a pickle that holds anything else (weights_only), so no code of the file runs. A hub id is its
snapshot on this machine: the hub is asked once, and where it cannot be reached the cached snapshot counts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlora.core.folders import replacing_folder
from fedlora.data.demo import HUB_NAMES
from fedlora.data.hub import file_digest, model_snapshot, readable, repository_and_revision, repository_of
from fedlora.doing import doing
from fedlora.errors import ConfigError, counted
from fedlora.seeds import derive_seed
from fedlora.training.settings import DType, Task

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


def hub_name(model: str) -> str | None:
    """The hub's name for a packaged model, owner/name@revision or a folder in the hub's cache; None for any other."""
    named = repository_and_revision(model)
    return HUB_NAMES.get(model) or (named[0] if named else repository_of(model))


@doing("looking for the base model")
def model_place(path: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Path:
    """A model's directory, of a GGUF file an unpacked one; for a hub id, its snapshot on this machine, downloaded if
    missing.

    Args:
        revision: of a hub id, a commit, tag or branch; by default the main branch. weights: False: only the small
            files, such as configuration and tokenizer.

    Raises:
        ConfigError: there is no such model, or neither the hub nor its cache has it.
    """
    found = Path(path)
    if found.exists():
        return dequantised(found) if found.suffix == ".gguf" and found.is_file() else found
    return model_snapshot(os.fspath(path), revision, weights=weights)


def weight_files(place: Path) -> list[Path]:
    """The files that hold a model's weights, whole or in shards: safetensors, or PyTorch's own if there are no others.
    Raises `ConfigError` if there are none."""
    for name, kind in (("model", "safetensors"), ("pytorch_model", "bin")):
        whole = place / f"{name}.{kind}"
        if found := [whole] if whole.is_file() else sorted(place.glob(f"{name}-*-of-*.{kind}")):
            return found
    raise ConfigError(f"the model {place} has no weights: neither model*.safetensors nor pytorch_model*.bin is there.")


@doing("unpacking the GGUF model, once")
def dequantised(file: Path) -> Path:
    """A GGUF language model as a float32 model directory, made once and kept in the cache ($FEDLORA_CACHE): to parse
    the words of such a file takes most of a minute."""
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
            raise ConfigError(f"the unpacked model {error} FEDLORA_CACHE may name another folder.") from error
    return target


def tokenizer_of(path: str | os.PathLike[str]) -> Any:
    """A model's tokenizer, without the model. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    folder = model_place(path, weights=False)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(  # transformers would make up an empty vocabulary
            f"the model {os.fspath(path)!r} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there."
        )
    with readable(f"the tokenizer of {os.fspath(path)!r} cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder)


def config_of(path: str | os.PathLike[str], *, classes: int = 0, dropout: float | None = None) -> Any:
    """A model's configuration. dropout: if given, replaces every rate in it. Raises `ConfigError`."""
    from transformers import AutoConfig

    folder = model_place(path, weights=False)
    with readable(f"the model {os.fspath(path)!r} cannot be loaded"):
        config = AutoConfig.from_pretrained(folder, **({"num_labels": classes} if classes else {}))
    rates = [name for name in config.to_dict() if "dropout" in name or name.endswith("pdrop")]
    if dropout and not rates:
        raise ConfigError(f"model.dropout = {dropout:g} has no effect: the model's config.json has no dropout.")
    for name in rates if dropout is not None else ():
        setattr(config, name, dropout)
    return config


@doing("loading the base model")
def load_base(
    path: str | os.PathLike[str], task: Task, labels: Sequence[str], *, seed: int, device: str, dropout: float | None,
    load_in_4bit: bool, dtype: DType = "float32",
) -> tuple[Any, Any]:  # fmt: skip
    """The model, on its device, and its tokenizer; arguments as in `AdaptedModel.load`. Raises `ConfigError`."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

    if task == "sequence-classification" and len(labels) < 2:  # of one class transformers makes a regression
        raise ConfigError(f"a classification needs the names of at least two classes, as labels; got {list(labels)}.")
    place = model_place(path)
    tokenizer = tokenizer_of(place)
    config = config_of(place, classes=len(labels) if task == "sequence-classification" else 0, dropout=dropout)
    kind: Any = AutoModelForCausalLM if task == "causal-lm" else AutoModelForSequenceClassification
    more: dict[str, Any] = {}
    if load_in_4bit:
        from transformers import BitsAndBytesConfig

        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        more["device_map"] = {"": device}
    otherwise = f"the model {os.fspath(path)!r} cannot be loaded"
    hint = " It needs config.json, a tokenizer, and model.safetensors or a pickle of tensors alone."
    with readable(otherwise, hint), torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "head"))
        network, found = kind.from_pretrained(
            place, config=config, dtype=getattr(torch, dtype), ignore_mismatched_sizes=True,
            output_loading_info=True, **more,
        )  # fmt: skip
    if found["mismatched_keys"]:
        name, stored, wanted = sorted(found["mismatched_keys"])[0]
        raise ConfigError(
            f"{otherwise}: {name!r} has the shape {tuple(stored)} in its weights, but {tuple(wanted)} by its config "
            f"with {len(labels)} classes. If it was fine-tuned to classify, name its classes (data.label_names)."
        )
    if task == "causal-lm":
        network.generation_config = GenerationConfig()  # greedy must stay greedy, whatever the model's own settings
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer of {os.fspath(path)!r} has no end-of-text token, which responses need.")
    else:
        network.config.id2label = dict(enumerate(labels))
        network.config.label2id = {name: k for k, name in enumerate(labels)}
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if network.config.get_text_config().pad_token_id is None:
        network.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if not load_in_4bit:
        with readable(f"the model cannot be put on device {device!r}"):  # too little memory
            network.to(device)
    return network, tokenizer


def check_device(device: str, load_in_4bit: bool) -> None:
    """Raises `ConfigError` if this machine cannot hold a model there, or not in 4 bits. Leaves GPUs alone: workers
    begin to use them."""
    if load_in_4bit and (device.partition(":")[0] != "cuda" or find_spec("bitsandbytes") is None):
        raise ConfigError(f"model.load_in_4bit needs a GPU and the library bitsandbytes; the device is {device!r}.")
    with readable(f"the model cannot be put on device {device!r}"):
        place = torch.device(device)
        if place.type != "cuda":
            torch.zeros((), device=place).item()  # fails on "meta" too, which holds no numbers
        elif (place.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"torch sees {counted(torch.cuda.device_count(), 'GPU')}.")


def bare_network(path: str | os.PathLike[str], task: Task) -> nn.Module:
    """The model without its weights, on torch's meta device, whose tensors have shapes and no numbers. Raises
    `ConfigError` if there is none, or transformers cannot build it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if task == "sequence-classification" else AutoModelForCausalLM
    config = config_of(path)
    with readable(f"the model {os.fspath(path)!r} cannot be built"), torch.device("meta"):
        network: nn.Module = kind.from_config(config, dtype=torch.float32)
    return network
