"""systemd's units: of the server, of the proxy in front of it, of a site. Absolute commands, nothing not needed.

The server's app is code that travels, and a site runs it: the unit is what bounds it. So a unit is root's file, and all
that is run or believed (programs, settings, keys, certificates) is read-only to it. What is forbidden, and why:
* Everything is read-only but `writable` (ProtectSystem, ProtectHome, ReadWritePaths); /tmp and /dev/shm are its own.
* /run is empty but for what finds names: the sockets there (the user's own systemd, D-Bus, containers, ssh and tmux in
  /tmp) would start programs outside of the unit.
* A user namespace (PrivateUsers): processes of the same user outside of the unit cannot be traced, nor their memory or
  their view of the files (/proc/PID/root) be written. In one nginx could not open a port below 1024: there it has no
  /proc, and no calls that reach into other processes.
* No /dev/pts: the terminals of people who are logged in as the same user could be read and written.
* MemoryDenyWriteExecute stays off where torch runs: oneDNN and TorchScript make code as they go, and are refused memory
  that is both written and run. nginx has it.
* A site may have an accelerator: its devices are closed but for NVIDIA's and AMD's. The server has none.
* /proc stays as it is but for other users' processes (ProcSubset=pid would hide the processors from torch).
* Address families: IP, and UNIX sockets, by which a site's trainer is spoken to.
Memory: a unit's limit ends the process that would otherwise take the machine; it is the last bound of an upload.
Exit code 2 is a fault of the folder's own files, which starting again does not mend: it is not started again.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import fedlora
from fedlora.core.echo import quoted
from fedlora.errors import ConfigError
from fedlora.flower.ownership import owner
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.setup.proxy import FILES
from fedlora.flower.setup.templates import filled

_MEMORY = re.compile(r"[1-9][0-9]{0,5}[MG]")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SHARED = (Path("/tmp"), Path("/var/tmp"))  # a unit has its own
_NO_DEVICES = "PrivateDevices=yes\n"
_NO_PROCESSES = """\
InaccessiblePaths=/proc
SystemCallFilter=~@debug process_vm_readv process_vm_writev pidfd_open pidfd_getfd kcmp
"""
_ACCELERATORS = """\
BindReadOnlyPaths=-/run/nvidia-persistenced -/run/opengl-driver
DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidiactl rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
"""


def unit_name(kind: str, label: str = "") -> str:
    """Of a "server", a "proxy" or a "site". label: tells several of one machine apart. Raises `ConfigError`.

    Example:
        >>> unit_name("site"), unit_name("site", "study2")
        ('fedlora-site.service', 'fedlora-site-study2.service')
    """
    if label and not _LABEL.fullmatch(label):
        raise ConfigError(f"{quoted(label)} cannot name a unit: up to 64 letters, digits, '_', '-' and '.'.")
    return f"fedlora-{kind}{'-' if label else ''}{label}.service"


def server_unit(
    folder: Path, *, user: str | None = None, memory: str = "8G", metrics: str | None = None,
    ledger: Path | None = None, known: Path | None = None, label: str = "", reads: Sequence[Path] = (),
) -> str:  # fmt: skip
    """Of `fedlora flower serve FOLDER`: started again when it fails, and not when all rounds are played.

    Args:
        folder: of the federation. user: as whom it runs; default: who owns the folder. memory: its limit. metrics:
            HOST:PORT for Prometheus. ledger: of a private federation; what charges it writes beside it, too. known:
            the folder of what is known of ledgers outside of theirs (`privacy.outside`). reads: its own
            base model and data, if any.

    Raises:
        ConfigError: a path or a user that a unit cannot name; root; a ledger beside what must not be written.
    """
    command = [*program(), "flower", "serve", str(folder), *(["--metrics", metrics] if metrics else [])]
    beside = [*([ledger.parent] if ledger else []), *([known] if known else [])]
    more = f"Environment={_word(f'FEDLORA_STATE_DIR={known}')}\n" if known else ""
    return _unit(
        folder, unit_name("server", label), "fedlora: a federation's server", command, user=user, memory=memory,
        writable=FederationFolder(folder).written, beside=beside, restart="on-failure", more=more, reads=reads,
    )  # fmt: skip


def proxy_unit(folder: Path, port: int, *, user: str | None = None, memory: str = "512M", label: str = "") -> str:
    """Of nginx in front of it. A port below 1024 is the one thing that it may do and others may not. `ConfigError`."""
    there = FederationFolder(folder)
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin") or "/usr/sbin/nginx"
    command = [nginx, "-e", str(there.proxy_state / "error.log"), "-c", str(there.proxy)]
    return _unit(
        folder, unit_name("proxy", label), "fedlora: the proxy before a federation's server", command, user=user,
        memory=memory, writable=[there.proxy_state], restart="always", after=f" {unit_name('server', label)}",
        capabilities="CAP_NET_BIND_SERVICE" if port < 1024 else "", compiles=False, users=port >= 1024,
        more=f"ExecReload={_words([nginx, *command[1:], '-s', 'reload'])}\nLimitNOFILE={FILES}\n",
    )  # fmt: skip


def site_unit(
    folder: Path, *, user: str | None = None, memory: str = "16G", label: str = "", reads: Sequence[Path] = ()
) -> str:
    """Of `fedlora flower node FOLDER`, at a site: started again however it ends, for Flower's node may end with code 0.

    Args:
        reads: its data and its base model, whose disks must be mounted first.

    Raises:
        ConfigError: as `server_unit`.
    """
    return _unit(
        folder, unit_name("site", label), "fedlora: a site of a federation",
        [*program(), "flower", "node", str(folder)], user=user, memory=memory, writable=[SiteFolder(folder).state],
        restart="always", accelerators=True, reads=reads,
    )  # fmt: skip


def program() -> list[str]:
    """The words that call this very `fedlora`, by absolute paths: a unit has no PATH of a virtual environment."""
    beside = Path(sys.executable).with_name("fedlora")
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "fedlora.cli"]


def check_apart(folder: Path, writable: Sequence[Path], own: Sequence[Path] = ()) -> None:
    """Raises `ConfigError` where settings, keys or the program itself lie below what the unit's processes may write, or
    where that lies among them. own: places in the folder that are made to be written."""
    for place in writable:
        if place.resolve().is_relative_to(folder.resolve()) and place not in own:
            raise ConfigError(
                f"{place} must be writable for the unit, and lies in {folder} among settings, keys and certificates, "
                f"which must not be. Put it elsewhere (a ledger: into a folder of its own, by privacy.ledger)."
            )
        for kept in (folder, Path(sys.prefix), Path(fedlora.__file__ or "").parent):
            if kept.resolve().is_relative_to(place.resolve()):
                raise ConfigError(
                    f"{place} must be writable for the unit, and {kept} lies in it: code that the unit runs could "
                    f"change what is run or believed at the next start. Put one of them elsewhere (a ledger: into a "
                    f"folder of its own, by privacy.ledger)."
                )


def _unit(
    folder: Path, name: str, what: str, command: list[str], *, user: str | None, memory: str, restart: str,
    writable: Sequence[Path], after: str = "", capabilities: str = "", more: str = "", accelerators: bool = False,
    compiles: bool = True, users: bool = True, reads: Sequence[Path] = (), beside: Sequence[Path] = (),
) -> str:  # fmt: skip
    user = user or owner(folder)
    if user == "root":
        raise ConfigError(
            f"{folder} is root's, and a unit of root gives whoever writes the server's app this whole machine. Make a "
            f"user for it (useradd --create-home fedlora), chown -R the folder to it, and call this as that one."
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}\$?", user):
        raise ConfigError(f"{quoted(user)} is no name of a user that a unit can say.")
    if not _MEMORY.fullmatch(memory):
        raise ConfigError(f"a unit's memory limit is such as 8G or 800M; got {quoted(memory)}.")
    check_apart(folder, [*writable, *beside], own=writable)
    writable = [*writable, *beside]
    for path in reads:
        if path.is_relative_to("/run") and not path.is_relative_to(folder):
            raise ConfigError(
                f"{path} lies in /run, of which a unit sees nothing. Put it elsewhere, and name it in {folder}."
            )
    places, bound = " ".join(map(_listed, writable)), ""
    shared = [path for path in (folder, *reads) if any(path.is_relative_to(place) for place in _SHARED)]
    if shared:  # they would not be there
        bound = f"BindReadOnlyPaths={' '.join(map(_listed, shared))}\n"
    if odd := [path for path in shared if ":" in str(path)]:  # of a mount: SOURCE:DESTINATION, also in quotes
        raise ConfigError(f"{quoted(str(odd[0]))} has a ':', and systemd takes it for two paths. Rename it.")
    if folder in shared:
        bound += f"BindPaths={places}\n"
    last = _ACCELERATORS if accelerators else _NO_DEVICES
    last += "" if users else _NO_PROCESSES
    last += "" if compiles else "MemoryDenyWriteExecute=yes\n"
    return filled(
        "unit.service", folder_=_shown(folder), name=name, what=what, user=user, after=after,
        command=_words(command), more=more, folder=_path(folder), restart=restart,
        mounts=" ".join(map(_listed, [folder, *reads])), memory=memory, writable=places,
        capabilities=capabilities, bound=bound,
        users="PrivateUsers=yes\n" if users else "", last=last,
    )  # fmt: skip


def _words(command: list[str]) -> str:
    """A command line as systemd reads it: quotes, specifiers and variables have no power."""
    return " ".join(_word(word) for word in command)


def _word(word: str) -> str:
    _printable(word)
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if re.search(r"""[\s"';\\]""", word) else word


def _path(folder: Path) -> str:
    """A path as the whole value of a setting, where only % has a meaning."""
    text = str(folder)
    _printable(text)
    return text.replace("%", "%%")


def _listed(folder: Path) -> str:
    """A path in a list of them."""
    _printable(str(folder))
    text = str(folder).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if re.search(r"""[\s"'\\]""", text) else text


def _shown(path: Path) -> str:
    return str(path).replace("\n", " ")


def _printable(text: str) -> None:
    if not text.isprintable():
        raise ConfigError(f"{quoted(text)} cannot stand in a unit of systemd: it has letters that do not print.")


__all__ = ["check_apart", "program", "proxy_unit", "server_unit", "site_unit", "unit_name"]
