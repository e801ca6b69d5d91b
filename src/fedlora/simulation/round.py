"""One round of the engine, from downloads to the close: training, traffic, and each client's outcome."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from fedlora.client import begin_round, finish_round
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, ClientMemory, Upload
from fedlora.core.parcels import held_after, pack
from fedlora.core.read_only import ReadOnly
from fedlora.core.sent import Attacked, Sent, Tampered, Tamperer
from fedlora.core.text import shown
from fedlora.core.trainer import Failed, Job, Trained, Workers, round_loss
from fedlora.doing import stepped
from fedlora.errors import ClientFailed, HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.server.checks import check_types
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState
from fedlora.simulation.records import ClientDone, RoundRecord
from fedlora.simulation.traffic import Traffic, with_download

log = logging.getLogger(__name__)

UploadHook = Callable[[Upload, int], Upload]  # an upload and its round, from 0 -> the upload that arrives


class Round:
    """One round being played: the engine's only mutable object. Call `play`, then get its `record`.

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
        self._refused: dict[str, str] = {}
        self._uploads: list[Upload] = []
        self._traffic = Traffic()

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

    def play(self, clients: Sequence[Client], workers: Workers) -> Iterator[ClientDone]:
        """Play every client's part, and close the round."""
        waiting: list[Sent] = []  # an adversary must know all uploads before the first arrives
        for job, result in stepped(self._trained(clients, workers), "clients", len(clients)):
            sent = self._finished(job, result)
            if sent is None:
                yield from self._done(job.download.client.id)
            elif self._adversary is not None:
                waiting.append(sent)
            else:
                yield from self._arrives(sent.upload)
        if self._adversary is not None:
            for upload in self._tampered(self._adversary, waiting):
                yield from self._arrives(upload)
        with self.timed("aggregate"):
            try:
                self._closed = self._opened.close()
            except QuorumNotMet as error:
                raise QuorumNotMet(f"{error} Failed clients: {self._refused or 'none'}.", error.refused) from error

    def record(self) -> RoundRecord:
        """The round's record, not yet evaluated. A private round's tells nothing about single clients, and no times:
        its duration would reveal who was drawn."""
        after = self._closed
        state = RunState(after.round, after, ReadOnly(self._memories))
        rank = _mean_rank(self._server, after)
        if self._private:
            return RoundRecord(after.round, state, {}, {}, {}, {}, {}, Traffic(), rank, ())
        return RoundRecord(
            round=after.round, state=state, losses=self._losses, weights=after.tally.weights if after.tally else {},
            refused=self._refused, metrics={}, seconds=dict(self.seconds), bytes=self._traffic, server_rank=rank,
            uploads=tuple(self._uploads), attacked=self._attacked, loss=round_loss(self._losses, self._examples),
            examples=self._examples,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------------- the steps

    def _jobs(self, clients: Iterable[Client]) -> Iterator[Job]:
        """Each client's work, after sending it what it lacks."""
        for client in clients:
            with self.timed("download"):
                memory = self._memories.get(client.id, ClientMemory())
                download = self._server.download(self._before.server, client)
                job = begin_round(download, memory)
                self._traffic = with_download(self._traffic, pack(download, memory.held))
                self._memories[client.id] = replace(memory, held=held_after(download, memory.kept))
                if self._adversary is not None:  # a trainer may modify its input in place
                    self._given[client.id] = job.adapter.map(Tensor.clone)
            yield job

    def _trained(self, clients: Sequence[Client], workers: Workers) -> Iterator[tuple[Job, Trained | Failed]]:
        """Every job with its result, each once; a job without a result has failed."""
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
            client = found[0].download.client.id
            if left.pop(client, None) is not found[0]:
                raise HyperparameterError(
                    f"the workers returned a job of {client!r} that they were not given, or returned already. "
                    f"`train_all` must yield each job that it draws once, with its result."
                )
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

    def _tampered(self, adversary: Tamperer, sent: Sequence[Sent]) -> Sequence[Upload]:
        """The round's uploads after an adversary who knows them all has changed its own."""
        made = adversary(sent, self._before.round)
        names = [one.upload.client.id for one in sent]
        if not isinstance(made, Tampered) or [u.client.id for u in made.uploads] != names:
            raise HyperparameterError(
                f"the adversary {adversary!r:.80} returned {made!r:.80}; it must return a Tampered with one upload for "
                f"each that was sent, changed or not, in the same order."
            )
        self._attacked = made.attacked
        return made.uploads

    def _arrives(self, upload: Upload) -> Iterator[ClientDone]:
        """One upload reaches the server, which takes or refuses it."""
        client = upload.client.id
        for hook in self._hooks:
            upload = hook(upload, self._before.round)
            if not isinstance(upload, Upload) or upload.client.id != client:
                raise HyperparameterError(
                    f"the hook {hook!r} returned {upload!r:.80} for the upload of {client!r}; it must return that "
                    f"client's upload, changed or not."
                )
        try:
            with self.timed("upload"):
                self._checked(upload)
                self._traffic = replace(
                    self._traffic, up_adapter=self._traffic.up_adapter + upload.nbytes_modules,
                    up_heads=self._traffic.up_heads + upload.nbytes_heads,
                )  # fmt: skip
                self._opened.add(upload)
            self._memories[client] = self._after[client]
            self._examples[client] = float(upload.num_examples)
            if self._opened.keeps:
                self._uploads.append(upload)
        except UploadRefused as refusal:
            self._refuse(refusal)
        yield from self._done(client)

    def _checked(self, upload: Upload) -> None:
        """Before its bytes are counted, which are those of tensors. Raises `UploadRefused`, and the round is told."""
        try:
            check_types(upload)
        except UploadRefused as refusal:
            self._opened.refuse(refusal)
            raise

    def _done(self, client: str) -> Iterator[ClientDone]:
        if not self._private:
            yield ClientDone(self._before.round + 1, client, self._losses.get(client), self._refused.get(client))

    def _refuse(self, refusal: UploadRefused) -> None:
        if self._server.round.quorum is None:
            raise refusal
        if not self._private:  # a private round logs its own
            log.warning("%s", shown(refusal, 1000))
        self._refused[refusal.client] = refusal.reason

    def _failed(self, client: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        failure = ClientFailed(client, self._before.round + 1, why)
        if self._server.round.quorum is None:
            raise failure from error
        if self._private:
            self._opened.refuse(UploadRefused(client, why))
        else:
            log.warning("%s; the round continues without it", shown(failure, 1000))
        self._refused[client] = why


def _mean_rank(server: Server, state: ServerState) -> float:
    """The rank of what the server holds, averaged over modules: a pair's own, or as the method says."""
    found = [
        module.rank if isinstance(module, LoRA) else server.method.diagnostics(module).get("rank")
        for module in state.modules.values()
    ]
    ranks = [rank for rank in found if isinstance(rank, int)]
    return sum(ranks) / len(ranks) if ranks else math.nan
