"""The work after a federation's last round: the last measurements, adapters, trackers, summary."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from fedlora.core import files
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.choosing import sites_test
from fedlora.flower.rounds.events import Fated, read_events
from fedlora.flower.rounds.federation import Begun
from fedlora.flower.rounds.lines import measurement_lines
from fedlora.flower.rounds.private_words import public_summary
from fedlora.flower.rounds.recording import Line, Recorder
from fedlora.flower.rounds.results import Results, taken_part
from fedlora.flower.rounds.site_evaluation import SiteRound
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.runs.finishing import MOST_CLASSES
from fedlora.runs.folder import plain
from fedlora.runs.manifest import code_facts
from fedlora.runs.private_run import PrivateRun
from fedlora.server.judged import of_run, remarks
from fedlora.server.state import RunState
from fedlora.training.evaluation import Measured
from fedlora.training.metrics import score_name

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Ended:
    """The summary's input. best: the best round's line. tested: "adapter" (the last state) and "best" -> its scores on
    the server's test file; empty for a method without a model at the server."""

    begun: Begun
    strategy: FedLoRA
    lines: list[Line]
    best: Line | None
    at_sites: SiteRound
    tested: Mapping[str, Measured]
    judged: Mapping[str, Any] | None


def finish(
    grid: Grid, begun: Begun, strategy: FedLoRA, recorder: Recorder, private: PrivateRun | None
) -> dict[str, Any]:
    """Write adapters, their scores, and the summary. The summary comes last: if it exists, everything does."""
    settings, home, server, state = begun.settings, begun.home, strategy.server, strategy.flower_state.state
    lines = recorder.lines(state.round)
    best = recorder.best(lines)
    chosen = {"adapter": state}
    if best is not None and best["round"] == state.round:
        chosen["best"] = state
    elif (found := recorder.best_state(best)) is not None:
        chosen["best"] = found
    at_sites = strategy.measure(grid, "test") if sites_test(settings) else SiteRound()
    for note in measurement_lines(at_sites.facts(), f"test set, round {state.round}"):
        log.warning("%s", note)
    judged = of_run(lines) if server.rule is not None else None
    for remark in remarks(judged, strategy.policy.clients) if judged is not None else ():
        log.warning("%s", remark)
    results = Results(
        settings, strategy.policy, server, begun.spec, begun.at_server, begun.known.base, _examples(home),
        judged, None if private is None else private.spent(state.round), begun.history.told(),
    )  # fmt: skip
    tested = _tested(begun, strategy, chosen)
    for name, measured in tested.items():
        scores, by = measured.scores, "server"
        if not scores and chosen[name].round == state.round:  # the sites measured this state
            scores, by = {k: v for k, v in at_sites.mean().items() if k != "examples"}, "the sites"
        results.write_model(home.server / name, chosen[name], scores, by if scores else "server")
    if settings.run.readouts:
        results.write_readouts(home.server / "clients", state, {n: s.scores for n, s in at_sites.measured.items()})
    recorder.close({k: (one.round, tested[k].scores if k in tested else {}) for k, one in chosen.items()})
    stopped = recorder.stopped(lines)
    if stopped is None and private is not None and strategy.stopped == "budget":
        why = private.releases.why_spent(state.round)
        stopped = {"round": state.round, "of": settings.run.rounds, "best_round": None, "best": None, "why": why}
    summary = _summary(_Ended(begun, strategy, lines, best, at_sites, tested, judged), stopped)
    if results.spent is not None:
        summary = public_summary(summary, results.spent)
    files.write(home.summary, json.dumps(plain(summary), indent=2, sort_keys=True) + "\n")
    return dict(plain(summary))


def _tested(begun: Begun, strategy: FedLoRA, chosen: Mapping[str, RunState]) -> dict[str, Measured]:
    """The scores of the server's model in each state on the server's test file, if there is one."""
    server, test = strategy.server, begun.at_server.test
    tested: dict[str, Measured] = {}
    for name, one in chosen.items():
        if not server.has_global_model(one.server):
            continue
        if name == "best" and one.round == chosen["adapter"].round:
            tested[name] = tested["adapter"]
        else:
            tested[name] = test.measure(server, one) if test is not None else Measured({}, None)
    return tested


def _summary(e: _Ended, stopped: Mapping[str, Any] | None) -> dict[str, Any]:
    """Any federation's summary; `public_summary` removes what a private one may not release."""
    settings, strategy, choosing, state = e.begun.settings, e.strategy, e.begun.choosing, e.strategy.flower_state.state
    key = "site_mean" if choosing.by == "sites" else "metrics"
    scored = [line for line in e.lines if line.get(key)]
    return {
        "federation": settings.id,
        "finished": True,
        "method": strategy.server.method.name,
        "rounds": state.round,
        "of": settings.run.rounds,
        "metric": score_name(settings.evaluate.metric),
        "measured_by": choosing.by,
        "validation": {
            "last": scored[-1][key] if scored else {},
            "best": e.best[key] if e.best is not None else {},
        },
        "best_round": e.best["round"] if e.best is not None else None,
        "stopped_early": stopped,
        "test": {place: e.tested[name].scores if name in e.tested else {} for place, name in _PLACES.items()},
        "confusion": _confusion(e),
        "site_test": {
            "sites": e.at_sites.facts()["site_metrics"], "mean": e.at_sites.mean(), "capped": e.at_sites.capped(),
            "unmeasured": dict(e.at_sites.unmeasured),
        },
        "sites": taken_part(strategy.policy, e.lines),
        "refusals": dict(strategy.flower_state.refusals),
        **({"defence": e.judged} if e.judged is not None else {}),
        "seconds": sum(line["seconds"] or 0.0 for line in e.lines),
        "adapter": "adapter" in e.tested,
        "versions": code_facts()["versions"],
        "settings": json.loads(settings.travelling()),
        "diagnostics": strategy.server.diagnostics(state.server),
    }  # fmt: skip


_PLACES = {"last": "adapter", "best": "best"}


def _confusion(e: _Ended) -> dict[str, Any] | None:
    classes = e.begun.settings.data.labels or []
    found = {place: e.tested[name].confusion if name in e.tested else None for place, name in _PLACES.items()}
    return None if found["last"] is None or len(classes) > MOST_CLASSES else {"classes": classes, **found}


def _examples(home: FederationFolder) -> dict[str, float]:
    """Client -> the number of examples that it last reported for training."""
    trained = (event for event in read_events(home.events) if isinstance(event, Fated) and event.fate == "trained")
    return {event.client: event.examples for event in trained if event.examples is not None}


__all__ = ["finish"]
