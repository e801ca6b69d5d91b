"""Observers that process each round a run has played, in order: kept uploads, the log, checkpoints.

An observer is told of a round before anybody outside is. `diagnosed` makes what they look at: the round's record with
its diagnosis, as one line of metrics.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from fedlora.adapters.uploads import write_upload
from fedlora.analysis.audit import gauge_drift, padded_average_error
from fedlora.core import checkpoint
from fedlora.core.folders import ANY_FOLDER, replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.methods.padded_average import PaddedAverage
from fedlora.runs.attack_section import attack_note
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_outputs import private_line
from fedlora.runs.private_run import PrivateRun
from fedlora.runs.stopping import Ranking
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord


@dataclass(frozen=True)
class Played:
    """A round for observers. before: the state it began from. line: for metrics.jsonl. last: no other round follows."""

    before: RunState
    record: RoundRecord
    line: Mapping[str, Any]
    last: bool


class Observer(Protocol):
    """Processes rounds, one after the other."""

    def see(self, played: Played) -> None: ...


def diagnosed(
    prepared: Prepared, before: RunState, record: RoundRecord, *, last: bool, private: PrivateRun | None
) -> Played:
    """The round with the diagnosis of its uploads; for a private run, only what may be released."""
    began = time.perf_counter()
    padded = _padded_error(prepared, before, record)
    if padded is not None:
        record = replace(record, seconds={**record.seconds, "diagnose": time.perf_counter() - began})
    line = describe(record, padded_error=padded, gauge=_gauge(prepared, record) if last else None)
    if private is not None:
        line = private_line(line, private.spent(record.round))
    return Played(before, record, line, last)


def describe(
    record: RoundRecord,
    *,
    padded_error: float | None = None,
    gauge: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A round as plain numbers: one line of metrics.jsonl.

    padded_error: error of zero-padded factor averaging on this round's uploads, None if not computed. gauge: the gauge
    check's result, if the round was checked.
    """
    tally = record.state.server.tally
    judged = tally.judged if tally is not None else None
    return {
        "round": record.round,
        "loss": record.loss,
        "losses": dict(record.losses),
        "examples": dict(record.examples),
        "weights": dict(record.weights),
        "refused": dict(record.refused),
        "metrics": dict(record.metrics),
        "seconds": dict(record.seconds),
        "bytes": {**asdict(record.bytes), "total": record.bytes.total},
        "server_rank": record.server_rank,
        "padded_error": padded_error,
        "gauge_drift": dict(gauge) if gauge is not None else None,
        **({"attack": asdict(record.attacked)} if record.attacked is not None else {}),
        **({"robust": judged.plain()} if judged is not None else {}),
    }


class Uploads:
    """Keeps clients' uploads as run.keep_uploads says."""

    def __init__(self, prepared: Prepared, folder: RunFolder) -> None:
        self._prepared, self._folder = prepared, folder

    def see(self, played: Played) -> None:
        kept = self._prepared.config.run.keep_uploads
        if kept == "all" or (played.last and kept == "last"):
            _keep_uploads(self._prepared, self._folder, played.before, played.record)


class Log:
    """Writes metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def see(self, played: Played) -> None:
        self._folder.append_metrics(played.line)


class Checkpoints:
    """Keeps the run.keep_checkpoints newest states, and the best one by validation. of: the run's identity."""

    def __init__(self, prepared: Prepared, folder: RunFolder, of: str, lines: Sequence[Mapping[str, Any]]) -> None:
        self._run, self._ranking, self._folder, self._of = prepared.config.run, Ranking(prepared.metric), folder, of
        self._best = self._ranking.best(lines)

    def see(self, played: Played) -> None:
        state = played.record.state
        if self._ranking.better(played.line, self._best):
            self._best = played.line
            checkpoint.save(self._folder.best_checkpoint, state.round, state, of=self._of, keep=1)
        if played.last or state.round % self._run.checkpoint_every == 0:
            self.keep(state)

    def keep(self, state: RunState) -> None:
        checkpoint.save(self._folder.checkpoints, state.round, state, of=self._of, keep=self._run.keep_checkpoints)


def _keep_uploads(prepared: Prepared, folder: RunFolder, before: RunState, record: RoundRecord) -> None:
    """Write each accepted upload as a PEFT directory, completed by the frozen parts it was trained with.

    A round is stored as a whole or not at all.
    """
    if not record.uploads:
        return
    with replacing_folder(folder.uploads(record.round), force=True, kind=ANY_FOLDER) as building:
        for upload in record.uploads:
            download = prepared.server.download(before.server, upload.client)
            modules = {}
            for name, came in download.adapter.modules.items():
                sent = upload.adapter.modules[name].tensors() if name in upload.adapter.modules else {}
                modules[name] = LoRA(**(came.tensors() | sent))
            heads = {**download.adapter.heads, **upload.adapter.heads}
            whole = replace(upload, adapter=Adapter(modules, heads))
            more = attack_note(prepared.adversary, upload.client.id)
            write_upload(building / upload.client.id, whole, prepared.spec, round=record.round, more=more)


def _padded_error(prepared: Prepared, before: RunState, record: RoundRecord) -> float | None:
    """The error that zero-padded factor averaging would have made; None if a factor is not shared, or the server keeps
    no uploads."""
    if not prepared.server.roles(before.server).both_shared or not record.uploads:
        return None
    return padded_average_error(before.server, record.uploads, record.weights)


def _gauge(prepared: Prepared, record: RoundRecord) -> dict[str, float] | None:
    """The gauge check on this round's real uploads, in float64: this run's method and zero-padded factor averaging."""
    roles = prepared.server.roles(record.state.server)
    if not roles.both_shared or not record.uploads:
        return None
    bare = [replace(upload, adapter=Adapter(upload.adapter.modules)) for upload in record.uploads]
    own, padded = replace(prepared.server, heads="frozen"), Server(PaddedAverage(), heads="frozen")
    return {
        own.method.name: gauge_drift(own, record.state.server, bare),
        "padded-average": gauge_drift(padded, padded.init(prepared.seed_adapter), bare),
    }
