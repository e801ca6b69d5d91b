"""One round of the engine, from downloads to the close: training, traffic, and each client's outcome."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from fedlora.client import begin_round, finish_round
from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, ClientMemory, Upload
from fedlora.core.parcels import held_after, pack
from fedlora.core.read_only import ReadOnly
from fedlora.core.sent import Attacked, Sent, Tamperer
from fedlora.core.trainer import Failed, Job, Workers, round_loss
from fedlora.doing import stepped
from fedlora.errors import ClientFailed, HyperparameterError, QuorumNotMet, UploadRefused
from fedlora.server.intake import Taken, take_in
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState
from fedlora.simulation.clock import Clock
from fedlora.simulation.hooks import UploadHook, hooked, tampered_by
from fedlora.simulation.private import private_record
from fedlora.simulation.records import ClientDone, RoundRecord
from fedlora.simulation.traffic import Traffic, with_download

log = logging.getLogger(__name__)


class Round:
    """One round being played: the engine's only mutable object. Call `play`, then get its `record`."""

    def __init__(
        self, server: Server, before: RunState, hooks: Sequence[UploadHook], adversary: Tamperer | None
    ) -> None:
        self.clock = Clock()
        self._server, self._before, self._hooks = server, before, hooks
        self._privacy = server.privacy  # if set, only its diary learns single clients' outcomes
        self._private = server.privacy is not None
        self._adversary = adversary
        self._attacked: Attacked | None = None
        self._given: dict[str, Adapter] = {}  # each client's start, kept only if somebody lies
        self._intake = server.open(before.server)
        self._memories = dict(before.clients)
        self._losses: dict[str, float] = {}
        self._examples: dict[str, float] = {}  # for clients whose upload was accepted
        self._refused: dict[str, str] = {}
        self._uploads: dict[str, Upload] = {}
        self._traffic = Traffic()
        self._after: dict[str, ClientMemory] = {}  # for clients whose upload is on its way: theirs if it counts
        self._done: list[ClientDone] = []  # not yet yielded
        self._begun: dict[str, ClientMemory] = {}  # each client's memory at the start of its round
        self._at_work: dict[str, Job] = {}  # handed to the workers, not yet returned

    @property
    def asked(self) -> Sequence[str] | None:
        """The clients the server asks, if it chooses them itself."""
        return self._intake.asked

    def play(self, clients: Sequence[Client], workers: Workers) -> Iterator[ClientDone]:
        """Play every client's part, and close the round."""
        sent = self._sent(self._trained(clients, workers))
        uploads = hooked(sent, self._hooks, self._before.round)
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
            if client in self._after and client not in self._refused:  # refused when compared with the others
                self._uploads.pop(client, None)
                self._memories[client] = self._begun[client]
                self._refuse(UploadRefused(client, reason), position=self._after[client].position)

    def record(self) -> RoundRecord:
        """The round's record, not yet evaluated."""
        after = self._closed
        if self._private:
            state = RunState(after.round, after, ReadOnly(self._memories))
            return private_record(state, _mean_rank(self._server, after))
        tally = after.tally
        weights, refused = (tally.weights, tally.refused) if tally is not None else ({}, {})
        refused = {**refused, **self._refused}
        examples = {client: n for client, n in self._examples.items() if client not in refused}
        return RoundRecord(
            round=after.round,
            state=RunState(after.round, after, ReadOnly(self._memories)),
            losses=self._losses,
            weights=weights,
            refused=refused,
            metrics={},
            seconds=dict(self.clock.seconds),
            bytes=self._traffic,
            server_rank=_mean_rank(self._server, after),
            uploads=tuple(self._uploads.values()),
            attacked=self._attacked,
            loss=round_loss(self._losses, examples),
            examples=examples,
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
        """Each client's work, after sending it what it lacks."""
        for client in clients:
            with self.clock("download"):
                memory = self._memories.get(client.id, ClientMemory())
                download = self._server.download(self._before.server, client)
                job = begin_round(download, memory)
                self._traffic = with_download(self._traffic, pack(download, memory.held))
                self._begun[client.id] = replace(memory, held=held_after(download, memory.kept))
                self._memories[client.id] = self._begun[client.id]
            self._at_work[client.id] = job
            if self._adversary is not None:  # a trainer may modify its input in place
                self._given[client.id] = job.adapter.map(Tensor.clone)
            yield job

    def _trained(self, clients: Sequence[Client], workers: Workers) -> Iterator[Sent]:
        """Uploads of clients whose work succeeded."""
        trained = self.clock.over("train", workers.train_all(self._jobs(clients)))
        for job, result in stepped(trained, "clients", len(clients)):
            client = job.download.client.id
            if self._at_work.pop(client, None) is not job:
                raise HyperparameterError(
                    f"the workers returned a job of {client!r} that they were not given, or returned already. "
                    f"`train_all` must yield each job that it draws once, with its result."
                )
            if isinstance(result, Failed):
                self._failed(result)
                continue
            self._losses[client] = result.loss
            try:
                played = finish_round(job, result)
            except UploadRefused as refusal:
                if self._privacy is not None:
                    self._privacy.note(self._before.round + 1, refusal.client, refusal.reason)
                self._refuse(refusal, position=result.position)
                self._tell(client)
                continue
            except HyperparameterError:
                raise
            except Exception as error:  # the trainer's result is not an adapter for this round
                self._failed(Failed(job, error))
                continue
            self._after[client] = played.memory
            yield Sent(played.upload, self._given.pop(client, job.adapter), job.download.roles)
        for job in list(self._at_work.values()):
            self._failed(Failed(job, RuntimeError("the workers drew its job and gave no result")))

    def _sent(self, sent: Iterator[Sent]) -> Iterator[Upload]:
        """Their uploads one by one; if somebody lies, all must be there before the first continues."""
        if self._adversary is None:
            yield from (one.upload for one in sent)
            return
        tampered = tampered_by(self._adversary, list(sent), self._before.round)
        self._attacked = tampered.attacked
        yield from tampered.uploads

    def _count(self, taken: Taken) -> None:
        """Record one client's upload: its bytes, and whether it counts."""
        client, t = taken.upload.client.id, self._traffic
        self._traffic = replace(
            t,
            up_adapter=t.up_adapter + taken.up_modules,
            up_heads=t.up_heads + taken.up_heads,
        )
        after = self._after.get(client)
        if taken.refusal is not None:
            self._uploads.pop(client, None)
            self._refuse(taken.refusal, position=after.position if after is not None else None)
        elif after is not None:
            self._memories[client] = after
            self._examples[client] = float(taken.upload.num_examples)
            if self._intake.keeps:
                self._uploads[client] = taken.upload
        self._tell(client)

    def _refuse(self, refusal: UploadRefused, *, position: int | None) -> None:
        """With a quorum the round continues: the client's kept parts stay as they were, but its data position moves."""
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
            log.warning("%s; the round continues without it", failure)
        self._refused[client] = why
        self._tell(client)


def _mean_rank(server: Server, state: ServerState) -> float:
    found = [facts.get("rank") for facts in server.diagnostics(state).values()]
    ranks = [rank for rank in found if isinstance(rank, int)]
    return sum(ranks) / len(ranks) if ranks else math.nan
