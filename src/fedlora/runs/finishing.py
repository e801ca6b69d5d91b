"""The end of a run: test its states, write its adapters, and last of all its summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedlora.core import checkpoint
from fedlora.errors import CheckpointError
from fedlora.privacy.releases import filtered
from fedlora.runs.exported import FOLDERS, Exports, clear_exports, client_adapter, global_adapter
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_run import PrivateRun, guarantee
from fedlora.runs.samples import write_samples
from fedlora.runs.stopping import Line, Ranking
from fedlora.runs.tracking import Trackers
from fedlora.server.judged import over_rounds
from fedlora.server.server import Server
from fedlora.server.state import RunState

log = logging.getLogger("fedlora.runs")
T = TypeVar("T")


def finish(
    prepared: Prepared,
    folder: RunFolder,
    state: RunState,
    of: str,
    *,
    stopped: Mapping[str, Any] | None,
    trackers: Trackers,
    private: PrivateRun | None,
) -> None:
    """Write adapters, the test result and the summary. The summary comes last: if it exists, the run is complete; after
    a kill before it, trackers get everything again.

    of: the run's identity. stopped: why it ends before its last round.
    """
    server, lines, config = prepared.server, folder.metrics(), prepared.config
    best, judged = Ranking(prepared.metric).best(lines), over_rounds(lines)
    labels, spent = prepared.manifest["data"]["label_names"], None if private is None else private.spent(state.round)
    exports = Exports(
        prepared.manifest, config, prepared.spec, prepared.tokenizer, labels,
        privacy=None if spent is None else guarantee(spent),
    )  # fmt: skip
    states = {"last": state}
    if (found := best_state(folder.best_checkpoint, RunState, server.method.State, of, best)) is not None:
        states["best"] = found
    tested, probes = _tested(prepared, states)
    validation = {line["round"]: line["metrics"] for line in lines}
    for name, one in states.items() if server.has_global_model(state.server) else ():
        scores, on, beside = tested[name], "test", validation.get(one.round)
        if not scores and beside:
            scores, on, beside = beside, "validation", None
        place = folder.path / FOLDERS[name]
        exports.write(place, global_adapter(server, one), one.round, scores, on=on, validation=beside)
    each = prepared.test.measure_clients(server, state) if prepared.test and config.evaluate.clients_at_end else {}
    if config.run.readouts or not server.has_global_model(state.server):
        for client in prepared.clients:
            own, place = client_adapter(server, state, client), folder.path / "clients" / client.id
            exports.write(place, own, state.round, each.get(client.id, {}), client=client.id)
    trackers.close({name: (one.round, tested[name]) for name, one in states.items()})
    clear_exports(folder, [client.id for client in prepared.clients], exports.made)
    write_samples(prepared, folder, state)
    for name in ("spectrum", "metric"):  # of an earlier end; new ones are drawn from the summary
        (folder.plots / f"{name}.png").unlink(missing_ok=True)
    last = lines[-1] if lines else {}
    summary = {
        **results(server, state, prepared.metric, lines, best, tested, labels, stopped, judged),
        "clients": len(prepared.clients),
        "target": prepared.target,
        "probes": {name: probes.get(name, {}) for name in FOLDERS},
        "seconds": _summed(lines, "seconds"),
        "bytes": _summed(lines, "bytes"),
        **{name: last.get(name) for name in ("server_rank", "padded_error", "gauge_drift")},
        "refused": sum(len(line["refused"]) for line in lines),
        **({"attack": prepared.manifest["attack"]} if prepared.adversary is not None else {}),
        "clients_at_end": each,
        "exports": sorted({place.relative_to(folder.path).parts[0] for place in exports.made}),
    }
    if spent is not None:
        summary = filtered("summary.json", {**summary, "privacy": spent})
    folder.write_json("summary.json", summary)


def _tested(
    prepared: Prepared, states: Mapping[str, RunState]
) -> tuple[dict[str, Mapping[str, float]], dict[str, Mapping[str, Mapping[str, float]]]]:
    """State -> its scores on the test set; and on each probe. One state under two names is measured once."""
    scores: dict[str, Mapping[str, float]] = {}
    probes: dict[str, Mapping[str, Mapping[str, float]]] = {}
    for name, state in states.items():
        if name == "best" and state.round == states["last"].round:
            scores[name], probes[name] = scores["last"], probes["last"]
            continue
        scores[name] = prepared.test.evaluate(prepared.server, state) if prepared.test else {}
        probes[name] = {probe: each.evaluate(prepared.server, state) for probe, each in prepared.probes.items()}
    return scores, probes


def results(
    server: Server, state: RunState, metric: str, lines: Sequence[Line], best: Line | None,
    tested: Mapping[str, Mapping[str, float]], classes: Sequence[str], stopped: Mapping[str, Any] | None,
    judged: Mapping[str, Any], *, scores: str = "metrics",
) -> dict[str, Any]:  # fmt: skip
    """What the summaries of a run and of a federation have in common.

    validation, test: scores of the "last" round and the "best" one. classes: none for a language model.
    stopped_early: where and why; None if all rounds were played. robust: what a robust rule did to each client
    (`server.judged.over_rounds`), only with one.

    Args:
        best: the best round's line. tested: "last", and "best" if there is one. scores: the table of a line by which
            rounds are compared.
    """
    scored = [line for line in lines if line.get(scores)]
    return {
        "method": server.method.name,
        "rounds": state.round,
        "metric": metric,
        "validation": {"last": scored[-1][scores] if scored else {}, "best": best[scores] if best else {}},
        "best_round": best["round"] if best else None,
        "stopped_early": stopped,
        "test": {name: tested.get(name, {}) for name in FOLDERS},
        "classes": list(classes),
        "diagnostics": server.diagnostics(state.server),
        **({"robust": judged} if judged else {}),
    }


def _summed(lines: Sequence[Mapping[str, Any]], table: str) -> dict[str, Any]:
    """The sum over rounds for each entry of that table."""
    keys = sorted({key for line in lines for key in line[table]})
    return {key: sum(line[table].get(key, 0) for line in lines) for key in keys}


def best_state(folder: Path, kind: type[T], of_method: type, of: str, best: Line | None) -> T | None:
    """The checkpoint of the best round; None without one, and, with a log line, if it is lost.

    folder: of the best rounds' checkpoints. kind: what they hold. of_method: the class of the method's own state. of:
    the run's identity. best: the round's line.
    """
    if best is None:
        return None
    round, why = best["round"], "it is not there"
    try:
        found = checkpoint.load_newest(folder, kind, of_method, of=of, upto=round, tell=log.warning)
        if found is not None and found[0] == round:
            return found[1]
    except CheckpointError as error:
        why = str(error)
    log.warning("best/ is not written: the state of round %d, the best one: %s", round, why)  # all else is complete
    return None
