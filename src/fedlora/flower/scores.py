"""Who measures a federation's rounds, and by whose scores they are compared.

data.validation says it: if it names a file of the server's, the server measures its model on that; if it is a share,
each site measures its own readout on the rows that it holds out, and rounds are compared by the mean over those that
answered, weighted by their examples. The question to a site carries the same as the next round's training message, and
the site stores that, so the training message can leave it out. The answer is a few numbers: scores by name, and the
number of examples. No text and no class name travels.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedlora.client import receive
from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.envelope import RecordError, enclose, opened, parts
from fedlora.flower.inside import Limit
from fedlora.flower.records import kept_names
from fedlora.flower.terms import HELD_OUT, HeldOut
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.stopping import Line, Ranking
from fedlora.training.measure import ModelEvaluator
from fedlora.training.metrics import METRICS, score_name

log = logging.getLogger(__name__)
Evaluators = Mapping[str, ModelEvaluator | None]  # a site's, by held-out part

# (least, most) for scores that do not lie between 0 and 1. A loss, in nats, has the limit of training (server.answers);
# a perplexity a thousand times that of chance among a million words. No useful model exceeds it.
_BOUNDS = {"loss": (0.0, 1e6), "perplexity": (1.0, 1e9)}
_ROOM = 1e-6  # for rounding
_MOST_EXAMPLES = 1e12
NUMBERS = Limit(2**20, 64, 2**20)  # a reply of numbers and of the names of parts that a site keeps


@dataclass(frozen=True)
class SiteScores:
    """What a site measured. scores: by name, finite. examples: how many were scored. kept: names of the parts that the
    site keeps for itself."""

    scores: Mapping[str, float]
    examples: int
    kept: tuple[str, ...] = ()


def as_question(record: RecordDict, part: str) -> RecordDict:
    """Turns a training message into the question how its readout scores on a held-out part (`HELD_OUT`)."""
    parts(record, ConfigRecord)["config"]["measure"] = part
    return record


def asked_part(record: RecordDict) -> HeldOut:
    """The part that a question asks about. Raises `RecordError`."""
    config = parts(record, ConfigRecord).get("config")
    part = config.get("measure") if config is not None else None
    if part not in HELD_OUT:
        raise RecordError(f"a message to measure names one of {', '.join(HELD_OUT)}; this one says {quoted(part, 40)}.")
    return part


def measured_record(
    download: Download, kept: Adapter | None, run: str, part: HeldOut, evaluators: Evaluators
) -> RecordDict:
    """A site's answer: the received readout, completed by the site's kept parts, measured on its held-out examples.

    A score that is not a number (from a model that diverged) is left out.

    Raises:
        ConfigError: this site holds out nothing.
    """
    evaluator = evaluators.get(part)
    client = download.client.id
    if evaluator is None or not evaluator.count(client):
        raise ConfigError(f"{client!r} holds no {part} examples out.")
    scores = evaluator.measure_adapter(receive(download, kept), client)
    named = {f"score-{name}": float(v) for name, v in scores.items() if "/" not in name and math.isfinite(v)}
    facts = {"run": run, "round": download.round, "measure": part}
    names = [*kept.modules, *kept.heads] if kept is not None else []
    metrics = MetricRecord({"num-examples": evaluator.count(client), **named})
    config = ConfigRecord({"measured": json.dumps(facts, sort_keys=True), "kept": names})
    return enclose(RecordDict({"metrics": metrics, "config": config}))


def record_measured(
    record: RecordDict, *, run: str, round: int, part: HeldOut, metric: str, local: Collection[str] = ()
) -> SiteScores:
    """The checked answer to a question: of this run, round and part, with known scores in their possible ranges.

    Args:
        metric: the score that must be there. local: names of the parts that a site can keep.

    Raises:
        RecordError: the answer fails a check.
    """
    opened(record, "it", "this server")
    config = parts(record, ConfigRecord)["config"]
    want = json.dumps({"run": run, "round": round, "measure": part}, sort_keys=True)
    if config.get("measured") != want:
        raise RecordError(f"its measurement is {quoted(config.get('measured'), 120)}; {want} was asked for.")
    found = parts(record, MetricRecord).get("metrics") or MetricRecord()
    examples = found.get("num-examples")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 1 <= examples <= _MOST_EXAMPLES:
        raise RecordError(f"its measurement counts {quoted(examples, 40)} examples; a whole number from 1 is needed.")
    known = {score_name(name) for name in METRICS}
    scores = {}
    for key, value in found.items():
        if key == "num-examples":
            continue
        name = key.removeprefix("score-")
        if not key.startswith("score-") or name not in known:
            raise RecordError(f"its measurement has a number {quoted(key, 40)}, which nobody asked for.")
        scores[name] = _possible(name, value)
    if metric not in scores:
        raise RecordError(f"it has no {metric}: the site's value is not a number. Did the model diverge?")
    return SiteScores(scores, examples, tuple(kept_names(config.get("kept"), local)))


def _possible(name: str, value: object) -> float:
    """The score. Raises `RecordError` if its value is impossible."""
    least, most = _BOUNDS.get(name, (0.0, 1.0))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecordError(f"its {name} is {quoted(value, 40)}, which is not a number.")
    if not least - _ROOM <= value <= most + _ROOM:
        raise RecordError(f"its {name} is {value:g}; it lies between {least:g} and {most:g}.")
    return float(value)


# ----------------------------------------------------------------------------------------------------- at the server


@dataclass(frozen=True)
class SiteRound:
    """The sites' measurements of one state. measured: site -> its scores, with their number of examples. unmeasured:
    site -> the reason for none."""

    measured: Mapping[str, SiteScores] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)

    def mean(self) -> dict[str, float]:
        """The means, weighted by examples, of the scores that all sites have, and their number of examples."""
        each = list(self.measured.values())
        names = [name for name in (each[0].scores if each else ()) if all(name in one.scores for one in each)]
        total = sum(one.examples for one in each)
        means = {name: math.fsum(one.scores[name] * one.examples for one in each) / total for name in names}
        return {**means, "examples": total} if each else {}

    def facts(self) -> dict[str, Any]:
        """The facts for a round's scores."""
        return {
            "site_metrics": {name: {**one.scores, "examples": one.examples} for name, one in self.measured.items()},
            "site_mean": self.mean(),
            "site_unmeasured": dict(self.unmeasured),
        }


def averaged(each: Iterable[MetricRecord], most: float) -> MetricRecord | None:
    """The mean of each finite number, weighted by num-examples, as Flower's own; None if there is none. most: what a
    claim of examples counts for at most."""
    found: dict[str, list[tuple[float, float]]] = {}
    for metrics in each:
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        weight = min(numbers.pop("num-examples", 0.0), most)
        for key, value in numbers.items() if weight > 0 else ():
            found.setdefault(key, []).append((weight, value))
    totals = {key: sum(w for w, _ in pairs) for key, pairs in found.items()}
    means = {key: sum(w / totals[key] * x for w, x in pairs) for key, pairs in found.items()}
    return MetricRecord(dict(means)) if means else None


@dataclass(frozen=True)
class Choosing(Ranking):
    """The order of a federation's rounds. by: whose scores; None: no round is measured. every, rounds: the rounds that
    are measured, as evaluate.every and run.rounds say."""

    by: Literal["server", "sites"] | None
    every: int = 1
    rounds: int = 0

    def due(self, round: int) -> bool:
        """Whether a round is measured."""
        return self.by is not None and round > 0 and (round % self.every == 0 or round == self.rounds)

    @property
    def where(self) -> str:
        return f"at the {self.by}"

    def score(self, line: Line) -> float | None:
        """A round's own score: the server's, or the sites' weighted mean. None if it was not measured."""
        if self.by is None:
            return None
        return self._of(line.get("metrics" if self.by == "server" else "site_mean") or {})


def choosing_of(settings: FederationSettings, model_here: bool) -> Choosing:
    """Whose scores compare rounds. model_here: whether the method keeps a model at the server.

    Raises:
        ConfigError: patience has no scores.
    """
    evaluate = settings.evaluate
    by: Literal["server", "sites"] | None = "sites" if settings.share("validation") else None
    if "validation" in settings.files() and model_here:
        by = "server"
    if by is None and evaluate.early_stopping_patience is not None:
        raise ConfigError(
            f"evaluate.early_stopping_patience = {evaluate.early_stopping_patience} looks at a score of each round, "
            f"and no round is measured: give data.validation a share (at the sites), or, for a method with a model at "
            f"the server, a file of its own."
        )
    log.info("rounds are measured at the %s", by) if by else log.info("no round is measured")
    return Choosing(score_name(evaluate.metric), by, evaluate.every, settings.run.rounds)
