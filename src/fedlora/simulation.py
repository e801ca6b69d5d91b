"""The in-process engine: all clients one after the other around one `Server`, as a generator over rounds.

    for record in simulate(server, clients, trainer, start(server, seed_adapter), rounds=10):
        record.state                      # all there is to store: a run continues from it, bit for bit
        record.losses, record.metrics, record.seconds, record.bytes

Knows no model and no data: `Trainer` and `Evaluator` are what it needs of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import torch

from fedlora.audit import padded_average_error, regauge
from fedlora.checks import named_tensors
from fedlora.client import Client, Download, Form, Upload, keep, prune, receive, send
from fedlora.delivery import Held, Parcel, held_after, pack
from fedlora.errors import ClientFailed, FedLoRAError, QuorumNotMet, UploadRefused
from fedlora.lora import Adapter, LoRA
from fedlora.rounds import sample_clients
from fedlora.seeds import derive_seed
from fedlora.server import OpenRound, Server, ServerState
from fedlora.sketch_round import BothSides, Sketch

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Trained:
    """What local training returns: the complete adapter, its examples, mean loss, and the new data position."""

    adapter: Adapter
    num_examples: int
    loss: float
    position: int


class Trainer(Protocol):
    """Runs one client's local work."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        """Train `adapter`, the complete one, from `position` in the client's data. A function of its arguments."""


@dataclass(frozen=True, eq=False)
class Job:
    """One client's local work: the arguments of `Trainer.train`."""

    download: Download
    adapter: Adapter
    position: int


class GroupTrainer(Trainer, Protocol):
    """A trainer that can run several clients' local work at once."""

    def train_group(self, jobs: Sequence[Job]) -> list[Trained]:
        """What `train` gives for each job, in their order. The jobs are of one round."""


class Evaluator(Protocol):
    """Measures a state, on whatever it was made for."""

    def evaluate(self, server: Server, state: RunState) -> Mapping[str, float]:
        """Metric name -> value."""


@dataclass(frozen=True, eq=False)
class ClientMemory:
    """What stays with a client between rounds.

    kept: local parts of the adapter. position: how far it has read its data. held: what need not be sent to it again
    (the engine has one copy of everything, so it stores only the list). ranks: where pruning changed them.
    """

    kept: Adapter | None = None
    position: int = 0
    held: Held | None = None
    ranks: Mapping[str, int] | None = None


@dataclass(frozen=True, eq=False)
class RunState:
    """A whole run between two rounds: what a checkpoint holds. `round` rounds are done."""

    round: int
    server: ServerState
    clients: Mapping[str, ClientMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round over all its clients, of the tensors that travel; adapter, heads and base apart.

    What was refused has travelled too.
    """

    up_adapter: int = 0
    up_heads: int = 0
    down_adapter: int = 0
    down_heads: int = 0
    down_base: int = 0

    @property
    def total(self) -> int:
        return self.up_adapter + self.up_heads + self.down_adapter + self.down_heads + self.down_base


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One finished round.

    round: its number, from 1. losses: client -> mean training loss. weights: client -> p_i of those that counted
    ({} of a sketched round, whose server sees sums only). refused: client -> why not (a refused upload or a failed
    client). seconds: by phase. server_rank: the mean over modules of the state's rank. padded_error: the relative error
    that zero-padded factor averaging would have made on this round's uploads; None where factors stay local, or uploads
    are dropped (`Server.memory`, a sketch). metrics: of the evaluator, {} where it did not run.
    """

    round: int
    state: RunState
    losses: Mapping[str, float]
    weights: Mapping[str, float]
    refused: Mapping[str, str]
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    bytes: Traffic
    server_rank: float
    padded_error: float | None
    uploads: tuple[Upload, ...]


def start(server: Server, seed_adapter: Adapter) -> RunState:
    """The state before the first round."""
    return RunState(0, server.init(seed_adapter))


def simulate(
    server: Server,
    clients: Sequence[Client],
    trainer: Trainer,
    state: RunState,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    evaluate_every: int = 1,
    form: Form = "factors",
    gauge_stress: float | None = None,
    together: int = 1,
    sketch: Sketch | None = None,
) -> Iterator[RoundRecord]:
    """Run from `state` until `rounds` rounds are done, yielding each round's record.

    Args:
        participation: share of clients a round, at least one client. seed: of the client sampling.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        form: what clients upload, factors or their subspace form. gauge_stress: a condition number; each upload is
            re-expressed in random coordinates of it, new in every round, before it is aggregated. An experiment: what
            is averaged means the same, so a method that minds averages coordinates.
        together: clients that are trained at once, by a trainer that can (`GroupTrainer`).
        sketch: rounds by two exchanges of sums (`sketch_round`) instead of uploads that the server sees.

    Raises:
        ClientFailed: a client's work raised, and the server has no quorum. With one, the round goes on without it.
        UploadRefused, QuorumNotMet: as `Server.aggregate`. The records yielded so far are unaffected.
    """
    by_id = {client.id: client for client in clients}
    while state.round < rounds:
        chosen = sample_clients(list(by_id), participation, seed=seed, round=state.round)
        stress = None if gauge_stress is None else (gauge_stress, derive_seed(seed, "gauge-stress", state.round))
        record = _one_round(server, [by_id[c] for c in chosen], trainer, state, form, stress, together, sketch)
        state = record.state
        if evaluator is not None and (state.round % evaluate_every == 0 or state.round == rounds):
            began = time.perf_counter()
            metrics = evaluator.evaluate(server, state)
            took = {**record.seconds, "evaluate": time.perf_counter() - began}
            record = replace(record, metrics=metrics, seconds=took)
        yield record


def as_pruned(client: Client, memory: ClientMemory) -> Client:
    """The client at the ranks that pruning has left it."""
    return client if memory.ranks is None else replace(client, rank=memory.ranks)


def _one_round(
    server: Server,
    clients: Sequence[Client],
    trainer: Trainer,
    state: RunState,
    form: Form,
    stress: tuple[float, int] | None,
    together: int,
    sketch: Sketch | None,
) -> RoundRecord:
    opened = server.open(state.server) if sketch is None else BothSides(server, state.server, sketch)
    memories = dict(state.clients)
    clock = _Clock()
    losses: dict[str, float] = {}
    failed: dict[str, str] = {}
    uploads: list[Upload] = []
    traffic = Traffic()

    def begin(client: Client) -> Job:
        """Send a client what it lacks."""
        nonlocal traffic
        memory = memories.get(client.id, ClientMemory())
        with clock("download"):
            download = server.download(state.server, as_pruned(client, memory))
            mine = receive(download, memory.kept)
            traffic = _with_download(traffic, pack(download, memory.held))
            memories[client.id] = replace(memory, held=held_after(download, memory.kept))
        return Job(download, mine, memory.position)

    def finish(job: Job, trained: Trained) -> None:
        """Take in what a client has trained, or say why not."""
        nonlocal traffic
        download, mine, client = job.download, job.adapter, job.download.client
        memory = memories[client.id]
        losses[client.id] = trained.loss
        with clock("upload"):
            made, ranks = trained.adapter, memory.ranks
            if download.roles.penalty is not None:
                made = prune(mine, made, download.roles.penalty)
                ranks = made.ranks if made.ranks != mine.ranks else ranks
                client = replace(client, rank=ranks or client.rank)
            upload = Upload(client, trained.num_examples, send(made, download.roles, form), form)
            kept = keep(made, download.roles)
            if sketch is None:
                traffic = _with_upload(traffic, upload)
            if stress is not None:
                upload = _restated(upload, *stress)
            reason = _refusal(opened, upload, kept, server)
            if reason is None:
                if server.memory is None and sketch is None:  # else they are not to pile up here either
                    uploads.append(upload)
                held = held_after(download, kept)
                memories[client.id] = ClientMemory(kept, trained.position, held, ranks)
            else:  # what it keeps stays as it was, but its data stream moves on
                failed[client.id] = reason
                memories[client.id] = replace(memory, position=trained.position)

    for first in range(0, len(clients), together):
        jobs = [begin(client) for client in clients[first : first + together]]
        with clock("train"):
            group = _train(trainer, jobs, server, failed)
        for job, trained in zip(jobs, group, strict=True):
            if trained is not None:
                finish(job, trained)
    with clock("aggregate"):
        try:
            after = opened.close()
        except QuorumNotMet as error:
            raise QuorumNotMet(f"{error} Failed clients: {failed or 'none'}.") from error
    if isinstance(opened, BothSides):
        traffic = replace(
            traffic,
            up_adapter=opened.sent,
            up_heads=opened.sent_heads,
            down_adapter=traffic.down_adapter + opened.received,
        )
    tally = after.tally
    assert tally is not None  # close() always counts
    roles = server.roles(state.server)
    padded_error = None
    if (roles.B, roles.A) == ("shared", "shared") and server.memory is None and sketch is None:
        with clock("diagnose"):
            padded_error = padded_average_error(state.server, uploads, tally.weights)
    return RoundRecord(
        round=after.round,
        state=RunState(after.round, after, MappingProxyType(memories)),
        losses=losses,
        weights=tally.weights,
        refused={**tally.refused, **failed},
        metrics={},
        seconds=clock.seconds,
        bytes=traffic,
        server_rank=_mean_rank(server, after),
        padded_error=padded_error,
        uploads=tuple(uploads),
    )


def _restated(upload: Upload, condition: float, seed: int) -> Upload:
    """The upload in random coordinates, in the dtypes in which it came: as a client would send it."""
    moved = regauge(upload, condition, seed=seed).adapter.modules
    modules = {}
    for name, lora in upload.adapter.modules.items():
        (B, A), (was_B, was_A) = moved[name].factors, lora.factors
        modules[name] = LoRA(B.to(was_B), A.to(was_A))
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


def _train(
    trainer: Trainer | GroupTrainer, jobs: Sequence[Job], server: Server, failed: dict[str, str]
) -> list[Trained | None]:
    """The jobs' results; None for a client that failed. A group that fails is trained again one by one."""
    if len(jobs) > 1:
        assert hasattr(trainer, "train_group"), "together > 1 needs a trainer with train_group"
        try:
            return list(trainer.train_group(jobs))
        except FedLoRAError:
            raise
        except Exception as error:
            log.warning("training %d clients together failed (%s); they are trained one by one", len(jobs), error)
    return [_train_one(trainer, job, server, failed) for job in jobs]


def _train_one(trainer: Trainer, job: Job, server: Server, failed: dict[str, str]) -> Trained | None:
    client, download = job.download.client.id, job.download
    try:
        return trainer.train(download, job.adapter, job.position)
    except FedLoRAError:
        raise
    except Exception as error:
        failure = ClientFailed(client, download.round + 1, f"{type(error).__name__}: {error}")
        if server.quorum is None:
            raise failure from error
        log.warning("%s; the round goes on without it", failure)
        failed[client] = f"{type(error).__name__}: {error}"
        return None


def _refusal(opened: OpenRound | BothSides, upload: Upload, kept: Adapter | None, server: Server) -> str | None:
    """None, and the upload counts; or why it does not. What stays local the server cannot see: it is checked here."""
    try:
        for name, tensor in named_tensors(kept or Adapter({})):
            if not bool(torch.isfinite(tensor).all()):
                raise UploadRefused(upload.client.id, f"the local {name} holds NaN or Inf: training diverged there.")
        opened.add(upload)
    except UploadRefused as refusal:
        if server.quorum is None:
            raise
        log.warning("%s", refusal)
        return refusal.reason
    return None


class _Clock:
    """Seconds by phase, added up over the clients of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._began = "", 0.0

    def __call__(self, phase: str) -> _Clock:
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        spent = time.perf_counter() - self._began
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent


def _size(loras: Mapping[str, LoRA]) -> int:
    return sum(t.numel() * t.element_size() for lora in loras.values() for t in lora.tensors().values())


def _head_size(adapter: Adapter) -> int:
    return sum(t.numel() * t.element_size() for t in adapter.heads.values())


def _with_upload(traffic: Traffic, upload: Upload) -> Traffic:
    return replace(
        traffic,
        up_adapter=traffic.up_adapter + _size(upload.adapter.modules),
        up_heads=traffic.up_heads + _head_size(upload.adapter),
    )


def _with_download(traffic: Traffic, parcel: Parcel) -> Traffic:
    sent = (parcel.adapter, parcel.start)
    return replace(
        traffic,
        down_adapter=traffic.down_adapter + sum(_size(a.modules) for a in sent),
        down_heads=traffic.down_heads + sum(_head_size(a) for a in sent),
        down_base=traffic.down_base + _size(parcel.base) + _size(parcel.steps),
    )


def _mean_rank(server: Server, state: ServerState) -> float:
    found = [facts.get("rank") for facts in server.diagnostics(state).values()]
    ranks = [rank for rank in found if isinstance(rank, int)]
    return sum(ranks) / len(ranks) if ranks else math.nan
