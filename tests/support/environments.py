"""Empty environments to install a release into, as a user would, outside of the checkout. With uv, in seconds."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# What a command may hear of the machine: where packages come from. No path of this checkout.
_KEPT = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_ALWAYS = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
_LIST = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
# What pip is told on this machine, and what uv calls it: uv does not read pip's settings.
_SETTINGS = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX"}


@dataclass(frozen=True)
class Environment:
    """A virtual environment at `path`; commands run in `work`, a folder beside it."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def work(self) -> Path:
        found = self.path.with_name(f"{self.path.name}-work")
        found.mkdir(exist_ok=True)
        return found

    def run(self, *words: object, code: int = 0) -> str:
        """What the environment's Python printed for these words; fails where it ends with another code."""
        return run([self.python, *words], self.work, code=code)

    def fedlora(self, *words: object, code: int = 0) -> str:
        """What the command printed."""
        return run([self.path / "bin" / "fedlora", *words], self.work, code=code)

    def install(self, *words: object) -> None:
        """`uv pip install WORDS`."""
        uv("pip", "install", "-q", "--python", self.python, *words)

    def distributions(self) -> dict[str, str]:
        """What is installed: name -> version."""
        found: dict[str, str] = json.loads(self.run("-c", _LIST))
        return {name.lower().replace("_", "-"): number for name, number in found.items()}


def empty(path: Path) -> Environment:
    """A new environment with nothing in it but the torch that is here, which on a CPU should be one without CUDA."""
    uv("venv", "-q", "--python", sys.executable, path)
    made = Environment(path)
    made.install(f"torch=={version('torch')}")
    return made


def uv(*words: object) -> None:
    """uv, with pip's settings."""
    run([sys.executable, "-m", "uv", *words], Path.cwd(), where_pip_looks())


@functools.cache
def where_pip_looks() -> dict[str, str]:
    """The places that pip is told of on this machine, as uv's settings."""
    said = run([sys.executable, "-m", "pip", "config", "list"], Path.cwd())
    found = {}
    for line in said.splitlines():
        name, told, value = line.partition("=")
        if told and (setting := _SETTINGS.get(name.rpartition(".")[2])) is not None:
            found[setting] = ",".join(value.strip("'").split())
    return found


def run(words: Sequence[object], folder: Path, more: Mapping[str, str] | None = None, code: int = 0) -> str:
    """What a command printed; fails, with the end of it, where the command ends with another code."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(("PIP_", "UV_"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=kept | _ALWAYS | dict(more or {}),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{words} ended with {done.returncode}, not {code}:\n{done.stdout[-4000:]}"
    return done.stdout
