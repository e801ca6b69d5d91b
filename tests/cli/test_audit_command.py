"""`fedlora audit` from the command line to its numbers and picture; kept uploads.

Kinds of evidence: *oracle* (errors and drifts by dense float64 matrices from what peft or safetensors hold),
*end-to-end* (real runs that keep uploads, directories that peft wrote, peft loading what was kept), *contract* (bad
input is one line and exit code 2).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from fedlora import METHODS, Adapter, AdapterSpec, LoRA, write_adapter
from support.command_line import Said, cells, invoke
from support.federations import SHAPES, noise
from support.peft_models import peft_layers, saved, trained
from support.projects import configured, contents, ran
from support.tiny_models import bert

SPEC = AdapterSpec({"base_model_name_or_path": "some/base", "target_modules": ["q", "v"]}, scaling=2.0)
QUICK = ("--draws", 1)


def audited(*args: object) -> dict[str, Any]:
    """`fedlora audit ARGS --json`: method -> its numbers."""
    found: dict[str, Any] = json.loads(invoke("audit", *args, "--json").stdout)
    return found


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of rank 4 by `write_adapter`. Read-only."""
    root = tmp_path_factory.mktemp("equal")
    for c in "abc":
        drawn = {m: [noise(of, c, m, dtype=torch.float32) for of in ((o, 4), (4, i))] for m, (o, i) in SHAPES.items()}
        write_adapter(root / c, Adapter({m: LoRA(B, A) for m, (B, A) in drawn.items()}), SPEC)
    return [root / c for c in "abc"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any]]:
    """Three adapters by peft, of ranks 2, 4, 3 and alpha / r of 4, 1, 2; and peft's models."""
    root, models = tmp_path_factory.mktemp("mixed"), []
    for k, (rank, alpha) in enumerate(((2, 8), (4, 4), (3, 6))):
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["query", "value"], task_type="SEQ_CLS")
        models.append(trained(bert, config, seed=k))
    return [saved(model, root / f"site-{k}") for k, model in enumerate(models)], models


def padded_error(models: list[Any], p: list[float]) -> float:
    """||(sum p s [B 0]) (sum p [A; 0]) - sum p s B A|| / ||sum p s B A||, all modules together, of peft's layers."""
    gap = size = 0.0
    for each in zip(*(peft_layers(model).values() for model in models), strict=True):
        B, A, mean = torch.zeros(32, 4).double(), torch.zeros(4, 32).double(), torch.zeros(32, 32).double()
        for share, layer in zip(p, each, strict=True):
            up, down = (one["default"].weight.detach().double() for one in (layer.lora_B, layer.lora_A))
            B[:, : len(down)] += share * layer.scaling["default"] * up
            A[: len(down)] += share * down
            mean += share * layer.scaling["default"] * up @ down
        gap += float((B @ A - mean).square().sum())
        size += float(mean.square().sum())
    return math.sqrt(gap / size)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_errors_of_mixed_ranks_are_the_dense_ones_and_the_table_shows_them(
    mixed: tuple[list[Path], list[Any]], wide: None
) -> None:
    """In the units of the whole update: alpha / r differs by client. Below 1e-3 as 2.7e-15, else a percentage."""
    paths, models = mixed
    args = (*paths, "--weights", "900,300,50", "--methods", "fedit, glora, glora rho=0.5, padded-average")
    found, shown = audited(*args, *QUICK), invoke("audit", *args, *QUICK).stdout
    want = padded_error(models, [900 / 1250, 300 / 1250, 50 / 1250])
    assert found["padded-average"]["error"] == pytest.approx(want, rel=1e-9)
    assert found["glora"]["error"] < 1e-12 < 0.01 < found["glora rho=0.5"]["error"]
    assert {facts["server_rank"] for facts in found["glora rho=0.5"]["modules"].values()} == {5}  # ceil(4.5)
    rows = {cells(line)[0]: cells(line) for line in shown.splitlines() if line.startswith("│")}
    assert set(rows) == {"glora", "glora rho=0.5", "padded-average"}
    for name, row in rows.items():
        numbers = (found[name]["error"], found[name]["drift"]["10.0"], found[name]["readout_drift"]["10.0"])
        assert row[1:4] == [f"{x:.1e}" if x < 1e-3 else f"{x:.1%}" for x in numbers]
    assert rows["glora"][4] == "R 9, nothing cut" and rows["glora rho=0.5"][4].startswith("R 5, union rank 9, ")
    assert "entry by entry" in found["fedit"]["refused"] and re.search("fedit not run: .*by entry", shown)


def test_who_moves_with_the_coordinates_and_who_cannot_run(equal: list[Path]) -> None:
    """All methods, the default. Factor averages move; fedex-lora's update does not, but the pair that clients get does;
    fedrot-lora undoes condition 1, which is orthogonal, and nothing else. Adapters that were trained apart are nothing
    for who has no global model or needs one common A."""
    found = audited(*equal, "--conditions", "1,10", "--draws", 1)
    assert set(found) == set(METHODS)
    for name in ("fedit", "hetlora", "lora-fair", "padded-average"):
        assert min(found[name]["drift"].values()) > 0.1
    assert max(found["fedex-lora"]["drift"].values()) < 1e-9 < 0.1 < min(found["fedex-lora"]["readout_drift"].values())
    assert found["fedrot-lora"]["drift"]["1.0"] < 1e-9 < 0.1 < found["fedrot-lora"]["drift"]["10.0"]
    refused = {name for name, audit in found.items() if audit["refused"]}
    assert refused == {"fedsa-lora", "fedsvd", "ffa-lora", "rolora"}
    assert all((found[name]["error"], found[name]["drift"]) == (None, None) for name in refused)


def test_an_audit_of_a_run_is_of_its_newest_uploads(project: Path, tmp_path: Path) -> None:
    """As of the folders of round 2, with the weights that these name. What is kept: tests/runs."""
    sets = ("run.keep_uploads=all", "run.rounds=2", "train.max_steps=2", "clients.ranks=[2,4,4]")
    folder = ran(configured(project, *sets), tmp_path / "run")
    methods = ("--methods", "padded-average, glora", *QUICK)
    found = audited("--from-run", folder.path, *methods)
    assert found["glora"]["error"] < 1e-9 and max(found["glora"]["drift"].values()) < 1e-9
    first, second = (sorted(folder.uploads(t).iterdir()) for t in (1, 2))
    assert audited(*second, *methods) == found != audited(*first, *methods)
    ran(configured(project, "run.rounds=3", *sets[2:]), folder.path, resume=True)  # without keeping
    said = invoke("audit", "--from-run", folder.path, *methods).stderr
    assert re.search(f"round 2 of {folder.path}, .* 3 rounds", said)


# ---- the picture -----------------------------------------------------------------------------------------------------


def test_a_picture_is_drawn_where_it_is_asked_for_and_replaces_those_of_fedlora_alone(
    mixed: tuple[list[Path], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    main: Callable[..., Said],
    drawn: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("audit", *mixed[0], "--methods", "glora", *QUICK)
    place, theirs = tmp_path / "some" / "own.png", tmp_path / "theirs.svg"
    for _ in range(2):
        assert f"plot: {place}" in main(*words, "--plot", place).err
    assert place.stat().st_size > 5000
    theirs.write_bytes(b"of a paper")
    said = main(*words, "--plot", theirs)
    assert "fedlora did not draw" in said.complaint() and not said.out and theirs.read_bytes() == b"of a paper"
    Path("audit.png").write_bytes(b"mine")
    assert "audit.png exists" in main(*words).complaint()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_audited_is_one_line_and_nothing_is_written(
    equal: list[Path], main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(equal[0].parent)
    before = contents(equal[0].parent)
    for words, says in (
        (["a", "b", "c", "--weights", "1,2"], "--weights has 2 numbers for 3"),
        (["a", "b", "--weights=-1,2"], "at least 0; got '-1,2'"),
        (["--from-run", "."], "holds no uploads"),
        (["a", "b", "--methods", "fedit", "--conditions", "1e300"], "--conditions"),
    ):
        assert says in main("audit", *words).complaint()
    assert contents(equal[0].parent) == before
