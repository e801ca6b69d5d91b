"""Every public name says what it is and shows it: a docstring with an example, and the examples run. Kind: structural,
end-to-end.

Examples run one name at a time in a user's project (support.projects), with all public names and the few values of
`world` at hand: what a server, its clients, a trainer are is not repeated in each.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedlora
from fedlora import Adapter, Client, LoRA, Server, Upload, build, receive, send, write_adapter
from fedlora.adapters import AdapterSpec
from fedlora.experiments.grid import Grid
from fedlora.experiments.results import append
from fedlora.experiments.spec import Experiment
from support.benchmark_files import task_file, write_glue, write_tasks
from support.made_results import line
from support.projects import make_project
from support.worked_examples import Toy

PACKAGES = (
    "fedlora", "fedlora.client", "fedlora.core", "fedlora.server", "fedlora.methods",
    "fedlora.adapters", "fedlora.analysis", "fedlora.simulation", "fedlora.training", "fedlora.runs", "fedlora.data",
    "fedlora.testing", "fedlora.workers", "fedlora.attacks", "fedlora.hf",
)  # fmt: skip
NOT_RUN = {"demo_data", "demo_model", "smollm2_model"}  # a network, or packages that not everybody has


def public() -> dict[str, Any]:
    """Name -> class or function, of all packages' `__all__`; a value (METHODS) has no docstring of its own."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        found.update({name: getattr(module, name) for name in module.__all__})
    return found


def documented() -> dict[str, Any]:
    return {name: x for name, x in public().items() if inspect.isclass(x) or inspect.isroutine(x)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.first(x)))
        return out


def world() -> dict[str, Any]:
    """What an example may use: a server of two clients, what they sent, and a network with data."""
    g = torch.Generator().manual_seed(0)
    modules = {name: LoRA(torch.zeros(6, 4), torch.randn(4, 5, generator=g)) for name in ("q", "v")}
    seed_adapter = Adapter(modules, {"head.weight": torch.zeros(3, 6)})
    server, clients, trainer = Server(build("glora")), [Client("site-1", 2), Client("site-2", 4)], Toy()
    state = server.init(seed_adapter)
    uploads = []
    for client in clients:
        download = server.download(state, client)
        trained = trainer.train(download, receive(download, None), 0).adapter
        uploads.append(Upload(client, 40, send(trained, download.roles)))
    images, labels = torch.randn(40, 5, generator=g), torch.randint(0, 3, (40,), generator=g)
    return {
        **public(), "torch": torch, "nn": nn, "Path": Path, "seed_adapter": seed_adapter, "server": server,
        "clients": clients, "trainer": trainer, "state": state, "uploads": uploads, "network": Network(),
        "images": images, "labels": labels, "dataset": torch.utils.data.TensorDataset(images, labels),
    }  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """config.toml, model, train.jsonl; benchmarks below root; a PEFT directory."""
    folder = make_project(tmp_path_factory.mktemp("project"))
    write_glue(folder / "root", "sst2")
    write_tasks(folder / "root", {"task1": task_file(), "task2": task_file(category="Logic")})
    config = {"peft_type": "LORA", "target_modules": ["q", "v"], "base_model_name_or_path": "model"}
    run = {"model": {"name": "demo"}, "data": {"train": "demo"}}
    axes = {"method": {"GLoRA": {"method.name": "glora"}}}
    mine = Experiment(name="mine", title="Mine", run=run, axes=axes, profiles={"mini": {"seeds": [0]}})
    append(folder / "results" / "mine.jsonl", line(Grid(mine, "mini").runs({})[0], {"accuracy": 0.5}))
    write_adapter(folder / "adapter", Adapter(world()["seed_adapter"].modules), AdapterSpec(config, scaling=2.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    lacking = [name for name, x in documented().items() if ">>>" not in (x.__doc__ or "")]
    assert not lacking, f"no docstring, or no example in it: {lacking}"


def test_every_package_lists_what_is_public() -> None:
    """And everything listed exists: `public` has fetched it."""
    assert fedlora.__all__ and len(public()) > 90


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what the package lists; what fails is printed with its name."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in sorted(documented().keys() & {*importlib.import_module(package).__all__}):
        example = doctest.DocTestParser().get_doctest(documented()[name].__doc__ or "", world(), name, None, 0)
        skipped = [e for e in example.examples if e.options.get(doctest.SKIP)]
        assert not skipped or name in NOT_RUN
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out
