"""One round's answers: each client's fate, as its answer comes, and what follows from it when the round closes.

Nothing here sends, waits or writes. The outcome does not depend on the order of answers (of a streamed round: up to
rounding).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flwr.app import Message, RecordDict

from fedlora.core.messages import ClientMemory, Held, Upload
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import shown
from fedlora.core.trainer import round_loss
from fedlora.errors import QuorumNotMet, UploadRefused
from fedlora.flower.envelope import Receipt, RecordError
from fedlora.flower.grid import NoAnswer
from fedlora.flower.server.state import FederationState
from fedlora.runs.folder import plain
from fedlora.server.rounds import OpenRound
from fedlora.server.state import RunState, Tally

log = logging.getLogger(__name__)
Fate = Literal["trained", "abstained", "refused", "failed", "late", "offline", "not sent", "not drawn"]
_MOST_LOSS = 1e6  # nats: chance among a million words is 14, and a diverged head has some thousands


# A site goes on from its state after this round, and behind this round's data, if its work counted; otherwise from its
# last work that did, so that it repeats this round's data, as in the engine, and its next message leaves nothing out.
COUNT: tuple[Fate, ...] = ("trained", "abstained")


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's reply, read. loss: None if it reports none. held: what need not be sent again; None: nothing."""

    upload: Upload
    loss: float | None
    held: Held | None


class Answers:
    """The answers of one round. Mutable; `close` ends it. Who was drawn and has no fate by then is late.

    before: the state that the round starts from. clients: all that may take part, in order. most_examples: what a
    claim counts for at most.
    """

    def __init__(
        self, before: FederationState, opened: OpenRound, clients: Sequence[str], online: Mapping[str, int],
        chosen: Sequence[str], most_examples: float = math.inf,
    ) -> None:  # fmt: skip
        self.asked = [name for name in clients if name in chosen and name in online]
        self._before, self._opened, self._clients, self._most = before, opened, clients, most_examples
        self._after: dict[str, ClientMemory] = {}
        self._counted: dict[str, float] = {}  # client -> examples that count
        self.fates: dict[str, tuple[Fate, str]] = {}
        self._reported: dict[str, dict[str, float]] = {"losses": {}, "examples": {}}
        for name in clients:
            if name not in self.asked:
                away = name not in online
                self.fates[name] = ("offline", "it is not online") if away else ("not drawn", "")

    def settle(self, name: str, fate: Fate, why: str) -> None:
        """An asked client's fate, other than that of an upload."""
        if fate == "refused":
            self._opened.refuse(UploadRefused(name, shown(why, 500)))
        self.fates[name] = (fate, shown(why, 1000))

    def take(self, name: str, reply: Message, read: Callable[[RecordDict], Reply]) -> None:
        """Give an asked client the fate of its reply. read: reads its upload, and raises `RecordError`. Nothing that a
        reply holds is raised."""
        if reply.has_error():
            error = reply.error
            fate: Any = error.fate if isinstance(error, NoAnswer) else "failed"
            return self.settle(name, fate, error.reason or "it gave no reason")
        try:
            found = _possible(read(reply.content))
        except RecordError as error:
            return self.settle(name, "refused", str(error))
        except Exception as error:  # a forged record can raise anything, and its sender is to blame
            log.exception("the reply of %s cannot be read", name)
            return self.settle(name, "refused", f"its reply cannot be read: {type(error).__name__}")
        upload = found.upload
        examples = upload.num_examples
        if math.isfinite(examples):  # no cap may repair a number that the round must refuse
            examples = min(examples, self._most)
        try:
            self._opened.add(replace(upload, num_examples=examples))
        except UploadRefused as refusal:
            self.fates[name] = "refused", shown(refusal.reason, 500)
            return
        self._after[name], self._counted[name] = ClientMemory(None, 0, found.held), float(examples)
        if not examples:  # nobody has checked its adapter
            return self.settle(name, "abstained", "it has 0 examples for this round")
        self._reported["examples"][name] = float(upload.num_examples)
        if found.loss is not None:
            self._reported["losses"][name] = found.loss
        self.settle(name, "trained", "")

    def close(self, spent: Callable[[int], Mapping[str, Any]] | None, seconds: float) -> FederationState:
        """Aggregate the accepted uploads.

        Args:
            spent: of a private federation, its spending after a round that is released. seconds: that the round took.

        Raises:
            QuorumNotMet: too few usable uploads, with every fate. The state is unchanged.
        """
        for name in self.asked:
            if name not in self.fates:
                self.settle(name, "late", "the round was closed before its answer came")
        try:
            after = self._opened.close()
        except QuorumNotMet as error:
            lost = {n: f"{f}: {why}" for n, (f, why) in self.fates.items() if f not in (*COUNT, "not drawn")}
            others = "; ".join(f"{name}: {why}" for name, why in lost.items() if name not in error.refused)
            raise QuorumNotMet(f"{error} Not there: {others}." if others else str(error), error.refused) from error
        tally = after.tally or Tally({})
        left_out = tally.judged.left_out if tally.judged is not None else {}
        line = {
            "round": after.round,
            "loss": round_loss(self._reported["losses"], self._counted),
            **{key: self._in_order(table) for key, table in self._reported.items()},
            "weights": dict(tally.weights),
            "fates": self._in_order({name: {"fate": fate, "why": why} for name, (fate, why) in self.fates.items()}),
            **({"robust": tally.judged.plain()} if tally.judged is not None else {}),
            "seconds": seconds,
            **({"privacy": spent(after.round)} if spent is not None else {}),
        }
        clients, receipts = self._known_after(after.round, left_out)
        state = RunState(after.round, after, ReadOnly(sorted(clients.items())))
        text = json.dumps(plain(line), allow_nan=False)
        return replace(self._before, state=state, receipts=ReadOnly(sorted(receipts.items())), line=text)

    def _known_after(
        self, round: int, left_out: Mapping[str, str]
    ) -> tuple[dict[str, ClientMemory], dict[str, Receipt]]:
        """What the server knows of each client, and the receipts of its work."""
        clients, receipts = dict(self._before.state.clients), dict(self._before.receipts)
        for name in self.asked:
            fate, why = self.fates[name]
            if fate in COUNT:
                clients[name] = self._after[name]
                lost = f"had no weight in the model, and the site goes on from its own state: {left_out.get(name)}"
                receipts[name] = Receipt(round, self._receipt_text(round, lost if name in left_out else ""))
                continue
            if name in clients:
                clients[name] = replace(clients[name], held=None)
            why = self._receipt_text(round, f"did not count: {fate}: {why}")
            receipts[name] = replace(receipts.get(name, Receipt()), why=why)
        return clients, receipts

    def _receipt_text(self, round: int, why: str) -> str:
        """For the site's log. A private round tells nobody."""
        private = self._opened.asked is not None
        return shown(f"round {round}: the work of this site {why}", 600) if why and not private else ""

    def _in_order(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {name: table[name] for name in self._clients if name in table}


def _possible(reply: Reply) -> Reply:
    """The reply, without a loss if it abstains. Raises `RecordError` for a loss that cannot be."""
    loss = reply.loss
    if loss is None or 0 <= loss <= _MOST_LOSS:
        return reply
    if not reply.upload.num_examples:
        return replace(reply, loss=None)
    raise RecordError(
        f"its loss is {loss:.3g}, and a possible one lies between 0 and {_MOST_LOSS:,.0f}: training diverged (use a "
        f"smaller train.learning_rate, or check the site's data)"
    )
