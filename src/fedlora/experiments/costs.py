"""The cost of runs, counted before they start: examples, tokens, texts to score, answers, bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlora.data import TextData
from fedlora.data.demo import model_location
from fedlora.errors import ConfigError, DataError, FedLoRAError
from fedlora.experiments.result import Result
from fedlora.experiments.runnable import clients_of
from fedlora.experiments.scores import of_clients
from fedlora.experiments.traffic import Bytes, bytes_of, turns_of
from fedlora.runs.client_data import Dealt, deal
from fedlora.runs.config import RunConfig
from fedlora.training.encode import check_length, encode
from fedlora.training.load import weight_files
from fedlora.training.loop import epoch_order
from fedlora.training.metrics import generates
from fedlora.training.settings import TrainSection
from fedlora.training.skeleton import Skeleton


@dataclass(frozen=True)
class Workload:
    """The work of a run. None: not counted, for one of the reasons in `whys`.

    trained, tokens: examples over all clients and rounds, and their tokens without padding; for a private run, whose
    draw is secret, the expected numbers. most: trained and tokens may be less, because training stops early, or because
    without data a client may lack a whole batch. scored: held-out texts to score, at most: the best state may be the
    last. answers: to generate, at most, of evaluate.max_new_tokens each. bytes: None for a private run, which does not
    report them.
    """

    trained: int | None
    tokens: int | None
    most: bool
    scored: int | None
    answers: int | None
    bytes: Bytes | None
    whys: tuple[str, ...]


class Workloads:
    """Counts runs. It reads data and encodes texts once for all runs that share them. data_root: for named data;
    without it these are not searched for (the hub is not asked)."""

    def __init__(self, data_root: Path | None) -> None:
        self.root = data_root
        self._dealt: dict[str, Dealt | str] = {}
        self._models: dict[str, Skeleton | str] = {}
        self._counted: dict[str, Workload] = {}
        self._weightless: dict[tuple[str, str | None], list[str]] = {}
        self._lengths: dict[tuple[object, ...], int] = {}  # of a text, by model and settings

    def of(self, config: RunConfig) -> Workload:
        """All that can be counted of the run; its learning rate changes nothing."""
        key = config.model_dump_json(exclude={"train": {"lr"}})
        if key not in self._counted:
            try:
                self._counted[key] = self._of(config)
            except FedLoRAError as error:  # it cannot be run at all
                self._counted[key] = Workload(None, None, False, None, None, None, (_line(error),))
        return self._counted[key]

    def _of(self, config: RunConfig) -> Workload:
        dealt, bare = self.data(config), self.model(config)
        whys = tuple(found for found in (dealt, bare) if isinstance(found, str))
        early = config.evaluate.patience is not None
        if isinstance(dealt, str):
            return Workload(examples_of(config), None, True, None, None, None, whys)
        trained, scored = examples_of(config, dealt.sizes), _scored(config, dealt)
        answers = scored if generates(config.evaluate.metric) else 0
        if config.model.task == "causal-lm":
            answers += 2 * min(config.evaluate.samples, _texts(dealt.test) or _texts(dealt.validation))
        if config.train.command is not None:
            why = "train.command: how many examples a program trains on, only the program knows"
            return Workload(None, None, early, scored, answers, None, (*whys, why))
        if isinstance(bare, str):
            return Workload(trained, None, early, scored, answers, None, whys)
        tokens = None
        try:
            tokens = self._tokens(config, dealt, bare)
        except (ConfigError, DataError) as error:
            whys = (_line(error),)
        moved = config.model.adapter is not None and config.method.build().moves_base
        size = None if config.privacy is not None or moved else bytes_of(config, bare.shapes, list(dealt.sizes))
        return Workload(trained, tokens, early, scored, answers, size, whys)

    def data(self, config: RunConfig) -> Dealt | str:
        """Who trains on what; the problem in one line, if that cannot be read."""
        c = config.clients
        key = json.dumps([config.data.model_dump(), config.run.seed, config.model.task, clients_of(config), c.partition,
                          c.alpha, c.min_size, c.own_test], default=str)  # fmt: skip
        if key not in self._dealt:
            self._dealt[key] = self._deal(config)
        return self._dealt[key]

    def model(self, config: RunConfig) -> Skeleton | str:
        """The model's skeleton; the problem in one line, if there is none, or LoRA cannot go there."""
        m, dealt = config.model, self.data(config)
        classes = 0 if m.task == "causal-lm" else 2 if isinstance(dealt, str) else len(dealt.classes)
        key = json.dumps([m.model_dump(include={"path", "revision", "task", "dropout"}),
                          config.lora.model_dump(), classes])  # fmt: skip
        if key not in self._models:
            try:
                self._models[key] = Skeleton(
                    model_location(m.path), m.task, config.lora, classes, revision=m.revision, dropout=m.dropout,
                )  # fmt: skip
            except (ConfigError, DataError) as error:
                self._models[key] = f"model.path = {m.path!r}: {_line(error)}"
        return self._models[key]

    def no_weights(self, config: RunConfig) -> list[str]:
        """The problem in one line, if a model that is here has no weights."""
        m = config.model
        if (m.path, m.revision) not in self._weightless:
            try:
                if (place := Path(model_location(m.path))).exists():
                    weight_files(place)
                self._weightless[m.path, m.revision] = []
            except FedLoRAError as error:
                self._weightless[m.path, m.revision] = [f"model.path = {m.path!r}: {_line(error)}"]
        return self._weightless[m.path, m.revision]

    def _deal(self, config: RunConfig) -> Dealt | str:
        if config.data.task is not None and self.root is None:
            return f"data.task = {config.data.task!r} without --data-root"
        try:
            return deal(config, self.root)
        except (ConfigError, DataError) as error:
            return _line(error)

    def _tokens(self, config: RunConfig, dealt: Dealt, bare: Skeleton) -> int:
        """The tokens of the examples that `examples_of` counts, each client's in the order of its epochs."""
        train, run, found = config.train, config.run, 0.0
        turns = _turns(config, tuple(dealt.sizes))
        for name, part in dealt.parts.items():
            lengths = self._lengths_of(config, part, bare)
            seen = turns[name] * _a_round(train, len(part))
            epochs, rest = divmod(seen, len(part))
            found += epochs * sum(lengths)
            if config.privacy is None:
                found += sum(lengths[k] for k in epoch_order(len(part), int(epochs), run.seed, name)[: int(rest)])
            else:
                found += rest * sum(lengths) / len(part)
        return round(found)

    def check_texts(self, config: RunConfig, dealt: Dealt, bare: Skeleton) -> None:
        """Raises `DataError` or `ConfigError` for training texts that cannot be encoded, or that are too long."""
        for part in dealt.parts.values():
            if config.model.task == "classification" and config.data.max_length <= (bare.longest or math.inf):
                part = part.select([0])  # all are cut: only the room for special tokens can lack
            check_length(max(self._lengths_of(config, part, bare), default=0), bare.longest)

    def _lengths_of(self, config: RunConfig, part: TextData, bare: Skeleton) -> list[int]:
        d, template = config.data, config.data.prompting() if config.model.task == "causal-lm" else None
        kind = json.dumps([config.model.path, config.model.revision, d.max_length, template])
        columns = (part.text, part.pair, part.responses, part.history)
        rows = zip(*(column for column in columns if column is not None), strict=True)
        texts: list[tuple[object, ...]] = [(kind, *row) for row in rows]
        new = [k for k, text in enumerate(texts) if text not in self._lengths]
        made = encode(part.select(new), bare.tokenizer, max_length=d.max_length, template=template)
        self._lengths |= {texts[k]: len(example["input_ids"]) for k, example in zip(new, made, strict=True)}
        return [self._lengths[text] for text in texts]


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]


def examples_of(config: RunConfig, sizes: Mapping[str, int] | None = None) -> int | None:
    """The number of examples that a run's clients train on, over all rounds; for a private run, whose draw is secret,
    the expected number.

    sizes: client -> its number of examples. Without them each client takes whole batches, which is the most; None if it
    trains by epochs, which only the data can count, or by a program of its own.
    """
    train = config.train
    if train.command is not None:
        return None
    if sizes is None:
        if not train.steps:
            return None
        sizes = {str(k): train.batch_size for k in range(clients_of(config))}
    turns = _turns(config, tuple(sizes))
    return round(sum(turns[name] * _a_round(train, size) for name, size in sizes.items()))


def trained_on(result: Result) -> int | None:
    """`examples_of` a finished run, from the sizes that it recorded; a private run does not report them."""
    train = result.settings.train
    sizes = result.examples or (dict.fromkeys(result.ranks, train.batch_size) if train.steps else {})
    return examples_of(result.settings, sizes) if sizes else None


def _a_round(train: TrainSection, size: int) -> int:
    """The examples that a client of this size trains on in a round, as in `training.loop`: a client with less than one
    batch uses a batch of its own size."""
    batch = min(train.batch_size, size)
    return (train.steps or math.ceil(train.epochs * size / batch)) * batch


def _turns(config: RunConfig, names: tuple[str, ...]) -> Mapping[str, float]:
    """Client -> the number of rounds in which it takes part; the expected one for a private run."""
    run = config.run
    if config.privacy is not None or run.participation == 1.0:
        return dict.fromkeys(names, run.rounds * run.participation)
    return {name: len(each) for name, each in turns_of(names, run.participation, run.seed, run.rounds).items()}


def _texts(sets: Mapping[str, TextData]) -> int:
    return sum(map(len, sets.values()))


def _scored(config: RunConfig, dealt: Dealt) -> int:
    """Validation (with `test_along` also the test set) by rounds, test sets at the last and best round, and clients'
    own at the end."""
    e, rounds, clients = config.evaluate, config.run.rounds, len(dealt.parts)
    validation, test, probes = _texts(dealt.validation), _texts(dealt.test), sum(map(_texts, dealt.probes.values()))
    own = _texts(dealt.own_test) or clients * test
    at_end = (own if e.clients_at_end else 0) + (clients * test if e.clients_at_end == "both" else 0)
    if of_clients(config):
        validation = _texts(dealt.own_validation) or clients * validation
        test, probes = own, clients * probes
    evaluations = math.ceil(rounds / e.every)
    states = 2 if validation and evaluations > 1 else 1  # the last, and the best if it can be another
    each = validation + (test if e.test_along else 0)
    return evaluations * each + states * (test + probes) + at_end
