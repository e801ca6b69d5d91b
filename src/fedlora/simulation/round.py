"""One round of the engine, from downloads to the close: training, traffic, and each client's outcome."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from fedlora.client import begin_round, finish_round
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, ClientMemory, Upload
from fedlora.core.parcels import Parcel, held_after, pack
from fedlora.core.read_only import ReadOnly
from fedlora.core.sent import Attacked, Sent, Tamperer
from fedlora.core.text import shown
from fedlora.core.trainer import Failed, Job, Trained, Workers, round_loss
from fedlora.doing import stepped
from fedlora.errors import ClientFailed, HyperparameterError, UploadRefused
from fedlora.server.kept import Kept
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState
from fedlora.simulation.records import RoundRecord, Traffic

log = logging.getLogger(__name__)

UploadHook = Callable[[Upload, int], Upload]  # an upload and its round, from 0 -> the upload that arrives


class Round:
    """One round being played: the engine's only mutable object.

    A client that fails or is refused goes on from its state before the round: it repeats this round's data.
    """

    def __init__(
        self, server: Server, before: RunState, hooks: Sequence[UploadHook], adversary: Tamperer | None
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._server, self._before, self._hooks, self._adversary = server, before, hooks, adversary
        self._private = server.privacy is not None
        self._opened = server.open(before.server)
        self._memories = dict(before.clients)
        self._after: dict[str, ClientMemory] = {}  # for clients whose upload is on its way: theirs if it counts
        self._given: dict[str, Adapter] = {}  # each client's start, kept only if somebody is byzantine
        self._attacked: Attacked | None = None
        self._losses: dict[str, float] = {}
        self._examples: dict[str, float] = {}  # for clients whose upload was accepted
        self._uploads: list[Upload] = []
        self._bytes = Counter[str]()

    @property
    def asked(self) -> Sequence[str] | None:
        """The clients the server asks, if it chooses them itself."""
        return self._opened.asked

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the elapsed time to a phase, less what phases inside it took."""
        began, inside = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - inside
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began - inside

    def play(self, clients: Sequence[Client], workers: Workers, each: Callable[[str], None]) -> RoundRecord:
        """Play every client's part, and close the round: its record, not yet evaluated. each: called with a client
        that is done, but in a private round, whose clients are secret."""
        waiting: list[Sent] = []  # an adversary must know all uploads before the first arrives
        for job, result in stepped(self._trained(clients, workers), "clients", len(clients)):
            sent = self._finished(job, result)
            if sent is not None and self._adversary is not None:
                waiting.append(sent)
            elif sent is not None:
                self._arrives(sent.upload)
            if not self._private:
                each(job.download.client.id)
        if self._adversary is not None:
            tampered = self._adversary(waiting, self._before.round)
            self._attacked = tampered.attacked
            for upload in tampered.uploads:
                self._arrives(upload)
        with self.timed("aggregate"):
            after = self._opened.close()
        return self._record(after)

    def _record(self, after: ServerState) -> RoundRecord:
        """A private round's tells nothing about single clients, and no times: its duration would reveal who was
        drawn."""
        state, rank = RunState(after.round, after, ReadOnly(self._memories)), _mean_rank(self._server, after)
        if self._private:
            return RoundRecord(after.round, state, {}, {}, {}, {}, {}, Traffic(), rank, ())
        return RoundRecord(
            round=after.round, state=state, losses=self._losses, weights=after.tally.weights if after.tally else {},
            refused=dict(self._opened.refused), metrics={}, seconds=dict(self.seconds), bytes=Traffic(**self._bytes),
            server_rank=rank, uploads=tuple(self._uploads), attacked=self._attacked,
            loss=round_loss(self._losses, self._examples), examples=self._examples,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- the steps

    def _jobs(self, clients: Iterable[Client]) -> Iterator[Job]:
        """Each client's work, after sending it what it lacks."""
        for client in clients:
            with self.timed("download"):
                memory = self._memories.get(client.id, ClientMemory())
                download = self._server.download(self._before.server, client)
                job = begin_round(download, memory)
                self._bytes += _downloaded(pack(download, memory.held))
                self._memories[client.id] = replace(memory, held=held_after(download, memory.kept))
                if self._adversary is not None:  # a trainer may modify its input in place
                    self._given[client.id] = job.adapter.map(Tensor.clone)
            yield job

    def _trained(self, clients: Sequence[Client], workers: Workers) -> Iterator[tuple[Job, Trained | Failed]]:
        """Every job with its result; a job without a result has failed."""
        left: dict[str, Job] = {}

        def given() -> Iterator[Job]:
            for job in self._jobs(clients):
                left[job.download.client.id] = job
                yield job

        results = iter(workers.train_all(given()))
        while True:
            with self.timed("train"):
                found = next(results, None)
            if found is None:
                break
            del left[found[0].download.client.id]
            yield found
        for job in left.values():
            yield job, Failed(job, RuntimeError("the workers drew its job and gave no result"))

    def _finished(self, job: Job, result: Trained | Failed) -> Sent | None:
        """The client's upload; None if it has none, because its work failed or diverged where no server can see it."""
        client = job.download.client.id
        if isinstance(result, Failed):
            self._failed(client, result.error)
            return None
        self._losses[client] = result.loss
        try:
            played = finish_round(job, result)
            factors, heads = (played.upload.adapter.only(parts) for parts in (("B", "A"), ("heads",)))
            self._bytes.update(up_adapter=_bytes(factors.tensors()), up_heads=_bytes(heads.tensors()))
        except UploadRefused as refusal:
            self._opened.refuse(refusal)
            self._refuse(refusal)
            return None
        except HyperparameterError:
            raise
        except Exception as error:  # the trainer's result is not an adapter for this round
            self._failed(client, error)
            return None
        self._after[client] = played.memory
        return Sent(played.upload, self._given.pop(client, job.adapter), job.download.roles)

    def _arrives(self, upload: Upload) -> None:
        """One upload reaches the server, which takes or refuses it."""
        client = upload.client.id
        for hook in self._hooks:
            upload = hook(upload, self._before.round)
        try:
            with self.timed("upload"):
                self._opened.add(upload)
        except UploadRefused as refusal:
            self._refuse(refusal)
            return
        self._memories[client] = self._after[client]
        self._examples[client] = float(upload.num_examples)
        if isinstance(self._server.round, Kept):
            self._uploads.append(upload)

    def _refuse(self, refusal: UploadRefused) -> None:
        if self._server.round.quorum is None:
            raise refusal
        if not self._private:  # a private round logs its own
            log.warning("%s", shown(refusal, 1000))

    def _failed(self, client: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        failure = ClientFailed(client, self._before.round + 1, why)
        if self._server.round.quorum is None:
            raise failure from error
        self._opened.refuse(UploadRefused(client, why))
        if not self._private:
            log.warning("%s; the round continues without it", shown(failure, 1000))


def _downloaded(parcel: Parcel) -> Counter[str]:
    """The bytes of its parts."""
    factors, heads = ([a.only(p) for a in (parcel.adapter, parcel.start)] for p in (("B", "A"), ("heads",)))
    base = [*parcel.base.values(), *parcel.steps.values()]
    return Counter(
        down_adapter=_bytes(t for a in factors for t in a.tensors()),
        down_heads=_bytes(t for a in heads for t in a.tensors()),
        down_base=_bytes(t for x in base for t in x.tensors().values()),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of dense tensors, whatever layout they have (the server refuses others later)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _mean_rank(server: Server, state: ServerState) -> float:
    """The rank of what the server holds, averaged over modules: a pair's own, or as the method says."""
    found = [
        module.rank if isinstance(module, LoRA) else server.method.diagnostics(module).get("rank")
        for module in state.modules.values()
    ]
    ranks = [rank for rank in found if isinstance(rank, int)]
    return sum(ranks) / len(ranks) if ranks else math.nan
