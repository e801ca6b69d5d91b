"""One base model in memory, with adapters of any rank swapped in and out.

Knows transformers and peft; knows nothing of federation, data or optimisers. The base weights change in one place only,
`AdaptedModel.activate`, which always starts from the pre-trained ones (`adapters.io.load_into_model`).
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlora.adapters.io import AdapterSpec, load_into_model, read_model
from fedlora.core.folders import replacing_folder
from fedlora.core.lora import Adapter
from fedlora.core.method import TailPenalty
from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed
from fedlora.training.frozen_prefix import remember
from fedlora.training.hub_models import source

Task = Literal["classification", "causal-lm"]


@dataclass(frozen=True)
class LoRASettings:
    """What every client's LoRA has in common.

    targets: module names or suffixes, one regular expression for whole paths, or "all-linear". scaling: the unit in
    which adapters travel: Delta W = scaling * B A. It is alpha / r for every client, unless `alpha` is given. alpha: a
    fixed one for all ranks, so that a client of rank r trains W0 + (alpha / r) B A as peft does, or with `rslora`
    W0 + (alpha / sqrt(r)) B A. dropout: on LoRA's input. saved: further modules to train in full; a classification head
    is added by peft itself.

    Example:
        >>> LoRASettings(targets=["query", "value"], scaling=2.0)  # doctest: +ELLIPSIS
        LoRASettings(targets=['query', 'value'], scaling=2.0, ...
    """

    targets: Sequence[str] | str
    scaling: float = 2.0
    dropout: float = 0.0
    saved: Sequence[str] = ()
    alpha: float | None = None
    rslora: bool = False

    def scale(self, r: int) -> float:
        """What a client of rank r multiplies its B A by in training: alpha / r, or alpha / sqrt(r)."""
        if self.alpha is None:
            return self.scaling
        return self.alpha / math.sqrt(r) if self.rslora else self.alpha / r


_SEED = "seed"
_USUAL_RANK = 512  # ranks above this are compared with the matrices before anything is made of them
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


def longest_input(network: nn.Module, positions: int | None) -> int | None:
    """The most tokens that a network can read, by its tables of positions and what its configuration says; None where
    it has no such table."""
    tables = [
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    return min([*tables, *([] if positions is None else [positions])]) if tables else None


def longest_of_files(model: Path) -> int | None:
    """The same of a model that is not loaded: its layers are made without their numbers."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model)
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    with torch.device("meta"):
        return longest_input(AutoModel.from_config(config), found if isinstance(found, int) else None)


class AdaptedModel:
    """A transformers model whose LoRA adapter can be replaced at once, whatever its ranks.

    One peft adapter is made for each distinct set of ranks that is asked for, and reused: fifty clients of three ranks
    cost three small adapters beside the one base model.

    Example:
        >>> model = AdaptedModel.load("model", "classification", LoRASettings(["query"]), labels=["no", "yes"])
        >>> adapter, spec = model.seed_adapter(4, seed=0)
        >>> model.activate(adapter)
        >>> sorted({lora.rank for lora in model.read().modules.values()})
        [4]
    """

    def __init__(
        self, base: nn.Module, tokenizer: Any, task: Task | None, settings: LoRASettings, *, checkpointing: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.task = task
        self.settings = settings
        self._base = base
        self._checkpointing = checkpointing
        self._model: Any = None
        self._names: dict[tuple[tuple[str, int], ...] | int, str] = {}
        self._active = ""

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        task: Task,
        settings: LoRASettings,
        *,
        labels: Sequence[str] = (),
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        dropout: float | None = None,
        four_bit: bool = False,
        checkpointing: bool = False,
        remember_prefix: bool = False,
    ) -> AdaptedModel:
        """A model and its tokenizer from a local directory or a hub id; safetensors only.

        A new classification head is drawn from `seed`, so that it is the same everywhere. dropout: replaces every
        dropout rate of the model's own configuration where given. four_bit: the base in NF4 (QLoRA), on a GPU with
        bitsandbytes. checkpointing: trade time for memory. remember_prefix: as `frozen_prefix.remember`.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoTokenizer,
            GenerationConfig,
        )

        if task == "classification" and len(labels) < 2:  # of one, transformers would make a regression without a word
            raise ConfigError(
                f"a classification needs the names of two classes or more, as labels; got {list(labels)}. Data of one "
                f"class leave nothing to tell apart."
            )
        extra: dict[str, Any] = {"num_labels": len(labels)} if task == "classification" else {}
        kind = AutoModelForSequenceClassification if task == "classification" else AutoModelForCausalLM
        folder = Path(path)
        if folder.suffix == ".gguf" and folder.is_file():
            folder = path = dequantised(folder)
        if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ConfigError(  # transformers would make up an empty vocabulary
                f"the model {os.fspath(path)!r} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there."
            )
        where = source(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **where)
            config = AutoConfig.from_pretrained(path, **where, **extra)
            if dropout is not None:
                rates = [k for k in config.to_dict() if "dropout" in k or k.endswith("pdrop")]
                for name in rates:
                    setattr(config, name, dropout)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(seed, "head"))
                base = kind.from_pretrained(
                    path, dtype=dtype, use_safetensors=True, config=config, **where, **_quantisation(four_bit, device)
                )
        except (OSError, ValueError, RuntimeError) as error:
            if task == "classification" and "ignore_mismatched_sizes" in str(error):
                made = {"dtype": dtype, "config": config, **_quantisation(four_bit, device)}
                raise ConfigError(_other_head(path, labels, kind, where, made)) from error
            raise ConfigError(
                f"the model {os.fspath(path)!r} cannot be loaded: {str(error).splitlines()[0]} "
                f"Give a directory with config.json, tokenizer and model.safetensors, or a hub id."
            ) from error
        if task == "causal-lm" and tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer of {os.fspath(path)!r} has no end-of-text token, which responses need.")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if base.config.get_text_config().pad_token_id is None:
            base.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        paths = [name for name, _ in base.named_modules()]
        absent = [name for name in settings.saved if not any(f".{path}".endswith(f".{name}") for path in paths)]
        if absent:
            raise ConfigError(
                f"lora.saved: {absent[0]!r} is no module of the model, and nothing would be trained in full by that "
                f"name. Its modules begin with {', '.join(paths[1:8])}, ..."
            )
        if task == "causal-lm":  # greedy is greedy, whatever the model's own generation settings are
            base.generation_config = GenerationConfig()
        if labels:
            base.config.id2label = dict(enumerate(labels))
            base.config.label2id = {name: k for k, name in enumerate(labels)}
        try:
            if not four_bit:  # bitsandbytes has put it there
                base.to(device)
            torch.zeros((), device=device).item()  # "meta" takes weights, and holds no numbers
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the model cannot be put on device {device!r}: {reason}") from error
        if remember_prefix:
            remember(base, settings.targets, tokenizer.pad_token_id)
        return cls(base, tokenizer, task, settings, checkpointing=checkpointing)

    @property
    def device(self) -> torch.device:
        return next(self._base.parameters()).device

    def check_classes(self, names: Sequence[str]) -> None:
        """Raises `ConfigError` for data whose k-th class is not the model's k-th: the head would learn and be measured
        on other classes than are meant, and no number would tell."""
        config: Any = getattr(self._base, "config", None)
        own = list((getattr(config, "id2label", None) or {}).values()) if self.task == "classification" else []
        nameless = own == [f"LABEL_{k}" for k in range(len(own))]  # a model that was not loaded by `load`
        if own and names and list(names) != own and not nameless:
            raise ConfigError(
                f"the model was loaded for the classes {own[:20]}, and data have {list(names[:20])}: class k is the "
                f"k-th name of both. Read every file with the same label_names, and load the model with "
                f"labels=data.label_names."
            )

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model has positions for; None where it does not say."""
        config: Any = getattr(self._base, "config", None)
        found = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
        return found if isinstance(found, int) else None

    @property
    def longest(self) -> int | None:
        """The most tokens that the model can read: the rows of its table of positions. None where it has none."""
        return longest_input(self.network, self.positions)

    @property
    def quantised(self) -> bool:
        """Whether an adapted weight is no floating-point number, so that nothing can be added to it."""
        return any(not self._base_layer(path).weight.is_floating_point() for path in self._adapted())

    @property
    def network(self) -> nn.Module:
        """The module to call: base and active adapter."""
        return self._model if self._model is not None else self._base

    def seed_adapter(self, rank: int | Mapping[str, int], *, seed: int) -> tuple[Adapter, AdapterSpec]:
        """A fresh adapter of `rank` as peft starts it (B = 0, A drawn from `seed`), the model's heads, and the spec."""
        name = self._adapter_for(rank)  # which also makes the peft model, where there is none yet
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "adapter"))
            self._model.add_adapter(_SEED, self._config(rank))
        adapter, _ = read_model(self._model, _SEED, scaling=self.settings.scaling)
        _, spec = read_model(self._model, name, scaling=self.settings.scaling)
        self._model.delete_adapter(_SEED)
        self._model.set_adapter(self._active)
        return replace(adapter.map(lambda t: t.cpu()), base=None), spec

    def activate(self, adapter: Adapter) -> None:
        """Make the model W0 + scaling * adapter.base, adapted by `adapter`: whatever was active before is gone."""
        ranks = adapter.ranks
        distinct = set(ranks.values())
        name = self._adapter_for(distinct.pop() if len(distinct) == 1 else ranks)
        if name != self._active:
            self._model.set_adapter(name)
            self._active = name
        load_into_model(self._model, adapter, name, scaling=self.settings.scaling)

    def read(self) -> Adapter:
        """The active adapter, as copies on the CPU. Its `base` is that of the one that was activated."""
        adapter, _ = read_model(self._model, self._active, scaling=self.settings.scaling)
        return adapter.map(lambda t: t.cpu())

    def trainable(self, *, B: bool = True, A: bool = True, heads: bool = True) -> list[nn.Parameter]:
        """The active adapter's parameters that may train; the others are switched off."""
        chosen = []
        for path, parameter in self._model.named_parameters():
            mine = path.endswith(f".{self._active}.weight") or f".modules_to_save.{self._active}." in path
            kind = B if ".lora_B." in path else A if ".lora_A." in path else heads
            parameter.requires_grad_(mine and kind)
            if mine and kind:
                chosen.append(parameter)
        return chosen

    def tail_penalty(self, penalty: TailPenalty) -> Tensor:
        """The declared penalty on the active adapter, as a term of the loss."""
        pairs = [
            in_unit(module.lora_B[self._active].weight, module.lora_A[self._active].weight, self.settings)
            for module in self._model.modules()
            if isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and self._active in module.lora_A
        ]
        return tail_penalty(pairs, penalty)

    def lora_layer(self, path: str) -> Any:
        """The adapted layer at `path`: it has a base_layer, and its forward is base and adapter."""
        return self._model.get_submodule(f"base_model.model.{path}")

    def lora_dropout(self, path: str) -> nn.Module:
        """What drops parts of the adapter's input at `path`."""
        dropout: nn.Module = self.lora_layer(path).lora_dropout[self._active]
        return dropout

    def head_layer(self, path: str) -> Any:
        """The fully trained module at `path` that the active adapter runs with."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            try:
                outer = self._model.get_submodule(".".join(["base_model.model", *parts[:length]]))
            except AttributeError:  # inside the wrapper that peft puts around a saved module
                continue
            if isinstance(getattr(outer, "modules_to_save", None), nn.ModuleDict):
                return outer.modules_to_save[self._active].get_submodule(".".join(parts[length:]))
        raise KeyError(path)

    def _adapter_for(self, rank: int | Mapping[str, int]) -> str:
        from peft import get_peft_model

        key = rank if isinstance(rank, int) else tuple(sorted(rank.items()))
        if key in self._names:
            return self._names[key]
        largest = rank if isinstance(rank, int) else max(rank.values())
        if largest > _USUAL_RANK:
            self._check_rank(largest)
        name = f"ranks{len(self._names)}"
        try:
            with torch.random.fork_rng(devices=[]):  # peft draws weights that nobody will see
                if self._model is None:
                    self._model = get_peft_model(self._base, self._config(rank), adapter_name=name)
                    self._active = name
                    if self._checkpointing:  # after peft, which would put a hook there that does not pickle
                        _checkpoint(self._base)
                else:
                    self._model.add_adapter(name, self._config(rank))
        except ValueError as error:
            targets, reason = self.settings.targets, str(error).splitlines()[0]
            raise ConfigError(f"LoRA cannot be put on {targets!r}: {reason}") from error
        self._names[key] = name
        return name

    def _check_rank(self, rank: int) -> None:
        """Raises `ConfigError` for a rank above both sides of every adapted matrix, before anything is made of it."""
        name = self._adapter_for(1)  # which makes the peft model
        adapter, _ = read_model(self._model, name, scaling=self.settings.scaling)
        sides = [max(len(B), A.shape[1]) for B, A in (lora.factors for lora in adapter.modules.values())]
        if rank > max(sides, default=rank):
            raise ConfigError(
                f"rank {rank:,} is above both sides of every adapted matrix (the longest has {max(sides):,}): an "
                f"update of full rank needs less. LoRA's ranks are mostly 2 to 64."
            )

    def _config(self, rank: int | Mapping[str, int]) -> Any:
        from peft import LoraConfig

        largest = rank if isinstance(rank, int) else max(rank.values())
        patterns = {} if isinstance(rank, int) else {f"^{path}": r for path, r in rank.items() if r != largest}
        targets, scaling, fixed = self.settings.targets, self.settings.scaling, self.settings.alpha
        return LoraConfig(
            r=largest,
            lora_alpha=fixed or scaling * largest,
            use_rslora=self.settings.rslora,
            rank_pattern=patterns,
            alpha_pattern={} if fixed else {path: scaling * r for path, r in patterns.items()},
            lora_dropout=self.settings.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            modules_to_save=list(self.settings.saved) or None,
            task_type={"classification": "SEQ_CLS", "causal-lm": "CAUSAL_LM", None: None}[self.task],
        )

    def frozen(self) -> list[nn.Parameter]:
        """The base weights, that no client trains: what processes can share."""
        return [
            parameter
            for path, parameter in self.network.named_parameters()
            if ".lora_" not in path and ".modules_to_save." not in path and parameter.is_contiguous()
        ]

    def to(self, device: str) -> None:
        """Move to a device. Nothing may have been added to the base weights."""
        self.network.to(device)

    def _adapted(self) -> list[str]:
        """The paths of the adapted modules."""
        return [
            name.removeprefix("base_model.model.")
            for name, module in (self._model.named_modules() if self._model is not None else ())
            if hasattr(module, "base_layer") and hasattr(module, "lora_A")
        ]

    def _base_layer(self, path: str) -> Any:
        return self._model.get_submodule(f"base_model.model.{path}").base_layer


def _checkpoint(base: Any) -> None:
    """Keep few activations; the gradient reaches the adapters although no base weight has one."""
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.disable_input_require_grads()  # transformers' own hook, which it may have put there: it does not pickle
    base.get_input_embeddings().register_forward_hook(_with_gradient)


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _other_head(
    path: str | os.PathLike[str], labels: Sequence[str], kind: Any, where: Mapping[str, Any], made: Mapping[str, Any]
) -> str:
    """What is said of a model whose weights are of other shapes than a classifier of these labels has."""
    from transformers import AutoConfig

    found = kind.from_pretrained(
        path, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **where, **made
    )[1]["mismatched_keys"]
    shapes = {name: (tuple(stored), tuple(wanted)) for name, stored, wanted in sorted(found)}
    heads = {name: stored[0] for name, (stored, wanted) in shapes.items() if wanted[:1] == (len(labels),)}
    model, listed = os.fspath(path), ", ".join(map(repr, labels[:5])) + ", ..." * (len(labels) > 5)
    if not heads:
        name, (stored, wanted) = next(iter(shapes.items()))
        return (
            f"the model {model!r} cannot be loaded: {name!r} has the shape {stored} in its weights, and {wanted} by "
            f"its config.json. Take the config.json that belongs to the weights."
        )
    name = next((name for name in heads if name.endswith("weight")), next(iter(heads)))
    rows, own = heads[name], list(AutoConfig.from_pretrained(path, **where).id2label.values())
    named = f" ({', '.join(map(repr, own[:5]))}{', ...' * (len(own) > 5)})" if len(own) == rows else ""
    theirs = (
        f"If its classes are the data's, name all {rows} in its order (data.labels of a run, --labels of a command). "
        if rows > len(labels)
        else ""
    )
    return (
        f"the model {model!r} cannot be loaded for the data's {len(labels)} classes ({listed}): it was fine-tuned "
        f"before, and its own head {name!r} has {rows} rows{named}. {theirs}For a new head take a model without one: "
        f"the pre-trained one that it was made from, or its layers alone, which in Python "
        f"transformers.AutoModel.from_pretrained({model!r}).save_pretrained('DIR') writes, and "
        f"transformers.AutoTokenizer.from_pretrained({model!r}).save_pretrained('DIR') its tokenizer beside them."
    )


def _quantisation(four_bit: bool, device: str) -> dict[str, Any]:
    """What `from_pretrained` needs for a base in 4 bits. Raises `ConfigError` without a GPU or bitsandbytes."""
    if not four_bit:
        return {}
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if not device.startswith("cuda") or find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.four_bit needs a GPU and the library bitsandbytes (pip install bitsandbytes); the device is "
            f"{device!r}."
        )
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": nf4, "device_map": {"": device}}


def dequantised(file: Path) -> Path:
    """A GGUF language model as a float32 model directory, made once and kept in the cache ($FEDLORA_CACHE)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    cache = Path(os.environ.get("FEDLORA_CACHE", Path.home() / ".cache" / "fedlora"))
    target = cache / f"{file.stem}-{digest}"
    if not target.is_dir():
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
        except (OSError, ValueError, ImportError, RuntimeError, struct.error) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"the model {file.name} cannot be read as GGUF: {reason}") from error
        try:
            with replacing_folder(target) as building:
                model.save_pretrained(building)
                tokenizer.save_pretrained(building)
        except ConfigError as error:
            if not target.is_dir():  # else somebody was faster
                raise ConfigError(
                    f"the dequantised model {error} Free some space, or name another folder in FEDLORA_CACHE."
                ) from error
    return target


def tail_penalty(pairs: Sequence[tuple[Tensor, Tensor]], penalty: TailPenalty) -> Tensor:
    """The declared penalty over factors (B, A). `client.tail_size` is the same sum.

    sqrt(x^2 + tiny) in place of the norm: the norm of a zero B, where training starts, has no gradient.
    """

    def size(t: Tensor) -> Tensor:
        return (t.float().square().sum() + 1e-24).sqrt()

    starts = [penalty.tail_start(len(A)) for _, A in pairs]
    tails = [size(B[:, q:]) * size(A[q:]) for (B, A), q in zip(pairs, starts, strict=True)]
    return penalty.strength * torch.stack(tails).sum()


def in_unit(B: Tensor, A: Tensor, settings: LoRASettings) -> tuple[Tensor, Tensor]:
    """Factors as they are trained, in the unit in which they travel: (s B / unit, A) of rank r's own scale s."""
    scale = settings.scale(len(A))
    return (B, A) if scale == settings.scaling else (B * (scale / settings.scaling), A)


_SLOW_TOKENIZER = [
    "vocab.txt", "vocab.json", "merges.txt", "*.model", "added_tokens.json", "special_tokens_map.json",
    "tokenizer_config.json",
]  # fmt: skip


def model_digests(path: str | os.PathLike[str]) -> dict[str, str]:
    """File name -> SHA-256 of a local model's weights and tokenizer, for the manifest; empty for a hub id."""
    folder = Path(path)
    if folder.is_file():  # GGUF
        return {folder.name: hashlib.sha256(folder.read_bytes()).hexdigest()}
    names = ["*.safetensors", "config.json", "tokenizer.json"]
    if not (folder / "tokenizer.json").exists():  # which has all of them in it
        names += _SLOW_TOKENIZER
    files = [file for name in names for file in folder.glob(name)]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}
