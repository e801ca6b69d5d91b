"""`fedlora compare`: several methods on one configuration.

Kinds of evidence: *end-to-end* (real runs on tiny transformers), *contract* (bad input is one line and exit code 2).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedlora
import fedlora.runs.execution
import fedlora.training.loop
from fedlora import build
from fedlora.errors import ConfigError
from fedlora.experiments.comparison import ComparedRuns
from fedlora.experiments.store import as_lines, read_results
from fedlora.runs.folder import RunFolder
from support.command_line import Said, cells, drawing, invoke, options
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import contents, pixels

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]


@pytest.fixture(scope="session")
def compared(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Three methods on ranks 2, 4, 4; FedIT cannot serve them."""
    out = tmp_path_factory.mktemp("compared") / "runs"
    args = ("compare", project / "config.toml", "--methods", "glora, fedit,padded-average", "--out", out)
    with drawing():
        return out, invoke(*args, "--set", "run.rounds=2")


def test_compare_runs_all_that_can_and_names_those_that_cannot(compared: tuple[Path, Any]) -> None:
    out, result = compared
    left = {"comparison.png", "comparison.pdf", "results.jsonl"}
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {"glora", "padded-average", *left}
    assert result.stdout.count("fedit not run: ") == 1
    first = result.stderr.index("fedit not run: ")
    assert first < result.stderr.index("glora, seed 0 begins"), "before hours are spent on the others"
    assert re.search("one seed: .*--seeds 0:8", result.stderr)
    assert "One seed: no interval" in result.stdout and "undecided" not in result.stdout


def test_compare_shows_each_methods_numbers(compared: tuple[Path, Any], project: Path) -> None:
    """Whole, though stdout is no terminal and says nothing of its width; by each run's own summary.json."""
    out, _ = compared
    before = contents(out / "glora")
    args = ("compare", project / "config.toml", "--methods", "glora,fedit,padded-average", "--out", out)
    result = invoke(*args, "--set", "run.rounds=2", "--resume")
    assert contents(out / "glora") == before, "what is finished is not run again"
    assert "…" not in result.stdout
    for name in ("glora", "padded-average"):
        s = RunFolder(out / name / "seed-0").read_json("summary.json")
        scores, costs = (cells(line) for line in result.stdout.splitlines() if line.startswith(f"│ {name} "))
        assert scores == [
            name, f"{s['test']['best']['accuracy']:.4f}", f"{s['validation']['best']['accuracy']:.4f}",
            f"{s['test']['last']['accuracy']:.4f}", "1",
        ]  # fmt: skip
        up = s["bytes"]["up_adapter"] + s["bytes"]["up_heads"]
        assert up < 1e6, "a small model: three digits"
        assert costs[:4] == [name, "server", f"{up / 1e6:.3f}", f"{(s['bytes']['total'] - up) / 1e6:.3f}"]
        assert costs[-1] == f"{s['gauge_drift'][name]:.1e}"


def test_compare_gives_every_method_the_same_clients_data_and_start(compared: tuple[Path, Any]) -> None:
    out, _ = compared
    manifests = [RunFolder(out / name / "seed-0").read_json("manifest.json") for name in ("glora", "padded-average")]
    for key in ("data", "clients", "model", "seed"):
        assert manifests[0][key] == manifests[1][key]
    first = [RunFolder(out / name / "seed-0").metrics()[0]["losses"] for name in ("glora", "padded-average")]
    assert first[0] == first[1], "in the first round all methods hand out the same start"


def test_compare_draws_one_picture(compared: tuple[Path, Any]) -> None:
    out, result = compared
    picture = pixels(out / "comparison.png")
    assert min(picture.shape[:2]) > 300 and picture[..., :3].std() > 0.05
    assert str(out / "comparison.png") in result.stderr


def test_compare_as_json(compared: tuple[Path, Any], project: Path) -> None:
    out, _ = compared
    args = ("compare", project / "config.toml", "--methods", "glora,fedit,padded-average", "--out", out)
    said = json.loads(invoke(*args, "--set", "run.rounds=2", "--resume", "--json").stdout)
    assert said["seeds"] == [0] and said["metric"] == "test, best" and said["reference"] == "glora"
    assert set(said["methods"]) == {"glora", "padded-average"} and said["differences"] == []
    for name, found in said["methods"].items():
        summary = RunFolder(out / name / "seed-0").read_json("summary.json")
        del summary["diagnostics"]
        assert found["runs"] == {"0": summary}
        assert found["mean"] == summary["test"]["best"]["accuracy"] and (found["n"], found["sd"]) == (1, None)
    assert list(said["refused"]) == ["fedit"] and "entry by entry" in said["refused"]["fedit"]


def test_the_frame_is_of_the_runs_that_are_there(compared: tuple[Path, Any], project: Path, tmp_path: Path) -> None:
    """Killed as the last run ended, damaged, or of runs that were extended since: expected are the folders."""
    out = tmp_path / "runs"
    shutil.copytree(compared[0], out)
    path, whole = out / "results.jsonl", read_results(compared[0])
    shorter = next(iter(whole.values())).model_copy(update={"digest": "0" * 16, "rounds": 1})
    lines = path.read_text().splitlines()
    for left in ("", "{", "\n".join([*lines[:2], ""]), as_lines({**whole, shorter.digest: shorter})):
        path.write_text(left)
        args = ("compare", project / "config.toml", "--methods", "glora,padded-average", "--out", out)
        invoke(*args, "--set", "run.rounds=2", "--resume")
        assert sorted(fedlora.results(out).digest) == sorted(whole), left[:40]


def test_compare_without_resume_leaves_old_runs_alone(
    compared: tuple[Path, Any], project: Path, main: Callable[..., Said]
) -> None:
    out, _ = compared
    before = contents(out)
    said = main("compare", project / "config.toml", "--methods", "glora", "--out", out, "--set", "run.rounds=2")
    assert "already holds a run" in said.complaint()
    assert contents(out) == before


def test_compare_shows_nothing_of_data_that_changed_while_its_runs_were_made(
    project: Path, tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seed deals its data by itself, so the runs' own digests cannot tell."""
    data = tmp_path / "train.jsonl"
    data.write_bytes((project / "train.jsonl").read_bytes())

    def changed_meanwhile(*_: Any, **__: Any) -> list[Any]:
        data.write_bytes(data.read_bytes() * 2)
        return []

    monkeypatch.setattr("fedlora.cli.compare_runs.run_stages", changed_meanwhile)
    args = ("--methods", "glora,svd", "--seeds", "0:2", "--set", f"data.train={data}", "--out", tmp_path / "out")
    said = main("compare", project / "config.toml", *args)
    assert said.code == 2 and "data.train changed" in said.err and "--resume" in said.err and not said.out


def test_compare_writes_into_no_folder_of_other_files(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    """Its picture would be written over; what a comparison leaves that was killed at its start is no other file."""
    theirs = tmp_path / "figures"
    theirs.mkdir()
    (theirs / "comparison.png").write_bytes(b"of a paper")
    said = main("compare", project / "config.toml", "--methods", "glora", "--out", theirs)
    assert "holds no run: 1 entry" in said.complaint() and "'comparison.png'" in said.complaint()
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == {"comparison.png": b"of a paper"}
    begun = tmp_path / "begun"
    (begun / "glora" / "seed-0").mkdir(parents=True)
    (begun / "failures").mkdir()
    ComparedRuns.at(begun).check_place(["glora", "svd"])
    with pytest.raises(ConfigError, match=r"2 entries, .* 'glora'"):
        ComparedRuns.at(begun).check_place(["svd"])


def test_compare_in_which_nothing_can_run_is_an_error(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    said = main("compare", project / "config.toml", "--methods", "fedit,fedrot-lora", "--out", tmp_path / "runs")
    assert "no method could run: fedit: " in said.error() and "fedrot-lora: " in said.error()
    assert not (tmp_path / "runs").exists()


def test_compare_checks_all_names_before_it_runs(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    said = main("compare", project / "config.toml", "--methods", "glora,glroa,svd rho=1", "--out", tmp_path / "runs")
    complaint = said.complaint()
    assert "glroa: " in complaint and "did you mean 'glora'" in complaint and "svd rho=1: " in complaint
    assert not (tmp_path / "runs").exists()


# ---- compare: methods with settings ----------------------------------------------------------------------------------

QUICK = ("run.rounds=1", "train.steps=2", "method.rho=0.75")


@pytest.fixture(scope="module")
def with_settings(project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """glora as the config has it (rho = 0.75), glora with a setting, raflora; fedit cannot run."""
    out = tmp_path_factory.mktemp("compared") / "runs"
    methods = "glora,  glora   gamma=1 , raflora, fedit"
    said = invoke("compare", project / "config.toml", "--methods", methods, "--out", out, "--json", *options(QUICK))
    return out, json.loads(said.stdout)


def test_each_entry_has_its_own_label_and_folder(with_settings: tuple[Path, dict[str, Any]]) -> None:
    """usage.md: `runs/my-compare/glora_gamma=1/seed-0`, and comparison.png beside them."""
    out, said = with_settings
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {
        "glora", "glora_gamma=1", "raflora", "results.jsonl",
    }  # fmt: skip
    assert list(said["methods"]) == sorted(["glora", "glora gamma=1", "raflora"])
    assert list(said["refused"]) == ["fedit"]
    for label, found in said["methods"].items():
        summary = RunFolder(out / label.replace(" ", "_") / "seed-0").read_json("summary.json")
        assert found["runs"]["0"]["test"] == summary["test"]


def test_each_entry_runs_what_its_label_says(with_settings: tuple[Path, dict[str, Any]]) -> None:
    """The manifest's method, by `build`: the bare name of the config's own method is the config's, with rho = 0.75; all
    others start from the method's defaults."""
    out, _ = with_settings
    folders = {path.name: RunFolder(path / "seed-0") for path in out.glob("[!.]*/")}
    made = {name: folder.read_json("manifest.json")["method"] for name, folder in folders.items()}
    assert made == {
        "glora": repr(build("glora", rho=0.75)),
        "glora_gamma=1": repr(build("glora", gamma=1)),
        "raflora": repr(build("raflora")),
    }


def test_the_comparison_names_labels_in_full_and_resumes(
    with_settings: tuple[Path, dict[str, Any]], project: Path
) -> None:
    """What is finished is not run again; a row for each label, with its own drift."""
    out, said = with_settings
    before = contents(out)
    methods = "glora, glora gamma=1, raflora"
    result = invoke("compare", project / "config.toml", "--methods", methods, "--out", out, "--resume", *options(QUICK))
    assert contents(out) == before
    rows = [cells(line) for line in result.stdout.splitlines() if line.startswith("│")]
    labels = ["glora", "glora gamma=1", "raflora"]
    assert [row[0] for row in rows] == labels * 2, "scores, then costs"
    for label, scores, costs in zip(labels, rows[:3], rows[3:], strict=True):
        s = said["methods"][label]["runs"]["0"]
        assert costs[-1] == f"{s['gauge_drift'][s['method']]:.1e}"
        assert scores[3] == f"{s['test']['last']['accuracy']:.4f}"


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ("glora gamma=1, glora gamma=1", "'glora gamma=1' is named twice"),
        ("glora, fedit, glora", "'glora' is named twice"),
        ("glora gamma=1,glora    gamma=1", "'glora gamma=1' is named twice"),
        ("all, flora", "'flora' is named twice"),
        ("glora gamma", "a method is NAME [KEY=VALUE ...]"),
        (",", "no method is named"),
        ("glora gama=1, glora gamma=7", "did you mean 'gamma'?"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    project: Path, tmp_path: Path, main: Callable[..., Said], methods: str, says: str
) -> None:
    """Exit code 2, nothing written; where each entry fails by itself, the line has all of the reasons."""
    said = main("compare", project / "config.toml", "--methods", methods, "--out", tmp_path / "runs")
    assert says in said.error() and not (tmp_path / "runs").exists()


def test_values_are_read_as_toml_and_bare_words_as_strings() -> None:
    """Numbers and words as `--set` has them; labels with one space, in the order given."""
    got = fedlora.cli.method_names.parse_methods(" glora  rho=0.5 history=2 word=paper,svd energy=1.0, fedit")
    assert {label: (s.name, s.model_extra) for label, s in got.items()} == {
        "glora rho=0.5 history=2 word=paper": ("glora", {"rho": 0.5, "history": 2, "word": "paper"}),
        "svd energy=1.0": ("svd", {"energy": 1.0}),
        "fedit": ("fedit", {}),
    }  # fmt: skip
