"""Tables of a run's configuration: each explains its keys, and builds its own part of the run.

Each key is a field below, with its default. `config` reads them from TOML.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, model_validator

from fedlora.analysis.audit import MOST, GaugeStress
from fedlora.core.method import Method
from fedlora.data.demo import model_location
from fedlora.data.hub import repository_and_revision
from fedlora.errors import HyperparameterError
from fedlora.methods import build
from fedlora.runs.stopping import Patience
from fedlora.runs.tracking import TrackerName
from fedlora.server.kept import Kept
from fedlora.server.rounds import Weighting
from fedlora.server.rules import Rule
from fedlora.server.server import Heads, Server
from fedlora.server.streamed import Streamed
from fedlora.simulation import UploadHook
from fedlora.training.load import bare_network, model_place
from fedlora.training.measure import Target
from fedlora.training.metrics import MetricName
from fedlora.training.models import AdaptedModel
from fedlora.training.programs import Program
from fedlora.training.settings import DType, LoRASettings, Positive, Section, Targets, Task, TrainSection
from fedlora.training.targets import adapted
from fedlora.workers.processes import available

Share = Annotated[float, Field(gt=0, le=1)]
Command = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0)]


class RunSection(Section):
    """Length, width and reproducibility of a run.

    rounds: how many. participation: the share of the clients drawn for each round. seed: of all randomness. threads:
    torch's (0: its own default); a fixed number gives the same bits. workers: processes that train and evaluate, with
    one thread or GPU each; "auto" is the machine's number. On a CPU they change no bit. checkpoint_every: rounds
    between stored states. keep_checkpoints: how many of the newest. readouts: write each client's readout at the end.
    keep_uploads: store uploads, for `fedlora audit`. report_to: trackers.
    """

    rounds: Positive = 10
    participation: Share = 1.0
    seed: int = 0
    threads: Annotated[int, Field(ge=0)] = 0
    workers: Positive | Literal["auto"] | None = None
    checkpoint_every: Positive = 1
    keep_checkpoints: Positive = 2
    readouts: bool = False
    keep_uploads: Literal["none", "last", "all"] = "none"
    report_to: list[TrackerName] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_thread_each(self) -> RunSection:
        if self.workers is not None and self.threads > 1:
            raise ValueError(
                f"run.workers = {self.workers!r} gives each worker one thread, but run.threads = {self.threads} asks "
                f"for more; leave one of them out"
            )
        return self

    def processes(self, device: str, clients: int) -> int:
        """The number of worker processes; 1: this process does the work. clients: per round."""
        if self.workers == "auto":
            return min(available(device), clients)
        return self.workers or 1

    def torch_threads(self) -> int:
        """Threads per process; 0 keeps torch's own default."""
        return self.threads if self.workers is None else 1


class ModelSection(Section):
    """The base model, which nobody changes.

    name: a folder, a GGUF file, a hub id or "owner/name@revision"; "demo" (MiniLM) and "smollm2" are packaged. task:
    what the model does. device: of torch; "auto" is a GPU if there is one. adapter: a PEFT folder to start from, or one
    on the hub. revision: of a hub id; default: the newest. dtype: of the base weights; adapters and heads stay float32.
    bf16: compute in bfloat16. gradient_checkpointing: less memory, more time. dropout: instead of the model's own.
    load_in_4bit: the base in 4 bits (a GPU and bitsandbytes; not fedex-lora and flora).
    """

    name: str
    task: Task = "sequence-classification"
    device: str = "auto"
    adapter: str | None = None
    revision: str | None = None
    dtype: DType = "float32"
    bf16: bool = False
    load_in_4bit: bool = False
    gradient_checkpointing: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_on_the_hub(cls, given: Any) -> Any:
        """owner/name@revision as its two parts."""
        path = given.get("name") if isinstance(given, dict) else None
        named = repository_and_revision(path) if isinstance(path, str) and not os.path.lexists(path) else None
        if named is None:
            return given
        if given.get("revision") is not None:
            raise ValueError(f"model.name = {path!r} names a revision, so leave out model.revision")
        return given | {"name": named[0], "revision": named[1]}

    @model_validator(mode="after")
    def _bfloat16_computes(self) -> ModelSection:
        if self.dtype == "bfloat16" and not self.bf16:
            raise ValueError("model.dtype = 'bfloat16' stores the base in bfloat16, so set model.bf16 = true, too")
        return self

    def location(self) -> Path | str:
        """Where the model is; packaged models are files of installed packages, and a hub id stays as it is, or is its
        snapshot on this machine if the revision is given."""
        return model_location(self.name) if self.revision is None else _snapshot(self.name, self.revision)

    def check_targets(self, targets: Targets) -> None:
        """Raise `ConfigError` if LoRA cannot go there, before weights are read."""
        adapted(bare_network(self.location(), self.task), targets)

    def chosen_device(self) -> str:
        """The configured device; for "auto" a GPU if there is one."""
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    def load(self, lora: LoRASettings, labels: Sequence[str], seed: int, *, device: str | None = None) -> AdaptedModel:
        """The base model in memory, with LoRA in place. device: overrides the configured one."""
        device = device or self.chosen_device()
        return AdaptedModel.load(
            self.location(), self.task, lora, labels=tuple(labels), seed=seed, device=device, dropout=self.dropout,
            load_in_4bit=self.load_in_4bit, gradient_checkpointing=self.gradient_checkpointing, dtype=self.dtype,
        )  # fmt: skip


_snapshot = lru_cache(maxsize=32)(model_place)  # each ask of the hub costs seconds, and one process asks often


class MethodSection(Section):
    """How uploads become the server's model. Further keys are the method's hyper-parameters.

    name: one of `fedlora methods`, or "module:Class".
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "glora"

    def build(self) -> Method[Any]:
        """The method. Raises `HyperparameterError`."""
        return build(self.name, **(self.model_extra or {}))


class ServerSection(Section):
    """The arguments of `fedlora.Server`, and an experiment with uploads.

    weighting: p_i; default: "uniform" with [robust], otherwise "examples". heads: of fully trained parts; default: the
    method's choice. quorum: the good uploads that a round needs; default: the first bad one stops the run (on Flower,
    one good upload is enough). stream: add uploads up as they come and forget them (methods that need only the sum).
    gauge_stress: re-express each upload in random coordinates of this condition number.
    """

    weighting: Weighting | None = None
    heads: Heads | None = None
    quorum: Positive | None = None
    stream: bool = False
    gauge_stress: Annotated[float, Field(ge=1, le=MOST)] | None = None

    def build(self, method: Method[Any], seed: int, rule: Rule | None = None) -> Server:
        """The server with that method. rule: from [robust]. Raises `HyperparameterError`."""
        if not self.stream:
            return Server(method, self.heads, seed, Kept(rule, self.weighting, self.quorum))
        if rule is not None:
            raise HyperparameterError(
                f"server.stream adds uploads up as they come and forgets them, and {rule.name} compares the changes of "
                f"all clients of a round: leave one of them out."
            )
        return Server(method, self.heads, seed, Streamed(self.weighting or "examples", self.quorum))

    def hooks(self, seed: int) -> list[UploadHook]:
        """Hooks applied to uploads on their way."""
        return [] if self.gauge_stress is None else [GaugeStress(self.gauge_stress, seed)]


class TrainTable(TrainSection):
    """One client's round: by fedlora's own loop, whose optimiser is new each round, or by a program of the client's.

    command: a program and its arguments, started for each client and round; it finds a PEFT folder and leaves one, and
    other keys here have no effect. {data} in it is the client's file of examples. timeout: seconds after which the
    program is ended and its client fails.
    """

    command: Command | None = None
    timeout: Seconds | None = None

    def program(self) -> Program | None:
        """The clients' program, if they have one."""
        return None if self.command is None else Program(tuple(self.command), self.timeout)


class EvaluateSection(Section):
    """What is measured, and when to stop. docs/how-to/measuring.md explains the metrics.

    every: rounds between evaluations; the last is always measured. target: whose model; "auto" is the server's if it
    has one. metric: reported, and used to choose the best round. max_new_tokens: the longest generated answer.
    batch_size: examples at a time. clients_at_end: also measure each client's own readout, on its own test set if it
    has one. early_stopping_patience: stop after so many evaluations in a row without a better validation metric.
    early_stopping_threshold: the smallest improvement that counts. samples: how many held-out prompts a language model
    answers, before and after training.
    """

    every: Positive = 1
    target: Target | Literal["auto"] = "auto"
    metric: MetricName = "accuracy"
    max_new_tokens: Positive = 64
    clients_at_end: bool = False
    batch_size: Positive = 64
    early_stopping_patience: Positive | None = None
    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0
    samples: Annotated[int, Field(ge=0)] = 5

    def stopping(self) -> Patience | None:
        """When to stop early."""
        if self.early_stopping_patience is None:
            return None
        return Patience(self.early_stopping_patience, self.early_stopping_threshold, self.every)
