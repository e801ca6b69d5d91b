"""Whose a federation's folder is: what another user writes there, root included, its server could not read."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder


def owner(folder: Path) -> str:
    """The name of who owns a folder, or will. Raises `ConfigError` for one without a name."""
    uid = folder.stat().st_uid if folder.exists() else os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError as error:
        raise ConfigError(f"the owner of {folder}, user id {uid}, has no name that a unit could say.") from error


def check_owner(there: FederationFolder) -> None:
    """Raises `ConfigError` where this process is not the folder's owner."""
    if there.path.stat().st_uid != os.getuid():
        name = owner(there.path)
        raise ConfigError(
            f"{there.path} belongs to the user {name!r}, and its server runs as that one: what another user writes "
            f"here it could not read. Call this as {name!r}: sudo -u {name} ..."
        )


__all__ = ["check_owner", "owner"]
