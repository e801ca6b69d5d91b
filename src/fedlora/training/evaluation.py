"""Measures a state on held-out text: the server's model, or each client's own.

A FedSA-LoRA run has no server model, so what is evaluated is a named choice (`Target`), stored with the result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

import torch

from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory
from fedlora.data.text import TextData
from fedlora.doing import doing, stepped
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.training.encoding import IGNORED, Cut, Encoded, check_length, collate, cut_of, cut_prompts, encode
from fedlora.training.generation import greedy, teacher_forced
from fedlora.training.looks import client_model, server_model
from fedlora.training.metrics import METRICS, MetricName, confusion_matrix, generates, recall, score_name, worst_of
from fedlora.training.models import AdaptedModel
from fedlora.training.prompting import end_tokens, find_template
from fedlora.training.settings import LongResponses

Target = Literal["server", "clients"]
Scores = dict[str, float]
GENERATED = tuple(name for name, metric in METRICS.items() if metric.of == "texts")  # these score answers


@dataclass(frozen=True, eq=False)
class Measured:
    """A state's measurements. scores: by name, as in `metrics`. confusion: number of examples of class (row) predicted
    as class (column), over all sets and clients; None for a language model."""

    scores: Scores
    confusion: list[list[int]] | None


class ModelEvaluator:
    """The scores of `training.metrics` on held-out text. Implements `simulation.Evaluator`.

    Besides the chosen metric, scores always include those that cost nothing: for classes accuracy, balanced_accuracy,
    macro_f1, matthews, loss and "recall/NAME"; for a language model accuracy (of tokens), loss and perplexity.

    Args:
        data: the common held-out sets by name; metrics are means over each set's examples, then over the sets; if there
            are several, also given for each ("group/NAME").
        own: client -> its own held-out set, if it has one; the target "clients" measures a client there, and otherwise
            on the common sets.
        target: "server": W0 + the server's whole update, with averaged heads. "clients": each client's readout at its
            own rank, completed by what it kept, not trained further; gives the mean, the worst, and each client's.
        bf16: compute in bfloat16 autocast, like training with bf16.
        metric: the metric to improve, a name in `metrics.METRICS`. "rouge-l" and "exact-match" generate; see
            `generation` for "rouge-l-teacher-forced".
        template, long_responses: for a language model's texts, as in `encoding.encode`.

    Example:
        >>> data = read_classification("train.jsonl", text="text", label="label")
        >>> lora = LoRASettings(targets=["query"])
        >>> model = AdaptedModel.load("model", "classification", lora, labels=data.label_names)
        >>> server = Server(build("glora"))
        >>> begun = start(server, model.seed_adapter(4, seed=0)[0])
        >>> 0 <= ModelEvaluator(model, data, [Client("site-1", 4)]).evaluate(server, begun)["accuracy"] <= 1
        True
    """

    def __init__(
        self,
        model: AdaptedModel,
        data: TextData | Mapping[str, TextData],
        clients: Sequence[Client],
        *,
        target: Target = "server",
        metric: MetricName = "accuracy",
        own: Mapping[str, TextData] | None = None,
        max_length: int = 128,
        max_new_tokens: int = 64,
        batch_size: int = 64,
        bf16: bool = False,
        template: str | None = None,
        long_responses: LongResponses = "refuse",
    ) -> None:
        self._model = model
        self._clients = clients
        self._target = target
        self._metric = metric
        self._bf16 = bf16
        self._limits = max_length, max_new_tokens, batch_size
        self._template = template
        self._long_responses = long_responses
        self._ends: tuple[int, ...] = ()
        if generates(metric):
            self._ends = end_tokens(find_template(template, model.tokenizer), model.tokenizer)
        groups = {"": data} if isinstance(data, TextData) else data
        self._groups = {name: self._prepared(part) for name, part in groups.items()}
        self._own = {c: {"": self._prepared(part)} for c, part in (own or {}).items()}
        self._through: Through | None = None
        self._parts = 1

    def cut(self) -> dict[str, Cut]:
        """How much held-out text did not fit: "read", where the wanted answer follows a prompt (losses, and scores of
        classes), and "asked", prompts to answer, which must leave room for max_new_tokens."""
        sets = [*self._groups.values(), *(held for own in self._own.values() for held in own.values())]
        read = cut_of(example for held in sets for example in held.examples)
        lost = [tokens for held in sets for tokens in held.lost]
        asked = Cut(len(lost), sum(tokens > 0 for tokens in lost), sum(lost))
        return {name: cut for name, cut in (("read", read), ("asked", asked)) if cut.cut}

    def spread(self, through: Through, parts: int) -> ModelEvaluator:
        """The same evaluator, with each set's work split into about `parts` pieces that `through` runs.

        The scores have the same bits for any number of parts: batches stay whole and are added in a fixed order.
        """
        other = copy(self)
        other._through, other._parts = through, parts
        return other

    @property
    def metric(self) -> str:
        """The name of the main metric in the scores."""
        return score_name(self._metric)

    def evaluate(self, server: Server, state: RunState) -> Scores:
        """The scores (means over examples, sets or clients); for target "clients" also the worst and each client's.

        Raises:
            NoGlobalModel: the target is the server's model, but the method has none.
        """
        return self.measure(server, state).scores

    def measure(self, server: Server, state: RunState) -> Measured:
        """`evaluate`, plus the confusion matrix."""
        if self._target == "server":
            adapter = server_model(server, state.server, quantised=self._model.quantised)
            return next(self._measured([_Look(adapter, None, self._groups)]))
        found = self._measure_clients(server, state)
        scores = {client: each.scores for client, each in found.items()}
        mine = {client: score[self.metric] for client, score in scores.items()}
        names = [name for name in next(iter(scores.values())) if "/" not in name]
        worst = worst_of(self.metric, list(mine.values()), lambda value: value)
        assert worst is not None
        means = {
            **{name: math.fsum(score[name] for score in scores.values()) / len(scores) for name in names},
            "worst": worst,
            **{f"client/{client}": score for client, score in mine.items()},
        }
        return Measured(means, _added([each.confusion for each in found.values()]))

    def measure_clients(self, server: Server, state: RunState, *, common: bool = False) -> dict[str, Scores]:
        """Client -> scores of the model it would start its next round with, on its own held-out text if it has some.

        common: use the common sets even for clients with their own.
        """
        return {client: each.scores for client, each in self._measure_clients(server, state, common=common).items()}

    def _measure_clients(self, server: Server, state: RunState, *, common: bool = False) -> dict[str, Measured]:
        owns = {client.id: None if common else self._own.get(client.id) for client in self._clients}
        looks = (
            _Look(
                client_model(server, state.server, client, state.clients.get(client.id, ClientMemory())),
                client.id if own else None,
                own or self._groups,
            )
            for client, own in zip(self._clients, owns.values(), strict=True)
        )
        return dict(zip(owns, self._measured(looks), strict=True))

    def measure_adapter(self, adapter: Adapter, client: str | None = None) -> Scores:
        """Scores of any adapter, on its base; on the client's own held-out text if it has some."""
        own = None if client is None else self._own.get(client)
        look = _Look(adapter, client if own else None, own or self._groups)
        return next(self._measured([look])).scores

    def count(self, client: str | None = None) -> int:
        """The number of held-out examples: the client's own if it has some, otherwise all."""
        own = None if client is None else self._own.get(client)
        return sum(len(held.examples) for held in (own or self._groups).values())

    def look(self, piece: Piece) -> Seen:
        """Run a model on its piece of a held-out set."""
        _, max_new_tokens, batch_size = self._limits
        held = (self._groups if piece.client is None else self._own[piece.client])[piece.group]
        self._model.activate(piece.adapter)
        order = held.answering if piece.answers else held.reading
        chosen = [order[k * batch_size : (k + 1) * batch_size] for k in piece.batches]
        flat = [i for batch in chosen for i in batch]  # sorted by length, so they form the same batches again
        if not piece.answers:
            batches = stepped(chosen, "batches")
            seen = [self._predictions([held.examples[i] for i in batch]) for batch in batches]
            return Seen(dict(zip(piece.batches, seen, strict=True)), {})
        if held.prompts is not None:
            texts = greedy(
                self._model, [held.prompts[i] for i in flat], max_new_tokens=max_new_tokens, batch_size=batch_size,
                ends=self._ends,
            )  # fmt: skip
        else:
            texts = teacher_forced(self._model, [held.examples[i] for i in flat], batch_size=batch_size)
        return Seen({}, dict(zip(flat, texts, strict=True)))

    def _measured(self, looks: Iterable[_Look]) -> Iterator[Measured]:
        """Each model's scores on its sets, from pieces that other processes may run. Each model is created only when
        its turn comes, so that few exist at a time."""
        drawn: deque[tuple[Mapping[str, _HeldOut], list[str]]] = deque()  # a model's sets, and each piece's set

        def pieces() -> Iterator[Piece]:
            for look in looks:
                of_it = self._pieces(look)
                drawn.append((look.groups, [piece.group for piece in of_it]))
                step.of = (step.of or 0) + len(of_it)
                yield from of_it

        def counted(seen: Iterable[Seen]) -> Iterator[Seen]:
            for step.done, one in enumerate(seen, 1):
                yield one

        with doing("measuring") as step:
            seen = counted((self._through or map)(self.look, pieces()))
            for first in seen:
                groups, names = drawn.popleft()
                parts: dict[str, list[Seen]] = {name: [] for name in groups}
                for name, part in zip(names, [first, *islice(seen, len(names) - 1)], strict=True):
                    parts[name].append(part)
                yield self._scores(groups, parts)

    def _pieces(self, look: _Look) -> list[Piece]:
        batch_size = self._limits[2]
        pieces = []
        for name, held in look.groups.items():
            count = math.ceil(len(held.examples) / batch_size)
            for answers in (False, True) if self._metric in GENERATED else (False,):
                for k in range(parts := max(1, min(self._parts, count))):  # strided, so each gets long and short texts
                    batches = range(k, count, parts)
                    pieces.append(Piece(look.adapter, look.client, name, answers, batches))
        return pieces

    def _prepared(self, data: TextData) -> _HeldOut:
        self._model.check_classes(data.label_names)
        max_length, max_new_tokens, _ = self._limits
        tokenizer = self._model.tokenizer
        prompts: list[list[int]] | None = None
        lost: list[int] = []
        if generates(self._metric):
            room = max_length - max_new_tokens
            cut = cut_prompts(data, tokenizer, max_length=room, template=self._template)
            prompts, lost = [ids for ids, _ in cut], [tokens for _, tokens in cut]
        references = data.references or tuple((response,) for response in data.responses or ())
        examples = encode(
            data, tokenizer, max_length=max_length, template=self._template, long_responses=self._long_responses
        )
        check_length(examples, self._model.longest)
        # Batches of similar lengths need little padding.
        reading = sorted(range(len(examples)), key=lambda i: len(examples[i]["input_ids"]))
        answering = reading if prompts is None else sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        return _HeldOut(examples, prompts, references, reading, answering, data.label_names, lost)

    def _scores(self, groups: Mapping[str, _HeldOut], seen: Mapping[str, Sequence[Seen]]) -> Measured:
        """Means over the sets; if there are several, also each set's own score. Empty sets do not count."""
        filled = {name: held for name, held in groups.items() if held.examples} or groups
        each = {name: scores_of(held, seen[name], self._metric) for name, held in filled.items()}
        confusion = _added([found.confusion for found in each.values()])
        first = next(iter(each.values()))
        if len(each) == 1:
            return Measured(first.scores, confusion)
        scores = {name: found.scores for name, found in each.items()}
        names = [name for name in first.scores if "/" not in name]
        means = {name: math.fsum(one[name] for one in scores.values()) / len(scores) for name in names}
        return Measured(means | {f"group/{name}": one[self.metric] for name, one in scores.items()}, confusion)

    @torch.no_grad()
    def _predictions(self, examples: Encoded) -> Batch:
        """Run one batch through the model."""
        network, device = self._model.network, self._model.device
        network.eval()
        inputs = collate(examples, self._model.tokenizer, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bf16):
            output = network(**inputs)
        labels, logits = inputs["labels"], output.logits
        if labels.ndim == 2:
            labels, logits = labels[:, 1:], logits[:, :-1]
        scored = labels != IGNORED
        return Batch(labels[scored].tolist(), logits.argmax(dim=-1)[scored].tolist(), float(output.loss))


def scores_of(held: _HeldOut, seen: Sequence[Seen], metric: MetricName) -> Measured:
    """One set's scores: over examples, or for a causal LM over response tokens (teacher-forced); and over generated
    answers if `metric` needs them. NaN if the set is empty."""
    batches = dict(sorted((k, batch) for part in seen for k, batch in part.batches.items())).values()
    labels = [y for batch in batches for y in batch.labels]
    predicted = [y for batch in batches for y in batch.predicted]
    taken: dict[str, tuple[object, object]] = {
        "labels": (labels, predicted),
        "losses": ([batch.loss for batch in batches], [len(batch.labels) for batch in batches]),
    }
    task = "classification" if held.classes else "causal-lm"
    scores = {
        score_name(name): found.measure(*taken[found.of])
        for name, found in METRICS.items()
        if found.of in taken and task in found.tasks
    }
    if metric in GENERATED:
        answers = {i: text for part in seen for i, text in part.answers.items()}
        fits = [METRICS[metric].measure(answers[i], right) for i, right in enumerate(held.references)]
        scores[score_name(metric)] = math.fsum(fits) / len(fits) if fits else math.nan
    if not held.classes:
        return Measured(scores, None)
    scores |= {f"recall/{held.classes[k]}": found for k, found in recall(labels, predicted).items()}
    return Measured(scores, confusion_matrix(labels, predicted, len(held.classes)))


def _added(matrices: Sequence[list[list[int]] | None]) -> list[list[int]] | None:
    """The entrywise sum; None if there are no matrices."""
    found = [matrix for matrix in matrices if matrix is not None]
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*found, strict=True)] if found else None


@dataclass(frozen=True)
class Batch:
    """A model's predictions for one batch. labels, predicted: one number per class label or scored token. loss: the
    mean over them."""

    labels: list[int]
    predicted: list[int]
    loss: float


@dataclass(frozen=True, eq=False)
class Piece:
    """One model, and some batches of one held-out set: a unit that can be measured anywhere.

    client: whose own sets; None: the common ones. answers: generate answers instead of reading the wanted ones.
    """

    adapter: Adapter
    client: str | None
    group: str
    answers: bool
    batches: range


@dataclass(frozen=True, eq=False)
class Seen:
    """A piece's outcome. batches: by index in the set. answers: by example."""

    batches: Mapping[int, Batch]
    answers: Mapping[int, str]


class Through(Protocol):
    """Runs the pieces somewhere: `map`, or a process pool."""

    def __call__(self, look: Callable[[Piece], Seen], pieces: Iterable[Piece]) -> Iterable[Seen]:
        """The result of `look` for each piece, in order. Pieces are drawn only as they are needed."""


@dataclass(frozen=True, eq=False)
class _Look:
    """One model and the held-out sets to measure it on. client: the owner of the sets, or None."""

    adapter: Adapter
    client: str | None
    groups: Mapping[str, _HeldOut]


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """One held-out set, encoded. prompts: for generation, or None. classes: their names, empty for a language model.
    reading, answering: its examples sorted by length, the order in which batches are formed. lost: the number of
    tokens cut from each prompt."""

    examples: Encoded
    prompts: list[list[int]] | None
    references: Sequence[Sequence[str]]
    reading: list[int]
    answering: list[int]
    classes: Sequence[str] = ()
    lost: Sequence[int] = ()
