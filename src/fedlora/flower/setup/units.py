"""systemd's units: for the server, the proxy in front of it, and a site. Absolute commands, no unneeded rights.

The server's app is code that travels, and a site runs it: the unit limits it. So a unit is root's file, and everything
executed or trusted (programs, settings, keys, certificates) is read-only to it. The restrictions and their reasons:
* Everything is read-only except `writable` (ProtectSystem, ProtectHome, ReadWritePaths); /tmp and /dev/shm are its own.
* /run is empty except for name resolution: the sockets there (the user's own systemd, D-Bus, containers, ssh and tmux
  in /tmp) could start programs outside of the unit.
* A user namespace (PrivateUsers): the unit cannot trace processes of the same user outside of it, nor write to their
  memory or their view of the files (/proc/PID/root). In one, nginx could not open a port below 1024: there it has no
  /proc, and no calls that reach into other processes.
* No /dev/pts: the unit could read and write the terminals of people who are logged in as the same user.
* MemoryDenyWriteExecute is off where torch runs: oneDNN and TorchScript generate code at run time, and need memory that
  is both writable and executable. nginx has it on.
* A site may have an accelerator: only NVIDIA's and AMD's devices are open. The server has none.
* /proc stays, except for other users' processes (ProcSubset=pid would hide the processors from torch).
* Address families: IP, and UNIX sockets, which connect to a site's trainer.
Memory: a unit's limit ends a process that would otherwise take the machine; it is the last limit for an upload.
Exit code 2 means a fault in the folder's own files, which a restart does not solve: the unit is not restarted.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import fedlora
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.setup.proxy import FILES
from fedlora.flower.setup.templates import filled

_MEMORY = re.compile(r"[1-9][0-9]{0,5}[MG]")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SHARED = (Path("/tmp"), Path("/var/tmp"))  # a unit has its own


def unit_name(kind: str, label: str = "") -> str:
    """The unit's name for a "server", a "proxy" or a "site". label: for several on one machine. Raises `ConfigError`.

    Example:
        >>> unit_name("site"), unit_name("site", "study2")
        ('fedlora-site.service', 'fedlora-site-study2.service')
    """
    if label and not _LABEL.fullmatch(label):
        raise ConfigError(f"{quoted(label)} cannot name a unit: up to 64 letters, digits, '_', '-' and '.'.")
    return f"fedlora-{kind}{'-' if label else ''}{label}.service"


def server_unit(
    folder: Path, *, user: str, memory: str | None = None,
    ledger: Path | None = None, label: str = "", reads: Sequence[Path] = (),
) -> str:  # fmt: skip
    """The unit for `fedlora flower serve FOLDER`: restarted after a failure, but not after all rounds are played.

    Args:
        folder: the federation's. user: whose processes they are. memory: its limit.
            ledger: a private federation's, in a folder of its own.
            reads: its own base model and data, if any.

    Raises:
        ConfigError: a path or a user that a unit cannot name; root; a ledger beside files that must not be writable.
    """
    command = [*program(), "flower", "serve", str(folder)]
    beside = [] if ledger is None else [ledger.parent]
    return _unit(
        "server", "fedlora: a federation's server", folder, command, user=user, memory=memory or "8G", label=label,
        writable=FederationFolder(folder).written, beside=beside, reads=reads,
    )  # fmt: skip


def proxy_unit(folder: Path, port: int, *, user: str, label: str = "") -> str:
    """The unit for nginx in front of it. Only it may open a port below 1024. Raises `ConfigError`."""
    there = FederationFolder(folder)
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin") or "/usr/sbin/nginx"
    command = [nginx, "-e", str(there.proxy_state / "error.log"), "-c", str(there.proxy)]
    return _unit(
        "proxy", "fedlora: the proxy before a federation's server", folder, command, user=user, memory="512M",
        label=label, writable=[there.proxy_state], low_port=port < 1024,
    )  # fmt: skip


def site_unit(
    folder: Path, *, user: str, memory: str | None = None, label: str = "",
    reads: Sequence[Path] = (),
) -> str:  # fmt: skip
    """The unit for `fedlora flower node FOLDER`: always restarted, because Flower's node may end with code 0.

    Args:
        reads: its data and its base model, whose disks must be mounted first.

    Raises:
        ConfigError: as in `server_unit`.
    """
    command = [*program(), "flower", "node", str(folder)]
    return _unit(
        "site", "fedlora: a site of a federation", folder, command, user=user, memory=memory or "16G", label=label,
        writable=[SiteFolder(folder).state], reads=reads,
    )  # fmt: skip


def program() -> list[str]:
    """The words that call this very `fedlora`, with absolute paths: a unit lacks a virtual environment's PATH."""
    beside = Path(sys.executable).with_name("fedlora")
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "fedlora.cli"]


def _check_apart(folder: Path, own: Sequence[Path], beside: Sequence[Path]) -> None:
    """Raises `ConfigError` if settings, keys or the program itself could be changed by what the unit may write: its own
    places in the folder, and others beside it."""
    kept = [path.resolve() for path in (folder, Path(sys.prefix), Path(fedlora.__file__ or "").parent)]
    for place in (*own, *beside):
        within = place.resolve().is_relative_to(kept[0]) and place not in own
        if within or any(path.is_relative_to(place.resolve()) for path in kept):
            raise ConfigError(
                f"the unit must be able to write {place}, but settings, keys or the program itself lie there or "
                f"around it: code that the unit runs could change what the next start runs or trusts. Put it elsewhere "
                f"(a ledger: into a folder of its own, with privacy.ledger)."
            )


def _unit(
    kind: str, what: str, folder: Path, command: list[str], *, user: str, memory: str, label: str,
    writable: Sequence[Path], beside: Sequence[Path] = (), reads: Sequence[Path] = (),
    low_port: bool = False,
) -> str:  # fmt: skip
    """beside: what it writes outside of the folder. low_port: it opens a port that Linux keeps for root."""
    if user == "root":
        raise ConfigError(
            f"{folder} belongs to root, and a unit that runs as root gives the author of the server's app this whole "
            f"machine. Create a user (useradd --create-home fedlora), chown -R the folder to it, and call this as that "
            f"user."
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}\$?", user):
        raise ConfigError(f"{quoted(user)} is not a user name that a unit can contain.")
    if not _MEMORY.fullmatch(memory):
        raise ConfigError(f"a unit's memory limit is such as 8G or 800M; got {quoted(memory)}.")
    _check_apart(folder, writable, beside)
    for path in reads:
        if path.is_relative_to("/run") and not path.is_relative_to(folder):
            raise ConfigError(
                f"{path} lies in /run, which a unit cannot see. Put it elsewhere, and name it in {folder}."
            )
    shared = [path for path in (folder, *reads) if any(path.is_relative_to(place) for place in _SHARED)]
    if odd := [path for path in shared if ":" in str(path)]:  # mounts are SOURCE:DESTINATION, even in quotes
        raise ConfigError(f"{quoted(str(odd[0]))} has a ':', which systemd reads as two paths. Rename it.")
    return filled(
        "unit.service", kind=kind, what=what, name=unit_name(kind, label), after=unit_name("server", label),
        folder=folder, command=command, user=user, memory=memory, writable=[*writable, *beside], needs=[folder, *reads],
        shared=shared, low_port=low_port, files=FILES,
    )  # fmt: skip


__all__ = ["program", "proxy_unit", "server_unit", "site_unit", "unit_name"]
