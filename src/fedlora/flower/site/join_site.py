"""A site's folder, made from the server's join file: key, settings, and the request for the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.site_file import Site


def make_site(folder: Path, join: Path, site: Site, facts: Mapping[str, Any]) -> Request:
    """Make a site's folder, completely or not at all. facts: its base model and versions; they go to the server.

    Raises:
        ConfigError: the folder is not empty, this is not a join file, or the place cannot be written.
    """
    refuse_existing(folder)
    JoinFile.read(join)
    content = join.read_bytes()
    with replacing_folder(folder) as building:
        building.chmod(0o700)
        return fill_site(building, content, site, facts)


def fill_site(folder: Path, join: bytes, site: Site, facts: Mapping[str, Any]) -> Request:
    """Write a site's files into an existing folder. Raises `ConfigError`."""
    here = SiteFolder(folder)
    for place in (here.state, here.logs):
        place.mkdir(mode=0o700, exist_ok=True)
    files.write(here.join, join)
    said = JoinFile.read(here.join)
    files.write(here.site, site.model_copy(update={"app": said.app}).toml())
    files.write(here.ca, said.ca)
    private, public = certificates.new_key()
    certificates.write_private(here.key, private)
    files.write(here.public_key, public)
    request = Request.make(said, private, facts)
    files.write(here.request, request.text())
    return request


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
    content = join.read_bytes()
    files.write(here.ca, said.ca)
    files.write(here.join, content)
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
    if folder.is_dir() and (found := sorted(path.name for path in folder.iterdir())):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(f"{folder} is not empty: it has {', '.join(found[:3])}{more}. Name another folder.")


__all__ = ["fill_site", "make_site", "refuse_existing", "take_join"]
