"""The drawings of the README and of the architecture page are those that the code makes now. Kind: structural."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import draw_architecture
import draw_idea
from fedlora import METHODS

ROOT = Path(__file__).parent.parent


def test_the_drawing_of_the_packages_is_the_codes() -> None:
    """Drawn again from today's imports: the same file, to the letter. With an import taken out it is another one."""
    stored = draw_architecture.FILE.read_text(encoding="utf-8")
    assert stored == draw_architecture.drawing(), "stale: python tools/draw_architecture.py"
    boxes = {text.text for text in ET.fromstring(stored).iter("{http://www.w3.org/2000/svg}text")}
    packages = {path.parent.name for path in (ROOT / "src" / "fedlora").glob("*/__init__.py")}
    assert packages <= boxes, "a new package wants a row in pyproject.toml and words in tools/draw_architecture.py"


def test_every_method_is_among_those_that_import_no_other() -> None:
    """But for FedIT, whose mean of factors others use."""
    (contract,) = (
        contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if contract["type"] == "independence"
    )
    others = {cls.__module__ for name, cls in METHODS.items() if name != "fedit"}
    assert set(contract["modules"]) == others, "pyproject.toml, tool.importlinter"


def test_arrows_that_follow_from_others_are_left_out() -> None:
    """By hand: a uses b and c, b uses c. The arrow from a to c is implied; without b's it is not."""
    edges = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset()}
    assert draw_architecture.reduced(edges) == [("a", "b"), ("b", "c")]
    assert draw_architecture.reduced({**edges, "b": frozenset()}) == [("a", "b"), ("a", "c")]


@pytest.mark.filterwarnings("ignore")
def test_the_picture_of_the_idea_says_what_is_measured() -> None:
    """GLoRA at rho = 1 is the true mean whatever the coordinates, to float64's rounding; the mean of factors is not.
    The README's text for those who cannot see it has the number drawn."""
    idea = draw_idea.measure()
    assert idea.off["glora"] < 1e-13 and 0.5 < idea.off["padded-average"] < 1.5
    stored = draw_idea.FILE.read_text(encoding="utf-8")
    off = f"{100 * idea.off['padded-average']:.0f}"
    assert f"{off}% of the mean" in stored
    plain, mean = (draw_idea.result(method, draw_idea.uploads()) for method in ("padded-average", "glora"))
    as_sent = f"{100 * float((plain - mean).norm() / mean.norm()):.0f}"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"by {as_sent} %" in readme and f"by {off} % in the median" in readme
    circles = [c.attrib for c in ET.fromstring(stored).iter("{http://www.w3.org/2000/svg}circle")]
    assert len(circles) == 2 * draw_idea.TIMES
    assert len({(c["cx"], c["cy"]) for c in circles[draw_idea.TIMES :]}) == 1
