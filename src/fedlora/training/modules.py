"""LoRA for any `nn.Module`: a network and a loss make a trainer, a network and a measure make an evaluator.

    model = LoRAModule(vit, targets=["qkv", "proj"], heads=["head"])
    trainer = ModuleTrainer(model, {"site-1": dataset, ...}, loss, TrainSettings(lr=1e-3, steps=20), seed=0)
    evaluator = ModuleEvaluator(model, measure, clients)
    seed_adapter, spec = model.seed_adapter(16, seed=0)

`simulation.simulate` takes all three. Any network will do; the loop, data stream and seeds are those of
`local.RoundTrainer`, so a run resumes to the bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory, Download
from fedlora.core.trainer import Trained
from fedlora.errors import ConfigError
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.training.local import RoundTrainer, without_data
from fedlora.training.looks import client_model, server_model
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, Targets, TrainSettings
from fedlora.training.targets import adapted, is_all_linear

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Any], Tensor]  # network and batch -> the batch's mean loss, a scalar
Measure = Callable[[nn.Module], Mapping[str, float]]  # network -> metric name -> value
_OF_TEXT = ("max_length", "loss_on", "class_weights", "template")  # settings that your own loss does not use


class Examples(Protocol):
    """A client's data: a list, or a `torch.utils.data.Dataset` with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LoRAModule(AdaptedModel):
    """Any network with LoRA on some of its linear layers. It takes the network over: peft wraps its layers in place.

    Args:
        network: its parameters are the base, which no client trains.
        targets: names of `nn.Linear` modules, each a whole path or its end; or one regular expression that matches
            whole paths; or "all-linear", all except the heads. LoRA on W (d_out, d_in) is W + scaling * B @ A with
            B (d_out, r) and A (r, d_in).
        heads: names of modules to train in full and average, such as a classifier.
        scaling: alpha / r, the same for all ranks. dropout: on LoRA's input.

    Raises:
        ConfigError: an unknown name, a target that cannot take LoRA, a head that cannot be averaged.

    Example:
        >>> model = LoRAModule(network, targets=["first"], heads=["head"])
        >>> seed_adapter, spec = model.seed_adapter(2, seed=0)  # spec: for write_adapter
        >>> model.activate(seed_adapter)
        >>> tuple(model.network(images).shape)
        (40, 3)
    """

    def __init__(
        self,
        network: nn.Module,
        targets: Targets,
        *,
        heads: Sequence[str] = (),
        scaling: float = 2.0,
        dropout: float = 0.0,
    ) -> None:
        asked: Any = targets if isinstance(targets, str) else list(targets)
        settings = LoRASettings(targets=asked, scaling=scaling, dropout=dropout, saved=list(heads))
        saved = [path for head in heads for path in _checked_head(network, head)]
        self.targets = tuple(_targeted(network, targets, saved))
        if is_all_linear(targets) or not isinstance(targets, str):
            settings = settings.model_copy(update={"targets": list(self.targets)})
        super().__init__(network, None, None, settings)
        for module in network.modules():
            if isinstance(module, nn.TransformerEncoderLayer):  # a hook makes it call its layers: torch's fused kernel
                module.register_forward_pre_hook(_nothing)  # would read the base weights and bypass the adapter


class ModuleTrainer(RoundTrainer):
    """Trains any client on one `LoRAModule` with your own loss. Implements `core.trainer.Trainer`.

    Args:
        data: client -> its examples. loss: of the network and a batch, the mean over the batch; it calls the network.
        settings: steps or epochs, optimiser, batch size; accumulation="auto" keeps batches whole. seed: for data order,
            dropout and torch's other randomness.
        collate: a list of examples -> a batch; default: torch's `default_collate`. The trainer moves the batch to the
            network's device.

    Base layers with running statistics (batch norm) run in evaluation mode: no client may change the base.

    Raises:
        ConfigError: a client without data, a setting that applies only to text, or a loss that cannot be trained on.

    Example:
        >>> def loss(network, batch):
        ...     images, labels = batch
        ...     return nn.functional.cross_entropy(network(images), labels)
        >>> model = LoRAModule(network, targets=["first"], heads=["head"])
        >>> data = {"site-1": dataset, "site-2": dataset}  # a torch Dataset, or a list of examples
        >>> trainer = ModuleTrainer(model, data, loss, TrainSettings(lr=1e-2, steps=2), seed=0)
        >>> begun = start(server, model.seed_adapter(4, seed=0)[0])
        >>> next(simulate(server, clients, trainer, begun, rounds=1)).round
        1
    """

    def __init__(
        self,
        model: AdaptedModel,
        data: Mapping[str, Examples],
        loss: Loss,
        settings: TrainSettings,
        *,
        seed: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        super().__init__(model, settings, seed=seed)
        for name in _OF_TEXT:
            if getattr(settings, name) != TrainSettings.model_fields[name].default:
                raise ConfigError(
                    f"TrainSettings.{name} is for text and has no effect here: do what it asks for in `loss` or "
                    f"`collate`, and leave it out."
                )
        self._data = dict(data)
        self._loss = loss
        self._collate = collate
        self._unreached: set[str] = set()  # warned once

    def examples(self, client: str) -> Sequence[Any]:
        """A client's examples, as given."""
        data = self._data.get(client)
        if data is None or len(data) == 0:
            raise ConfigError(without_data(client, self._data))
        return data  # type: ignore[return-value] # only its length and items are used

    def ready(self) -> nn.Module:
        network = super().ready()
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        return network

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """As `RoundTrainer.train`, but raises if anything other than the adapter changed."""
        before = self._buffers()
        trained = super().train(download, adapter, position)
        changed = [name for name, mark in self._buffers().items() if before.get(name, mark) != mark]
        if changed:
            raise ConfigError(
                f"training changed the buffer {changed[0]!r} of the base ({len(changed)} such), and the next client "
                f"would start from it. Put a trained buffer into heads; otherwise do not change it in training."
            )
        return trained

    def losses(self, client: str, picked: list[Any]) -> Iterator[Tensor]:
        s, network, device = self._settings, self._model.network, self._model.device
        parts = 1 if s.accumulation == "auto" else s.accumulation  # there is no padding to save
        micro = math.ceil(len(picked) / parts)
        for k in range(0, len(picked), micro):
            part = picked[k : k + micro]
            batch = _moved(self._collate(part), device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=s.bf16):
                loss = _checked_loss(self._loss(network, batch))
            yield loss * (len(part) / len(picked)) if len(part) < len(picked) else loss
        self._tell_unreached()

    def _tell_unreached(self) -> None:
        """Warn once if an adapted layer has no part in the loss: its LoRA would never change."""
        for name, parameter in self._model.network.named_parameters():
            if parameter.requires_grad and parameter.grad is None and ".lora_" in name:
                path = name.removeprefix("base_model.model.").split(".lora_")[0]
                if path not in self._unreached:
                    log.warning(
                        "the loss does not depend on the LoRA of %r: its layer was not called in a step. Code that "
                        "reads `layer.weight` itself bypasses LoRA; leave such a layer out of targets.",
                        path,
                    )
                self._unreached.add(path)

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Name -> identity of a base buffer, and how often it was written."""
        found = self._model.network.named_buffers()
        return {
            name.removeprefix("base_model.model."): (id(b), b._version)
            for name, b in found
            if ".modules_to_save." not in name
        }


class ModuleEvaluator:
    """Measures a state's models with your own function. Implements `simulation.Evaluator`.

    Args:
        measure: the network, in evaluation mode and without gradients -> metric name -> value.
        clients: those whose models target="clients" measures.
        target: "server": the server's model. "clients": each client's own, before its next round: each metric's mean,
            and each client's as "client/ID/metric".
        own: client -> its own measure, if it has one; target="clients" only.

    Example:
        >>> def measure(network):
        ...     return {"accuracy": float((network(images).argmax(dim=1) == labels).float().mean())}
        >>> model = LoRAModule(network, targets=["first"], heads=["head"])
        >>> begun = start(server, model.seed_adapter(4, seed=0)[0])
        >>> sorted(ModuleEvaluator(model, measure).evaluate(server, begun))
        ['accuracy']
    """

    def __init__(
        self,
        model: AdaptedModel,
        measure: Measure,
        clients: Sequence[Client] = (),
        *,
        target: str = "server",
        own: Mapping[str, Measure] | None = None,
    ) -> None:
        if target not in ("server", "clients"):
            raise ConfigError(f"target must be 'server' or 'clients'; got {target!r}.")
        if target == "clients" and not clients:
            raise ConfigError("target='clients' measures each client's model: hand in the clients.")
        if own and target == "server":
            raise ConfigError("own measures are for clients, but target='server' uses none; set target='clients'.")
        strangers = sorted(set(own or {}) - {client.id for client in clients})
        if strangers:
            raise ConfigError(f"own has a measure for {strangers[0]!r} ({len(strangers)} such), who is not a client.")
        self._model = model
        self._measure = measure
        self._clients = tuple(clients)
        self._target = target
        self._own = dict(own or {})

    def evaluate(self, server: Server, state: RunState) -> dict[str, float]:
        """A state's scores. Raises `NoGlobalModel` if there is no server's model to measure."""
        if self._target == "server":
            return self.measured(server_model(server, state.server), self._measure)
        scores = {}
        for client in self._clients:
            memory = state.clients.get(client.id, ClientMemory())
            own = self._own.get(client.id, self._measure)
            scores[client.id] = self.measured(client_model(server, state.server, client, memory), own)
        names = next(iter(scores.values()))
        odd = [client for client, score in scores.items() if set(score) != set(names)]
        if odd:
            raise ConfigError(
                f"the metrics of {odd[0]!r} are {sorted(scores[odd[0]])}, but those of {next(iter(scores))!r} are "
                f"{sorted(names)}, so they have no mean. Use the same metrics for all."
            )
        means = {name: math.fsum(score[name] for score in scores.values()) / len(scores) for name in names}
        return means | {f"client/{c}/{name}": x for c, score in scores.items() for name, x in score.items()}

    @torch.no_grad()
    def measured(self, model: Adapter, measure: Measure) -> dict[str, float]:
        """The result of `measure` for one model, as plain numbers."""
        self._model.activate(model)
        found = measure(self._model.network.eval())
        if not isinstance(found, Mapping) or not found:
            raise ConfigError(
                f"a measure must return metrics by name, as {{'accuracy': 0.9}}; got {found!r:.80} of type "
                f"{type(found).__name__}."
            )
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"a metric is one number; got {dict(found)!r:.200}: {error}.") from error


def _targeted(network: nn.Module, targets: Targets, saved: Sequence[str]) -> list[str]:
    """The paths of the layers that get LoRA, in network order; "all-linear" skips those that cannot."""
    layers = dict(network.named_modules())
    every = is_all_linear(targets)
    chosen = []
    for path in adapted(network, targets):
        head = any(path == head or path.startswith(f"{head}.") for head in saved)
        inside = isinstance(layers.get(path.rpartition(".")[0]), nn.MultiheadAttention)
        if head and not every:
            raise ConfigError(f"{path!r} is in targets and in heads: it gets LoRA or is trained in full, not both.")
        if inside and not every:
            raise ConfigError(
                f"{path!r} is inside nn.MultiheadAttention, whose code bypasses LoRA, so nothing would train. "
                f"Leave it out of targets, or write the attention with nn.Linear layers of your own."
            )
        if not head and not inside:
            chosen.append(path)
    if not chosen:
        raise ConfigError(f"targets = {targets!r} matches only heads of the network.")
    return chosen


def _checked_head(network: nn.Module, head: str) -> list[str]:
    """The paths that a head's name refers to."""
    found = [(path, module) for path, module in network.named_modules() if f".{path}".endswith(f".{head}")]
    if not found:
        names = [path for path, _ in network.named_children()]
        raise ConfigError(f"no module of the network is called {head!r}; its top-level modules are {names[:8]}.")
    for path, module in found:
        for name, tensor in module.state_dict().items():
            if not tensor.is_floating_point():
                raise ConfigError(
                    f"the head {path!r} holds {name!r} of {str(tensor.dtype).removeprefix('torch.')}, which has no "
                    f"mean. Use a head without it (for a norm layer, track_running_stats=False)."
                )
    return [path for path, _ in found]


def _checked_loss(loss: Any) -> Tensor:
    """The loss. Raises `ConfigError` if it cannot be trained on."""
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        got = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else f"{loss!r:.60}"
        raise ConfigError(
            f"loss(network, batch) must return the batch's mean loss as a tensor of one number; got {got}."
        )
    if not loss.requires_grad:
        raise ConfigError(
            "loss(network, batch) has no gradient: it does not depend on the network, or was detached (.item(), "
            "no_grad). Call the network passed to it, not another copy."
        )
    return loss


def _moved(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on `device`."""
    if isinstance(batch, Tensor) or callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch


def _nothing(module: nn.Module, args: Any) -> None:
    """A hook that does nothing."""


__all__ = ["Examples", "LoRAModule", "Loss", "Measure", "ModuleEvaluator", "ModuleTrainer"]
