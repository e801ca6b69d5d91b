"""`fedlora run` by the command line: what it prints, and bad input.

Kinds: *end-to-end*, *contract* (bad input is one line and exit code 2, and writes nothing).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.cli.run_words import tell_data
from fedlora.runs.folder import RunFolder
from support.command_line import Said, options  # first, for it expects what typer's import warns of

# isort: split
from fedlora.cli.screen import byte_size
from support.projects import FEDSA, Finished


def test_where_no_terminal_shows_a_bar_there_is_a_line_for_each_round(finished: Finished) -> None:
    rounds = finished.folder.read_json("summary.json")["rounds"]
    told = [line.split(",")[0] for line in finished.err.splitlines() if line.startswith("round ")]
    assert told == [f"round {k} of {rounds} done" for k in range(1, rounds + 1)]
    assert "━" not in finished.err, "the bar's last state, drawn at its end"


def test_on_stdout_there_is_only_json(
    finished: Finished, project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Asked of a finished run, where `--resume` has nothing to train."""
    run = shutil.copytree(finished.folder.path, tmp_path / "run")
    sets = options(("run.readouts=true", "evaluate.clients_at_end=true"))
    said = main("run", project / "config.toml", "--out", run, "--resume", "--json", *sets)
    assert said.code == 0 and json.loads(said.out) == RunFolder(run).read_json("summary.json")


# ---- bad input -------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], str]] = {
    "no such model": (["model.name=nowhere"], "'nowhere' is neither a folder"),
    "no such data": (["data.train=nowhere.jsonl"], "nowhere.jsonl does not exist"),
    "mixed ranks": (["method.name=fedit"], "entry by entry"),
    "nothing to train on": (["data.validation=0.6", "data.test=0.5"], "sum is below 1"),
    "no such device": (["model.device=banana"], "banana"),
    "a tracker that is not installed": (["run.report_to=['mlflow']"], "mlflow, which is not installed"),
    "server target without a server model": ([*FEDSA, "evaluate.target=server"], "no global model"),
}


@pytest.mark.parametrize(("sets", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_code_2_and_writes_nothing(
    project: Path,
    tmp_path: Path,
    main: Callable[..., Said],
    monkeypatch: pytest.MonkeyPatch,
    sets: list[str],
    says: str,
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    said = main("run", project / "config.toml", "--out", tmp_path / "run", *options(sets))
    assert says in said.error() and said.out == "" and not (tmp_path / "run").exists()


def test_classes_of_one_row_and_copies_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: of three clients together no class but "yes" has one row, "maybe" none; two rows repeat others."""
    counts = {"a": [3, 1, 0], "b": [2, 0, 0], "c": [1, 0, 0]}
    data = {"label_names": ["no", "yes", "maybe"], "label_counts": counts, "repeated": 2}
    copies = {"test": {"examples": 8, "copies": 5}}
    tell_data({"data": data, "copies": copies, "cut": {}, "cut_held_out": {}}, 128, 64)
    said = " ".join(capsys.readouterr().err.split())
    assert "'yes', 'maybe': " in said and "2 training examples repeat" in said and "'no'" not in said
    assert "8 examples of test, 5 are copies" in said


def test_validation_without_a_test_is_shown_alone(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    """The score that the summary has, on the screen and on the adapter's card, by the name of its data."""
    said = main("run", project / "config.toml", "--out", tmp_path / "run", *options(("data.test=0", "run.rounds=1")))
    score = json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]["last"]["accuracy"]
    assert re.search(rf"accuracy, last \(round 1\)\W+validation {score:.3f}", said.out)
    assert re.search(rf"held-out validation .*accuracy {score:.4f}", (tmp_path / "run/adapter/README.md").read_text())


def test_resuming_where_no_run_is_says_that_it_begins(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    """A slip in --out would train again what stands elsewhere; said before the model is loaded, which fails here."""
    done = main("run", project / "config.toml", "--out", tmp_path / "rnu", "--resume", "--set", "model.name=nowhere")
    assert done.code == 2 and "rnu" in done.err.splitlines()[0] and "round 1" in done.err


def test_all_that_is_wrong_with_a_file_is_said_at_once(
    project: Path, tmp_path: Path, main: Callable[..., Said]
) -> None:
    """First of its keys and values; then of what they mean: files, metric, methods, ranks that do not fit."""
    for wrong, says in (
        (("run.round=3", "train.learning_rate=fast"), ("'rounds'", "got 'fast'")),
        (("data.test=no.csv", "evaluate.metric=rouge-l", "method.rho=2", "data.validation=none.csv"),
         ("no.csv", "none.csv", "rouge-l", "rho is a share")),
        (("evaluate.metric=rouge-l", "method.name=fedit", "attack.kind=sign-flip", "attack.clients=['site-9']"),
         ("rouge-l", "'site-9'")),
    ):  # fmt: skip
        said = main("run", project / "config.toml", "--out", tmp_path / "run", *options(wrong))
        assert all(words in said.error() for words in says), said.err


def test_a_run_shows_its_classes_by_name_and_its_bytes_in_a_unit(finished: Finished) -> None:
    """Screen, summary and card agree; the counts stand in the order of the column's title."""
    s = finished.folder.read_json("summary.json")
    data = finished.folder.read_json("manifest.json")["data"]
    assert s["classes"] == ["blue", "green", "red"] and "macro f1" in finished.out
    assert "blue / green / red" in finished.out and " / ".join(map(str, data["label_counts"]["site-1"])) in finished.out
    shown = [byte_size(n) for n in (0, 999, 30_161, 999_940, 1_500_000)]
    assert shown == ["0 bytes", "999 bytes", "30.2 KB", "999.9 KB", "1.5 MB"]
