"""The in-process engine: a federation around one `Server`, as a generator over rounds.

    for record in simulate(server, clients, trainer, start(server, seed_adapter), rounds=10):
        record.state                      # all there is to store: a run continues from it, bit for bit
        record.losses, record.metrics, record.seconds, record.bytes

Knows no model and no data: `Trainer` and `Evaluator` are what it needs of them. What varies is handed in: who does
the work (`Workers`), how the server takes uploads in (its own options), what happens to an upload on its way
(`hooks`), and, in experiments, who lies (`adversary`). `play` yields what happens in between, too.
"""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, get_args

from torch import Tensor

from fedlora.client import begin_round, finish_round
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, ClientMemory, Form, Upload, as_pruned
from fedlora.core.parcels import Parcel, held_after, pack
from fedlora.core.read_only import ReadOnly
from fedlora.core.sent import Attacked, Sent, Tampered, Tamperer
from fedlora.core.trainer import Failed, GroupTrainer, Job, OneByOne, Together, Trained, Trainer, Workers
from fedlora.errors import ClientFailed, HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.server import sample_clients
from fedlora.server.intake import Taken, take_in
from fedlora.server.private_options import Privacy
from fedlora.server.server import Server, start
from fedlora.server.state import RunState, ServerState

log = logging.getLogger(__name__)
X = TypeVar("X")

UploadHook = Callable[[Upload, int], Upload]  # an upload and its round, from 0 -> what arrives at the server


class Evaluator(Protocol):
    """Measures a state, on whatever it was made for.

    Example:
        >>> class Size:
        ...     def evaluate(self, server, state):
        ...         return {"norm": sum(lora.norm() for lora in server.global_update(state.server).values())}
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1, evaluator=Size()))
        >>> sorted(record.metrics)
        ['norm']
    """

    def evaluate(self, server: Server, state: RunState) -> Mapping[str, float]:
        """Metric name -> value."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one round over all its clients, of the tensors that travel; adapter, heads and base apart.

    What was refused has travelled too.

    Example:
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1))
        >>> record.bytes.up_adapter  # two modules, (6 + 5) numbers for each of 2 + 4 ranks, 4 bytes each
        528
    """

    up_adapter: int = 0
    up_heads: int = 0
    down_adapter: int = 0
    down_heads: int = 0
    down_base: int = 0

    @property
    def total(self) -> int:
        return self.up_adapter + self.up_heads + self.down_adapter + self.down_heads + self.down_base


@dataclass(frozen=True)
class ClientDone:
    """One client of a round is done. loss: its mean training loss, None where it failed. refused: why it does not
    count; None: it does, as far as its own upload goes, or it abstained. A defence judges later: see the record.

    Example:
        >>> played = play(server, clients, trainer, start(server, seed_adapter), rounds=1)
        >>> [event.client for event in played if isinstance(event, ClientDone)]
        ['site-1', 'site-2']
    """

    round: int
    client: str
    loss: float | None
    refused: str | None


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One finished round.

    round: its number, from 1. losses: client -> mean training loss. weights: client -> p_i of those that counted
    ({} of a sketched round, whose server sees sums only). refused: client -> why not (a refused upload or a failed
    client). seconds: by phase. server_rank: the mean over modules of the state's rank. metrics: of the evaluator, {}
    where it did not run. uploads: those that counted, as the server got them; () where it drops them. Of a private
    round nothing but state, metrics, seconds and server_rank is told; `state.clients` is a secret: who took part.
    attacked: what an adversary did, None where there is none.

    Example:
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1))
        >>> record.round, record.losses, record.weights
        (1, {'site-1': 0.5, 'site-2': 0.5}, {'site-1': 0.5, 'site-2': 0.5})
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
    uploads: tuple[Upload, ...]
    attacked: Attacked | None = None


def simulate(
    server: Server,
    clients: Sequence[Client],
    trainer: Trainer | Workers,
    state: RunState,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    evaluate_every: int = 1,
    form: Form = "factors",
    hooks: Sequence[UploadHook] = (),
    adversary: Tamperer | None = None,
) -> Iterator[RoundRecord]:
    """Run from `state` until `rounds` rounds are done, yielding each round's record.

    Args:
        trainer: trains one client at a time; or `Workers`, which say how many at once and where, as `Together`.
        participation: share of clients a round, at least one client; 1 for a private server, which samples itself and
            secretly. seed: of the client sampling.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        form: what clients upload, factors or their subspace form. hooks: what becomes of each upload on its way, one
            after the other: experiments such as `analysis.audit.GaugeStress`. adversary: clients that lie, knowing all
            uploads of a round, before any hook: experiments such as `attacks.Adversary`.

    Raises:
        HyperparameterError: two clients of one id; an evaluator that gives no numbers by name.
        ClientFailed: a client's work raised, and the server has no quorum. With one, the round goes on without it.
        UploadRefused, QuorumNotMet: as `Server.aggregate`. The records yielded so far are unaffected.

    Example:
        >>> for record in simulate(server, clients, trainer, start(server, seed_adapter), rounds=2):
        ...     print(record.round, record.losses)
        1 {'site-1': 0.5, 'site-2': 0.5}
        2 {'site-1': 0.5, 'site-2': 0.5}
    """
    played = play(
        server, clients, trainer, state, rounds=rounds, participation=participation, seed=seed, evaluator=evaluator,
        evaluate_every=evaluate_every, form=form, hooks=hooks, adversary=adversary,
    )  # fmt: skip
    return (event for event in played if isinstance(event, RoundRecord))


def play(
    server: Server,
    clients: Sequence[Client],
    trainer: Trainer | Workers,
    state: RunState,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    evaluator: Evaluator | None = None,
    evaluate_every: int = 1,
    form: Form = "factors",
    hooks: Sequence[UploadHook] = (),
    adversary: Tamperer | None = None,
) -> Iterator[ClientDone | RoundRecord]:
    """`simulate`, with an event for each client that is done as well: what a progress bar shows.

    Example:
        >>> for event in play(server, clients, trainer, start(server, seed_adapter), rounds=1):
        ...     print(type(event).__name__)
        ClientDone
        ClientDone
        RoundRecord
    """
    by_id = {client.id: client for client in clients}
    if len(by_id) < len(clients):
        names = [client.id for client in clients]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise HyperparameterError(
            f"{len(twice)} client ids occur more than once, {twice[0]!r} for one. A client's memory and its part in "
            f"the mean go by its id: give each its own."
        )
    if form not in get_args(Form):
        raise HyperparameterError(f"form is one of {get_args(Form)}; got {form!r}.")
    if evaluate_every < 1:
        raise HyperparameterError(f"evaluate_every is a number of rounds >= 1; got {evaluate_every}.")
    if not isinstance(state, RunState):
        raise HyperparameterError(
            f"state is a RunState, as `start(server, seed_adapter)` or a record has it; got a {type(state).__name__}."
        )
    if not isinstance(trainer, Workers) and not callable(getattr(trainer, "train", None)):
        raise HyperparameterError(
            f"trainer has a method train(download, adapter, position) -> Trained; {trainer!r:.80} has none."
        )
    if evaluator is not None and not callable(getattr(evaluator, "evaluate", None)):
        raise HyperparameterError(
            f"evaluator has a method evaluate(server, state) -> {{name: value}}; {evaluator!r:.80} has none."
        )
    if server.privacy is not None:
        _check_private(server.privacy, by_id, participation)
        if isinstance(trainer, Together) and trainer.size > 1:
            raise HyperparameterError(
                f"Together(size={trainer.size}) trains clients in one batch, so that one client changes what others "
                f"send, and privacy bounds what it sends itself: hand in the trainer, or workers that train each "
                f"client by itself."
            )
    workers = trainer if isinstance(trainer, Workers) else OneByOne(trainer)
    if adversary is not None and server.privacy is not None:
        raise HyperparameterError("an adversary's doings are told, and a private round tells of no single client.")
    if adversary is not None:
        log.warning("clients of this federation lie on purpose, and its results are an experiment's: %r", adversary)
    while state.round < rounds:
        round = _Round(server, state, form, hooks, adversary)
        chosen = round.asked
        if chosen is None:
            chosen = sample_clients(list(by_id), participation, seed=seed, round=state.round)
        yield from round.play([by_id[c] for c in chosen], workers)
        record = round.record()
        state = record.state
        if evaluator is not None and (state.round % evaluate_every == 0 or state.round == rounds):
            with round.clock("evaluate"):
                metrics = _checked_metrics(evaluator.evaluate(server, state))
            record = replace(record, metrics=metrics, seconds=dict(round.clock.seconds))
        yield record


def _check_private(privacy: Privacy, clients: Iterable[str], participation: float) -> None:
    """Raises `HyperparameterError` where the engine would play other rounds than those that the ledger charges."""
    if participation != 1.0:
        raise HyperparameterError(
            f"participation = {participation:g} draws clients by a public seed, and privacy counts on a secret draw: "
            f"leave participation out and set Privacy(sampling={participation:g})."
        )
    apart = sorted(set(clients) ^ set(privacy.clients))
    if apart:
        who = "is not among the clients given" if apart[0] in privacy.clients else "is not in Privacy(clients=...)"
        raise HyperparameterError(
            f"the clients given and the {len(privacy.clients)} of Privacy(clients=...) differ in {len(apart)}: "
            f"{apart[0]!r} for one {who}. The round draws from those, and the mean divides by how many they are: name "
            f"the same ones in both."
        )


class _Round:
    """One round being played: the engine's only mutable thing. `play` it, then ask for its `record`."""

    def __init__(
        self, server: Server, before: RunState, form: Form, hooks: Sequence[UploadHook], adversary: Tamperer | None
    ) -> None:
        self.clock = _Clock()
        self._server, self._before, self._form, self._hooks = server, before, form, hooks
        self._privacy = server.privacy  # then nobody but its diary is told what became of whom
        self._private = server.privacy is not None
        self._adversary = adversary
        self._attacked: Attacked | None = None
        self._given: dict[str, Adapter] = {}  # what each began from, where somebody lies
        self._intake = server.open(before.server)
        self._memories = dict(before.clients)
        self._losses: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        self._uploads: dict[str, Upload] = {}
        self._traffic = Traffic()
        self._after: dict[str, ClientMemory] = {}  # of those whose upload is on its way: theirs if it counts
        self._done: list[ClientDone] = []  # not yet told
        self._begun: dict[str, ClientMemory] = {}  # as it was when the round began for each
        self._at_work: dict[str, Job] = {}  # handed to the workers, and not come back

    @property
    def asked(self) -> Sequence[str] | None:
        """Whom the server asks, where it decides that."""
        return self._intake.asked

    def play(self, clients: Sequence[Client], workers: Workers) -> Iterator[ClientDone]:
        """Every client's part, and the close."""
        uploads = self._hooked(self._sent(self._trained(clients, workers)))
        for taken in self.clock.over("upload", take_in(self._intake, uploads)):
            self._count(taken)
            yield from self._drained()
        yield from self._drained()
        with self.clock("aggregate"):
            try:
                self._closed = self._intake.close()
            except QuorumNotMet as error:
                raise QuorumNotMet(f"{error} Failed clients: {self._refused or 'none'}.") from error
        for client, reason in (self._closed.tally.refused if self._closed.tally is not None else {}).items():
            if client in self._after and client not in self._refused:  # a defence's doing, with all uploads before it
                log.warning("client %r does not count in round %d: %s", client, self._closed.round, reason)
                self._uploads.pop(client, None)
                self._memories[client] = replace(self._begun[client], position=self._after[client].position)

    def record(self) -> RoundRecord:
        """What came of it, not evaluated yet."""
        after = self._closed
        if self._private:
            state = RunState(after.round, after, ReadOnly(self._memories))
            return RoundRecord(
                after.round,
                state,
                {},
                {},
                {},
                {},
                dict(self.clock.seconds),
                Traffic(),
                _mean_rank(self._server, after),
                (),
            )
        tally = after.tally
        weights, refused = (tally.weights, tally.refused) if tally is not None else ({}, {})
        return RoundRecord(
            round=after.round,
            state=RunState(after.round, after, ReadOnly(self._memories)),
            losses=self._losses,
            weights=weights,
            refused={**refused, **self._refused},
            metrics={},
            seconds=dict(self.clock.seconds),
            bytes=self._traffic,
            server_rank=_mean_rank(self._server, after),
            uploads=tuple(self._uploads.values()),
            attacked=self._attacked,
        )

    def _drained(self) -> list[ClientDone]:
        done, self._done = self._done, []
        return done

    def _tell(self, client: str) -> None:
        if self._private:
            return
        round, loss, refused = self._before.round + 1, self._losses.get(client), self._refused.get(client)
        self._done.append(ClientDone(round, client, loss, refused))

    def _jobs(self, clients: Iterable[Client]) -> Iterator[Job]:
        """Each client's work, once it has been sent what it lacks."""
        for client in clients:
            with self.clock("download"):
                memory = self._memories.get(client.id, ClientMemory())
                download = self._server.download(self._before.server, as_pruned(client, memory))
                job = begin_round(download, memory)
                self._traffic = _with_download(self._traffic, pack(download, memory.held))
                self._begun[client.id] = replace(memory, held=held_after(download, memory.kept))
                self._memories[client.id] = self._begun[client.id]
            self._at_work[client.id] = job
            if self._adversary is not None:  # a trainer may train what it is given in place
                self._given[client.id] = job.adapter.map(Tensor.clone)
            yield job

    def _trained(self, clients: Iterable[Client], workers: Workers) -> Iterator[Sent]:
        """What those send whose work went well."""
        for job, result in self.clock.over("train", workers.train_all(self._jobs(clients))):
            client = job.download.client.id
            if self._at_work.pop(client, None) is not job:
                raise HyperparameterError(
                    f"the workers returned a job of {client!r} that they were not given, or returned already. "
                    f"`train_all` yields each job that it draws once, with its result."
                )
            if isinstance(result, Failed):
                self._failed(result)
                continue
            self._losses[client] = result.loss
            memory = self._memories[client]
            try:
                played = finish_round(job, result, memory, self._form)
            except UploadRefused as refusal:
                if self._privacy is not None:
                    self._privacy.note(self._before.round + 1, refusal.client, refusal.reason)
                self._refuse(refusal, position=result.position)
                self._tell(client)
                continue
            except HyperparameterError:
                raise
            except Exception as error:  # what its trainer made is no adapter of this round
                self._failed(Failed(job, error))
                continue
            self._after[client] = played.memory
            yield Sent(played.upload, self._given.pop(client, job.adapter), job.download.roles)
        for job in list(self._at_work.values()):
            self._failed(Failed(job, RuntimeError("the workers drew its job and gave no result")))

    def _sent(self, sent: Iterator[Sent]) -> Iterator[Upload]:
        """Their uploads one by one; where somebody lies, all are there before the first goes on."""
        if self._adversary is None:
            yield from (one.upload for one in sent)
            return
        everything = list(sent)
        tampered = self._adversary(everything, self._before.round)
        names = [one.upload.client.id for one in everything]
        if not isinstance(tampered, Tampered) or [u.client.id for u in tampered.uploads] != names:
            raise HyperparameterError(
                f"the adversary {self._adversary!r:.80} returned {tampered!r:.80}; it returns a Tampered with one "
                f"upload for each that was sent, changed or not, in the same order."
            )
        self._attacked = tampered.attacked
        yield from tampered.uploads

    def _hooked(self, uploads: Iterable[Upload]) -> Iterator[Upload]:
        """The uploads as they arrive at the server."""
        for upload in uploads:
            client = upload.client.id
            for hook in self._hooks:
                upload = hook(upload, self._before.round)
                if not isinstance(upload, Upload) or upload.client.id != client:
                    raise HyperparameterError(
                        f"the hook {hook!r} returned {upload!r:.80} for the upload of {client!r}; it returns that "
                        f"client's upload, changed or not."
                    )
            yield upload

    def _count(self, taken: Taken) -> None:
        """An exchange with one client is over: what travelled, and whether it counts."""
        client, t = taken.upload.client.id, self._traffic
        self._traffic = replace(
            t,
            up_adapter=t.up_adapter + taken.up_modules,
            up_heads=t.up_heads + taken.up_heads,
            down_adapter=t.down_adapter + taken.down,
        )
        after = self._after.get(client)
        if taken.refusal is not None:
            self._uploads.pop(client, None)
            self._refuse(taken.refusal, position=after.position if after is not None else None)
        elif after is not None:
            self._memories[client] = after
            if self._intake.keeps:
                self._uploads[client] = taken.upload
        if taken.exchange == 0:
            self._tell(client)

    def _refuse(self, refusal: UploadRefused, *, position: int | None) -> None:
        """Where there is a quorum the round goes on: what the client keeps stays as it was, but its data move on."""
        if self._server.quorum is None and not self._private:
            raise refusal
        if self._privacy is None:
            log.warning("%s", refusal)
        self._refused[refusal.client] = refusal.reason
        if position is not None:
            memory = self._memories[refusal.client]
            self._memories[refusal.client] = replace(memory, position=position)

    def _failed(self, failed: Failed) -> None:
        client, why = failed.job.download.client.id, f"{type(failed.error).__name__}: {failed.error}"
        failure = ClientFailed(client, self._before.round + 1, why)
        if self._server.quorum is None and not self._private:
            raise failure from failed.error
        if self._privacy is not None:
            self._privacy.note(self._before.round + 1, client, why)
        else:
            log.warning("%s; the round goes on without it", failure)
        self._refused[client] = why
        self._tell(client)


class _Clock:
    """Seconds by phase. A phase inside another stops the outer one, so that they add up to what has passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._began = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._began
        self._began = now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._turn()
        self._open.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def over(self, phase: str, items: Iterator[X]) -> Iterator[X]:
        """The items, with the time that each takes to come."""
        end = object()
        while True:
            with self(phase):
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]


def _checked_metrics(metrics: Any) -> Mapping[str, float]:
    """What an evaluator gave, if it is numbers by name."""
    if not isinstance(metrics, Mapping):
        raise HyperparameterError(
            f"evaluate() returns metrics by name, as {{'accuracy': 0.9}}; got a {type(metrics).__name__}."
        )
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise HyperparameterError(
                f"evaluate() returns one plain number for each metric; got {value!r:.80} for {name!r}. Of a tensor "
                f"that is .item()."
            )
    return metrics


def _size(loras: Mapping[str, LoRA]) -> int:
    return sum(t.numel() * t.element_size() for lora in loras.values() for t in lora.tensors().values())


def _head_size(adapter: Adapter) -> int:
    return sum(t.numel() * t.element_size() for t in adapter.heads.values())


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


__all__ = [
    "ClientDone", "ClientMemory", "Evaluator", "Failed", "GroupTrainer", "Job", "OneByOne", "RoundRecord", "RunState",
    "Together", "Traffic", "Trained", "Trainer", "UploadHook", "Workers", "as_pruned", "play", "simulate", "start",
]  # fmt: skip
