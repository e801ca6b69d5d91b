"""The oldest and the newest versions that pyproject.toml allows. Kind: end-to-end, of what an index has today.

torch is the exception: it stays the one that is here, for other builds weigh gigabytes. So its lower bound, and torch
newer than constraints.txt, are not tested.
"""

from __future__ import annotations

import email
import re
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from release.conftest import Built
from support.environments import Environment, empty
from support.needs import ADAPTERS, NEEDS

pytestmark = [pytest.mark.release, pytest.mark.timeout(1800)]
EVERYTHING = ("train", "plot", "flower", "hub", "privacy", "track")


@pytest.mark.parametrize("which", ["lowest", "highest"])
def test_what_the_bounds_allow_works(built: Built, tmp_path: Path, which: str) -> None:
    """Lowest: each bound as a pin. Asked only for low versions, a resolver takes higher ones without a word."""
    made = empty(tmp_path / "environment")
    lines = [line for line in stated(built.wheel) if line.name != "torch"]
    asked = [f"{line.name}=={least(line)}" if which == "lowest" else f"{line.name}{line.specifier}" for line in lines]
    (tmp_path / "torch.txt").write_text(f"torch=={version('torch')}\n")
    # one of them has no wheel, and all others must: what has no wheel any more is too old for this Python
    wheels = ("--only-binary", ":all:", "--no-binary", "rouge-score")
    made.install("-c", tmp_path / "torch.txt", *wheels, f"{built.wheel}[{','.join(EVERYTHING)}]", *asked)
    for lines_that_need in NEEDS.values():
        assert "sound" in made.run("-W", "ignore", "-c", lines_that_need)
    plays(made)


def plays(made: Environment) -> None:
    """Commands of each kind, to the end."""
    made.run("-c", ADAPTERS)
    made.fedlora("merge", "a", "b", "-o", "merged")
    made.fedlora("inspect", "a", "b")
    made.fedlora("methods")
    assert re.search(r"flwr .*ok", made.fedlora("doctor"))


def stated(wheel: Path) -> list[Requirement]:
    """What the wheel asks for, with all extras for users."""
    with zipfile.ZipFile(wheel) as opened:
        facts = email.message_from_bytes(opened.read(next(n for n in opened.namelist() if n.endswith("/METADATA"))))
    found = map(Requirement, facts.get_all("Requires-Dist", []))
    wanted = [r for r in found if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in EVERYTHING)]
    return [r for r in wanted if r.name != "fedlora"]  # an extra that asks for another one


def least(line: Requirement) -> str:
    """The lowest version that the line allows."""
    (low,) = (part.version for part in line.specifier if part.operator == ">=")
    return low
