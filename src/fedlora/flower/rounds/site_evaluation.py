"""Ask all sites to measure their own readouts of a state: who is asked, their answers, and the mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MessageType

from fedlora.core.echo import shown
from fedlora.core.messages import ClientMemory, Download, as_pruned
from fedlora.flower.messages.codecs import Codec
from fedlora.flower.messages.measuring import HeldOut, SiteScores, as_question, record_measured
from fedlora.flower.messages.records import RecordError
from fedlora.flower.rounds.collecting import Answer
from fedlora.flower.rounds.membership import is_quarantined
from fedlora.flower.terms.policy import Policy, shares_lost
from fedlora.server.closing import held_to_share
from fedlora.server.server import Server
from fedlora.server.state import RunState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteRound:
    """The sites' measurements of one state.

    measured: site -> its scores, with the number of examples that it claims. unmeasured: site -> why there are none.
    counts: site -> the number of examples that its scores count for. share: the largest share of one site in a mean.
    seconds: the duration; None if nobody was asked.
    """

    measured: Mapping[str, SiteScores] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0
    seconds: float | None = None

    def weights(self) -> dict[str, float]:
        """Each site's weight, in no unit."""
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
        """The facts as in a line of rounds.jsonl."""
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


@dataclass(frozen=True, eq=False)
class SiteEvaluation:
    """One measurement of a state at all sites.

    round: the state's. asked: node -> its message. not_asked: site -> why not. most: site -> the most examples that it
    can have measured. share: the largest share of one site's scores in a mean.
    """

    part: HeldOut
    run: str
    round: int
    asked: Mapping[int, Download]
    not_asked: Mapping[str, str]
    most: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0

    @classmethod
    def of(
        cls,
        server: Server,
        state: RunState,
        policy: Policy,
        refusals: Mapping[str, int],
        examples: Mapping[str, float],
        part: HeldOut,
        run: str,
        online: Mapping[str, int],
    ) -> SiteEvaluation:
        """Asks every client of the policy, drawn or not, except those that are offline or whose uploads are refused.

        Args:
            refusals: client -> its refused uploads since the last accepted one. examples: client -> its training
                examples, from the last accepted upload: its scores count for no more.
        """
        asked, not_asked = {}, {}
        for name in policy.clients:
            if is_quarantined(policy, refusals, name):
                not_asked[name] = f"it is in quarantine after {refusals[name]} refused uploads"
            elif refusals.get(name):
                not_asked[name] = "its last upload was refused, and until one is taken it does not count"
            elif name not in online:
                not_asked[name] = "it is not online"
            else:
                memory = state.clients.get(name, ClientMemory())
                asked[online[name]] = server.download(state.server, as_pruned(policy.client(name), memory))
        most = {name: min(examples.get(name, 0.0), policy.max_examples) for name in policy.clients}
        return cls(part, run, state.round, asked, not_asked, most, policy.share)

    def messages(self, codec: Codec, ttl: float) -> list[Message]:
        """A question to each asked site; it is complete, whatever the site already holds."""
        group = f"{self.run}-{self.round}-measure-{self.part}"
        return [
            Message(
                as_question(codec.question(download, None, self.run), self.part), node, MessageType.EVALUATE,
                ttl=ttl, group_id=group,
            )
            for node, download in self.asked.items()
        ]  # fmt: skip

    def read(self, answers: Iterable[Answer], metric: str) -> SiteRound:
        """The answers, in the policy's order. It never raises, because a reply is a stranger's."""
        found = {answer.client: answer for answer in answers}
        measured, unmeasured = {}, dict(self.not_asked)
        for download in self.asked.values():
            name = download.client.id
            said = self._read(found.get(name), metric)
            if isinstance(said, SiteScores):
                measured[name] = said
            else:
                unmeasured[name] = said
        for name, why in unmeasured.items():
            log.warning("round %d: %s was not measured at its site: %s", self.round, name, why)
        counts = {name: min(float(one.examples), self.most.get(name, 0.0)) for name, one in measured.items()}
        result = SiteRound(measured, unmeasured, counts, self.share)
        for name, shares in result.capped().items():
            log.warning(
                "round %d: what %s measured counts %.0f %% instead of %.0f %%: it says that it is of %s examples, it "
                "is known to have %.6g, and one site counts %.0f %% at most (max_weight_share)",
                self.round, name, 100 * shares["counted"], 100 * shares["claimed"], shown(measured[name].examples, 20),
                self.most.get(name, 0.0), 100 * self.share,
            )  # fmt: skip
        return result

    def _read(self, answer: Answer | None, metric: str) -> SiteScores | str:
        if answer is None or answer.message is None:
            return answer.why if answer is not None and answer.why else "it did not answer in time"
        reply = answer.message
        if reply.has_error():
            return f"it failed: {shown(reply.error.reason, 300)}"
        try:
            return record_measured(reply.content, run=self.run, round=self.round, part=self.part, metric=metric)
        except RecordError as error:
            return str(error)
        except Exception as error:  # a forged record can raise anything else, and its sender is to blame
            log.exception("the measurement of %s cannot be read", answer.client)
            return f"its measurement cannot be read: {type(error).__name__}"


__all__ = ["Asking", "SiteEvaluation", "SiteRound"]
