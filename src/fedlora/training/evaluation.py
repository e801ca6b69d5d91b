"""Measure a state: on which text, and of whom - the server's model, or each client's own.

A FedSA-LoRA run has no server model, so what was evaluated is a named choice (`Target`) that is stored with the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedlora.adapters.io import pad_rank
from fedlora.client import receive
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, ClientMemory, as_pruned
from fedlora.data.text import TextData
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState
from fedlora.training.encoding import IGNORED, Encoded, collate, encode, encode_prompts
from fedlora.training.generation import greedy, rouge_l, teacher_forced
from fedlora.training.models import AdaptedModel

Target = Literal["server", "clients"]
Metric = Literal["accuracy", "rouge-l", "rouge-l-teacher-forced"]
Scores = dict[str, float]


class ModelEvaluator:
    """Accuracy, loss and ROUGE-L on held-out text. Implements `simulation.Evaluator`.

    Args:
        data: the common held-out sets by name; metrics are means over examples within each, then over the sets, and
            also given for each where there are several ("group/NAME").
        own: client -> its own held-out set, where clients have one; the target "clients" measures each client there,
            and on the common sets otherwise.
        target: "server": W0 + the server's whole update, with averaged heads. "clients": each client's readout at its
            own rank, completed by what it kept, not trained further; the mean, the worst, and each by itself.
        bf16: compute in bfloat16 autocast, as training does where it is asked to.
        metric: what a better model is better at. "accuracy" is of classes, and for a language model of response tokens
            (teacher-forced). "rouge-l" generates; see `generation` for the other one.
    """

    def __init__(
        self,
        model: AdaptedModel,
        data: TextData | Mapping[str, TextData],
        clients: Sequence[Client],
        *,
        target: Target = "server",
        metric: Metric = "accuracy",
        own: Mapping[str, TextData] | None = None,
        max_length: int = 128,
        max_new_tokens: int = 64,
        batch_size: int = 64,
        bf16: bool = False,
    ) -> None:
        self._model = model
        self._clients = clients
        self._target = target
        self._metric = metric
        self._bf16 = bf16
        self._limits = max_length, max_new_tokens, batch_size
        groups = {"": data} if isinstance(data, TextData) else data
        self._groups = {name: self._prepared(part) for name, part in groups.items()}
        self._own = {c: {"": self._prepared(part)} for c, part in (own or {}).items()}

    @property
    def metric(self) -> str:
        """The name, in the scores, of what a better model is better at."""
        return self._metric.replace("-", "_")

    def evaluate(self, server: Server, state: RunState) -> Scores:
        """The scores (means over examples, sets or clients), and for clients also worst and each client's."""
        if self._target == "server":
            return self.measure_server(server, state.server)
        scores = self.measure_clients(server, state)
        mine = {client: score[self.metric] for client, score in scores.items()}
        names = [name for name in next(iter(scores.values())) if "/" not in name]
        return {
            **{name: math.fsum(score[name] for score in scores.values()) / len(scores) for name in names},
            "worst": min(mine.values()),
            **{f"client/{client}": score for client, score in mine.items()},
        }

    def measure_server(self, server: Server, state: ServerState) -> Scores:
        """The server's model. Raises `NoGlobalModel` where the method has none."""
        update = server.global_update(state)
        if self._model.quantised:  # nothing can be added to the base: the whole update as an adapter
            rank = 1 << max(max(lora.rank for lora in update.values()) - 1, 0).bit_length()  # few different ones
            self._model.activate(Adapter({name: pad_rank(lora, rank) for name, lora in update.items()}, state.heads))
            return self._measure(self._groups)
        nothing = {
            name: LoRA(*(f[:, :1] * 0 if k == 0 else f[:1] * 0 for k, f in enumerate(lora.factors)))
            for name, lora in state.start.modules.items()
        }
        self._model.activate(Adapter(nothing, state.heads), update)
        return self._measure(self._groups)

    def measure_clients(self, server: Server, state: RunState) -> dict[str, Scores]:
        """Client -> scores of what it would start its next round with."""
        return {
            c.id: self.measure_client(server, state.server, c, state.clients.get(c.id, ClientMemory()))
            for c in self._clients
        }

    def measure_client(self, server: Server, state: ServerState, client: Client, memory: ClientMemory) -> Scores:
        """What `client` would start its next round with, on its own held-out text where it has some."""
        download = server.download(state, as_pruned(client, memory))
        self._model.activate(receive(download, memory.kept), download.base_delta)
        return self._measure(self._own.get(client.id, self._groups))

    def _prepared(self, data: TextData) -> _HeldOut:
        max_length, max_new_tokens, _ = self._limits
        tokenizer = self._model.tokenizer
        prompts = None
        if self._metric == "rouge-l":
            prompts = encode_prompts(data, tokenizer, max_length=max_length - max_new_tokens)
        references = data.references or tuple((response,) for response in data.responses or ())
        return _HeldOut(encode(data, tokenizer, max_length=max_length), prompts, references)

    def _measure(self, groups: Mapping[str, _HeldOut]) -> Scores:
        """Means over the sets; and each set's own where there are several."""
        each = {name: self._measure_one(part) for name, part in groups.items()}
        names = next(iter(each.values()))
        means = {name: math.fsum(scores[name] for scores in each.values()) / len(each) for name in names}
        if len(each) == 1:
            return means
        return means | {f"group/{name}": scores[self.metric] for name, scores in each.items()}

    def _measure_one(self, part: _HeldOut) -> Scores:
        _, max_new_tokens, batch_size = self._limits
        scores = self._predictions(part.examples)
        if self._metric == "accuracy":
            return scores
        if part.prompts is not None:
            answers = greedy(self._model, part.prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
        else:
            answers = teacher_forced(self._model, part.examples, batch_size=batch_size)
        fits = [rouge_l(answer, right) for answer, right in zip(answers, part.references, strict=True)]
        return scores | {self.metric: math.fsum(fits) / len(fits)}

    @torch.no_grad()
    def _predictions(self, data: Encoded) -> Scores:
        """Mean loss and accuracy: of examples; of response tokens for a causal LM (the next one, teacher-forced)."""
        network, device = self._model.network, self._model.device
        batch_size = self._limits[2]
        network.eval()
        loss, right, count = 0.0, 0, 0
        # Batches of alike length waste little padding; the sums do not depend on the order.
        order = sorted(range(len(data)), key=lambda i: len(data[i]["input_ids"]))
        for k in range(0, len(order), batch_size):
            inputs = collate([data[i] for i in order[k : k + batch_size]], self._model.tokenizer, device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bf16):
                output = network(**inputs)
            labels, logits = inputs["labels"], output.logits
            if labels.ndim == 2:
                labels, logits = labels[:, 1:], logits[:, :-1]
            scored = labels != IGNORED
            right += int((logits.argmax(dim=-1)[scored] == labels[scored]).sum())
            count += int(scored.sum())
            loss += float(output.loss) * int(scored.sum())
        return {"accuracy": right / count, "loss": loss / count}


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """One held-out set, encoded. prompts: for generation, or None."""

    examples: Encoded
    prompts: list[list[int]] | None
    references: Sequence[Sequence[str]]
