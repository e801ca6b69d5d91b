"""[privacy] in an experiment: every run is a population of its own, and nothing of it passes for an account of anybody.

Kinds: end-to-end, hostile. Expected epsilons come from dp-accounting by itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlora.cli.formats import Format
from fedlora.cli.scores import show_scores
from fedlora.errors import ConfigError
from fedlora.experiments.grid import Grid
from fedlora.experiments.page_tables import tables_of
from fedlora.experiments.places import Places
from fedlora.experiments.runner import run_all
from fedlora.experiments.spec import Experiment, load_experiment
from fedlora.privacy import recompute
from fedlora.runs.config import load_config
from fedlora.runs.private_simulation import LEDGER, simulated
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.training_data import classification, save_encoder

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
EXPERIMENT = """
title = "Tiny"
question = "What does epsilon cost?"
rows = "privacy"
[run.model]
path = "{model}"
dropout = 0.0
[run.clients]
count = 3
ranks = [2]
partition = "iid"
[run.method]
name = "ffa-lora"
[run.data]
task = "sst2"
validation = 0.2
max_length = 16
[run.server]
weighting = "uniform"
[run.train]
steps = 1
batch_size = 4
[run.run]
rounds = 2
threads = 1
[axes.privacy]
none = {{}}
noisy = {{ "privacy.clip" = 1.0, "privacy.noise_multiplier" = 1.5, "privacy.delta" = 0.01 }}
noisier = {{ "privacy.clip" = 1.0, "privacy.noise_multiplier" = 3.0, "privacy.delta" = 0.01 }}
[profiles.mini]
seeds = [0]
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return made(tmp_path_factory.mktemp("experiments"))


def made(folder: Path, changed: tuple[str, str] = ("", "")) -> Experiment:
    """The experiment as a file in that folder, with one text replaced by another."""
    save_encoder(folder / "model")
    text = EXPERIMENT.format(model="model")
    (folder / "tiny.toml").write_text(text.replace(*changed) if changed[0] else text)
    return load_experiment(folder / "tiny.toml")


@pytest.fixture(scope="module")
def finished(experiment: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """All three runs, on made-up sentences as the hub has them."""
    pytest.importorskip("opendp")
    pytest.importorskip("dp_accounting")
    root = tmp_path_factory.mktemp("data")
    (root / "glue" / "sst2").mkdir(parents=True)
    for name, size, seed in (("train", 60, 0), ("validation", 20, 1)):
        data = classification(size, seed)
        lines = [
            json.dumps({"sentence": text, "label": min(y, 1), "idx": k}) + "\n"
            for k, (text, y) in enumerate(zip(data.text, data.labels or (), strict=True))
        ]
        (root / "glue" / "sst2" / f"{name}.jsonl").write_text("".join(lines))
    work = tmp_path_factory.mktemp("work")
    places = Places(work / "results", work, root)
    assert [o.error for o in run_all(places.grid(experiment, "mini").missing, places)] == [
        None,
        None,
        None,
    ]
    return places


def test_each_run_charges_its_own_ledger_alone_and_its_result_says_so(
    experiment: Experiment, finished: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    """dp-accounting itself gives the epsilon of two Gaussian releases at z. The table says it, too."""
    dp = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    done = finished.finished()
    for run in Grid(experiment, "mini", done).runs:
        found, label = done[run.digest], run.cell["privacy"]
        assert str(finished.work) not in found.model_dump_json()
        if label == "none":
            assert found.privacy is None
            continue
        z = {"noisy": 1.5, "noisier": 3.0}[label]
        accountant = pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp.GaussianDpEvent(z), 2)
        told = found.privacy
        assert told is not None and told.epsilon_planned == pytest.approx(accountant.get_epsilon(0.01), rel=1e-3)
        assert (told.noise_multiplier, told.delta, told.sampling, told.rounds_planned) == (z, 0.01, 1.0, 2)
        folder = finished.folder(run)
        ledger = recompute(folder.path / LEDGER)
        assert len(ledger.events) == 2 and "SIMULATED" in ledger.population
        card = " ".join((folder.path / "adapter" / "README.md").read_text().split())
        assert "anybody's data (SIMULATED" in card
    grid = Grid(experiment, "mini", done)
    show_scores(grid, "", tables_of(grid), Format.markdown)
    assert "account of anybody's data" in capsys.readouterr().out


def test_a_result_is_found_again_wherever_the_folders_are(finished: Places, tmp_path: Path) -> None:
    """The same file in another folder plans the same digests: no path of a ledger is in them."""
    assert finished.grid(made(tmp_path), "mini").missing == []


def test_an_experiment_names_no_population_and_no_ledger(tmp_path: Path) -> None:
    for key in ("population", "ledger", "budget"):
        folder = tmp_path / key
        folder.mkdir()
        theirs = made(folder, ('"privacy.delta" = 0.01', f'"privacy.delta" = 0.01, "privacy.{key}" = "x"'))
        with pytest.raises(ConfigError, match=rf"privacy\.{key}: .*simulated"):
            _ = Grid(theirs, "mini").runs


def test_a_run_of_ones_own_is_no_simulation(tmp_path: Path) -> None:
    told = simulated({"privacy": {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}})["privacy"]
    words = "\n".join(f"{key} = {value!r}" for key, value in told.items())
    (tmp_path / "c.toml").write_text(f'[model]\npath = "demo"\n[data]\ntrain = "demo"\n[privacy]\n{words}\n')
    with pytest.raises(ConfigError, match="whose data these are"):
        load_config(tmp_path / "c.toml")


def test_tables_without_privacy_stay_as_they_are() -> None:
    raw = {"data": {"train": "demo"}}
    assert simulated(raw) is raw
