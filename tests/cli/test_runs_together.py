"""`train.together` from the command line: several clients at once, with the progress bar watching. Kind: end to end.

`run` and `compare` crashed with it once, because the bar wrapped the trainer and hid what it could do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.command_line import Said
from support.known_warnings import FUTURE_NAMES

pytestmark = [
    FUTURE_NAMES,
    pytest.mark.filterwarnings(r"ignore:Could not find a config file in:UserWarning:peft\.utils\.save_and_load"),
]
SETS = ("--set", "train.together=2", "--set", "run.rounds=2")


def test_run_trains_clients_together(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    """Three clients in groups of two and one; losses and weights are those of one by one, to rounding."""
    done = main("run", project / "config.toml", "--out", tmp_path / "two", *SETS)
    assert done.code == 0, done.err
    assert "6/6" in done.err  # every client's update was an event for the bar
    alone = main("run", project / "config.toml", "--out", tmp_path / "one", *SETS, "--set", "train.together=1")
    assert alone.code == 0, alone.err
    two, one = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    for a, b in zip(two, one, strict=True):
        assert a["weights"] == b["weights"] and a["bytes"] == b["bytes"]
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-3)


def test_compare_trains_clients_together(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    done = main("compare", project / "config.toml", "--methods", "glora,fedsvd", "--out", tmp_path / "c", *SETS)
    assert done.code == 0, done.err
    assert "not run" not in done.out
    assert (tmp_path / "c" / "fedsvd" / "seed-0" / "summary.json").is_file()
