"""One attempt at a round: its questions, each answer's fate as it comes, and the outcome.

The round opens before the first question and checks each upload once, as it arrives; the attempt decides each
client's fate, and reports it. Nothing here sends, waits or writes. The outcome does not depend on the order of answers
(of a streamed round: up to rounding).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from flwr.app import Message
from torch import Tensor

from fedlora.core.lora import LoRA, change_of
from fedlora.core.messages import ClientMemory, Download, Upload
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import shown
from fedlora.core.trainer import round_loss
from fedlora.errors import QuorumNotMet, UploadRefused
from fedlora.flower.messages.codecs import Reply
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.messages.records import RecordError
from fedlora.flower.rounds.collecting import Answer
from fedlora.flower.rounds.events import AttemptFailed, Event, Fate, Fated
from fedlora.flower.rounds.flower_state import FlowerState, Unusable
from fedlora.flower.rounds.membership import Drawn
from fedlora.flower.rounds.questions import MessageMaker, NotServed, Question, reply_limit
from fedlora.server.rounds import OpenRound
from fedlora.server.state import RunState, ServerState, Tally

log = logging.getLogger(__name__)
Report = Callable[[Event], None]
_MOST_LOSS = 1e6  # nats: chance among a million words is 14, and a diverged head has some thousands


class Effect(NamedTuple):
    """What a fate does to its client. This table is the only place that decides it.

    In the attempt that counts, all of it holds:
    usable: its upload goes into the model (a robust rule may give it no weight).
    keeps_work: its site goes on from its state after this round, and behind this round's data; otherwise from an older
    one, so that it repeats this round's data, as in the engine; if it was sent a message, the next one leaves nothing
    out.

    In an attempt that does not count, nothing of it holds. Of each client that was drawn and online, the server
    remembers a fate that is not `usable` until the round is done (`FlowerState.unusable`): who has fewer of them is
    asked first. If the client is not drawn for the attempt that counts, the round's line has this fate in place of "not
    drawn".

    A site learns by its next message why its work did not count (`Receipt.why`). The line's `missing` names all whose
    fate has no `keeps_work`, except for "not drawn".
    """

    usable: bool = False
    keeps_work: bool = False


EFFECTS: Mapping[Fate, Effect] = {
    "trained": Effect(usable=True, keeps_work=True),
    "abstained": Effect(keeps_work=True),
    "refused": Effect(),
    "failed": Effect(),
    "late": Effect(),
    "offline": Effect(),
    "not sent": Effect(),
    "not drawn": Effect(),
}


class Attempt:
    """One attempt. Mutable; `close` ends it. Whoever was to be asked and has no fate by then is late, or not sent.

    maker: makes the messages of the state before the round. opened: the round. nth: its number. deadline:
    seconds for an answer, and the life of a message. report: called with each fate once it is known; a later fate of
    the same client replaces the one before.
    """

    def __init__(
        self, maker: MessageMaker, drawn: Drawn, opened: OpenRound, nth: int, deadline: float, report: Report
    ) -> None:
        self.server, self.policy, self.flower_state = maker.server, maker.policy, maker.flower_state
        self.round, self.nth, self.deadline = self.flower_state.next_round, nth, deadline
        self._maker, self._drawn, self._opened, self._report = maker, drawn, opened, report
        self._sent: list[str] = []  # who was sent a message; without those that the SuperLink did not take
        self._taken: dict[str, tuple[float, ClientMemory]] = {}  # its examples that count, and its memory if it counts
        self._fates = {name: Fated(self.round, nth, name, *told) for name, told in drawn.not_asked.items()}
        for name, before in self.flower_state.unusable.items():  # asked in an earlier attempt at the round
            if name in self._fates and self._fates[name].fate == "not drawn":
                self._fates[name] = Fated(self.round, nth, name, cast(Fate, before.fate), before.why)

    def questions(self) -> Iterator[Question]:
        """A message for each client to ask, made on demand; none for one whom the method cannot serve."""
        group = f"{self.flower_state.run}-{self.round}-{self.nth}"
        for name in self._drawn.asked:
            try:  # the message has the same deadline; otherwise a straggler would work through stale rounds
                download = self._maker.download(name)
                limit = reply_limit(download.client, self.flower_state.state.server, self.policy)
                question = self._maker.question(download, group, self.deadline, limit)
            except NotServed as error:
                self._settle(name, "not sent", str(error))
                continue
            self._sent.append(name)
            del download
            yield question
            del question

    def take(self, answer: Answer) -> None:
        """Settle the fate of an asked client. It never raises, whatever a reply
        holds."""
        name, came = answer.client, {"seconds": round(answer.seconds, 3), "bytes": answer.bytes or None}
        if not answer.sent:
            self._sent.remove(name)
        if answer.message is None:
            if answer.fate == "refused":
                self._opened.refuse(UploadRefused(name, answer.why))
            return self._settle(name, answer.fate or "failed", answer.why, **came)
        sent = self._maker.download(name)
        try:
            found = self._read(name, answer.message, sent)
        except RecordError as error:
            self._opened.refuse(UploadRefused(name, shown(error, 500)))
            return self._settle(name, "refused", shown(error, 500), **came)
        upload = found.upload
        weighs = upload.num_examples
        if math.isfinite(weighs):  # no cap may repair a number that the round must refuse
            weighs = min(weighs, self.policy.max_examples)
        try:
            self._opened.add(replace(upload, num_examples=weighs))
        except UploadRefused as refusal:
            return self._settle(name, "refused", shown(refusal.reason, 500), **came)
        self._taken[name] = float(weighs), ClientMemory(None, 0, found.held)
        examples = float(upload.num_examples)
        if not examples:  # nobody has checked its adapter
            return self._settle(name, "abstained", "it has 0 examples for this round", **came)
        norm = update_norm(upload, sent)
        self._settle(name, "trained", "", loss=found.loss, examples=examples, norm=norm, **came)

    @property
    def fates(self) -> dict[str, Fated]:
        """The known fates of the policy's clients, in its order."""
        return {name: self._fates[name] for name in self.policy.clients if name in self._fates}

    @property
    def missing(self) -> dict[str, str]:
        """Client -> why nothing of it was taken, for all who were drawn."""
        found = {name: one for name, one in self.fates.items() if one.fate != "not drawn"}
        return {name: one.why for name, one in found.items() if not EFFECTS[one.fate].keeps_work}

    def failed(self, error: QuorumNotMet) -> AttemptFailed:
        """The event that reports its failure: the error, which names those that it refused, and who else is missing."""
        others = "; ".join(f"{name}: {why}" for name, why in self.missing.items() if name not in error.refused)
        return AttemptFailed(self.round, self.nth, f"{error} Not there: {others}." if others else str(error))

    def not_counted(self) -> FlowerState:
        """What the server knows after an attempt that did not count. No site is told why another was refused."""
        why = "did not count: too few uploads of this attempt were usable, so none of them counted"
        known, unusable = self._known_after(dict.fromkeys(self._sent, why), counts=False), {}
        for name in self._drawn.asked:
            if not EFFECTS[(found := self._fates[name]).fate].usable:
                before = known.unusable.get(name)
                unusable[name] = Unusable(1 + (before.times if before else 0), found.fate, found.why)
        return replace(known, unusable=ReadOnly({**known.unusable, **unusable}))

    def close(self) -> tuple[FlowerState, dict[str, Any]]:
        """Aggregate the accepted uploads. The next state, and the round's line.

        Raises:
            QuorumNotMet: too few usable uploads. The state is unchanged.
        """
        for name in self._drawn.asked:  # nobody, if all questions were sent and all answers taken
            if name not in self._fates:
                sent = name in self._sent
                why = f"the attempt was closed before {'its answer came' if sent else 'its message was made'}"
                self._settle(name, "late" if sent else "not sent", why)
        after = self._opened.close()
        tally = after.tally or Tally({})
        left_out = tally.judged.left_out if tally.judged is not None else {}
        no_weight = "had no weight in the model, and the site goes on from its own state"
        known = self._known_after({name: f"{no_weight}: {why}" for name, why in left_out.items()}, counts=True)
        state = RunState(after.round, after, known.state.clients)
        return replace(known, state=state, unusable=ReadOnly()), self._line(after)

    # -------------------------------------------------------------------------------------------------------- inside

    def _known_after(self, though_taken: Mapping[str, str], *, counts: bool) -> FlowerState:
        """What the server knows of the clients after the attempt, by `EFFECTS`; the model is still the one before it.

        though_taken: client -> what its work lacks although it was taken. counts: whether the attempt does.
        """
        known = self.flower_state
        clients, receipts, examples = dict(known.state.clients), dict(known.receipts), dict(known.examples)
        for name in self._sent:
            effect, receipt = EFFECTS[self._fates[name].fate], receipts.get(name, Receipt())
            if counts and effect.usable:
                examples[name] = self._fates[name].examples or 0.0
            if counts and effect.keeps_work:
                clients[name] = self._taken[name][1]
                receipt = replace(receipt, counted=self.round, answered=self.round, sure=True)
            elif counts and name in clients:
                clients[name] = replace(clients[name], held=None)
            receipts[name] = replace(receipt, why=self._why_not(name, though_taken.get(name, "")))
        if self._opened.stored:  # a private sum from before a kill: who trained for it is unknown
            clients = {name: replace(client, held=None) for name, client in clients.items()}
            unsure = Receipt(self.round, self.round, sure=False)
            receipts = dict.fromkeys([*receipts, *self.policy.clients], unsure)
        return replace(
            known,
            state=replace(known.state, clients=ReadOnly(clients)),
            examples=ReadOnly(sorted(examples.items())),
            receipts=ReadOnly(receipts),
        )

    def _why_not(self, name: str, though_taken: str) -> str:
        """For an asked client: why its work did not count, or had no weight, or "". A private round tells nobody."""
        fated = self._fates[name]
        why = though_taken if EFFECTS[fated.fate].keeps_work else f"did not count: {fated.fate}: {fated.why}"
        if not why or self.server.privacy is not None:
            return ""
        return shown(f"round {self.round}: the work of this site {why}", 600)

    def _read(self, name: str, message: Message, sent: Download) -> Reply:
        """A client's reply as an upload; the round checks its values. Raises `RecordError`."""
        try:
            known = self.flower_state
            reply = self._maker.codec.reply(message.content, sent, known.state.server, known.run)
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

    def _line(self, after: ServerState) -> dict[str, Any]:
        """The round's line of rounds.jsonl, as far as it is known here."""
        tally, fates = after.tally or Tally({}), self.fates
        trained = {name: fated for name, fated in fates.items() if fated.fate == "trained"}
        losses = {name: fated.loss for name, fated in trained.items() if fated.loss is not None}
        return {
            "round": after.round,
            "attempt": self.nth,
            "loss": round_loss(losses, {name: self._taken[name][0] for name in trained}),
            "losses": losses,
            "weights": dict(tally.weights),
            "missing": self.missing,
            "fates": {name: {"fate": fated.fate, "why": fated.why} for name, fated in fates.items()},
            "norms": {name: fated.norm or 0.0 for name, fated in trained.items()},
            **({"defence": tally.judged.plain()} if tally.judged is not None else {}),
        }

    def _settle(self, name: str, fate: Fate, why: str, **more: Any) -> None:
        self._fates[name] = Fated(self.round, self.nth, name, fate, why, **more)
        self._report(self._fates[name])


def update_norm(upload: Upload, download: Download) -> float:
    """sqrt of the sum over modules of ||B A - B_0 A_0||_F^2: how far the client moved from its readout (B_0, A_0).

    The log reports it for people; a robust rule (`fedlora.server.rules`) is what weighs changes. Heads do not
    count. A frozen factor is the download's. If a factor stays at the client, it is the norm of only the other one's
    change, which depends on coordinates, but equally for all clients of the round.
    """
    begun = download.adapter.modules
    return math.hypot(*(_moved(lora, begun.get(name)) for name, lora in upload.adapter.modules.items()))


def _moved(lora: LoRA, begun: LoRA | None) -> float:
    if begun is not None and len(begun.tensors()) == 2:
        return change_of(lora, begun).norm()
    if len(lora.tensors()) == 2:
        return lora.norm()
    ((factor, tensor),) = lora.map(Tensor.double).tensors().items()
    was = None if begun is None else begun.tensors().get(factor)
    return float(torch.linalg.vector_norm(tensor if was is None or was.shape != tensor.shape else tensor - was))
