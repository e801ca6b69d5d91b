"""What a run stores of each round: a line of metrics.jsonl with a diagnosis of the uploads, the uploads, and states."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedlora.adapters.uploads import write_upload
from fedlora.analysis.audit import gauge_drift, padded_average_error
from fedlora.core import checkpoint
from fedlora.core.folders import ANY_FOLDER, replacing_folder
from fedlora.core.lora import Adapter, LoRA
from fedlora.methods.padded_average import PaddedAverage
from fedlora.runs.attack_section import attack_note
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import Prepared
from fedlora.runs.stopping import Ranking
from fedlora.server.server import Server
from fedlora.server.state import RunState
from fedlora.simulation import RoundRecord


def diagnosed(prepared: Prepared, before: RunState, record: RoundRecord, *, last: bool) -> dict[str, Any]:
    """A round's line, with its diagnosis: nothing of it if a factor is not shared, or the server keeps no uploads.
    before: the state it began from. last: no other round follows, so the gauge check is made."""
    padded, gauge, began = None, None, time.perf_counter()
    if prepared.server.roles(before.server).both_shared and record.uploads:
        padded = padded_average_error(before.server, record.uploads, record.weights)
        record = replace(record, seconds={**record.seconds, "diagnose": time.perf_counter() - began})
    if last and prepared.server.roles(record.state.server).both_shared and record.uploads:
        gauge = _gauge(prepared, record)
    return describe(record, padded_error=padded, gauge=gauge)


def describe(
    record: RoundRecord, *, padded_error: float | None = None, gauge: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """A round as plain numbers: one line of metrics.jsonl. padded_error: the error of zero-padded factor averaging on
    its uploads. gauge: the gauge check's result."""
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


def _gauge(prepared: Prepared, record: RoundRecord) -> dict[str, float]:
    """The gauge check on this round's real uploads, in float64: this run's method and zero-padded factor averaging."""
    bare = [replace(upload, adapter=Adapter(upload.adapter.modules)) for upload in record.uploads]
    own, padded = replace(prepared.server, heads="frozen"), Server(PaddedAverage(), heads="frozen")
    return {
        own.method.name: gauge_drift(own, record.state.server, bare),
        "padded-average": gauge_drift(padded, padded.init(prepared.seed_adapter), bare),
    }


def keep_uploads(prepared: Prepared, folder: RunFolder, before: RunState, record: RoundRecord) -> None:
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


class Checkpoints:
    """Keeps the run.keep_checkpoints newest states, and the best one by validation.

    of: the run's identity. lines: of the rounds before.
    """

    def __init__(self, prepared: Prepared, folder: RunFolder, of: str, lines: Sequence[Mapping[str, Any]]) -> None:
        self._run, self._ranking, self._folder, self._of = prepared.config.run, Ranking(prepared.metric), folder, of
        self._best = self._ranking.best(lines)

    def see(self, line: Mapping[str, Any], state: RunState, *, last: bool) -> None:
        """Store what is to be kept of a round."""
        if self._ranking.better(line, self._best):
            self._best = line
            checkpoint.save(self._folder.best_checkpoint, state.round, state, of=self._of, keep=1)
        if last or state.round % self._run.checkpoint_every == 0:
            self.keep(state)

    def keep(self, state: RunState) -> None:
        checkpoint.save(self._folder.checkpoints, state.round, state, of=self._of, keep=self._run.keep_checkpoints)
