"""A federation's folder and a site's, as `init` and `site` leave them, without a base model: in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedlora import Adapter, AdapterSpec, LoRA
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.server.init import write_federation
from fedlora.flower.site.run import fill_site
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site

SERVER_NAME = "fl.example.org"
SITE: dict[str, Any] = {"data": {"train": "/nowhere/notes.csv"}, "model": {"name": "/nowhere/model"}}


def federation_folder(path: Path, port: int = 443, **tables: object) -> FederationFolder:
    """Of two sites, one and two. tables: of federation.toml."""
    said = {"id": "fed-1", "network": {"name": SERVER_NAME, "port": port}, "data": {"label_names": ["no", "yes"]}}
    text = tomli_w.dumps({**said, "lora": {"target_modules": ["q"]}, **tables})
    settings = FederationSettings.model_validate({**said, "lora": {"target_modules": ["q"]}, **tables})
    adapter = Adapter({"q": LoRA(B=torch.zeros(8, 2), A=torch.ones(2, 6) / 7)})
    start = adapter, AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]})
    path.mkdir(parents=True)
    write_federation(path, text, settings, {"one": 2, "two": 2}, start, {"base": "b" * 64})
    return FederationFolder(path)


def site_folder(path: Path, fed: FederationFolder, name: str = "one") -> SiteFolder:
    """Of a site whose data and model are nowhere."""
    path.mkdir(parents=True)
    fill_site(path, JoinFile.read(fed.join), Site(name, SITE))
    return SiteFolder(path)
