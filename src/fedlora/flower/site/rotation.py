"""Another key for a site: a new pair is made beside the old one, which works until the server has admitted the new one;
then the node switches by itself. It can write no key: the next `fedlora flower site --rotate` deletes the old one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.reach import Found
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile, Request


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
            f"{here.next_key} exists, but is not in use yet: {found.why} Send {here.request} to the server, which "
            f"admits it with: fedlora flower admit FED request.toml --rotate."
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


__all__ = ["asked", "go_over", "rotate_key"]
