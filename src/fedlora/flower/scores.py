"""A site measures its own readout on its held-out data: the question, the answer, and the server's checks.

The question carries the same as the next round's training message, and the site stores that, so the training message
can leave it out. The answer is a few numbers: scores by name, and the number of examples. No text and no class name
travels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedlora.client import receive
from fedlora.core.lora import Adapter
from fedlora.core.messages import Download
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.envelope import Envelope, RecordError, enclose, opened, parts
from fedlora.flower.records import kept_names
from fedlora.training.measure import ModelEvaluator
from fedlora.training.metrics import METRICS, score_name

HeldOut = Literal["validation", "test"]
HELD_OUT: tuple[HeldOut, ...] = ("validation", "test")
Evaluators = Mapping[str, ModelEvaluator | None]  # a site's, by held-out part

# (least, most) for scores that do not lie between 0 and 1. A loss, in nats, has the limit of training (server.answers);
# a perplexity a thousand times that of chance among a million words. No useful model exceeds it.
_BOUNDS = {"matthews": (-1.0, 1.0), "loss": (0.0, 1e6), "perplexity": (1.0, 1e9)}
_ROOM = 1e-6  # for rounding
_MOST_EXAMPLES = 1e12


@dataclass(frozen=True)
class SiteScores:
    """What a site measured. scores: by name, finite. examples: how many were scored. kept: names of the parts that the
    site keeps for itself."""

    scores: Mapping[str, float]
    examples: int
    kept: tuple[str, ...] = ()


def as_question(record: RecordDict, part: HeldOut) -> RecordDict:
    """Turns a training message into the question how its readout scores on a held-out part."""
    parts(record, ConfigRecord)["config"]["measure"] = part
    return record


def asked_part(record: RecordDict) -> HeldOut:
    """The part that a question asks about. Raises `RecordError`."""
    config = parts(record, ConfigRecord).get("config")
    said = config.get("measure") if config is not None else None
    if said not in HELD_OUT:
        raise RecordError(f"a message to measure names one of {', '.join(HELD_OUT)}; this one says {quoted(said, 40)}.")
    return said


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
    said = {"run": run, "round": download.round, "measure": part}
    names = [*kept.modules, *kept.heads] if kept is not None else []
    metrics = MetricRecord({"num-examples": evaluator.count(client), **named})
    config = ConfigRecord({"measured": json.dumps(said, sort_keys=True), "kept": names})
    return enclose(RecordDict({"metrics": metrics, "config": config}), Envelope())


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
