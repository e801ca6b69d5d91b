"""Measure a state: on which text, and of whom - the server's model, or each client's own.

A FedSA-LoRA run has no server model, so what was evaluated is a named choice (`Target`) that is stored with the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from fedlora.client import Client, receive
from fedlora.data.text import TextData
from fedlora.encoding import IGNORED, Encoded, collate, encode
from fedlora.lora import Adapter, LoRA
from fedlora.models import AdaptedModel
from fedlora.server import Server, ServerState
from fedlora.simulation import ClientMemory, RunState, as_pruned

Target = Literal["server", "clients"]


class ModelEvaluator:
    """Accuracy and loss on held-out text. Implements `simulation.Evaluator`.

    Args:
        data: the common held-out set. own: client -> its own held-out set, where clients have one; the target
            "clients" measures each client there, and on the common set otherwise.
        target: "server": W0 + the server's whole update, with averaged heads. "clients": each client's readout at its
            own rank, completed by what it kept, not trained further; the mean, the worst, and each by itself.
    """

    def __init__(
        self,
        model: AdaptedModel,
        data: TextData,
        clients: Sequence[Client],
        *,
        target: Target = "server",
        own: Mapping[str, TextData] | None = None,
        max_length: int = 128,
        batch_size: int = 64,
    ) -> None:
        self._model = model
        self._clients = clients
        self._target = target
        self._batch_size = batch_size
        self._data = encode(data, model.tokenizer, max_length=max_length)
        self._own = {c: encode(part, model.tokenizer, max_length=max_length) for c, part in (own or {}).items()}

    def evaluate(self, server: Server, state: RunState) -> dict[str, float]:
        """accuracy and loss (means over examples, or over clients), and for clients also worst and each client's."""
        if self._target == "server":
            return self.measure_server(server, state.server)
        scores = self.measure_clients(server, state)
        accuracies = {client: score["accuracy"] for client, score in scores.items()}
        return {
            "accuracy": math.fsum(accuracies.values()) / len(accuracies),
            "loss": math.fsum(score["loss"] for score in scores.values()) / len(scores),
            "worst": min(accuracies.values()),
            **{f"client/{client}": accuracy for client, accuracy in accuracies.items()},
        }

    def measure_server(self, server: Server, state: ServerState) -> dict[str, float]:
        """The server's model. Raises `NoGlobalModel` where the method has none."""
        update = server.global_update(state)
        nothing = {
            name: LoRA(*(f[:, :1] * 0 if k == 0 else f[:1] * 0 for k, f in enumerate(lora.factors)))
            for name, lora in state.start.modules.items()
        }
        self._model.activate(Adapter(nothing, state.heads), update)
        return self._measure(self._data)

    def measure_clients(self, server: Server, state: RunState) -> dict[str, dict[str, float]]:
        """Client -> accuracy and loss of what it would start its next round with."""
        return {
            c.id: self.measure_client(server, state.server, c, state.clients.get(c.id, ClientMemory()))
            for c in self._clients
        }

    def measure_client(
        self, server: Server, state: ServerState, client: Client, memory: ClientMemory
    ) -> dict[str, float]:
        """What `client` would start its next round with, on its own held-out text where it has some."""
        download = server.download(state, as_pruned(client, memory))
        self._model.activate(receive(download, memory.kept), download.base_delta)
        return self._measure(self._own.get(client.id, self._data))

    @torch.no_grad()
    def _measure(self, data: Encoded) -> dict[str, float]:
        """Mean loss and accuracy: of examples; of response tokens for a causal LM (the next one, teacher-forced)."""
        network, device = self._model.network, self._model.device
        network.eval()
        loss, right, count = 0.0, 0, 0
        # Batches of alike length waste little padding; the sums do not depend on the order.
        order = sorted(range(len(data)), key=lambda i: len(data[i]["input_ids"]))
        for k in range(0, len(order), self._batch_size):
            inputs = collate([data[i] for i in order[k : k + self._batch_size]], self._model.tokenizer, device)
            output = network(**inputs)
            labels, logits = inputs["labels"], output.logits
            if labels.ndim == 2:
                labels, logits = labels[:, 1:], logits[:, :-1]
            scored = labels != IGNORED
            right += int((logits.argmax(dim=-1)[scored] == labels[scored]).sum())
            count += int(scored.sum())
            loss += float(output.loss) * int(scored.sum())
        return {"accuracy": right / count, "loss": loss / count}
