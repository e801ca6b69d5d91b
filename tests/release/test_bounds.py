"""The oldest and the newest versions that pyproject.toml allows. Kind: end-to-end, of what an index has today.

torch is the exception: it stays the one that is here, for other builds weigh gigabytes. So its lower bound, and torch
newer than constraints.txt, are not tested.
"""

from __future__ import annotations

from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from release.conftest import Built
from support.environments import Environment, empty
from support.needs import ADAPTERS, NEEDS

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]
EVERYTHING = "train,plot,flower,stats,hub,privacy,track"
BOUNDED_BELOW = (
    "numpy",
    "transformers",
    "peft",
    "pydantic",
    "typer",
    "scikit-learn",
    "matplotlib",
    "scipy",
    "safetensors",
)


@pytest.mark.parametrize("which", ["lowest-direct", "highest"])
def test_what_the_bounds_allow_works(built: Built, tmp_path: Path, which: str) -> None:
    made = empty(tmp_path / "environment")
    (tmp_path / "torch.txt").write_text(f"torch=={version('torch')}\n")
    # one of them has no wheel, and all others must: what has no wheel any more is too old for this Python
    wheels = ("--only-binary", ":all:", "--no-binary", "rouge-score")
    made.install("--resolution", which, "-c", tmp_path / "torch.txt", *wheels, f"{built.wheel}[{EVERYTHING}]")
    found = made.distributions()
    if which == "lowest-direct":
        assert {name: found[name] for name in BOUNDED_BELOW} == {
            name: padded(low, found[name]) for name, low in bounds().items() if name in BOUNDED_BELOW
        }
    for lines in NEEDS.values():
        assert "sound" in made.run("-W", "ignore", "-c", lines)
    plays(made)


def plays(made: Environment) -> None:
    """Commands of each kind, to the end."""
    made.run("-c", ADAPTERS)
    made.fedlora("merge", "a", "b", "-o", "merged")
    made.fedlora("inspect", "a", "b")
    made.fedlora("methods")
    assert "flower-superlink" in made.fedlora("doctor")


def bounds() -> dict[str, str]:
    """Requirement -> the least version that is allowed."""
    found = map(Requirement, requires("fedlora") or [])
    return {r.name: part.version for r in found for part in r.specifier if part.operator == ">="}


def padded(low: str, like: str) -> str:
    """2 as 2.0.0, where the version found has so many parts."""
    return ".".join([*low.split("."), "0", "0", "0"][: like.count(".") + 1])
