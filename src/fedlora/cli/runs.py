"""`fedlora run` and `demo`: federations from config files, behind a progress bar, with a table at the end."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.options import AsJson, Config, DataRoot, Resume, Sets
from fedlora.cli.run_words import show_run, tell_attack, tell_data
from fedlora.cli.screen import bar, notes, plotted, print_json
from fedlora.doing import doing
from fedlora.runs.folder import RunFolder
from fedlora.runs.quiet import quiet_libraries
from fedlora.server.judged import in_words

if TYPE_CHECKING:
    from fedlora.runs.config import RunConfig
    from fedlora.simulation import RoundRecord

Out = Annotated[Path | None, typer.Option(help="the run folder (default: runs/<config name>)")]


def run(
    config: Config,
    set: Sets = None,
    out: Out = None,
    resume: Resume = False,
    data_root: DataRoot = None,
    json: AsJson = False,
) -> None:
    """Run one federation from a config file."""
    _run(config, set or [], RunFolder(out or Path("runs") / config.stem), resume, json, data_root)


def demo(set: Sets = None, out: Out = None, resume: Resume = False, json: AsJson = False) -> None:
    """GLoRA on a real model and real text: six sites of ranks 2 to 16, about three minutes on two cores."""
    file = Path(str(files("fedlora") / "demo.toml"))
    _run(file, set or [], RunFolder(out or Path("runs") / "demo"), resume, json)


def _run(
    file: Path, sets: list[str], folder: RunFolder, resume: bool, as_json: bool, data_root: Path | None = None
) -> None:
    from fedlora.runs.config import load_config
    from fedlora.runs.resuming import changes

    config = load_config(file, sets)
    if resume and folder.exists() and not changes(folder, config) and folder.finished():
        notes.warn(f"{folder.path} holds a finished run: nothing was trained now. More rounds: a larger run.rounds.")
    else:
        _rounds(config, folder, resume, data_root)
    if not (folder.plots / "metric.png").exists():  # also if the run was killed between the summary and the plots
        plotted(lambda plots: plots.plot_run(folder))
    if as_json:
        print_json(folder.read_json("summary.json"))
    else:
        show_run(folder)


def _rounds(config: RunConfig, folder: RunFolder, resume: bool, data_root: Path | None) -> None:
    """Play all rounds, behind a progress bar."""
    from fedlora.core.checkpoint import newest_round
    from fedlora.runs.execution import execute
    from fedlora.runs.preparation import prepare

    folder.check_place(resume)
    if resume and not folder.exists():
        notes.warn(f"{folder.path} holds no run yet: it begins with round 1.")
    quiet_libraries()
    label, secret = config.method.name, config.privacy is not None
    with notes.status(f"{label}: reading data and model"), doing("reading data and model", closed=secret):
        prepared = prepare(config, data_root)
    tell_attack(prepared.manifest)
    tell_data(prepared.manifest, config.data.max_length, config.evaluate.max_new_tokens)
    if secret:
        notes.warn(
            "private: this screen names clients that fail or are refused, so only the server's operator may see it. "
            "Such a client counts as zero; even if all do, the round is released (as noise) and charged."
        )
    done = (newest_round(folder.checkpoints) or 0) if folder.exists() else 0
    each = prepared.per_round
    watch = _Watch(label, config.run.rounds, each, prepared.metric, done)
    with watch.bar:
        for record in execute(prepared, folder, resume=resume, on_client=watch.client_done):
            watch.round_done(record)


class _Watch:
    """The progress bar's state: finished client updates, the round, the last whole round's loss and the last metric in
    words.

    If nobody watches a bar (a log), each round prints a line instead. done: rounds finished before this process.
    """

    def __init__(self, label: str, rounds: int, per_round: int, metric: str, done: int) -> None:
        self._rounds, self._per_round, self._metric = rounds, per_round, metric
        self.bar = bar("{task.fields[round]}", "clients", "{task.fields[loss]}", "{task.fields[metric]}")
        self._task = self.bar.add_task(
            label, total=rounds * per_round, completed=done * per_round, round=f"round {min(done + 1, rounds)}",
            loss="", metric="",
        )  # fmt: skip

    def client_done(self, client: str) -> None:
        self.bar.update(self._task, advance=1)

    def round_done(self, done: RoundRecord) -> None:
        round, metrics, tally = done.round, done.metrics, done.state.server.tally
        shown: dict[str, Any] = {"metric": f"{self._metric} {metrics[self._metric]:.3f}"} if metrics else {}
        shown["loss"] = "" if done.loss is None else f"loss {done.loss:.3f}"
        now = f"round {min(round + 1, self._rounds)}"
        self.bar.update(self._task, completed=round * self._per_round, round=now, **shown)
        if not notes.is_terminal:
            parts = [f"round {round} of {self._rounds} done", shown["loss"], shown.get("metric", "")]
            notes.print(", ".join(filter(None, parts)))
        notes.warn(*(f"round {round}: {client} left out: {reason}" for client, reason in done.refused.items()))
        if tally is not None and tally.judged is not None and (judged := in_words(tally.judged.plain())):
            notes.warn(f"round {round}: {judged}")
