"""One attempt at a round: its questions, each answer's result as it comes, and the outcome.

The round's intake opens before the first question and checks each upload once, as it arrives; the attempt decides each
client's fate. Nothing here sends, waits or writes. The outcome does not depend on the order of answers (if
`Server.memory` is too small for all uploads: up to rounding).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType

from fedlora.core.echo import shown
from fedlora.core.messages import Client, ClientMemory, Download, Held, as_pruned
from fedlora.core.read_only import ReadOnly
from fedlora.core.trainer import round_loss
from fedlora.errors import HyperparameterError, RankMismatch, UploadRefused
from fedlora.flower.messages.codecs import Codec, Reply
from fedlora.flower.messages.counted import Counted
from fedlora.flower.messages.envelope import TOLD
from fedlora.flower.messages.parts import parts
from fedlora.flower.messages.records import RecordError
from fedlora.flower.rounds.arrivals import Limit
from fedlora.flower.rounds.collecting import Answer, Question
from fedlora.flower.rounds.events import Fate, Fated
from fedlora.flower.rounds.membership import Drawn
from fedlora.flower.rounds.memory import FlowerState
from fedlora.flower.rounds.norms import far_ones, update_norm
from fedlora.flower.terms.policy import Policy, shares_lost
from fedlora.server.intake import Intake
from fedlora.server.server import Server
from fedlora.server.state import RunState, ServerState, Tally
from fedlora.server.terms import ranks_of

log = logging.getLogger(__name__)
_MB = 2**20
_MOST_LOSS = 1e6  # nats: chance among a million words is 14, and a diverged head has some thousands


@dataclass(frozen=True)
class Closed:
    """The outcome of a round. overturned: fates that the aggregation changed, by a defence. trained: how many trained.
    loss: the round's (`core.trainer.round_loss`), NaN if no client reports one."""

    memory: FlowerState
    line: Mapping[str, Any]
    overturned: tuple[Fated, ...]
    trained: int
    loss: float


@dataclass(frozen=True)
class _Trained:
    """Facts about an accepted upload. examples: as the client claims. count: as the server counts. memory: what the
    server will know about the client if the round counts."""

    examples: float
    count: float
    loss: float | None
    memory: ClientMemory


class Attempt:
    """One attempt. Mutable; `close` ends it.

    number: of the round, from 1. attempt: from 1. online: name -> node id. group: its messages' group. intake: the
    round's, open. told: client -> the fate of its last work, if that did not count.
    """

    def __init__(
        self,
        server: Server,
        policy: Policy,
        codec: Codec,
        memory: FlowerState,
        drawn: Drawn,
        online: Mapping[str, int],
        intake: Intake,
        *,
        attempt: int,
        deadline: float,
        told: Mapping[str, str] = ReadOnly({}),
    ) -> None:
        self.server, self.policy, self.codec, self.memory, self.drawn = server, policy, codec, memory, drawn
        self.number, self.attempt, self.deadline = memory.state.round + 1, attempt, deadline
        self.group = f"{memory.run}-{self.number}-{attempt - 1}"
        self._online, self._told = online, told
        self._sent: dict[str, Client] = {}  # a large message is not kept, but made again when it is needed
        self._taken: dict[str, _Trained] = {}
        self._fates: dict[str, Fated] = {}
        self._refusals = dict(memory.refusals)
        self.private = server.privacy is not None
        self._intake = intake

    def questions(self) -> Iterator[Question]:
        """A message for each client to ask, at its own rank, made on demand."""
        state = self.memory.state
        for name in self.drawn.asked:
            memory = state.clients.get(name, ClientMemory())
            client = as_pruned(self.policy.client(name), memory)
            try:  # the message has the same deadline; otherwise a straggler would work through stale rounds
                question = self._question(client, memory.held, self.deadline)
            except (RankMismatch, HyperparameterError) as error:
                self._settle(name, "refused", f"{self.server.method.name} cannot serve it: {error}")
                continue
            self._sent[name] = client
            yield question
            del question

    def _question(self, client: Client, held: Held | None, ttl: float) -> Question:
        name, download = client.id, self._download(client)
        counted = self.memory.counted.get(name, Counted())
        record = self.codec.question(download, held, self.memory.run, counted)
        if name in self._told:
            parts(record, ConfigRecord)["config"][TOLD] = self._told[name]
        return Question(
            name,
            Message(record, self._online[name], MessageType.TRAIN, ttl=ttl, group_id=self.group),
            reply_limit(client, self.memory.state.server, self.policy),
            partial(self._question, client, None) if held is not None else None,
        )

    def _download(self, client: Client) -> Download:
        return self.server.download(self.memory.state.server, client)

    def take(self, answer: Answer) -> Fated:
        """The fate of an asked client, at once; final, unless the aggregation changes it.

        It never raises, whatever a reply holds.
        """
        name, came = answer.client, {"seconds": round(answer.seconds, 3), "bytes": answer.bytes or None}
        if answer.message is None:
            fate = answer.fate or "failed"
            if fate == "refused":
                return self._refuse(name, answer.why, **came)
            return self._settle(name, fate, answer.why, **came)
        sent = self._download(self._sent[name])
        try:
            found = self._read(name, answer.message, sent)
        except RecordError as error:
            return self._refuse(name, shown(error, 500), **came)
        upload = found.upload
        count = upload.num_examples
        if math.isfinite(count):  # no cap may repair a count that the intake must refuse
            count = min(count, self.policy.max_examples)
        try:
            self._intake.add(replace(upload, num_examples=count))
        except UploadRefused as refusal:
            self._count_refusal(name)
            return self._settle(name, "refused", shown(refusal.reason, 500), **came)
        before = self.memory.state.clients.get(name, ClientMemory())
        after = ClientMemory(None, 0, found.held, before.ranks if found.ranks is None else found.ranks)
        self._taken[name] = _Trained(float(upload.num_examples), float(count), found.loss, after)
        return self._settle(
            name,
            "trained",
            "" if upload.num_examples else "it abstained, with 0 examples",
            loss=found.loss,
            examples=float(upload.num_examples),
            norm=update_norm(upload, sent),
            **came,
        )

    @property
    def fates(self) -> dict[str, Fated]:
        """The known fates of the policy's clients, in its order."""
        known = {
            name: Fated(self.number, self.attempt, name, fate, why)
            for name, (fate, why) in self.drawn.not_asked.items()
        } | self._fates
        return {name: known[name] for name in self.policy.clients if name in known}

    @property
    def asked(self) -> frozenset[str]:
        """The clients for which a message was made."""
        return frozenset(self._sent)

    @property
    def refusals(self) -> Mapping[str, int]:
        """client -> its number of refused uploads in a row, including this attempt's; in the policy's order."""
        order = {name: k for k, name in enumerate(self.policy.clients)}
        return ReadOnly(
            dict(sorted(self._refusals.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))
        )

    def close(self) -> Closed:
        """Aggregate the accepted uploads.

        Raises:
            QuorumNotMet: too few usable uploads. The state is unchanged.
        """
        state = self.memory.state
        taken = {
            name: self._taken[name] for name in self.policy.clients if name in self._taken
        }  # in the policy's order
        claimed = {name: reply.examples for name, reply in taken.items()}
        for name, why in self._in_quarantine().items():
            self._intake.refuse(UploadRefused(name, why))
        after = self._intake.close()
        tally = after.tally or Tally({})
        for name, reason in tally.refused.items():  # refused only after all uploads had arrived
            self._overturn(name, reason)
        trained = [name for name in taken if self._fates[name].fate == "trained"]
        memories, work = dict(state.clients), dict(self.memory.counted)
        for name in self._sent:
            if name in trained:
                memories[name], work[name] = taken[name].memory, Counted(self.number, self.number)
                self._refusals.pop(name, None)
                continue
            if name in memories:
                memories[name] = replace(memories[name], held=None)  # its current content is unknown
            if self._fates[name].fate in ("refused", "failed"):  # as in the engine: only its data position moves on
                work[name] = replace(work.get(name, Counted()), answered=self.number)
        if self.private and not self._sent:  # the sum was there already; who trained for it before the kill is unknown
            memories = {name: replace(memory, held=None) for name, memory in memories.items()}
            work = dict.fromkeys([*work, *self.policy.clients], Counted(self.number, self.number, sure=False))
        known = {**self.memory.examples, **{name: claimed[name] for name in trained}}
        memory = FlowerState(
            self.memory.run, RunState(after.round, after, ReadOnly(memories)), self.refusals,
            ReadOnly({name: known[name] for name in sorted(known)}), ReadOnly(work),
        )  # fmt: skip
        losses = {name: reply.loss for name, reply in taken.items() if name in trained and reply.loss is not None}
        loss = round_loss(losses, {name: reply.count for name, reply in taken.items()})
        overturned = tuple(self._fates[name] for name in taken if name not in trained)
        by_examples = self.server.weighs_by == "examples"
        counted = {name: claimed[name] for name in trained if name in tally.weights}
        capped = shares_lost(counted, tally.weights) if by_examples and not self.private else {}
        line = {**self._line(after, losses, trained, capped), "loss": loss}
        return Closed(memory, line, overturned, len(trained), math.nan if loss is None else loss)

    # -------------------------------------------------------------------------------------------------------- inside

    def _in_quarantine(self) -> dict[str, str]:
        """client -> why it counts as refused without being asked, unless others were drawn in its place."""
        others = {name: fate for name, (fate, _) in self.drawn.not_asked.items()}
        if "not drawn" in others.values():
            return {}
        return {name: "it is in quarantine" for name, fate in others.items() if fate == "quarantined"}

    def _read(self, name: str, message: Message, sent: Download) -> Reply:
        """A client's reply as an upload; the intake checks its values. Raises `RecordError`."""
        try:
            reply = self.codec.reply(message.content, sent, self.memory.state.server, self.memory.run)
        except RecordError:
            raise
        except Exception as error:  # a forged record can raise anything else, and its sender is to blame
            log.exception("the reply of %s cannot be read", name)
            raise RecordError(f"its reply cannot be read: {type(error).__name__}") from error
        if reply.loss is None or 0 <= reply.loss <= _MOST_LOSS:
            return reply
        if not reply.upload.num_examples:
            return replace(reply, loss=None)
        if reply.loss < 0 and math.isfinite(reply.loss):
            raise RecordError(f"its loss is {reply.loss:.3g}; a measured loss is never below 0")
        most = f", above {_MOST_LOSS:,.0f}" if math.isfinite(reply.loss) else ""
        raise RecordError(
            f"its loss is {reply.loss:.3g}{most}: training diverged (use a smaller train.lr, or check the site's data)"
        )

    def _line(
        self,
        after: ServerState,
        losses: Mapping[str, float],
        trained: list[str],
        capped: Mapping[str, Mapping[str, float]],
    ) -> dict[str, Any]:
        fates = self.fates
        norms = {name: fates[name].norm or 0.0 for name in trained}
        tally = after.tally or Tally({})
        return {
            "round": after.round,
            "attempt": self.attempt,
            "losses": dict(losses),
            "weights": dict(tally.weights),
            "refused": {n: f.why for n, f in fates.items() if f.fate not in ("trained", "not drawn")},
            "fates": {name: {"fate": fated.fate, "why": fated.why} for name, fated in fates.items()},
            "norms": norms,
            "far": far_ones(norms),
            "capped": {name: dict(shares) for name, shares in capped.items()},
            "alike": dict(tally.alike),
            **({"defence": tally.judged.plain()} if tally.judged is not None else {}),
        }

    def _refuse(self, name: str, why: str, **came: Any) -> Fated:
        """Record an answer that could not become an upload; a robust rule counts it as a liar's."""
        self._intake.refuse(UploadRefused(name, why))
        self._count_refusal(name)
        return self._settle(name, "refused", why, **came)

    def _overturn(self, name: str, reason: str) -> None:
        before = self._fates.get(name)
        if before is not None and before.fate == "trained":
            self._count_refusal(name)
            self._fates[name] = replace(before, fate="refused", why=shown(reason, 500))

    def _settle(self, name: str, fate: Fate, why: str, **more: Any) -> Fated:
        self._fates[name] = Fated(self.number, self.attempt, name, fate, why, **more)
        return self._fates[name]

    def _count_refusal(self, name: str) -> None:
        self._refusals[name] = self._refusals.get(name, 0) + 1


def reply_limit(client: Client, state: ServerState, policy: Policy) -> Limit:
    """The limit of this client's reply: twice its largest upload and 1 MB, or the policy's limit."""
    total = tensors = 0
    for name, rank in ranks_of(client, state).items():
        B, A = state.start.modules[name].factors
        total += rank * (B.shape[0] + A.shape[1]) * max(4, B.element_size(), A.element_size())
        tensors += 2
    total += sum(head.numel() * max(4, head.element_size()) for head in state.heads.values())
    tensors += len(state.heads)
    most = 2 * total + _MB if policy.max_upload_mb is None else int(policy.max_upload_mb * _MB)
    return Limit(most, 64 + 4 * tensors + most // (_MB // 4), 2 * _MB + 2048 * tensors)


__all__ = ["Attempt", "Closed", "reply_limit"]
