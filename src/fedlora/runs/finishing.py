"""The end of a run: test its states, write its adapters, and last of all its summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedlora.core import checkpoint
from fedlora.errors import CheckpointError
from fedlora.runs.exported import FOLDERS, Exports, clear_exports, client_adapter, export_folder, global_adapter
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_outputs import private_summary, without_times
from fedlora.runs.private_run import PrivateRun, told
from fedlora.runs.samples import write_samples
from fedlora.runs.stopping import Line, Ranking
from fedlora.runs.tracking import Trackers
from fedlora.server.judged import of_run
from fedlora.server.state import RunState
from fedlora.training.evaluation import Measured

log = logging.getLogger("fedlora.runs")
T = TypeVar("T")
_MOST_CLASSES = 100  # in a stored confusion matrix, whose size is their square


@dataclass(frozen=True)
class Summary:
    """summary.json: a run's results.

    validation, test, probes: scores of the "last" round and the "best" one. stopped_early: where and why; None if all
    rounds were played. seconds, bytes: sums over the rounds. refused: number of uploads. exports: the folders with
    adapters. attack, defence: None if there was none; then omitted from the file.
    """

    method: str
    rounds: int
    clients: int
    target: str
    metric: str
    validation: Mapping[str, Mapping[str, float]]
    best_round: int | None
    stopped_early: Mapping[str, Any] | None
    test: Mapping[str, Mapping[str, float]]
    confusion: Mapping[str, Any] | None
    probes: Mapping[str, Mapping[str, Mapping[str, float]]]
    clients_at_end: Mapping[str, Mapping[str, float]]
    clients_at_end_common: Mapping[str, Mapping[str, float]]
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    server_rank: float | None
    padded_error: float | None
    gauge_drift: Mapping[str, float] | None
    gauge_drift_as_sent: Mapping[str, float] | None
    refused: int
    exports: Sequence[str]
    diagnostics: Mapping[str, Any]
    attack: Mapping[str, Any] | None = None
    defence: Mapping[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """The file's content."""
        return {
            key: value for key, value in vars(self).items() if value is not None or key not in ("attack", "defence")
        }


@dataclass(frozen=True)
class _Tested:
    """A state, with its measurements on the test set and on each probe."""

    state: RunState
    measured: Measured
    probes: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, prepared: Prepared, state: RunState) -> _Tested:
        measured = prepared.test.measure(prepared.server, state) if prepared.test else Measured({}, None)
        probes = {name: evaluator.evaluate(prepared.server, state) for name, evaluator in prepared.probes.items()}
        return cls(state, measured, probes)


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
    """Write adapters, the test result and the summary. The summary comes last: if it exists, the run is complete.

    of: the run's identity. stopped: why it ends before its last round.
    """
    server, lines = prepared.server, folder.metrics()
    best = Ranking(prepared.metric).best(lines)
    judged = of_run(lines) if server.rule is not None else None
    spent = None if private is None else private.spent(state.round)
    exports = Exports(
        prepared.manifest, prepared.config, prepared.spec, prepared.tokenizer, prepared.manifest["data"]["labels"],
        export_folder(prepared.tokenizer), privacy=None if spent is None else told(spent), judged=judged,
    )  # fmt: skip
    tested = {"last": _Tested.of(prepared, state)}
    found = best_state(folder.best_checkpoint, RunState, server.method.State, of, best)
    if found is not None:
        tested["best"] = tested["last"] if found.round == state.round else _Tested.of(prepared, found)
    validation = {line["round"]: line["metrics"] for line in lines}
    if server.has_global_model(state.server):
        for name, one in tested.items():
            round, scores, on = one.state.round, one.measured.scores, "test"
            if not scores and validation.get(round):
                scores, on = validation[round], "validation"
            beside = validation.get(round) if on == "test" else None
            place = folder.path / FOLDERS[name]
            exports.write(place, global_adapter(server, one.state), round, scores, on=on, validation=beside)
    asked = prepared.config.evaluate.clients_at_end
    each = prepared.test.measure_clients(server, state) if prepared.test and asked else {}
    common = prepared.test.measure_clients(server, state, common=True) if prepared.test and asked == "both" else {}
    if prepared.config.run.readouts or not server.has_global_model(state.server):
        for client in prepared.clients:
            own = client_adapter(server, state, client)
            place = folder.path / "clients" / client.id
            exports.write(place, own, state.round, each.get(client.id, {}), client=client.id)
    # before the summary: if a kill interrupts this, a resume reports it again
    trackers.close({name: (one.state.round, one.measured.scores) for name, one in tested.items()})
    clear_exports(folder, prepared.tokenizer, [client.id for client in prepared.clients], exports.made)
    samples = write_samples(prepared, folder, state)
    parts = sorted({place.relative_to(folder.path).parts[0] for place in exports.made})
    summary = _summary(prepared, state, lines, best, tested, stopped, each, common, parts, judged).plain()
    made = [path for place in exports.made for path in place.rglob("*") if path.is_file()]
    if spent is not None:
        summary = private_summary(summary, spent, "manifest.json", "metrics.jsonl", "summary.json")
    folder.finish(summary, [*samples, *made])
    without_times(folder, prepared.config)


def _summary(
    prepared: Prepared, state: RunState, lines: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None,
    tested: Mapping[str, _Tested], stopped: Mapping[str, Any] | None, each: Mapping[str, Mapping[str, float]],
    common: Mapping[str, Mapping[str, float]], exports: Sequence[str], judged: Mapping[str, Any] | None,
) -> Summary:  # fmt: skip
    """each, common: `finish`'s measurements of the clients, on their own test sets and on the common one."""
    server = prepared.server
    last = lines[-1] if lines else {}
    scored = [line for line in lines if line["metrics"]]
    return Summary(
        method=server.method.name,
        rounds=state.round,
        clients=len(prepared.clients),
        target=prepared.target,
        metric=prepared.metric,
        validation={"last": scored[-1]["metrics"] if scored else {}, "best": best["metrics"] if best else {}},
        best_round=best["round"] if best else None,
        stopped_early=stopped,
        test=_both(tested, lambda one: one.measured.scores),
        confusion=confusion(prepared.manifest["data"]["labels"], {name: one.measured for name, one in tested.items()}),
        probes=_both(tested, lambda one: one.probes),
        clients_at_end=each,
        clients_at_end_common=common,
        seconds=_summed(lines, "seconds"),
        bytes=_summed(lines, "bytes"),
        server_rank=last.get("server_rank"),
        padded_error=last.get("padded_error"),
        gauge_drift=last.get("gauge_drift"),
        gauge_drift_as_sent=last.get("gauge_drift_as_sent"),
        refused=sum(len(line["refused"]) for line in lines),
        exports=exports,
        diagnostics=server.diagnostics(state.server),
        attack=prepared.manifest["attack"] if prepared.adversary is not None else None,
        defence=judged,
    )


def _both(tested: Mapping[str, _Tested], what: Callable[[_Tested], Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: what(tested[name]) if name in tested else {} for name in FOLDERS}


def _summed(lines: Sequence[Mapping[str, Any]], table: str) -> dict[str, Any]:
    """The sum over rounds for each entry of that table."""
    keys = sorted({key for line in lines for key in line[table]})
    return {key: sum(line[table].get(key, 0) for line in lines) for key in keys}


def confusion(classes: Sequence[str], tested: Mapping[str, Measured]) -> dict[str, Any] | None:
    """The test set's confusion matrices with class names: a row is a true class, a column a predicted one. None for a
    language model, without a test set, and for more than 100 classes. tested: "last", and "best" if there is one."""
    found = {name: tested[name].confusion if name in tested else None for name in FOLDERS}
    return None if found["last"] is None or len(classes) > _MOST_CLASSES else {"classes": classes, **found}


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
