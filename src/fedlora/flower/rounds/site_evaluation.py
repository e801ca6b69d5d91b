"""Asks all sites to measure their own readouts of a state: who is asked, their answers, and the mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flwr.app import Message, MessageType

from fedlora.core.echo import shown
from fedlora.core.messages import ClientMemory, Held, as_pruned
from fedlora.core.parcels import held_after
from fedlora.core.read_only import ReadOnly
from fedlora.flower.messages.codecs import Codec
from fedlora.flower.messages.counted import Counted
from fedlora.flower.messages.measuring import HeldOut, SiteScores, as_question, record_measured
from fedlora.flower.messages.records import RecordError
from fedlora.flower.rounds.arrivals import Limit
from fedlora.flower.rounds.collecting import Answer, Question
from fedlora.flower.rounds.membership import is_quarantined
from fedlora.flower.rounds.memory import FlowerState
from fedlora.flower.terms.policy import Policy, shares_lost
from fedlora.server.closing import held_to_share
from fedlora.server.server import Server

log = logging.getLogger(__name__)
_NUMBERS = Limit(2**20, 64, 2**20)  # a reply of numbers and of the names of parts that a site keeps


@dataclass(frozen=True)
class SiteRound:
    """The sites' measurements of one state.

    measured: site -> its scores, with the number of examples that it claims. unmeasured: site -> the reason for none.
    counts: site -> the number of examples that its scores count for. share: the largest share of one site in a mean.
    seconds: the duration; None if nobody was asked.
    """

    measured: Mapping[str, SiteScores] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0
    seconds: float | None = None

    def weights(self) -> dict[str, float]:
        """Each site's relative weight."""
        return held_to_share({name: self.counts.get(name, 0.0) for name in self.measured}, self.share)

    def mean(self) -> dict[str, float]:
        """The weighted means of the scores that all counted sites have, and their number of examples."""
        weights = {name: weight for name, weight in self.weights().items() if weight > 0}
        each = [(self.measured[name].scores, weight) for name, weight in weights.items()]
        names = [name for name in (each[0][0] if each else ()) if all(name in scores for scores, _ in each)]
        total = math.fsum(weights.values())
        means = {name: math.fsum(scores[name] * weight for scores, weight in each) / total for name in names}
        return {**means, "examples": sum(self.counts[name] for name in weights)} if each else {}

    def capped(self) -> dict[str, dict[str, float]]:
        """Sites whose scores weigh less than claimed: the claimed share, and the one that counted."""
        return shares_lost({name: float(one.examples) for name, one in self.measured.items()}, self.weights())

    def facts(self) -> dict[str, Any]:
        """The facts for a line of rounds.jsonl."""
        return {
            "site_metrics": {name: {**one.scores, "examples": one.examples} for name, one in self.measured.items()},
            "site_mean": self.mean(),
            "site_unmeasured": dict(self.unmeasured),
            "site_counts": dict(self.counts),
            "site_share": self.share,
            "site_capped": self.capped(),
            **({"measure_seconds": self.seconds} if self.seconds is not None else {}),
        }


@dataclass(frozen=True)
class Asking:
    """When sites are asked, and for which score. due: whether a round is measured."""

    metric: str
    due: Callable[[int], bool]


class SiteEvaluation:
    """One measurement of a state at all sites: it asks every client of the policy, drawn or not, except those that are
    not online and those whose uploads are refused. Mutable: it notes what each message carried.

    memory: what the server knows of its clients. A site's scores count for no more examples than it trained on. online:
    name -> node id.
    """

    def __init__(
        self, server: Server, policy: Policy, memory: FlowerState, part: HeldOut, online: Mapping[str, int]
    ) -> None:
        self._server, self._policy, self._known, self._part, self._online = server, policy, memory, part, online
        self._state, self._run, self._not_asked = memory.state, memory.run, dict[str, str]()
        for name in policy.clients:
            if is_quarantined(policy, memory.refusals, name):
                self._not_asked[name] = f"it is in quarantine after {memory.refusals[name]} refused uploads"
            elif memory.refusals.get(name):
                self._not_asked[name] = "its last upload was refused, and until one is taken it does not count"
            elif name not in online:
                self._not_asked[name] = "it is not online"
        self._most = {name: min(memory.examples.get(name, 0.0), policy.max_examples) for name in policy.clients}
        self._carried: dict[str, Held] = {}  # what a client holds if it stored its message, and keeps all that it can

    def questions(self, codec: Codec, ttl: float) -> Iterator[Question]:
        """A question for each asked client, made on demand."""
        for name in self._policy.clients:
            if name not in self._not_asked:
                yield self._question(name, codec, self._memory(name).held, ttl)

    def _question(self, name: str, codec: Codec, held: Held | None, ttl: float) -> Question:
        download = self._server.download(self._state.server, as_pruned(self._policy.client(name), self._memory(name)))
        self._carried[name] = held_after(download, download.start, untrained=True)
        record = codec.question(download, held, self._run, self._known.counted.get(name, Counted()))
        message = Message(
            as_question(record, self._part), self._online[name],
            MessageType.EVALUATE, ttl=ttl, group_id=f"{self._run}-{self._state.round}-measure-{self._part}",
        )  # fmt: skip
        whole = partial(self._question, name, codec, None) if held is not None else None
        return Question(name, message, _NUMBERS, whole)

    def _memory(self, name: str) -> ClientMemory:
        return self._state.clients.get(name, ClientMemory())

    def read(self, answers: Iterable[Answer], metric: str) -> SiteRound:
        """The answers, in the policy's order. It never raises, because a reply is a stranger's."""
        found = {answer.client: answer for answer in answers}
        measured, unmeasured = {}, dict(self._not_asked)
        for name in self._carried:
            said = self._read(name, found.get(name), metric)
            if isinstance(said, SiteScores):
                measured[name] = said
            else:
                unmeasured[name] = said
        for name, why in unmeasured.items():
            log.warning("round %d: %s was not measured at its site: %s", self._state.round, name, why)
        counts = {name: min(float(one.examples), self._most.get(name, 0.0)) for name, one in measured.items()}
        result = SiteRound(measured, unmeasured, counts, self._policy.share)
        for name, shares in result.capped().items():
            log.warning(
                "round %d: the scores of %s count %.0f %% instead of %.0f %%: it claims %s examples, it is known to "
                "have %.6g, and one site counts %.0f %% at most (max_weight_share)",
                self._state.round, name, 100 * shares["counted"], 100 * shares["claimed"],
                shown(measured[name].examples, 20), self._most.get(name, 0.0), 100 * self._policy.share,
            )  # fmt: skip
        return result

    @property
    def asked(self) -> bool:
        """Whether any site was asked."""
        return bool(self._carried)

    def memories(self, found: SiteRound) -> Mapping[str, ClientMemory]:
        """What the server knows about its clients now: a client that measured holds everything that training starts
        from. About the others it knows what it knew before."""
        held = {
            name: replace(self._memory(name), held=replace(self._carried[name], local=one.kept))
            for name, one in found.measured.items()
        }
        return ReadOnly({**self._state.clients, **held})

    def _read(self, name: str, answer: Answer | None, metric: str) -> SiteScores | str:
        if answer is None or answer.message is None:
            return answer.why if answer is not None and answer.why else "it did not answer in time"
        reply = answer.message
        if reply.has_error():
            return f"it failed: {shown(reply.error.reason, 300)}"
        try:
            return record_measured(
                reply.content, run=self._run, round=self._state.round, part=self._part, metric=metric,
                local=self._carried[name].local,
            )  # fmt: skip
        except RecordError as error:
            return str(error)
        except Exception as error:  # a forged record can raise anything, and its sender is to blame
            log.exception("the measurement of %s cannot be read", name)
            return f"its measurement cannot be read: {type(error).__name__}"


__all__ = ["Asking", "SiteEvaluation", "SiteRound"]
