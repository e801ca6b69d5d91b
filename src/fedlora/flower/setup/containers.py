"""A federation in containers: one image for server and sites (on a CPU), and nginx in front of it.

The image holds no secret and no data: folders are mounted, each at its path on its machine, so that absolute paths in
them stay valid. The SuperLink listens on loopback in its container too; the proxy is in the same network namespace, and
its port is the only published one. There is no Kubernetes: a federation has one server, and each site is another
organisation's machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedlora.core.echo import quoted
from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.setup.proxy import FILES
from fedlora.flower.setup.templates import filled
from fedlora.flower.setup.units import check_apart
from fedlora.flower.terms.settings import FederationSettings

_HEAD = """\
# Written by `fedlora flower init`, and read as JSON within YAML. From {folder}:
#   docker compose build
#   docker compose up -d server proxy                      at the server
#   SITES=/srv docker compose up -d site-NAME              at a site, whose folder is /srv/NAME
# All of it on one machine is a try. A site's data and base model must lie in its folder, or be mounted as it is.
"""


def write_containers(folder: Path, home: Path, settings: FederationSettings, sites: Sequence[str]) -> None:
    """Write Dockerfile and compose.yaml of the federation in `home`. Raises `ConfigError`: see `compose`."""
    folder.mkdir()
    (folder / "wheels").mkdir()
    (folder / "wheels" / "README").write_text(
        f"fedlora-{version('fedlora')}-py3-none-any.whl goes here: the image is built with it, and with no other.\n"
    )
    (folder / "Dockerfile").write_text(dockerfile(home), encoding="utf-8")
    (folder / "compose.yaml").write_text(compose(home, settings, sites), encoding="utf-8")


def dockerfile(home: Path) -> str:
    """The image for server and sites."""
    torch = version("torch").partition("+")[0]  # the version of this federation's maker, in its CPU build
    return filled("Dockerfile", image=_image(), folder=f"{home}/docker", version=version("fedlora"), torch=torch)


def compose(home: Path, settings: FederationSettings, sites: Sequence[str]) -> str:
    """All services: server and proxy in one network namespace, a service for each site.

    Raises:
        ConfigError: a path that a mount cannot name; a ledger beside files that must not be writable.
    """
    if not str(home).isprintable() or set(str(home)) & set(':$"\\'):
        raise ConfigError(f"{quoted(str(home))} cannot be mounted into a container: it has ':', '$' or a quote.")
    network, user, there = settings.network, _user(home), FederationFolder(home)
    ledger = [Path(settings.privacy.ledger).parent] if settings.privacy is not None else []
    check_apart(home, ledger)
    server: dict[str, Any] = {
        **_service(["flower", "serve", str(home)], user), "volumes": _mounts(home, [*there.written, *ledger]),
        "restart": "on-failure",
        "ports": [f"{network.port}:{network.port}"],
        "networks": {"default": {"aliases": [str(network.name)]}},
    }  # fmt: skip
    proxy: dict[str, Any] = {
        "image": "nginx:stable", "user": user, "network_mode": "service:server", "depends_on": ["server"],
        "volumes": _mounts(home, [there.proxy_state]), "ulimits": {"nofile": FILES}, **_LIMITS,
        "entrypoint": ["nginx", "-e", f"{there.proxy_state}/error.log", "-c", str(there.proxy)],
    }  # fmt: skip
    services = {"server": server, "proxy": proxy}
    for site in sites:
        place = f"${{SITES:-{home.parent}}}/{site}"
        mounts = _mounts(Path(place), [SiteFolder(Path(place)).state])
        services[f"site-{site}"] = {**_service(["flower", "node", place], user), "volumes": mounts}
    return _HEAD.format(folder=f"{home}/docker") + json.dumps({"services": services}, indent=2) + "\n"


_LIMITS: Mapping[str, Any] = {
    "restart": "unless-stopped", "read_only": True, "tmpfs": ["/tmp"], "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
}  # fmt: skip


def _mounts(folder: Path, writable: Sequence[Path]) -> list[str]:
    """Mount settings, keys and certificates read-only, and only what the processes write writable."""
    return [f"{folder}:{folder}:ro", *(f"{place}:{place}" for place in writable)]


def _service(command: list[str], user: str) -> dict[str, Any]:
    return {"image": _image(), "build": ".", "user": user, "command": command, **_LIMITS, "init": True}


def _image() -> str:
    return f"fedlora:{version('fedlora')}"


def _user(home: Path) -> str:
    """The folder's owner, or its maker, by number, because containers have no user names."""
    if not home.exists():
        return f"{os.getuid()}:{os.getgid()}"
    facts = home.stat()
    return f"{facts.st_uid}:{facts.st_gid}"


__all__ = ["compose", "dockerfile", "write_containers"]
