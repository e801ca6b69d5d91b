"""A federation's folder and a site's, as `init` and `site` leave them, without a base model: setup's own code, in
milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch

from fedlora import Adapter, AdapterSpec, LoRA
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.setup.project import Federation, make_federation
from fedlora.flower.setup.start import Start
from fedlora.flower.site.site_folder import fill_site
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site

SERVER_NAME = "fl.example.org"


def federation_folder(path: Path, port: int = 443, **tables: object) -> FederationFolder:
    """Of two sites, one and two. tables: of federation.toml."""
    said = {"id": "fed-1", "network": {"name": SERVER_NAME, "port": port}, "data": {"labels": ["no", "yes"]}}
    settings = FederationSettings.model_validate({**said, "lora": {"targets": ["q"]}, **tables})
    adapter = Adapter({"q": LoRA(B=torch.zeros(8, 2), A=torch.ones(2, 6) / 7)})
    start = Start(adapter, AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]}))
    make_federation(path, Federation(settings, {"one": 2, "two": 2}, start))
    return FederationFolder(path)


def site_folder(path: Path, join: Path) -> SiteFolder:
    """Of a join file's site, whose data and model are nowhere."""
    path.mkdir(parents=True)
    fill_site(path, join.read_bytes(), Site(name=join.stem, data="/nowhere/notes.csv", model="/nowhere/model"), {})
    return SiteFolder(path)
