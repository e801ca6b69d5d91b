"""The thin Flower app of a federation, two shims, and the connection by which it is reached."""

from __future__ import annotations

from pathlib import Path

import tomli_w

CONNECTION = "fedlora"
_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedlora-app"
version = "1.0.0"
description = "Federated LoRA by fedlora"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedlora"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "fedlora_app.server_app:app"
clientapp = "fedlora_app.client_app:app"

"""
_SHIM = '''\
"""{what}. All of it is in fedlora.flower.apps."""

from fedlora.flower.apps import {name} as app

__all__ = ["app"]
'''


def write_app(folder: Path, home: Path) -> None:
    """The app of the federation in `home`: fedlora itself is installed, not shipped."""
    package = folder / "fedlora_app"
    package.mkdir(parents=True)
    asked = tomli_w.dumps({"tool": {"flwr": {"app": {"config": {"folder": str(home)}}}}})
    (folder / "pyproject.toml").write_text(_APP + asked, encoding="utf-8")
    (folder / "README.md").write_text(
        "A thin Flower app: fedlora is installed on server and nodes, not shipped in it.\n"
    )
    (folder / "LICENSE").write_text("Apache-2.0\n")
    (package / "__init__.py").write_text('"""The app\'s two shims."""\n')
    (package / "server_app.py").write_text(_SHIM.format(what="The ServerApp", name="server_app"))
    (package / "client_app.py").write_text(_SHIM.format(what="The ClientApp", name="client_app"))


def write_connection(folder: Path, home: Path, port: int) -> None:
    """$FLWR_HOME of the federation in `home`: its SuperLink, on loopback."""
    folder.mkdir(mode=0o700)
    link = {"address": f"127.0.0.1:{port}", "root-certificates": f"{home}/certs/ca.crt"}
    connection = {"default": CONNECTION, CONNECTION: link}
    (folder / "config.toml").write_text(tomli_w.dumps({"superlink": connection}), encoding="utf-8")


__all__ = ["CONNECTION", "write_app", "write_connection"]
