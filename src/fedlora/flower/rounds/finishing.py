"""What is done once, when the rounds of a federation are over: the last measurements, adapters, trackers, summary."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from fedlora.core import checkpoint, files
from fedlora.errors import CheckpointError
from fedlora.flower.places import FederationFolder
from fedlora.flower.rounds.events import Fated, read_events
from fedlora.flower.rounds.federation import Federation
from fedlora.flower.rounds.measured_where import sites_test
from fedlora.flower.rounds.memory import FlowerState
from fedlora.flower.rounds.private_words import public_summary
from fedlora.flower.rounds.results import Results, taken_part
from fedlora.flower.rounds.site_evaluation import SiteRound
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.finishing import MOST_CLASSES
from fedlora.runs.folder import plain
from fedlora.runs.manifest import code_facts
from fedlora.runs.tracking import Tracker, numbers_of_test
from fedlora.server.judged import of_run, remarks
from fedlora.server.state import RunState
from fedlora.training.metrics import score_name

log = logging.getLogger(__name__)


def finish(grid: Grid, federation: Federation, trackers: Sequence[Tracker]) -> dict[str, Any]:
    """Adapters, what they score, and the summary. The summary comes last: where it is, all is there."""
    strategy, settings, home = federation.strategy, federation.settings, federation.folder
    server, state, lines = strategy.server, strategy.memory.state, federation.lines()
    best_line = federation.best(lines)
    chosen: dict[str, RunState] = {"adapter": state}
    if best_line is not None and (found := _best_state(federation, best_line["round"])) is not None:
        chosen["best"] = found
    at_sites = SiteRound()
    if sites_test(settings):
        strategy.measure(grid, "test")
        at_sites = strategy.at_sites
    judged = of_run(lines) if server.rule is not None else None
    for remark in remarks(judged, strategy.policy.clients) if judged is not None else ():
        log.warning("%s", remark)
    results = Results(
        settings,
        strategy.policy,
        server,
        federation.spec,
        federation.at_server,
        federation.base_digest,
        _examples(home),
        judged,
        None if federation.private is None else federation.private.spent(state.round),
    )
    scores: dict[str, dict[str, float]] = {}
    confusion: dict[str, Any] = {}
    for name, one in chosen.items():
        if not server.has_global_model(one.server):
            continue
        if name == "best" and one.round == state.round:
            scores[name], confusion[name] = scores["adapter"], confusion["adapter"]
        elif federation.at_server.test is not None:
            measured = federation.at_server.test.measure(server, one)
            scores[name], confusion[name] = measured.scores, measured.confusion
        else:
            scores[name], confusion[name] = {}, None
        said, by = scores[name], "server"
        if not said and one.round == state.round:  # which is what the sites have measured
            said, by = {k: v for k, v in at_sites.mean().items() if k != "examples"}, "the sites"
        results.write_model(home.server / name, one, said, by if said else "server")
    if settings.run.readouts:
        results.write_readouts(home.server / "clients", state, {n: s.scores for n, s in at_sites.measured.items()})
    for tracker in trackers:
        for name, one in chosen.items():
            tracker.log(one.round, numbers_of_test(scores.get(name, {}), best=name == "best"))
        tracker.close()
    choosing = federation.choosing
    key = "metrics" if choosing is None or choosing.by == "server" else "site_mean"
    scored = [line for line in lines if line.get(key)]
    summary = {
        "federation": settings.id,
        "finished": True,
        "method": server.method.name,
        "rounds": state.round,
        "of": settings.run.rounds,
        "metric": score_name(settings.evaluate.metric),
        "measured_by": None if choosing is None else choosing.by,
        "validation": {
            "last": scored[-1][key] if scored else {},
            "best": best_line[key] if best_line is not None else {},
        },
        "best_round": best_line["round"] if best_line is not None else None,
        "stopped_early": federation.stopped(lines) or getattr(strategy, "out_of_budget", None),
        "test": {"last": scores.get("adapter", {}), "best": scores.get("best", {})},
        "confusion": _confusion(settings, confusion),
        "site_test": {
            "sites": at_sites.facts()["site_metrics"], "mean": at_sites.mean(), "capped": at_sites.capped(),
            "unmeasured": dict(at_sites.unmeasured),
        },
        "sites": taken_part(strategy.policy, lines),
        "refusals": dict(strategy.memory.refusals),
        **({"defence": judged} if judged is not None else {}),
        "seconds": sum(line["seconds"] or 0.0 for line in lines),
        "adapter": "adapter" in scores,
        "versions": code_facts()["versions"],
        "settings": json.loads(settings.travelling()),
        "diagnostics": server.diagnostics(state.server),
    }  # fmt: skip
    if results.spent is not None:
        summary = public_summary(summary, results.spent)
    files.write(home.summary, json.dumps(plain(summary), indent=2, sort_keys=True) + "\n")
    return dict(plain(summary))


def _best_state(federation: Federation, round: int) -> RunState | None:
    """The state of the best round, as it was stored then; None, and said, where it is lost."""
    kind = federation.strategy.server.method.State
    try:
        found = checkpoint.load_newest(
            federation.best_checkpoint, FlowerState, kind, of=federation.settings.id, upto=round, tell=log.warning
        )
    except CheckpointError as error:
        found = None
        log.warning("best/ is not written: %s", error)
    if found is None or found[0] != round:
        log.warning("best/ is not written: the state of round %d, the best one, is not there any more", round)
        return None
    return found[1].state


def _confusion(settings: FederationSettings, found: Mapping[str, Any]) -> dict[str, Any] | None:
    classes = settings.data.labels or []
    if found.get("adapter") is None or len(classes) > MOST_CLASSES:
        return None
    return {"classes": classes, "last": found["adapter"], "best": found.get("best")}


def _examples(home: FederationFolder) -> dict[str, float]:
    """Client -> how many examples it last said it trained on."""
    told = (event for event in read_events(home.events) if isinstance(event, Fated) and event.fate == "trained")
    return {event.client: event.examples for event in told if event.examples is not None}


__all__ = ["finish"]
