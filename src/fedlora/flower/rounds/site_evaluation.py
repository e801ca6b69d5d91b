"""Asks all sites to measure their own readouts of a state: who is asked, their answers, and the mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedlora.core.messages import ClientMemory, Held
from fedlora.core.parcels import held_after
from fedlora.core.read_only import ReadOnly
from fedlora.flower.messages.measuring import HeldOut, SiteScores, record_measured
from fedlora.flower.messages.records import RecordError
from fedlora.flower.rounds.arrivals import Limit
from fedlora.flower.rounds.collecting import Answer
from fedlora.flower.rounds.questions import MessageMaker, NotServed, Question

log = logging.getLogger(__name__)
_NUMBERS = Limit(2**20, 64, 2**20)  # a reply of numbers and of the names of parts that a site keeps


@dataclass(frozen=True)
class SiteRound:
    """The sites' measurements of one state.

    measured: site -> its scores, with their number of examples. unmeasured: site -> the reason for none. seconds: the
    duration; None if nobody was asked.
    """

    measured: Mapping[str, SiteScores] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    def mean(self) -> dict[str, float]:
        """The means, weighted by examples, of the scores that all sites have, and their number of examples."""
        each = list(self.measured.values())
        names = [name for name in (each[0].scores if each else ()) if all(name in one.scores for one in each)]
        total = sum(one.examples for one in each)
        means = {name: math.fsum(one.scores[name] * one.examples for one in each) / total for name in names}
        return {**means, "examples": total} if each else {}

    def facts(self) -> dict[str, Any]:
        """The facts for a line of rounds.jsonl."""
        return {
            "site_metrics": {name: {**one.scores, "examples": one.examples} for name, one in self.measured.items()},
            "site_mean": self.mean(),
            "site_unmeasured": dict(self.unmeasured),
            **({"measure_seconds": self.seconds} if self.seconds is not None else {}),
        }


class SiteEvaluation:
    """One measurement of a state at all sites: it asks every client of the policy, drawn or not, except those that are
    not online or that the method cannot serve. Mutable: it notes what each message carried."""

    def __init__(self, maker: MessageMaker, part: HeldOut) -> None:
        self._maker, self._part = maker, part
        self._flower_state, self._policy = maker.flower_state, maker.policy
        self._not_asked = {name: "it is not online" for name in self._policy.clients if name not in maker.online}
        self._carried: dict[str, Held] = {}  # what a client holds if it stored its message, and keeps all that it can

    def questions(self, ttl: float) -> Iterator[Question]:
        """A question for each asked client, made on demand. ttl: seconds to live."""
        group = f"{self._flower_state.run}-{self._flower_state.state.round}-measure-{self._part}"
        for name in self._policy.clients:
            if name not in self._not_asked:
                try:
                    download = self._maker.download(name)
                except NotServed as error:
                    self._not_asked[name] = str(error)
                    continue
                self._carried[name] = held_after(download, download.start, untrained=True)
                question = self._maker.question(download, group, ttl, _NUMBERS, self._part)
                del download
                yield question
                del question

    def read(self, answers: Iterable[Answer], metric: str) -> SiteRound:
        """The answers, in the policy's order. It never raises, because a reply is a stranger's."""
        found = {answer.client: self._read(answer, metric) for answer in answers}
        said = {name: found[name] for name in self._carried}
        measured = {name: one for name, one in said.items() if isinstance(one, SiteScores)}
        unmeasured = self._not_asked | {name: why for name, why in said.items() if isinstance(why, str)}
        return SiteRound(measured, unmeasured)

    @property
    def asked(self) -> bool:
        """Whether any site was asked."""
        return bool(self._carried)

    def memories(self, found: SiteRound) -> Mapping[str, ClientMemory]:
        """What the server knows about its clients now: a client that measured holds everything that training starts
        from. About the others it knows what it knew before."""
        held = {
            name: replace(self._maker.known(name), held=replace(self._carried[name], local=one.kept))
            for name, one in found.measured.items()
        }
        return ReadOnly({**self._flower_state.state.clients, **held})

    def _read(self, answer: Answer, metric: str) -> SiteScores | str:
        name, reply = answer.client, answer.message
        if reply is None:
            return answer.why
        try:
            return record_measured(
                reply.content, run=self._flower_state.run, round=self._flower_state.state.round, part=self._part,
                metric=metric, local=self._carried[name].local,
            )  # fmt: skip
        except RecordError as error:
            return str(error)
        except Exception as error:  # a forged record can raise anything, and its sender is to blame
            log.exception("the measurement of %s cannot be read", name)
            return f"its measurement cannot be read: {type(error).__name__}"
