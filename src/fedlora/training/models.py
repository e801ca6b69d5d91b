"""One base model in memory, with adapters of any rank swapped in and out.

It knows transformers and peft, but nothing about federation, data or optimisers. Only `AdaptedModel.activate` changes
the base weights, always starting from the pre-trained ones (`adapters.io.load_into_model`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlora.adapters.io import head_tensors, load_into_model, read_model
from fedlora.adapters.writer import AdapterSpec
from fedlora.core.lora import Adapter
from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed
from fedlora.training.load import load_base
from fedlora.training.settings import DType, LoRASettings, Task
from fedlora.training.targets import targeted

_SEED = "seed"


class AdaptedModel:
    """A model whose LoRA adapter can be replaced at once, whatever its ranks.

    It takes over a network, a transformers model or any module with linear layers: peft wraps its layers in place. It
    creates one peft adapter for each distinct set of ranks and reuses it: fifty clients with three different ranks
    cost three small adapters beside the one base model.

    Args:
        network: its parameters are the base, which no client trains.
        settings: where LoRA goes, its scaling, and the modules to train in full and average (`modules_to_save`), such
            as a classifier with a name of its own.
        tokenizer, task: of a transformers model; `load` finds both.

    Raises:
        ConfigError: a target or a saved module that the network does not have, or that cannot take LoRA.

    Example:
        >>> model = AdaptedModel.load(
        ...     "model", "sequence-classification", LoRASettings(target_modules=["query"]), labels=["no", "yes"]
        ... )
        >>> adapter, spec = model.seed_adapter(4, seed=0)
        >>> model.activate(adapter)
        >>> sorted({lora.rank for lora in model.read().modules.values()})
        [4]
    """

    def __init__(
        self, network: nn.Module, settings: LoRASettings, *, tokenizer: Any = None, task: Task | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer, self.task, self.settings = tokenizer, task, settings
        self._base, self._gradient_checkpointing = network, gradient_checkpointing
        self._model: Any = None
        self._names: dict[tuple[tuple[str, int], ...] | int, str] = {}
        self._active = ""
        self._targets = targeted(network, settings, plain=task is None)
        for module in network.modules():
            if isinstance(module, nn.TransformerEncoderLayer):  # a hook makes it call its layers: torch's fused kernel
                module.register_forward_pre_hook(_nothing)  # would read the base weights and bypass the adapter

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], task: Task, settings: LoRASettings, *, labels: Sequence[str] = (),
        seed: int = 0, device: str = "cpu", dropout: float | None = None, load_in_4bit: bool = False,
        gradient_checkpointing: bool = False, dtype: DType = "float32",
    ) -> AdaptedModel:  # fmt: skip
        """A model and its tokenizer from a local directory, a GGUF file or a hub id; files as in `load`.

        A new classification head is drawn from `seed`, so that it is the same everywhere. dropout: if given, replaces
        every dropout rate in the model's configuration. load_in_4bit: the base in NF4 (QLoRA), on a GPU with
        bitsandbytes.
        gradient_checkpointing: gradient checkpointing, which trades time for memory. dtype: of the base weights;
        adapters and heads are float32 in any case.

        Raises:
            ConfigError: the model cannot be loaded, or LoRA cannot go where the settings say.
        """
        base, tokenizer = load_base(
            path, task, labels, seed=seed, device=device, dropout=dropout, load_in_4bit=load_in_4bit, dtype=dtype
        )
        return cls(base, settings, tokenizer=tokenizer, task=task, gradient_checkpointing=gradient_checkpointing)

    @property
    def device(self) -> torch.device:
        return next(self._base.parameters()).device

    def check_classes(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` if the data's k-th class is not the model's k-th: the head would silently learn and be
        scored on the wrong classes."""
        config: Any = getattr(self._base, "config", None)
        own = list((getattr(config, "id2label", None) or {}).values()) if self.task == "sequence-classification" else []
        nameless = own == [f"LABEL_{k}" for k in range(len(own))]  # a model not created by `load`
        if own and names and list(names) != own and not nameless:
            raise ConfigError(
                f"the model was loaded for the classes {own[:20]}, but data have {list(names[:20])}: class k is the "
                f"k-th name in both. Use one list of names for all files (label_names) and for the model (labels)."
            )

    @property
    def positions(self) -> int | None:
        """The longest sequence by the model's configuration; None if it does not say."""
        config: Any = getattr(self._base, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        found = getattr(text, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    @property
    def longest(self) -> int | None:
        """The most tokens the model can read: the rows of its position table. None if it has none."""
        tables = [
            module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
            for name, module in self.network.named_modules()
            if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        ]
        return min([*tables, *([] if self.positions is None else [self.positions])]) if tables else None

    @property
    def quantised(self) -> bool:
        """Whether an adapted weight is not floating-point, so that nothing can be added to it."""
        adapted: list[Any] = [m for m in self.network.modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A")]
        return any(not module.base_layer.weight.is_floating_point() for module in adapted)

    @property
    def network(self) -> nn.Module:
        """The module to call: base and active adapter."""
        return self._model if self._model is not None else self._base

    def seed_adapter(self, rank: int | Mapping[str, int], *, seed: int) -> tuple[Adapter, AdapterSpec]:
        """A fresh adapter of `rank` as peft starts it (B = 0, A drawn from `seed`), the model's heads, and the spec."""
        name = self._add(rank)  # also creates the peft model, if there is none yet
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "adapter"))
            self._model.add_adapter(_SEED, self._config(rank))
        adapter, _ = read_model(self._model, _SEED, scaling=self.settings.unit)
        _, spec = read_model(self._model, name, scaling=self.settings.unit)
        self._model.delete_adapter(_SEED)
        self._model.set_adapter(self._active)
        return replace(adapter.map(lambda t: t.cpu()), base=None), spec

    def activate(self, adapter: Adapter) -> None:
        """Set the model to W0 + scaling * adapter.base, adapted by `adapter`, replacing whatever was active."""
        name = self._add(adapter.ranks)
        if name != self._active:
            self._model.set_adapter(name)
            self._active = name
        load_into_model(self._model, adapter, name, scaling=self.settings.unit)

    def read(self) -> Adapter:
        """The active adapter, as copies on the CPU. Its `base` is that of the activated adapter."""
        adapter, _ = read_model(self._model, self._active, scaling=self.settings.unit)
        return adapter.map(lambda t: t.cpu())

    def trainable(self, *, B: bool = True, A: bool = True, heads: bool = True) -> list[nn.Parameter]:
        """The active adapter's parameters that may train; all others are frozen."""
        return trainable(self._model, self._active, B=B, A=A, heads=heads)

    def _add(self, rank: int | Mapping[str, int]) -> str:
        """The name of the peft adapter with these ranks, created if there is none yet."""
        from peft import get_peft_model

        if not isinstance(rank, int) and len(set(rank.values())) == 1:
            rank = next(iter(rank.values()))
        key = rank if isinstance(rank, int) else tuple(sorted(rank.items()))
        if key in self._names:
            return self._names[key]
        name = f"ranks{len(self._names)}"
        try:
            with torch.random.fork_rng(devices=[]):  # peft draws weights that are never used
                if self._model is None:
                    self._model = get_peft_model(self._base, self._config(rank), adapter_name=name)
                    self._active = name
                    if self._gradient_checkpointing:  # after peft, which would add a hook that does not pickle
                        _checkpoint(self._base)
                else:
                    self._model.add_adapter(name, self._config(rank))
        except (ValueError, RuntimeError) as error:  # RuntimeError: a rank for which there is no memory
            targets, reason = self.settings.target_modules, str(error).splitlines()[0]
            raise ConfigError(f"LoRA cannot be put on {targets!r}: {reason}") from error
        for _, head in head_tensors(self._model, name):  # peft leaves them in the base's type
            head.data = head.data.float() if head.dtype == torch.bfloat16 else head.data
        self._names[key] = name
        return name

    def _config(self, rank: int | Mapping[str, int]) -> Any:
        from peft import LoraConfig

        ranked, fixed = rank_fields(rank, self.settings.unit), self.settings.lora_alpha
        if fixed:
            ranked |= {"lora_alpha": fixed, "alpha_pattern": {}}
        return LoraConfig(
            **ranked,
            use_rslora=self.settings.use_rslora,
            lora_dropout=self.settings.lora_dropout,
            target_modules=self._targets,
            modules_to_save=list(self.settings.modules_to_save) or None,
            task_type={"sequence-classification": "SEQ_CLS", "causal-lm": "CAUSAL_LM", None: None}[self.task],
        )

    def to(self, device: str) -> None:
        """Move to a device. The base weights must be unchanged."""
        self.network.to(device)


def rank_fields(rank: int | Mapping[str, int], scaling: float) -> dict[str, Any]:
    """A LoraConfig's fields for one rank, or module -> rank, so that alpha / r is `scaling` in every module."""
    largest = rank if isinstance(rank, int) else max(rank.values())
    patterns = {} if isinstance(rank, int) else {f"^{path}": r for path, r in rank.items() if r != largest}
    return {
        "r": largest, "lora_alpha": scaling * largest, "rank_pattern": patterns,
        "alpha_pattern": {path: scaling * r for path, r in patterns.items()},
    }  # fmt: skip


def trainable(model: nn.Module, name: str, *, B: bool = True, A: bool = True, heads: bool = True) -> list[nn.Parameter]:
    """The parameters of a peft model's adapter `name` that may train; all others are frozen."""
    chosen = []
    for path, parameter in model.named_parameters():
        mine = path.endswith(f".{name}.weight") or f".modules_to_save.{name}." in path
        kind = B if ".lora_B." in path else A if ".lora_A." in path else heads
        parameter.requires_grad_(mine and kind)
        if mine and kind:
            chosen.append(parameter)
    return chosen


def _checkpoint(base: Any) -> None:
    """Keep few activations; let the gradient reach the adapters although no base weight has one."""
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.disable_input_require_grads()  # transformers may have added its own hook, which does not pickle
    base.get_input_embeddings().register_forward_hook(_with_gradient)


def _with_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that does nothing."""
