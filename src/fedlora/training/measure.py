"""Measures a state on held-out text: the server's model, or each client's own.

A FedSA-LoRA run has no server model, so what is evaluated is a named choice (`Target`), stored with the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedlora.adapters.writer import pad_rank
from fedlora.client import receive
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, ClientMemory
from fedlora.data.text import TextData
from fedlora.doing import doing
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState
from fedlora.training.encode import (
    IGNORED,
    Cut,
    Encoded,
    batches,
    check_length,
    collate,
    cut_of,
    cut_prompts,
    encode,
)  # fmt: skip
from fedlora.training.generate import greedy, teacher_forced
from fedlora.training.metrics import METRICS, MetricName, generates, score_name, worst_of
from fedlora.training.models import AdaptedModel
from fedlora.training.templates import find_template

Target = Literal["server", "clients"]
Scores = dict[str, float]
OwnMeasure = Callable[[nn.Module, Any], Mapping[str, float]]  # network and data -> metric name -> value


@dataclass(frozen=True, eq=False)
class Look:
    """One model on one held-out set: what a process of a pool measures at a time. client: whose own sets; None: the
    common ones. group: the set's name."""

    adapter: Adapter
    client: str | None
    group: str


Through = Callable[[Callable[[Look], Scores], Iterable[Look]], Iterable[Scores]]  # `map`, or a process pool's


class ModelEvaluator:
    """The scores of `training.metrics` on held-out text. Implements `simulation.Evaluator`.

    Besides the chosen metric, scores always include those that cost nothing: for classes accuracy, macro_f1 and loss;
    for a language model accuracy (of tokens), loss and perplexity.

    Args:
        data: the common held-out sets by name; metrics are means over each set's examples, then over the sets; if there
            are several, also given for each ("group/NAME").
        own: client -> its own held-out set, if it has one; the target "clients" measures a client there, and otherwise
            on the common sets.
        target: "server": W0 + the server's whole update, with averaged heads. "clients": each client's readout at its
            own rank, completed by what it kept, not trained further; gives the mean, the worst, and each client's.
        bf16: compute in bfloat16 autocast, like training with bf16.
        metric: the metric to improve, a name in `metrics.METRICS`. "rouge-l" and "exact-match" generate; see
            `generate` for "rouge-l-teacher-forced".
        template: for a language model's texts, as in `encode.encode`.
        measure: for any network: of the network, in evaluation mode and without gradients, and a held-out set of any
            kind (`data` is then one set), the scores by name.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> lora = LoRASettings(target_modules=["query"])
        >>> model = AdaptedModel.load("model", "sequence-classification", lora, labels=data.label_names)
        >>> server = Server(build("glora"))
        >>> begun = start(server, model.seed_adapter(4, seed=0)[0])
        >>> 0 <= ModelEvaluator(model, data, [Client("site-1", 4)]).evaluate(server, begun)["accuracy"] <= 1
        True
    """

    def __init__(
        self, model: AdaptedModel, data: TextData | Mapping[str, TextData] | Any, clients: Sequence[Client], *,
        target: Target = "server", metric: MetricName = "accuracy", own: Mapping[str, Any] | None = None,
        max_length: int = 128, max_new_tokens: int = 64, batch_size: int = 64, bf16: bool = False,
        template: str | None = None, measure: OwnMeasure | None = None,
    ) -> None:  # fmt: skip
        self._model, self._clients, self._target, self._metric = model, clients, target, metric
        self._bf16, self._template, self._own_measure = bf16, template, measure
        self._limits = max_length, max_new_tokens, batch_size
        self._ends = find_template(template, model.tokenizer).ends if measure is None and generates(metric) else ()
        groups = {"": data} if measure is not None or isinstance(data, TextData) else data
        self._groups = {name: self._prepared(part) for name, part in groups.items()}
        self._own = {client: {"": self._prepared(part, client)} for client, part in (own or {}).items()}
        self._through: Through = map

    def spread(self, through: Through) -> ModelEvaluator:
        """The same evaluator, with models and sets measured by `through`: the same bits, wherever each is."""
        other = copy(self)
        other._through = through
        return other

    def cut(self) -> dict[str, Cut]:
        """How much of the common sets did not fit: "read", where the wanted answer follows a prompt (losses, and scores
        of classes), and "asked", prompts to answer, which must leave room for max_new_tokens."""
        held = [one for one in self._groups.values() if isinstance(one, _HeldOut)]
        read = cut_of([example for one in held for example in one.examples])
        asked = cut_of([prompt for one in held for prompt in one.prompts or ()])
        return {name: cut for name, cut in (("read", read), ("asked", asked)) if cut.cut}

    @property
    def metric(self) -> str:
        """The name of the main metric in the scores."""
        return score_name(self._metric)

    def evaluate(self, server: Server, state: RunState) -> Scores:
        """The scores (means over examples, sets or clients); for target "clients" also the worst and each client's.

        Raises:
            NoGlobalModel: the target is the server's model, but the method has none.
        """
        if self._target == "server":
            return self.measure_adapter(server_model(server, state.server, quantised=self._model.quantised))
        scores = self.measure_clients(server, state)
        names = [name for name in next(iter(scores.values())) if "/" not in name]
        means = {name: math.fsum(score[name] for score in scores.values()) / len(scores) for name in names}
        if self._own_measure is not None:
            return means | {f"client/{c}/{name}": score[name] for c, score in scores.items() for name in names}
        mine = {client: score[self.metric] for client, score in scores.items()}
        worst = worst_of(self.metric, list(mine), mine.__getitem__)
        assert worst is not None
        return {**means, "worst": mine[worst], **{f"client/{client}": score for client, score in mine.items()}}

    def measure_clients(self, server: Server, state: RunState) -> dict[str, Scores]:
        """Client -> scores of the model it would start its next round with, on its own held-out text if it has some."""
        models = (
            client_model(server, state.server, client, state.clients.get(client.id, ClientMemory()))
            for client in self._clients
        )
        names = [client.id for client in self._clients]
        return dict(zip(names, self._measured(models, names), strict=True))

    def measure_adapter(self, adapter: Adapter, client: str | None = None) -> Scores:
        """Scores of any adapter, on its base; on the client's own held-out text if it has some."""
        return self._measured([adapter], [client])[0]

    def count(self, client: str | None = None) -> int:
        """The number of held-out examples: the client's own if it has some, otherwise all."""
        return sum(len(held.examples) for held in (self._own.get(client or "") or self._groups).values())

    def look(self, look: Look) -> Scores:
        """One model's scores on one held-out set."""
        self._model.activate(look.adapter)
        held = (self._groups if look.client is None else self._own[look.client])[look.group]
        if self._own_measure is not None:
            with torch.no_grad():
                found = self._own_measure(self._model.network.eval(), held)
            return {str(name): float(value) for name, value in found.items()}
        labels, predicted, losses, counts = list[int](), list[int](), list[float](), list[int]()
        texts, size = [example["input_ids"] for example in held.examples], self._limits[2]
        for batch in batches(texts, size, "batches"):
            true, best, loss = self._predictions([held.examples[k] for k in batch])
            labels += true
            predicted += best
            losses.append(loss)
            counts.append(len(true))
        given = {"labels": (labels, predicted), "losses": (losses, counts)}
        task = "sequence-classification" if held.classes else "causal-lm"
        scores = {
            score_name(name): found.measure(*given[found.of])
            for name, found in METRICS.items()
            if found.of in given and task in found.tasks
        }
        if METRICS[self._metric].of == "texts":
            if held.prompts is None:
                answers = teacher_forced(self._model, held.examples, batch_size=size)
            else:
                prompts, limit = [prompt["input_ids"] for prompt in held.prompts], self._limits[1]
                answers = greedy(self._model, prompts, max_new_tokens=limit, batch_size=size, ends=self._ends)
            fits = list(map(METRICS[self._metric].measure, answers, held.references))
            scores[self.metric] = math.fsum(fits) / len(fits) if fits else math.nan
        return scores

    def _measured(self, models: Iterable[Adapter], whose: Sequence[str | None]) -> list[Scores]:
        """Each model's scores on the sets of a client that has some, otherwise on the common ones; empty sets do not
        count. A model is made when its turn comes, so that few exist at a time."""
        owners = [client if client in self._own else None for client in whose]
        sets = []
        for client in owners:
            held = self._groups if client is None else self._own[client]
            sets.append([n for n, one in held.items() if self._own_measure or one.examples] or list(held))
        looks = (
            Look(adapter, client, name)
            for adapter, client, names in zip(models, owners, sets, strict=True) for name in names
        )  # fmt: skip
        with doing("measuring"):
            scores = iter(self._through(self.look, looks))
            return [_mean({name: next(scores) for name in names}, self.metric) for names in sets]

    def _prepared(self, data: Any, client: str | None = None) -> Any:
        """A held-out set of text, encoded; for a measure of the caller's own, the set as it is."""
        if self._own_measure is not None:
            return data
        data = data if client is None else data.of(client)
        self._model.check_classes(data.label_names)
        max_length, max_new_tokens, _ = self._limits
        tokenizer = self._model.tokenizer
        prompts: Encoded | None = None
        if generates(self._metric):
            prompts = cut_prompts(data, tokenizer, max_length=max_length - max_new_tokens, template=self._template)
        references = data.references or tuple((response,) for response in data.responses or ())
        examples = encode(data, tokenizer, max_length=max_length, template=self._template)
        check_length(examples, self._model.longest)
        return _HeldOut(examples, prompts, references, bool(data.label_names))

    @torch.no_grad()
    def _predictions(self, examples: Encoded) -> tuple[list[int], list[int], float]:
        """One batch's labels and what the model predicts, per class label or token that counts; its mean loss."""
        network, device = self._model.network, self._model.device
        inputs = collate(examples, self._model.tokenizer, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bf16):
            output = network.eval()(**inputs)
        labels, logits = inputs["labels"], output.logits
        if labels.ndim == 2:
            labels, logits = labels[:, 1:], logits[:, :-1]
        scored = labels != IGNORED
        return labels[scored].tolist(), logits.argmax(dim=-1)[scored].tolist(), float(output.loss)


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """One held-out set, encoded. prompts: for generation, or None. classes: or a language model's."""

    examples: Encoded
    prompts: Encoded | None
    references: Sequence[Sequence[str]]
    classes: bool


def _mean(sets: Mapping[str, Scores], metric: str) -> Scores:
    """Means over the sets; if there are several, also each set's own score."""
    first = next(iter(sets.values()))
    if len(sets) == 1:
        return dict(first)
    means = {name: math.fsum(one[name] for one in sets.values()) / len(sets) for name in first}
    return means | {f"group/{name}": one[metric] for name, one in sets.items()}


# -------------------------------------------------------------------------------------------- the models of a state


def server_model(server: Server, state: ServerState, *, quantised: bool = False) -> Adapter:
    """W0 + the server's whole update, with its heads: the base includes the update, and the adapter is zero.

    quantised: the base cannot be changed, so the whole update is the adapter.

    Raises:
        NoGlobalModel: the method has none.
    """
    update = server.global_update(state)
    if quantised:
        rank = 1 << max(max(lora.rank for lora in update.values()) - 1, 0).bit_length()  # a power of two: few variants
        return Adapter({name: pad_rank(lora, rank) for name, lora in update.items()}, state.heads)
    nothing = {name: LoRA(B[:, :1] * 0, A[:1]) for name, x in state.start.modules.items() for B, A in [x.factors]}
    return Adapter(nothing, state.heads, update)


def client_model(server: Server, state: ServerState, client: Client, memory: ClientMemory) -> Adapter:
    """The model `client` would start its next round with: its readout, completed by what it kept."""
    return receive(server.download(state, client), memory.kept)
