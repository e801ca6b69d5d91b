"""The end of a run: test its states, write its adapters, and last of all its summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.core import checkpoint
from fedlora.core.lora import Adapter
from fedlora.errors import CheckpointError
from fedlora.runs.card import model_card
from fedlora.runs.exported import clear_exports, client_adapter, export_folder, global_adapter, write_export
from fedlora.runs.folder import RunFolder
from fedlora.runs.observers import Trackers
from fedlora.runs.preparation import Prepared
from fedlora.runs.private_outputs import private_summary, without_times
from fedlora.runs.private_run import PrivateRun, told
from fedlora.runs.samples import write_samples
from fedlora.runs.stopping import Ranking
from fedlora.server.judged import of_run
from fedlora.server.state import RunState
from fedlora.training.evaluation import Measured
from fedlora.training.prompting import is_jinja

log = logging.getLogger("fedlora.runs")
MOST_CLASSES = 100  # in a stored confusion matrix, whose size is their square


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


class _Exports:
    """A run's adapter folders, each with its card. They share one tokenizer, so later ones link its files.

    privacy: a private run's guarantee, in words. judged: what a robust rule did.
    """

    def __init__(
        self, prepared: Prepared, folder: RunFolder, privacy: str | None, judged: Mapping[str, Any] | None
    ) -> None:
        self._prepared, self._folder, self._privacy, self._judged = prepared, folder, privacy, judged
        self.made: list[Path] = []

    def write(
        self, name: str, adapter: Adapter, round: int, scores: Mapping[str, float], client: str | None = None,
        on: str = "test", validation: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """name: the folder's. client: the adapter's owner, if it is a client's own. on: the data of the scores.
        validation: the round's scores there, beside those on the test set."""
        p, template = self._prepared, self._prepared.config.data.prompting()
        card = model_card(
            p.manifest, p.config, adapter, round, scores,
            on=on, client=client, privacy=self._privacy, judged=self._judged, validation=validation,
        )  # fmt: skip
        write_export(
            self._folder.path / name, adapter, p.spec, p.tokenizer, p.manifest["data"]["labels"], card,
            like=self.made[0] if self.made else None, chat_template=template if is_jinja(template) else None,
            kind=export_folder(p.tokenizer),
        )  # fmt: skip
        self.made.append(self._folder.path / name)

    def names(self) -> list[str]:
        """Names of the folders within the run's."""
        return sorted({place.relative_to(self._folder.path).parts[0] for place in self.made})

    def files(self) -> list[Path]:
        return [path for place in self.made for path in place.rglob("*") if path.is_file()]


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
    exports = _Exports(prepared, folder, None if spent is None else told(spent), judged)
    tested = _tested(prepared, folder, state, of, best)
    validation = {line["round"]: line["metrics"] for line in lines}
    if server.has_global_model(state.server):
        for name, one in tested.items():
            round, scores, on = one.state.round, one.measured.scores, "test"
            if not scores and validation.get(round):
                scores, on = validation[round], "validation"
            beside = validation.get(round) if on == "test" else None
            exports.write(name, global_adapter(server, one.state), round, scores, on=on, validation=beside)
    asked = prepared.config.evaluate.clients_at_end
    each = prepared.test.measure_clients(server, state) if prepared.test and asked else {}
    common = prepared.test.measure_clients(server, state, common=True) if prepared.test and asked == "both" else {}
    if prepared.config.run.readouts or not server.has_global_model(state.server):
        for client in prepared.clients:
            own = client_adapter(server, state, client)
            exports.write(f"clients/{client.id}", own, state.round, each.get(client.id, {}), client.id)
    # before the summary: if a kill interrupts this, a resume reports it again
    trackers.close((name, one.state.round, one.measured.scores) for name, one in tested.items())
    clear_exports(folder, prepared.tokenizer, [client.id for client in prepared.clients], exports.made)
    samples = write_samples(prepared, folder, state)
    summary = _summary(prepared, state, lines, best, tested, stopped, each, common, exports, judged).plain()
    folder.finish(summary if spent is None else private_summary(summary, spent), [*samples, *exports.files()])
    without_times(folder, prepared.config)


def _summary(
    prepared: Prepared, state: RunState, lines: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None,
    tested: Mapping[str, _Tested], stopped: Mapping[str, Any] | None, each: Mapping[str, Mapping[str, float]],
    common: Mapping[str, Mapping[str, float]], exports: _Exports, judged: Mapping[str, Any] | None,
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
        confusion=_confusion(prepared, tested),
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
        exports=exports.names(),
        diagnostics=server.diagnostics(state.server),
        attack=prepared.manifest["attack"] if prepared.adversary is not None else None,
        defence=judged,
    )


def _tested(
    prepared: Prepared, folder: RunFolder, state: RunState, of: str, best: Mapping[str, Any] | None
) -> dict[str, _Tested]:
    """ "adapter" -> the last state, and "best" -> the best by validation, if there is one."""
    last = _Tested.of(prepared, state)
    if best is None or (found := _best_state(prepared, folder, of, best["round"])) is None:
        return {"adapter": last}
    return {"adapter": last, "best": last if found.round == state.round else _Tested.of(prepared, found)}


def _both(tested: Mapping[str, _Tested], what: Callable[[_Tested], Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {"last": what(tested["adapter"]), "best": what(tested["best"]) if "best" in tested else {}}


def _summed(lines: Sequence[Mapping[str, Any]], table: str) -> dict[str, Any]:
    """The sum over rounds for each entry of that table."""
    keys = sorted({key for line in lines for key in line[table]})
    return {key: sum(line[table].get(key, 0) for line in lines) for key in keys}


def _confusion(prepared: Prepared, tested: Mapping[str, _Tested]) -> dict[str, Any] | None:
    """The test set's confusion matrices with class names: a row is a true class, a column a predicted one. None for a
    language model, without a test set, and for more than 100 classes."""
    classes = prepared.manifest["data"]["labels"]
    last, best = tested["adapter"].measured, tested.get("best")
    if last.confusion is None or len(classes) > MOST_CLASSES:
        return None
    return {"classes": classes, "last": last.confusion, "best": best.measured.confusion if best else None}


def _best_state(prepared: Prepared, folder: RunFolder, of: str, round: int) -> RunState | None:
    kind, why = prepared.server.method.State, f"the state of round {round} is not there"
    try:
        found = checkpoint.load_newest(folder.best_checkpoint, RunState, kind, of=of, upto=round, tell=log.warning)
        if found is not None and found[0] == round:
            return found[1]
    except CheckpointError as error:
        why = str(error)
    log.warning("best/ is not written: %s", why)  # the run itself is complete
    return None
