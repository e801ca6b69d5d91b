"""A site's folder: made from the server's join file, with another join file later, and with another key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.folders import check_target
from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site


def fill_site(folder: Path, join: bytes, site: Site, facts: Mapping[str, Any]) -> Request:
    """Write a site's files into an existing folder.

    Args:
        join: the content of the server's join file. facts: the site's, about its base model and its versions; they go
            to the server.

    Raises:
        ConfigError: this is not a join file.
    """
    from fedlora.flower.site.held_out import record_of  # loads torch

    here = SiteFolder(folder)
    for place in (here.state, here.logs):
        place.mkdir(exist_ok=True)
    for place in (here.path, here.state, here.logs):
        place.chmod(0o700)
    files.write(here.join, join)
    said = JoinFile.read(here.join)
    files.write(record_of(here.state, said.federation, said.site), "{}")  # a site that joins holds out rows anew
    files.write(here.site, site.toml())
    files.write(here.ca, said.ca)
    return _with_key(here, said, facts)


def take_join(folder: Path, join: Path) -> JoinFile:
    """Replace an existing site's join file: the server has another name, port or authority. Key, data and model stay.

    Raises:
        ConfigError: this is not a join file, or belongs to another site or federation.
    """
    here = SiteFolder(folder.resolve())
    said, own, before = JoinFile.read(join), Site.read(here.site).name, JoinFile.read(here.join).federation
    if said.site != own:
        raise ConfigError(f"{join} is for the site {said.site!r}, but {folder} is of {own!r}: ask for the right one.")
    if said.federation != before:
        raise ConfigError(
            f"{join} is for the federation {said.federation}, but {folder} takes part in {before}, so its stored state "
            f"would not fit. Name another folder."
        )
    files.write(here.ca, said.ca)
    files.write(here.join, said.text())
    return said


def refuse_existing(folder: Path) -> None:
    """Raises `ConfigError` if a site's folder, or anything else, already exists there."""
    here = SiteFolder(folder)
    if here.site.is_file() and here.key.is_file():
        name = Site.read(here.site).name
        raise ConfigError(
            f"{folder} is already the folder of the site {name!r}, with its key, and stays. To take part: fedlora "
            f"flower node {folder}. Another key: fedlora flower site {folder} --rotate. Other data or another model: "
            f"edit {here.site}. The server's new join file: give --join alone. Another federation: name another folder."
        )
    check_target(folder)


def rotate_key(folder: Path) -> Request:
    """Replace a site's key, and make the request with the new one. A running node holds the old key until the server
    admits the new one: then its connection ends, and its next start reads the new one.

    Raises:
        ConfigError: this is not a site's folder, or its base model cannot be read.
    """
    from fedlora.flower.terms.facts import model_facts  # loads torch

    here = SiteFolder(folder.resolve())
    join, model = JoinFile.read(here.join), Site.read(here.site).model
    facts = model_facts(model, FederationSettings.from_travelling(join.settings))
    return _with_key(here, join, facts.table())


def _with_key(here: SiteFolder, join: JoinFile, facts: Mapping[str, Any]) -> Request:
    private, public = certificates.new_key()
    new = here.key.with_name("key.new")
    certificates.write_private(new, private)
    os.replace(new, here.key)
    files.write(here.public_key, public)
    request = Request.make(join, private, facts)
    files.write(here.request, request.text())
    return request


__all__ = ["fill_site", "refuse_existing", "rotate_key", "take_join"]
