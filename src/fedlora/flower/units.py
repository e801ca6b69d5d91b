"""systemd's units: of the server, of the proxy in front of it, of a site. Absolute commands, nothing not needed.

What is forbidden, and why the rest is not:
* Everything but the own folder is read-only (ProtectSystem, ProtectHome, ReadWritePaths); /tmp is its own.
* MemoryDenyWriteExecute stays off where torch runs: oneDNN and TorchScript make code as they go, and are refused memory
  that is both written and run. nginx has it.
* A site may have an accelerator: its devices are closed but for NVIDIA's and AMD's. The server has none.
* /proc stays as it is but for other users' processes (ProcSubset=pid would hide the processors from torch).
* Address families: IP, and UNIX sockets, by which a site's trainer is spoken to.
Memory: a unit's limit ends the process that would otherwise take the machine; it is the last bound of an upload.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from fedlora.core.echo import quoted
from fedlora.errors import ConfigError
from fedlora.flower.ownership import owner

SERVER, PROXY, SITE = "fedlora-server.service", "fedlora-proxy.service", "fedlora-site.service"
_MEMORY = re.compile(r"[1-9][0-9]{0,5}[MG]")
_HARDENED = """\
NoNewPrivileges=yes
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={folder}
{tmp}ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RemoveIPC=yes
UMask=0077
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
SystemCallArchitectures=native
SystemCallFilter=@system-service
{unprivileged}SystemCallErrorNumber=EPERM
"""
_NO_DEVICES = "PrivateDevices=yes\n"
_ACCELERATORS = """\
DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidiactl rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
"""
_UNIT = """\
# Made by {by}. To install it, as root:
#   systemctl enable --now {path}
# Other limits: systemctl edit {name}
[Unit]
Description={what}
Wants=network-online.target
After=network-online.target{after}
StartLimitIntervalSec=0

[Service]
Type={kind}
User={user}
ExecStart={command}
{more}WorkingDirectory={folder}
Restart={restart}
RestartSec={pause}
KillMode=mixed
TimeoutStopSec=60
MemoryMax={memory}
MemorySwapMax=0
TasksMax=1024
{hardened}
[Install]
WantedBy=multi-user.target
"""


def server_unit(folder: Path, *, user: str | None = None, memory: str = "8G") -> str:
    """Of `fedlora flower serve FOLDER`: started again when it fails, and not when all rounds are played.

    Args:
        folder: of the federation. user: as whom it runs; default: who owns the folder. memory: its limit.

    Raises:
        ConfigError: a path or a user that a unit cannot name.
    """
    return _unit(
        folder, SERVER, "fedlora: a federation's server", [*program(), "flower", "serve", str(folder)], user=user,
        memory=memory, restart="on-failure", by="fedlora flower init",
    )  # fmt: skip


def proxy_unit(folder: Path, configuration: Path, port: int, *, user: str | None = None, memory: str = "512M") -> str:
    """Of nginx in front of it. A port below 1024 is the one thing that it may do and others may not. `ConfigError`.

    Root's nginx changes its workers to another user, and gives that one its folders: it may do that, too.
    """
    user = user or owner(folder)
    needed = ["CAP_NET_BIND_SERVICE"] if port < 1024 else []
    needed += ["CAP_SETUID", "CAP_SETGID", "CAP_CHOWN", "CAP_DAC_OVERRIDE"] if user == "root" else []
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin") or "/usr/sbin/nginx"
    command = [nginx, "-e", str(configuration.parent / "error.log"), "-c", str(configuration)]
    return _unit(
        folder, PROXY, "fedlora: the proxy before a federation's server", command, user=user, memory=memory,
        restart="always", by="fedlora flower init", capabilities=" ".join(needed),
        more=f"ExecReload={_words([nginx, *command[1:], '-s', 'reload'])}\n", compiles=False,
    )  # fmt: skip


def site_unit(folder: Path, *, user: str | None = None, memory: str = "16G") -> str:
    """Of `fedlora flower node FOLDER`, at a site: started again however it ends, for Flower's node may end with code 0.

    Raises:
        ConfigError: as `server_unit`.
    """
    return _unit(
        folder, SITE, "fedlora: a site of a federation", [*program(), "flower", "node", str(folder)], user=user,
        memory=memory, restart="always", by="fedlora flower site", accelerators=True,
    )  # fmt: skip


def program() -> list[str]:
    """The words that call this very `fedlora`, by absolute paths: a unit has no PATH of a virtual environment."""
    beside = Path(sys.executable).with_name("fedlora")
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "fedlora.cli"]


def _unit(
    folder: Path, name: str, what: str, command: list[str], *, user: str | None, memory: str, restart: str, by: str,
    capabilities: str = "", more: str = "", accelerators: bool = False, compiles: bool = True,
) -> str:  # fmt: skip
    user = user or owner(folder)
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}\$?", user):
        raise ConfigError(f"{quoted(user)} is no name of a user that a unit can say.")
    if not _MEMORY.fullmatch(memory):
        raise ConfigError(f"a unit's memory limit is such as 8G or 800M; got {quoted(memory)}.")
    shared = any(folder.is_relative_to(place) for place in ("/tmp", "/var/tmp"))  # a private one would hide it
    hardened = _HARDENED.format(
        folder=_listed(folder), capabilities=capabilities, tmp="" if shared else "PrivateTmp=yes\n",
        unprivileged="" if "CAP_SETUID" in capabilities else "SystemCallFilter=~@privileged\n",
    )  # fmt: skip
    hardened += _ACCELERATORS if accelerators else _NO_DEVICES
    hardened += "" if compiles else "MemoryDenyWriteExecute=yes\n"
    return _UNIT.format(
        by=by, path=_shown(folder / ("" if name == SITE else "systemd") / name), name=name, what=what, user=user,
        after=f" {SERVER}" if name == PROXY else "", kind="exec", command=_words(command), more=more,
        folder=_path(folder), restart=restart, pause=10, memory=memory, hardened=hardened,
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
    return shlex.quote(str(path).replace("\n", " "))


def _printable(text: str) -> None:
    if not text.isprintable():
        raise ConfigError(f"{quoted(text)} cannot stand in a unit of systemd: it has letters that do not print.")


__all__ = ["PROXY", "SERVER", "SITE", "program", "proxy_unit", "server_unit", "site_unit"]
