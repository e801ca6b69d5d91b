"""The thin Flower app of every federation, as its server sends it to the sites: two shims. fedlora itself is installed
on both sides, and not sent. A site runs no other app than this one.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import cache

_PROJECT = """\
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

[tool.flwr.app.config]
folder = ""
"""
_SHIM = '''\
"""{what}. All of it is in fedlora.flower.apps."""

from fedlora.flower.apps import {name} as app

__all__ = ["app"]
'''
_FILES = {
    "pyproject.toml": _PROJECT,
    "README.md": "A thin Flower app: fedlora is installed on server and nodes, not shipped in it.\n",
    "LICENSE": "Apache-2.0\n",
    "fedlora_app/__init__.py": '"""The app\'s two shims."""\n',
    "fedlora_app/server_app.py": _SHIM.format(what="The ServerApp", name="server_app"),
    "fedlora_app/client_app.py": _SHIM.format(what="The ClientApp", name="client_app"),
}


@cache
def bundle() -> bytes:
    """The app as a FAB, Flower's zip. The run names the folder to play, so that every federation has the same app.

    Flower's own packer compresses, and another zlib makes other bytes from the same files. Here they are stored
    uncompressed, so the digest survives an upgrade of the server's machine, and a site's own fedlora gets the same.
    """
    sums = [f"{name},{digest(text.encode())},{8 * len(text.encode())}" for name, text in _FILES.items()]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        for name, text in {**_FILES, ".info/CONTENT": "\n".join(sums)}.items():
            packed.writestr(zipfile.ZipInfo(name), text)
    return made.getvalue()


def digest(content: bytes) -> str:
    """An app's SHA-256."""
    return hashlib.sha256(content).hexdigest()
