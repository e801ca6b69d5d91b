"""The release as it would be uploaded, and an environment with its core; both made once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.environments import Environment, empty, run

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Built:
    """A wheel, and the source that it was built from."""

    wheel: Path
    source: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`python -m build`: the wheel is made from the source distribution, not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], out)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, source)


@pytest.fixture(scope="session")
def core(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install fedlora`, beside torch alone."""
    made = empty(tmp_path_factory.mktemp("environments") / "core")
    made.install(built.wheel)
    return made
