"""The work after a federation's last round: the last measurements, adapters, trackers, summary."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from flwr.serverapp import Grid

from fedlora.core import files
from fedlora.flower.rounds.choosing import sites_test
from fedlora.flower.rounds.events import Fated, read_events
from fedlora.flower.rounds.federation import Begun
from fedlora.flower.rounds.log_lines import measurement_lines
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
_FOLDERS = {"last": "adapter", "best": "best"}  # a state that is kept -> its folder


def finish(
    grid: Grid, begun: Begun, strategy: FedLoRA, recorder: Recorder, private: PrivateRun | None
) -> dict[str, Any]:
    """Write adapters, their scores, and the summary. The summary comes last: if it exists, everything does."""
    settings, home, state = begun.settings, begun.home, strategy.flower_state.state
    lines = strategy.lines.finished()
    best = recorder.best(lines)
    chosen = {"last": state}
    if best is not None and best["round"] == state.round:
        chosen["best"] = state
    elif (found := recorder.best_state(best)) is not None:
        chosen["best"] = found
    at_sites = strategy.measure(grid, "test") if sites_test(settings) else SiteRound()
    for note in measurement_lines(at_sites.facts(), f"test set, round {state.round}"):
        log.warning("%s", note)
    judged = of_run(lines) if begun.server.rule is not None else None
    for remark in remarks(judged, strategy.policy.clients) if judged is not None else ():
        log.warning("%s", remark)
    spent = None if private is None else private.spent(state.round)
    results = Results(begun, strategy.policy, _examples(begun), judged, spent)
    tested = _tested(begun, chosen)
    for name, measured in tested.items():
        scores, by = measured.scores, "server"
        if not scores and chosen[name].round == state.round:  # the sites measured this state
            scores, by = {k: v for k, v in at_sites.mean().items() if k != "examples"}, "the sites"
        results.write_model(home.server / _FOLDERS[name], chosen[name], scores, by if scores else "server")
    if settings.run.readouts:
        results.write_readouts(home.server / "clients", state, {n: s.scores for n, s in at_sites.measured.items()})
    recorder.close({k: (one.round, tested[k].scores if k in tested else {}) for k, one in chosen.items()})
    stopped = recorder.stopped(lines)
    if stopped is None and private is not None and strategy.stopped == "budget":
        why = private.releases.why_spent(state.round)
        stopped = {"round": state.round, "of": settings.run.rounds, "best_round": None, "best": None, "why": why}
    summary = _summary(begun, strategy, best, at_sites, tested, judged, stopped)
    if spent is not None:
        summary = public_summary(summary, spent)
    files.write(home.summary, json.dumps(plain(summary), indent=2, sort_keys=True) + "\n")
    return dict(plain(summary))


def _tested(begun: Begun, chosen: Mapping[str, RunState]) -> dict[str, Measured]:
    """The scores of the server's model in each state on the server's test file, if there is one; for a method without a
    model at the server, of no state."""
    server, test = begun.server, begun.at_server.test
    tested: dict[str, Measured] = {}
    for name, one in chosen.items():
        if not server.has_global_model(one.server):
            continue
        if name == "best" and one.round == chosen["last"].round:
            tested[name] = tested["last"]
        else:
            tested[name] = test.measure(server, one) if test is not None else Measured({}, None)
    return tested


def _summary(
    begun: Begun, strategy: FedLoRA, best: Line | None, at_sites: SiteRound, tested: Mapping[str, Measured],
    judged: Mapping[str, Any] | None, stopped: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Any federation's summary; `public_summary` removes what a private one may not release."""
    settings, state, lines = begun.settings, strategy.flower_state.state, strategy.lines.finished()
    key = "site_mean" if begun.choosing.by == "sites" else "metrics"
    scored = [line for line in lines if line.get(key)]
    return {
        "federation": settings.id,
        "finished": True,
        "method": strategy.server.method.name,
        "rounds": state.round,
        "of": settings.run.rounds,
        "metric": score_name(settings.evaluate.metric),
        "measured_by": begun.choosing.by,
        "validation": {
            "last": scored[-1][key] if scored else {},
            "best": best[key] if best is not None else {},
        },
        "best_round": best["round"] if best is not None else None,
        "stopped_early": stopped,
        "test": {name: tested[name].scores if name in tested else {} for name in _FOLDERS},
        "confusion": _confusion(begun, tested),
        "site_test": {
            "sites": at_sites.facts()["site_metrics"], "mean": at_sites.mean(), "capped": at_sites.capped(),
            "unmeasured": dict(at_sites.unmeasured),
        },
        "sites": taken_part(strategy.policy, lines),
        "refusals": dict(strategy.flower_state.refusals),
        **({"defence": judged} if judged is not None else {}),
        "seconds": sum(line["seconds"] or 0.0 for line in lines),
        "adapter": "last" in tested,
        "versions": code_facts()["versions"],
        "settings": json.loads(settings.travelling()),
        "diagnostics": strategy.server.diagnostics(state.server),
    }  # fmt: skip


def _confusion(begun: Begun, tested: Mapping[str, Measured]) -> dict[str, Any] | None:
    classes = begun.settings.data.labels or []
    found = {name: tested[name].confusion if name in tested else None for name in _FOLDERS}
    return None if found["last"] is None or len(classes) > MOST_CLASSES else {"classes": classes, **found}


def _examples(begun: Begun) -> dict[str, float]:
    """Client -> the number of examples that it last reported for training."""
    trained = (e for e in read_events(begun.home.events) if isinstance(e, Fated) and e.fate == "trained")
    return {event.client: event.examples for event in trained if event.examples is not None}
