"""A run from start to end: go through the rounds and leave everything in its folder.

`execute(prepared, folder)` is a generator of rounds that stores as it goes. Killed at any moment, `execute` on the same
folder continues with the same bits.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedlora.adapters.io import pad_rank
from fedlora.adapters.uploads import write_upload
from fedlora.analysis.audit import gauge_drift, padded_average_error, storing_drift
from fedlora.client import receive
from fedlora.core import checkpoint
from fedlora.core.folders import replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import ClientMemory, as_pruned
from fedlora.errors import BudgetSpent, CheckpointError, counted
from fedlora.methods.padded_average import PaddedAverage
from fedlora.runs import resuming
from fedlora.runs.attack_section import attack_note
from fedlora.runs.card import model_card
from fedlora.runs.crew import crewed
from fedlora.runs.exported import export_folder, write_export
from fedlora.runs.folder import RunFolder, plain
from fedlora.runs.identity import identity
from fedlora.runs.own_exports import UPLOADS, check_replaceable, clear_exports
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_outputs import private_line, private_summary, shown_config, without_times
from fedlora.runs.private_releases import begin, keep_config, read_private
from fedlora.runs.private_run import PrivateRun, check_affordable, opened_private, told
from fedlora.runs.readouts import global_adapter
from fedlora.runs.samples import write_samples
from fedlora.runs.tracking import Tracker, TrackerName, check_trackers, make_tracker, numbers, numbers_of_test
from fedlora.server.judged import of_run
from fedlora.server.server import Server, start
from fedlora.server.state import RunState
from fedlora.simulation import ClientDone, RoundRecord, play
from fedlora.training.evaluation import Measured
from fedlora.training.metrics import best_of, is_better
from fedlora.training.prompting import is_jinja

log = logging.getLogger("fedlora.runs")
MOST_CLASSES = 100  # in a stored confusion matrix, whose size grows with their square


def execute(prepared: Prepared, folder: RunFolder, *, resume: bool = False) -> Iterator[RoundRecord]:
    """Run all rounds that are still to do, storing each; then write the adapters, the test result and the summary.

    Where `evaluate.patience` ends the run early, the round that it ends with is the last in every respect.

    Raises:
        ConfigError: the folder holds files that are no run's, or going on would replace what somebody put into its
            adapters; nothing is written.
        CheckpointError: it holds a run and `resume` is off, or one of another configuration, or one whose states are
            gone.
        Whatever `simulate` raises; all finished rounds are stored by then.

    Example:
        >>> prepared = prepare(load_config(Path("config.toml"), ["run.rounds=1"]))
        >>> [record.round for record in execute(prepared, RunFolder(Path("runs/one")))]
        [1]
    """
    for event in execute_events(prepared, folder, resume=resume):
        if isinstance(event, RoundRecord):
            yield event


def execute_events(
    prepared: Prepared, folder: RunFolder, *, resume: bool = False
) -> Iterator[ClientDone | RoundRecord]:
    """`execute`, with an event for each client that is done as well: for a progress bar."""
    folder.check_place()
    if not folder.exists():
        check_affordable(prepared)  # before there is a folder
    with crewed(prepared) as crew, folder.held():
        yield from _executed(crew, folder, resume)


def _executed(prepared: Prepared, folder: RunFolder, resume: bool) -> Iterator[ClientDone | RoundRecord]:
    config = prepared.config
    check_trackers(config.run.track)
    resumed = folder.exists()
    state, of = _opened(prepared, folder, resume)
    private = opened_private(prepared, folder, state.server)
    if private is not None:
        prepared = replace(prepared, server=private.server)
    server = prepared.server
    lines, link = folder.rewind(state.round, of)
    trackers = [_tracker(name, prepared, folder, lines, resumed) for name in config.run.track]
    metric, patience = prepared.metric, config.evaluate.stopping()
    best_line = best_of(metric, [line for line in lines if line["metrics"]], lambda line: line["metrics"][metric])
    best = best_line["metrics"][metric] if best_line else None
    stopped = patience.stop(lines, config.run.rounds) if patience else None
    events = play(
        server,
        prepared.clients,
        prepared.workers,
        state,
        rounds=config.run.rounds if stopped is None else state.round,
        participation=config.run.participation if private is None else 1.0,  # a private server draws itself
        seed=config.run.seed,
        evaluator=prepared.validation,
        evaluate_every=config.evaluate.every,
        form=config.server.upload,
        hooks=config.server.hooks(config.run.seed),
        adversary=prepared.adversary,
    )
    for event in events if private is None else _until_spent(events, state.round):
        if event is None:
            stopped = _spent(state.round, config.run.rounds, private)
            break
        if isinstance(event, ClientDone):
            yield event
            continue
        record = event
        before, state = state, record.state
        if patience:
            seen = [*lines, plain({"round": record.round, "metrics": record.metrics})]
            stopped = patience.stop(seen, config.run.rounds)
        last = state.round == config.run.rounds or stopped is not None
        if config.run.keep_uploads == "all" or (last and config.run.keep_uploads == "last"):
            _keep_uploads(prepared, folder, before, record)
        began = time.perf_counter()
        padded = _padded_error(prepared, before, record)
        if padded is not None:
            record = replace(record, seconds={**record.seconds, "diagnose": time.perf_counter() - began})
        line = describe(record, padded_error=padded, gauge=_gauge(prepared, record) if last else None)
        if private is not None:
            line = private_line(line, private.spent(state.round))
        link = folder.append_metrics(line, link)
        lines.append(plain(line))
        for tracker in trackers:
            tracker.log(record.round, numbers(line))
        if record.metrics and is_better(metric, record.metrics[metric], best):
            best = record.metrics[metric]
            checkpoint.save(folder.best_checkpoint, state.round, state, of=of, keep=1)
        if last or state.round % config.run.checkpoint_every == 0:
            checkpoint.save(folder.checkpoints, state.round, state, of=of, keep=config.run.keep_checkpoints)
        yield record
        if last:
            break
    if stopped is not None and private is not None:
        checkpoint.save(folder.checkpoints, state.round, state, of=of, keep=config.run.keep_checkpoints)
    _finish(prepared, folder, state, of, stopped, trackers, private)


def _until_spent(events: Iterator[ClientDone | RoundRecord], done: int) -> Iterator[ClientDone | RoundRecord | None]:
    """The events of a private run, and None where the population's budget has no room for another round; where there
    was none for its first, the error itself. done: rounds before."""
    try:
        for event in events:
            done += 1
            yield event
    except BudgetSpent:
        if not done:
            raise
        yield None


def _spent(round: int, rounds: int, private: PrivateRun | None) -> dict[str, Any]:
    """What a summary says of a run that the population's budget ended: of the ledger alone, which is public."""
    why = (
        "another round would have passed the budget of privacy.population: others have charged its ledger meanwhile. "
        "`fedlora privacy LEDGER --budget` raises it, for good and for all to see; then --resume goes on"
    )
    if private is not None and private.releases.was_charged(round + 1):
        why = (
            f"this run's own round {round + 1} was released and charged already, and its noised sum is not in this "
            f"folder: the folder is a copy, or was set back. To release another one is beyond the budget. Go on in the "
            f"folder that has it"
        )
    return {"round": round, "of": rounds, "best_round": None, "best": None, "why": why}


def _tracker(
    name: TrackerName, prepared: Prepared, folder: RunFolder, lines: Sequence[Mapping[str, Any]], resumed: bool
) -> Tracker:
    """A tracker that knows all rounds before: after a resume it is told them again."""
    tracker = make_tracker(name, folder.path, json.loads(shown_config(prepared.config).canonical()), anew=resumed)
    for line in lines:
        tracker.log(line["round"], numbers(line))
    return tracker


def describe(
    record: RoundRecord,
    *,
    padded_error: float | None = None,
    gauge: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """A round as plain numbers: one line of metrics.jsonl.

    padded_error: of zero-padded factor averaging on this round's uploads, None where it has none. gauge: what the gauge
    check found, where the round was checked.
    """
    tally = record.state.server.tally
    judged = tally.judged if tally is not None else None
    return {
        "round": record.round,
        "loss": record.loss,
        "losses": dict(record.losses),
        "weights": dict(record.weights),
        "refused": dict(record.refused),
        "metrics": dict(record.metrics),
        "seconds": dict(record.seconds),
        "bytes": {**asdict(record.bytes), "total": record.bytes.total},
        "server_rank": record.server_rank,
        "padded_error": padded_error,
        "gauge_drift": dict(gauge["float64"]) if gauge is not None else None,
        "gauge_drift_as_sent": dict(gauge["as sent"]) if gauge is not None else None,
        **({"attack": asdict(record.attacked)} if record.attacked is not None else {}),
        **({"defence": judged.plain()} if judged is not None else {}),
    }


def _identity(prepared: Prepared, folder: RunFolder) -> str:
    if prepared.secrets is None:
        return identity(prepared.config, prepared.manifest)
    return identity(prepared.config, prepared.secrets, str(read_private(folder, "run.json").get("secret")))


def _opened(prepared: Prepared, folder: RunFolder, resume: bool) -> tuple[RunState, str]:
    """The state to go on from, the newest sound checkpoint or a fresh start; and the run's identity."""
    fresh = start(prepared.server, prepared.seed_adapter)
    if not folder.exists():
        if prepared.secrets is not None:
            begin(folder, prepared.secrets)
            keep_config(folder, prepared.config.canonical())
        of = _identity(prepared, folder)
        folder.create(shown_config(prepared.config).canonical(), {**prepared.manifest, "run": of})
        return fresh, of
    if not resume:
        raise CheckpointError(
            f"{folder.path} already holds a run; add --resume to go on with it, or choose another --out."
        )
    changed = resuming.changes(folder, prepared.config)
    if prepared.secrets is None:
        resuming.check_content(folder, prepared.manifest)
    else:
        resuming.check_content(folder, json.loads(json.dumps(prepared.secrets)), read_private(folder, "content.json"))
    of = _identity(prepared, folder)
    resuming.check_manifest(folder, of)
    if not folder.finished() and os.path.lexists(folder.sums):
        log.warning("%s is gone, and the run had ended: its results are made again", folder.path / "summary.json")
    kind = prepared.server.method.State
    loaded = checkpoint.load_newest(folder.checkpoints, RunState, kind, of=of, tell=log.warning)
    ended = folder.ended()
    if loaded is None and ended:
        raise CheckpointError(
            f"{folder.path} holds a run that has ended after {counted(ended, 'round')}, and checkpoints/ has no state "
            f"of it: going on would train all of them again. Put checkpoints/ back, or choose another --out."
        )
    state = loaded[1] if loaded else fresh
    _check_best(prepared, folder, of, folder.upto(state.round, of)[0])
    if (logged := len(folder.metrics())) > state.round:
        newest = f"the newest state in checkpoints/ is of round {state.round}" if loaded else "checkpoints/ has none"
        log.warning("%s are logged, and %s: later ones are played again", counted(logged, "round"), newest)
    check_replaceable(prepared, folder, state)
    if folder.finished():
        folder.lacking()  # raises where a file of the result is another one by now
    if changed:
        resuming.settle(folder, prepared.config, prepared.manifest)
    folder.sweep()
    return state, of


def _check_best(prepared: Prepared, folder: RunFolder, of: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """checkpoints/best/ has the best state of these rounds; where it has not, it gets the one in checkpoints/.

    Raises:
        CheckpointError: neither of them has it.
    """
    metric, kind = prepared.metric, prepared.server.method.State
    best = best_of(metric, [line for line in lines if line["metrics"]], lambda line: line["metrics"][metric])
    if best is None:
        return
    round, why = best["round"], "none is there"
    checkpoint.newest_round(folder.best_checkpoint)  # where a directory has its place, it cannot be put back
    try:
        found = checkpoint.load_newest(folder.best_checkpoint, RunState, kind, of=of, tell=log.warning)
        if found is not None and (found[0] == round or found[0] > len(lines)):  # a later one is made again, as it was
            return
        why = why if found is None else f"that of round {found[0]} is there"
    except CheckpointError as error:
        why = str(error)
    said = f"{folder.best_checkpoint}/ lacks the state of round {round}, the best one so far by {metric} ({why})"
    found = checkpoint.load_newest(folder.checkpoints, RunState, kind, of=of, upto=round, tell=log.warning)
    if found is None or found[0] != round:
        raise CheckpointError(f"{said}, and checkpoints/ has it no more. Restore it, or choose another --out.")
    log.warning("%s: it is taken from checkpoints/", said)
    checkpoint.save(folder.best_checkpoint, round, found[1], of=of, keep=1)


def _keep_uploads(prepared: Prepared, folder: RunFolder, before: RunState, record: RoundRecord) -> None:
    """Each accepted upload, completed by the frozen parts that it was trained with, as a PEFT directory.

    A round is stored as a whole or not at all.
    """
    if not record.uploads:
        return
    with replacing_folder(folder.uploads(record.round), force=True, kind=UPLOADS) as building:
        for upload in record.uploads:
            download = prepared.server.download(before.server, upload.client)
            modules = {}
            for name, came in download.adapter.modules.items():
                sent = upload.adapter.modules[name].tensors() if name in upload.adapter.modules else {}
                modules[name] = pad_rank(LoRA(**(came.tensors() | sent)), 1)
            heads = {**download.adapter.heads, **upload.adapter.heads}
            whole = replace(upload, adapter=Adapter(modules, heads))
            more = attack_note(prepared.adversary, upload.client.id)
            write_upload(building / upload.client.id, whole, prepared.spec, round=record.round, more=more)


def _padded_error(prepared: Prepared, before: RunState, record: RoundRecord) -> float | None:
    """The error that zero-padded factor averaging would have made; None where a factor stays at home, or the server
    keeps no uploads."""
    if not prepared.server.roles(before.server).both_shared or not record.uploads:
        return None
    return padded_average_error(before.server, record.uploads, record.weights)


def _gauge(prepared: Prepared, record: RoundRecord) -> dict[str, dict[str, float]] | None:
    """The gauge check on this round's real uploads: this run's method beside zero-padded factor averaging.

    "float64": of the methods, on float64 copies. "as sent": of the server, on the uploads in their dtypes, and beside
    it how far storing them in other coordinates moves the mean itself ("storing").
    """
    roles = prepared.server.roles(record.state.server)
    if not roles.both_shared or not record.uploads:
        return None
    bare = [replace(upload, adapter=Adapter(upload.adapter.modules)) for upload in record.uploads]
    own, padded = replace(prepared.server, heads="frozen"), Server(PaddedAverage(), heads="frozen")
    begun = padded.init(prepared.seed_adapter)
    tally = record.weights
    found = {}
    for kind, as_sent in (("float64", False), ("as sent", True)):
        found[kind] = {
            own.method.name: gauge_drift(own, record.state.server, bare, as_sent=as_sent),
            "padded-average": gauge_drift(padded, begun, bare, as_sent=as_sent),
        }
    found["as sent"]["storing"] = storing_drift(bare, tally)
    return found


def _finish(
    prepared: Prepared,
    folder: RunFolder,
    state: RunState,
    of: str,
    stopped: Mapping[str, Any] | None,
    trackers: Sequence[Tracker],
    private: PrivateRun | None = None,
) -> None:
    """Adapters, the test result and the summary. The summary comes last: where it is, the run is complete."""
    server, lines = prepared.server, folder.metrics()
    scored = [line for line in lines if line["metrics"]]
    best_line = best_of(prepared.metric, scored, lambda line: line["metrics"][prepared.metric])
    loaded = _best_state(prepared, folder, of, best_line["round"]) if best_line else None
    states = {"adapter": state} | ({"best": loaded[1]} if loaded else {})
    measured: dict[str, Measured] = {}
    results: dict[str, dict[str, float]] = {}
    probes: dict[str, dict[str, dict[str, float]]] = {}
    exported: list[Path] = []
    template = prepared.config.data.prompting()
    spent = None if private is None else private.spent(state.round)
    jinja = template if template is not None and is_jinja(template) else None
    kind = export_folder(prepared.tokenizer)

    judged = of_run(lines) if server.rule is not None else None

    def export(place: Path, adapter: Adapter, card: str) -> None:
        """The tokenizer is the same everywhere: the later folders have links to the first one's."""
        first, labels = exported[0] if exported else None, prepared.manifest["data"]["labels"]
        write_export(
            place, adapter, prepared.spec, prepared.tokenizer, labels, card, like=first, chat_template=jinja, kind=kind
        )
        exported.append(place)

    for name, chosen in states.items():
        if name == "best" and chosen.round == state.round:  # the same state
            measured[name], results[name], probes[name] = measured["adapter"], results["adapter"], probes["adapter"]
        else:
            measured[name] = prepared.test.measure(server, chosen) if prepared.test else Measured({}, None)
            results[name] = measured[name].scores
            probes[name] = {probe: evaluator.evaluate(server, chosen) for probe, evaluator in prepared.probes.items()}
        if server.has_global_model(chosen.server):
            adapter = global_adapter(server, chosen)
            card = model_card(prepared.manifest, prepared.config, adapter, chosen.round, results[name],
                              privacy=None if spent is None else told(spent), judged=judged)  # fmt: skip
            export(folder.path / name, adapter, card)
    asked = prepared.config.evaluate.clients_at_end
    each = prepared.test.measure_clients(server, state) if prepared.test and asked else {}
    common = prepared.test.measure_clients(server, state, common=True) if prepared.test and asked == "both" else {}
    if prepared.config.run.readouts or not server.has_global_model(state.server):
        for client in prepared.clients:
            memory = state.clients.get(client.id, ClientMemory())
            download = server.download(state.server, as_pruned(client, memory))
            own, scores = receive(download, memory.kept).folded(), each.get(client.id, {})
            card = model_card(prepared.manifest, prepared.config, own, state.round, scores, client=client.id,
                              privacy=None if spent is None else told(spent), judged=judged)  # fmt: skip
            export(folder.path / "clients" / client.id, own, card)
    for tracker in trackers:  # before the summary: what is lost by a kill here is told again
        for name, chosen in states.items():
            tracker.log(chosen.round, numbers_of_test(results[name], best=name == "best"))
        tracker.close()
    clear_exports(prepared, folder, exported)
    made = write_samples(prepared, folder, state)
    summary = {
        "method": server.method.name,
        "rounds": state.round,
        "clients": len(prepared.clients),
        "target": prepared.target,
        "metric": prepared.metric,
        "validation": {
            "last": scored[-1]["metrics"] if scored else {},
            "best": best_line["metrics"] if best_line else {},
        },
        "best_round": best_line["round"] if best_line else None,
        "stopped_early": stopped,
        "test": {"last": results["adapter"], "best": results.get("best", {})},
        "confusion": _confusion(prepared, measured),
        "probes": {"last": probes["adapter"], "best": probes.get("best", {})},
        "clients_at_end": each,
        "clients_at_end_common": common,
        "seconds": {phase: sum(line["seconds"].get(phase, 0.0) for line in lines) for phase in _phases(lines)},
        "bytes": {key: sum(line["bytes"][key] for line in lines) for key in (lines[0]["bytes"] if lines else ())},
        "server_rank": lines[-1]["server_rank"] if lines else None,
        "padded_error": lines[-1]["padded_error"] if lines else None,
        "gauge_drift": lines[-1]["gauge_drift"] if lines else None,
        "gauge_drift_as_sent": lines[-1].get("gauge_drift_as_sent") if lines else None,
        "refused": sum(len(line["refused"]) for line in lines),
        **({"attack": prepared.manifest["attack"]} if prepared.adversary is not None else {}),
        **({"defence": judged} if judged is not None else {}),
        "exports": sorted({place.relative_to(folder.path).parts[0] for place in exported}),
        "diagnostics": server.diagnostics(state.server),
    }
    made += [path for place in exported for path in place.rglob("*") if path.is_file()]
    folder.finish(summary if spent is None else private_summary(summary, spent), made)
    without_times(folder, prepared.config)


def _confusion(prepared: Prepared, measured: Mapping[str, Measured]) -> dict[str, Any] | None:
    """The test set's confusion matrices with the classes' names: a row is a true class, a column what it was taken for.
    None for a language model, without a test set, and of more than 100 classes."""
    classes = prepared.manifest["data"]["labels"]
    if measured["adapter"].confusion is None or len(classes) > MOST_CLASSES:
        return None
    best = measured.get("best")
    return {"classes": classes, "last": measured["adapter"].confusion, "best": best.confusion if best else None}


def _phases(lines: list[dict[str, Any]]) -> list[str]:
    return sorted({phase for line in lines for phase in line["seconds"]})


def _best_state(prepared: Prepared, folder: RunFolder, of: str, round: int) -> tuple[int, RunState] | None:
    kind, why = prepared.server.method.State, f"the state of round {round} is not there"
    try:
        found = checkpoint.load_newest(folder.best_checkpoint, RunState, kind, of=of, upto=round, tell=log.warning)
        if found is not None and found[0] == round:
            return found
    except CheckpointError as error:
        why = str(error)
    log.warning("best/ is not written: %s", why)  # the run itself is whole
    return None
