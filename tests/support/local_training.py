"""Local training on tiny models: how they are loaded, what a client gets, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedlora import Adapter, Client, Download, LoRA, Roles
from fedlora.core.trainer import Trained
from fedlora.training.loop import LocalTrainer
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings
from support.training_data import LABELS


def loader(classifier: Path) -> Loader:
    """A fresh copy of the classifier in memory, or of another model; without dropout unless asked for."""

    def load(path: Path = classifier, **options: Any) -> AdaptedModel:
        lora = {"target_modules": ["query", "value"]} | options.pop("lora", {})
        options = {"task": "sequence-classification", "labels": LABELS, "dropout": 0.0} | options
        return AdaptedModel.load(path, options.pop("task"), LoRASettings(**lora), **options)

    return load


Loader = Callable[..., AdaptedModel]


def download(adapter: Adapter, client: str = "a", round: int = 0, **fields: Any) -> Download:
    parts: dict[str, Any] = {"roles": Roles(), "start": Adapter({}), "base": {}}
    return Download(client=Client(client, 4), round=round, adapter=adapter, **(parts | fields))


def drawn(adapter: Adapter, rank: int | Mapping[str, int], seed: int, size: float = 0.2) -> Adapter:
    """Modules and heads of `adapter`, with random factors of `rank`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return size * torch.randn(*shape, generator=generator)

    ranks = dict.fromkeys(adapter.modules, rank) if isinstance(rank, int) else rank
    modules = {}
    for name, lora in adapter.modules.items():
        B, A = lora.factors
        modules[name] = LoRA(randn(B.shape[0], ranks[name]), randn(ranks[name], A.shape[1]))
    heads = {name: head + randn(*head.shape) for name, head in adapter.heads.items()}
    return replace(adapter, modules=modules, heads=heads)


def bits(adapter: Adapter) -> dict[str, tuple[tuple[int, ...], bytes]]:
    tensors = {f"{name}/{f}": t for name, lora in adapter.modules.items() for f, t in lora.tensors().items()}
    tensors |= adapter.heads
    return {name: (tuple(t.shape), t.detach().contiguous().numpy().tobytes()) for name, t in tensors.items()}


def distance(a: Adapter, b: Adapter) -> float:
    """The largest difference of an entry, factors and heads alike."""
    pairs = [
        (x, b.modules[name].tensors()[f]) for name, lora in a.modules.items() for f, x in lora.tensors().items()
    ] + [(head, b.heads[name]) for name, head in a.heads.items()]
    return max(float((x - y).abs().max()) for x, y in pairs)


def base_weights(model: AdaptedModel) -> dict[str, Tensor]:
    """Copies of all parameters that belong to no adapter."""
    return {
        name: p.detach().clone()
        for name, p in model.network.named_parameters()
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def dense(path: Path, kind: Callable[[], nn.Module], updates: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> Any:
    """The plain model with W += update written into its weights: no peft, nothing of fedlora."""
    network = kind()
    network.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"), strict=False)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, update in updates.items():
            parameters[f"{name}.weight"] += update
        for name, head in heads.items():
            parameters[name].copy_(head)
    return network.eval()


@torch.no_grad()
def logits(network: Any, ids: Sequence[int]) -> Tensor:
    """What a model in evaluation mode says to one unpadded example."""
    was = network.training
    network.eval()
    out: Tensor = network(input_ids=torch.tensor([list(ids)])).logits[0]
    network.train(was)
    return out


class Recorder:
    """A trainer that remembers what it was asked and what came out."""

    def __init__(self, inner: LocalTrainer) -> None:
        self.inner = inner
        self.calls: list[tuple[Download, Adapter, int, Trained]] = []

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        trained = self.inner.train(download, adapter, position)
        self.calls.append((download, adapter, position, trained))
        return trained
