"""A federation's folder made by hand, and its sites in this process: real tiny models, Flower's wire format between."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import RecordDict

from fedlora.adapters.writer import write_adapter
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.places import SiteFolder
from fedlora.flower.server.federation import play
from fedlora.flower.server.journal import read_rounds
from fedlora.flower.site.trainer import Trainer
from fedlora.flower.terms.facts import Facts, versions_here
from fedlora.flower.terms.joining import Address, JoinFile
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.sections import ModelSection
from support.certificates import authority, pem
from support.flower_grid import FastClock, LocalGrid
from support.training_data import LABELS, classification, rows, save_encoder

CA = pem(authority())
RANKS = {"acme": 2, "berlin": 4, "cork": 4}
SETTINGS: dict[str, Any] = {
    "id": "fed-test",
    "model": {"dropout": 0.0},
    "data": {"label_names": list(LABELS), "max_length": 16, "validation": 0.25, "test": 0.25},
    "lora": {"target_modules": ["query", "value"]},
    "train": {"learning_rate": 0.02, "max_steps": 3, "batch_size": 8},
    "run": {"rounds": 3, "threads": 1},
}


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of a settings file, the later ones' keys over the earlier ones'."""
    whole: dict[str, Any] = {}
    for one in tables:
        for name, value in one.items():
            whole[name] = {**whole.get(name, {}), **value} if isinstance(value, Mapping) else value
    return whole


def write_join(folder: Path, settings: FederationSettings, facts: Facts | None = None) -> None:
    """A join file, as far as a site's trainer and the server's rounds read it."""
    address = Address(name="fl.example.org", port=443, ca=CA)
    known = dict(facts or versions_here())
    join = JoinFile(federation=settings.id, server=address, agreed=settings.agreed(), facts=known)
    (folder / "join.toml").write_text(join.text())


class SiteNode:
    """A site's trainer in this process."""

    def __init__(self, site_file: Path) -> None:
        self._do: Trainer = Trainer(SiteFolder(site_file.parent))

    def work(self, record: RecordDict) -> RecordDict:
        return self._do("train", record)

    def measure(self, record: RecordDict) -> RecordDict:
        return self._do("evaluate", record)


class FederationOnDisk:
    """FED with its start and settings, three sites with data of their own, and a model that all have."""

    def __init__(self, root: Path, **tables: Any) -> None:
        self.root, self.home, self.model = root, root / "fed", root / "model"
        save_encoder(self.model, layers=2)  # tests ask which round is best and where scores stop moving
        for k, name in enumerate(RANKS):
            (root / f"{name}.jsonl").write_text(rows(classification(60, k, skew=k)))
            site = {"model": {"name": str(self.model), "device": "cpu"}, "data": {"train": str(root / f"{name}.jsonl")}}
            (root / "sites" / name).mkdir(parents=True)
            (root / "sites" / name / "site.toml").write_text(tomli_w.dumps({"name": name, **site}))
        for k, name in enumerate(("validation", "test")):
            (root / f"{name}.jsonl").write_text(rows(classification(40, 10 + k)))
        self.tables = merged(SETTINGS, {"model": {"name": str(self.model)}})
        self.home.mkdir(mode=0o700)
        self.write(**tables)
        self.facts: Facts | None = None
        settings = self.settings()
        model = ModelSection(name=str(self.model), dropout=0.0)
        adapter, spec = model.load(settings.lora, LABELS, 0, device="cpu").seed_adapter(4, seed=0)
        write_adapter(self.home / "start", adapter, spec)
        (self.home / "policy.toml").write_text(tomli_w.dumps({"deadline": 30.0, "clients": RANKS}))

    def write(self, **tables: Any) -> None:
        """Edit federation.toml."""
        self.tables = merged(self.tables, tables)
        (self.home / "federation.toml").write_text(tomli_w.dumps(self.tables))

    def settings(self) -> FederationSettings:
        return FederationSettings.load(self.home / "federation.toml")

    def at_server(self) -> dict[str, str]:
        """The keys of [data] of a server that has files of its own to measure on."""
        return {part: str(self.root / f"{part}.jsonl") for part in ("validation", "test")}

    def grid(self) -> LocalGrid:
        """The sites, over what they keep on their disks."""
        if not self.lines():
            self.agree()
        nodes: dict[str, Any] = {name: SiteNode(self.root / "sites" / name / "site.toml") for name in RANKS}
        return LocalGrid(nodes)

    def agree(self) -> None:
        """join.toml, at the server and at the sites."""
        for folder in (self.home, *(self.root / "sites").iterdir()):
            write_join(folder, self.settings(), self.facts)

    def play(self, grid: LocalGrid | None = None) -> dict[str, Any]:
        return play(BoundedGrid(grid or self.grid(), clock=FastClock()), self.home)

    def lines(self) -> list[dict[str, Any]]:
        return read_rounds(self.home / "server" / "rounds.jsonl")
