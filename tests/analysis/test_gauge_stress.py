"""`server.gauge_stress`: every upload in other coordinates, in every round, the same ones again. Kind: end-to-end.

Which methods train on as if nothing had happened: test_audit.py, and the contract `gauge`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedlora.analysis.audit import MOST, random_gauge
from support.command_line import Said
from support.federations import MIXED
from support.known_warnings import FUTURE_NAMES
from support.projects import configured, make_project, ran, same_run
from support.states import content
from support.toy_trainer import run

pytestmark = FUTURE_NAMES

F64 = torch.float64


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_it_is_a_function_of_seed_and_round() -> None:
    """A run that goes on from its first round's state sends the same bits; another round or seed other ones."""
    whole = list(run("glora", MIXED, dtype=F64, gauge_stress=10.0, seed=3))
    rest = list(run("glora", MIXED, dtype=F64, gauge_stress=10.0, seed=3, state=whole[0].state))
    other = list(run("glora", MIXED, dtype=F64, gauge_stress=10.0, seed=4, rounds=1))
    assert [content(r.uploads) for r in rest] == [content(r.uploads) for r in whole[1:]]
    assert content(other[0].uploads) != content(whole[0].uploads)


# ---- from a config ---------------------------------------------------------------------------------------------------

SHORT = ("train.max_steps=4", "clients.ranks=[4]", "clients.count=3", "run.rounds=3", "evaluate.every=3")


def test_a_stopped_run_goes_on_in_the_same_coordinates(tmp_path: Path) -> None:
    """Stopped after one round and resumed: the bits of the run that was never stopped."""
    config = configured(make_project(tmp_path / "project"), *SHORT, "method.name=fedit", "server.gauge_stress=10")
    whole = ran(config, tmp_path / "whole")
    stopped = ran(config, tmp_path / "stopped", 1)
    ran(config, stopped.path, resume=True)
    same_run(stopped, whole)


def test_what_can_never_run_is_one_line(tmp_path: Path, main: Callable[..., Said]) -> None:
    """One factor has no coordinates; a condition is from 1 to 1e12, at which float64 keeps four digits."""
    project = make_project(tmp_path / "project")
    for sets, said in (
        (("method.name=ffa-lora", "server.gauge_stress=10"), r"server.gauge_stress .*both factors.* ffa-lora "),
        (("server.gauge_stress=0.5",), r"server\.gauge_stress"),
        (("server.gauge_stress=nan",), r"server\.gauge_stress"),
        (("server.gauge_stress=1e20",), r"server\.gauge_stress.*1e\+20"),
    ):
        words = [word for one in (*SHORT, *sets) for word in ("--set", one)]
        assert re.search(said, main("run", project / "config.toml", "--out", tmp_path / "run", *words).error())
        assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"1e\+12.*1e\+20"):
        random_gauge(4, 1e20)
    Q = random_gauge(4, MOST)
    torch.testing.assert_close(torch.linalg.solve(Q, Q), torch.eye(4, dtype=F64), rtol=0, atol=1e-3)
