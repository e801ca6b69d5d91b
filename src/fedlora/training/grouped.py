"""Several clients trained at once on the one base model: the same training as one after the other, in fewer passes.

The base model sees the clients' batches as one; each example is given its own client's LoRA factors and heads, and
each client its own loss, gradient, clipping and optimiser state, so none of them can tell that the others are there.
Examples of all clients are sorted by length before they are cut into micro-batches, so there is less padding too.

    x (n, T, d_in), factors A (K, r, d_in), B (K, d_out, r), owner (n,):
    y = base(x) + scale[owner] * (x A[owner]^T) B[owner]^T

Ranks may differ: smaller ones are padded with zeros, which have no gradient. So may the scales (a fixed alpha).
`LocalTrainer` is the reference that this is tested against; with dropout the two draw different masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlora.adapters.io import pad_rank
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.method import Role, Roles, TailPenalty
from fedlora.core.trainer import Job, Trained
from fedlora.errors import ConfigError
from fedlora.seeds import derive_seed
from fedlora.training.bfloat16 import bfloat16_autocast
from fedlora.training.encoding import IGNORED, Example, collate, scored
from fedlora.training.local import LocalTrainer, micro_batch, optimizer_for
from fedlora.training.models import AdaptedModel, in_unit, tail_penalty

Stacked = dict[str, nn.Parameter]  # a parameter of all clients: client first


class GroupedTrainer(LocalTrainer):
    """A `LocalTrainer` that can train several clients of one round at once. Implements `core.trainer.GroupTrainer`.

    Example:
        >>> def workers(model, data):  # four clients at a time, in one batch
        ...     return Together(GroupedTrainer(model, data, TrainSettings(steps=20), seed=0), size=4)
    """

    def train_group(self, jobs: Sequence[Job]) -> list[Trained]:
        """What `train` gives for each of `jobs`, which are of one round: in their order.

        Raises:
            ConfigError: a client has no data, or a head is no linear layer, so that it cannot be given by example.
        """
        s, model, device = self._settings, self._model, self._model.device
        names, download = [job.download.client.id for job in jobs], jobs[0].download
        data = [self.examples(name) for name in names]
        batches = [min(s.batch_size, len(part)) for part in data]
        steps = [s.steps or math.ceil(s.epochs * len(part) / batch) for part, batch in zip(data, batches, strict=True)]
        orders = [self.order(name, job.position) for name, job in zip(names, jobs, strict=True)]
        weights = [self._class_weights[name] for name in names]
        model.activate(jobs[0].adapter)
        model.trainable(B=False, A=False, heads=False)
        model.network.train()
        group = _Group([job.adapter for job in jobs], download.roles, model)
        optimizer = optimizer_for(group.trained, s, download.round)
        totals = torch.zeros(len(jobs), dtype=torch.float64)
        done: dict[int, Adapter] = {}
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), group.adapting():
            torch.manual_seed(derive_seed(self._seed, "train", download.round, *names))
            for step in range(max(steps)):
                active = [k for k in range(len(jobs)) if step < steps[k]]
                picked = [(k, data[k][next(orders[k])]) for k in active for _ in range(batches[k])]
                for owners, losses in group.forward(picked, s.accumulation, weights, bf16=s.bf16):
                    losses.sum().backward()  # type: ignore[no-untyped-call]
                    totals.index_add_(0, owners.cpu(), losses.detach().double().cpu())
                if download.roles.penalty is not None:
                    group.penalty(active, download.roles.penalty).backward()  # type: ignore[no-untyped-call]
                if s.clip:
                    group.clip(s.clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                # those with fewer steps are read at their last: what the optimiser's momentum does later is not theirs
                done |= {k: group.read(k) for k in active if step + 1 == steps[k]}
        return [
            Trained(done[k], len(data[k]), float(totals[k]) / steps[k], jobs[k].position + steps[k] * batches[k])
            for k in range(len(jobs))
        ]


class _Group:
    """The stacked parameters of a group of clients, and the model as it runs with them."""

    def __init__(self, adapters: Sequence[Adapter], roles: Roles, model: AdaptedModel) -> None:
        self._model = model
        self._ranks = [adapter.ranks for adapter in adapters]
        self._bases = [adapter.base for adapter in adapters]
        self._owner = torch.empty(0, dtype=torch.long)
        device, first = model.device, adapters[0]

        def stacked(parts: Sequence[Tensor], role: Role) -> nn.Parameter:
            return nn.Parameter(torch.stack(list(parts)).to(device), requires_grad=role != "frozen")

        self._B: Stacked = {}
        self._A: Stacked = {}
        for name in first.modules:
            largest = max(ranks[name] for ranks in self._ranks)
            padded = [pad_rank(adapter.modules[name], largest).factors for adapter in adapters]
            folds = [self._fold(k, name) for k in range(len(adapters))]
            self._B[name] = stacked([B if f == 1 else B / f for (B, _), f in zip(padded, folds, strict=True)], roles.B)
            self._A[name] = stacked([A for _, A in padded], roles.A)
        self._heads: Stacked = {name: stacked([a.heads[name] for a in adapters], roles.heads) for name in first.heads}
        everything = [*self._B.values(), *self._A.values(), *self._heads.values()]
        self.trained = [parameter for parameter in everything if parameter.requires_grad]

    def _fold(self, k: int, name: str) -> float:
        """Client k's own scale relative to the unit in which adapters travel; 1 where all have one scale."""
        settings = self._model.settings
        return settings.scale(self._ranks[k][name]) / settings.scaling

    def read(self, k: int) -> Adapter:
        """Client k's adapter, as copies on the CPU."""

        def own(stack: nn.Parameter) -> Tensor:
            return stack.detach()[k].cpu().clone()

        modules = {}
        for name, rank in self._ranks[k].items():
            B, A = own(self._B[name])[:, :rank].clone(), own(self._A[name])[:rank].clone()
            modules[name] = LoRA(*in_unit(B, A, self._model.settings))
        return Adapter(modules, {name: own(stack) for name, stack in self._heads.items()}, self._bases[k])

    def forward(
        self,
        picked: Sequence[tuple[int, Example]],
        accumulation: int | Literal["auto"],
        weights: Sequence[Sequence[float] | None],
        *,
        bf16: bool,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Micro-batch after micro-batch: whose example each is (n,), and its share of its client's mean loss (n,).

        weights: each client's, of the classes, or None.
        """
        device, counts = self._model.device, [0.0] * len(self._ranks)
        for k, example in picked:
            counts[k] += scored(example, weights[k])
        picked = sorted(picked, key=lambda one: len(one[1]["input_ids"]))
        size = micro_batch(len(picked), accumulation, device)
        for start in range(0, len(picked), size):
            part = picked[start : start + size]
            self._owner = torch.tensor([k for k, _ in part], device=device)
            inputs = collate([example for _, example in part], self._model.tokenizer, device)
            labels = inputs.pop("labels")
            with bfloat16_autocast(device, bf16, self._model.network):
                logits = self._model.network(**inputs).logits
            share = torch.tensor([_weight(example, weights[k]) / counts[k] for k, example in part], device=device)
            yield self._owner, _losses(logits.float(), labels) * share

    def penalty(self, active: Sequence[int], penalty: TailPenalty) -> Tensor:
        """The sum of the clients' own penalties: each has a gradient in its own factors only."""
        pairs = [
            in_unit(self._B[name][k, :, : ranks[name]], self._A[name][k, : ranks[name]], self._model.settings)
            for k, ranks in ((k, self._ranks[k]) for k in active)
            for name in ranks
        ]
        return tail_penalty(pairs, penalty)

    def clip(self, largest: float) -> None:
        """Each client's gradient to a norm of `largest` at most, as `clip_grad_norm_` does for one."""
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factor = (largest / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)))

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """The model with these parameters in place of its own adapter."""
        replaced: list[Any] = []
        try:
            for name in self._B:
                layer = self._model.lora_layer(name)
                layer.forward = self._lora(name, layer)
                replaced.append(layer)
            for path, parameters in _by_module(self._heads).items():
                layer = self._model.head_layer(path)
                if not isinstance(layer, nn.Linear):
                    raise ConfigError(
                        f"the head {path!r} is a {type(layer).__name__}, and train.together can give only linear heads "
                        f"to each client by example. Set train.together = 1."
                    )
                setattr(layer, "forward", self._linear(parameters))  # noqa: B010 - mypy takes it for a method
                replaced.append(layer)
            yield
        finally:
            for layer in replaced:
                del layer.forward  # the class's own again

    def _lora(self, name: str, layer: Any) -> Callable[..., Tensor]:
        base, dropout = layer.base_layer, self._model.lora_dropout(name)
        B, A, settings = self._B[name], self._A[name], self._model.settings
        scales = torch.tensor([settings.scale(ranks[name]) for ranks in self._ranks], device=A.device, dtype=A.dtype)

        def forward(x: Tensor) -> Tensor:
            y: Tensor = base(x)
            rows = dropout(x.to(A.dtype)).reshape(len(x), -1, x.shape[-1])
            low = torch.bmm(rows, A[self._owner].mT)
            added = torch.bmm(low, B[self._owner].mT).reshape(y.shape)
            scale = settings.scaling if settings.alpha is None else scales[self._owner].view(-1, *[1] * (y.dim() - 1))
            return (y + scale * added).to(y.dtype)

        return forward

    def _linear(self, parameters: Mapping[str, nn.Parameter]) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            weight = parameters["weight"][self._owner]
            rows = x.to(weight.dtype).reshape(len(x), -1, x.shape[-1])
            y = torch.bmm(rows, weight.mT)
            if "bias" in parameters:
                y = y + parameters["bias"][self._owner].unsqueeze(1)
            return y.reshape(*x.shape[:-1], y.shape[-1])

        return forward


def _weight(example: Example, weights: Sequence[float] | None) -> float:
    return 1.0 if weights is None else weights[example["labels"]]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each example's summed cross entropy (n,): of its class, or of the tokens that are scored."""
    if labels.dim() == 1:
        return nn.functional.cross_entropy(logits, labels, reduction="none")
    said, asked = logits[:, :-1].transpose(1, 2), labels[:, 1:]
    return nn.functional.cross_entropy(said, asked, ignore_index=IGNORED, reduction="none").sum(1)


def _by_module(heads: Stacked) -> dict[str, dict[str, nn.Parameter]]:
    """Module path -> its parameters by their own names."""
    grouped: dict[str, dict[str, nn.Parameter]] = {}
    for name, stack in heads.items():
        path, _, own = name.rpartition(".")
        grouped.setdefault(path, {})[own] = stack
    return grouped


__all__ = ["GroupedTrainer"]
