"""A run that begins from a trained adapter. Kinds of evidence: *oracle* (dense products, the other run's scores),
*contract* (what does not fit is one line)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora.adapters.io import read_adapter
from fedlora.errors import FedLoRAError
from fedlora.methods.registry import METHODS
from fedlora.runs.execution import execute
from fedlora.runs.folder import RunFolder
from fedlora.runs.preparation import prepare
from fedlora.server.server import start
from support.projects import configured, make_project, ran

SETS = ("data.max_length=8", "clients.count=2", "clients.ranks=[3]", "clients.partition=iid", "run.rounds=2")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project, and the adapter of a run of rank 2 in it."""
    root = make_project(tmp_path_factory.mktemp("warm"))
    ran(configured(root, *SETS, "clients.ranks=[2]", "method.name=fedit"), root / "first")
    return root


def prepared(root: Path, adapter: str = "first/adapter", *more: str) -> Any:
    return prepare(configured(root, *SETS, f"model.adapter={adapter}", *more))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_begins_with_the_given_update(world: Path, method: str) -> None:
    """Rank 2 among clients of rank 3: the server's update is B A of the files, in float64; the third slot is fresh."""
    run = prepared(world, "first/adapter", f"method.name={method}")
    given, _ = read_adapter(world / "first" / "adapter", scaling=2.0)
    state = start(run.server, run.seed_adapter).server
    assert {lora.rank for lora in run.seed_adapter.modules.values()} == {3}
    assert all(bool(lora.factors[1][2].any()) for lora in run.seed_adapter.modules.values()), "B = A = 0 never learns"
    if method != "fedsa-lora":  # which has no model of the server's: its clients get B
        update = run.server.global_update(state)
        for name, lora in given.modules.items():
            wanted, got = (one.map(torch.Tensor.double).delta() for one in (lora, update[name]))
            assert bool(wanted.any()) and torch.allclose(got, wanted, atol=1e-5 * float(wanted.abs().max()))
    assert all(torch.equal(head, given.heads[name]) for name, head in state.start.heads.items())


def test_the_run_begins_where_the_other_one_ended(world: Path, tmp_path: Path) -> None:
    """Same validation: its loss before the first round is the other run's last. The manifest has the adapter's
    digests, and with other bytes there it is another run."""
    run = prepared(world)
    last = json.loads((world / "first" / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]["loss"]
    begun = run.validation.evaluate(run.server, start(run.server, run.seed_adapter))["loss"]
    assert begun == pytest.approx(last, rel=1e-5)
    assert "adapter_model.safetensors" in run.manifest["model"]["adapter"]
    list(execute(run, RunFolder(tmp_path / "second")))


def test_what_does_not_fit_is_one_line(world: Path, tmp_path: Path) -> None:
    modules = r"in 1 module, .*value.* query, value \(2 modules\), the run query \(1 module\)"
    for change, says in (
        (["lora.target_modules=['query']"], modules),
        (["data.label_names=['red', 'green', 'blue']"], "trained for the classes"),
        (["method.name=fedit", "clients.ranks=[1]"], "fedit averages factors .* rank 2, not 1"),
    ):
        with pytest.raises(FedLoRAError, match=says) as caught:
            prepared(world, "first/adapter", *change)
        assert "\n" not in str(caught.value)
    for key, value, says in (
        ("base_model_name_or_path", "other/base", "other/base"), ("modules_to_save", None, "head|classifier"),
    ):  # fmt: skip
        folder = shutil.copytree(world / "first" / "adapter", tmp_path / key)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(FedLoRAError, match=says):
            prepared(world, str(folder))
