"""A site's folder: made from the server's join file, with another join file later, and with another key.

A new key is made beside the old one, which works until the server has admitted the new one; then the node switches by
itself. It can write no key: the next `fedlora flower site --rotate` deletes the old one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.folders import replacing_folder
from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.reach import Found
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
    from fedlora.flower.site.held_out import record_of  # loads torch

    here = SiteFolder(folder)
    for place in (here.state, here.logs):
        place.mkdir(mode=0o700, exist_ok=True)
    files.write(here.join, join)
    said = JoinFile.read(here.join)
    files.write(record_of(here.state, said.federation, said.site), "{}")  # a site that joins holds out rows anew
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


def rotate_key(folder: Path, facts: Mapping[str, Any], look: Callable[[Path], Found]) -> Request | None:
    """Make a new key and a request with it, in a site's folder. The old key works until the server admits the new one.
    None: the last new key has been admitted, and replaces the old one here. look: asks the server with a key.

    Raises:
        ConfigError: this is not a site's folder, or a new key already waits to be admitted.
    """
    here = SiteFolder(folder)
    join = JoinFile.read(here.join)
    if here.next_key.exists():
        found = look(here.next_key)
        if found.fate == "admitted":
            go_over(here)
            return None
        raise ConfigError(
            f"{here.next_key} is there, and not in use yet: {found.why} Send {here.request} to the server, where it is "
            f"admitted by: fedlora flower admit FED request.toml --rotate."
        )
    private, public = certificates.new_key()
    certificates.write_private(here.next_key, private)
    files.write(_public_of(here.next_key), public)
    request = Request.make(join, private, facts)
    files.write(here.request, request.text())
    return request


def asked(here: SiteFolder, look: Callable[[Path], Found]) -> tuple[Found, Path]:
    """The server's answer to this site's key, and that key: the new one if the server knows only that. look: asks it
    with a key."""
    found = look(here.key)
    if found.fate in ("not admitted", "refused") and here.next_key.exists():
        other = look(here.next_key)
        if other.fate == "admitted":
            return other, here.next_key
    return found, here.key


def go_over(here: SiteFolder) -> None:
    """Replace the old key by the new one, which the server has admitted. The old one is deleted."""
    os.replace(_public_of(here.next_key), here.public_key)
    os.replace(here.next_key, here.key)


def _public_of(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


__all__ = ["asked", "fill_site", "go_over", "make_site", "refuse_existing", "rotate_key", "take_join"]
