"""`server.gauge_stress`: every upload in other coordinates, in every round. Who trains on as if nothing had happened.

Kinds of evidence: contract (the trajectory of gauge-invariant methods is that without stress), end-to-end (a config).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora import Server, build
from fedlora.analysis.audit import MOST, random_gauge, relative_difference
from fedlora.simulation import RoundRecord
from support.command_line import Said
from support.federations import EQUAL, MIXED
from support.known_warnings import FUTURE_NAMES
from support.projects import configured, make_project, ran, same_run
from support.states import content
from support.toy_trainer import run

pytestmark = FUTURE_NAMES

F64 = torch.float64


def models(records: list[RoundRecord], server: Server) -> list[Mapping[str, Any]]:
    """The server's whole update after each round."""
    return [server.global_update(record.state.server) for record in records]


def drift(name: str, ranks: Mapping[str, int], condition: float, **options: Any) -> list[float]:
    """By round: how far the model of a stressed run is from that of the same run without."""
    plain, moved = (
        models(list(run(name, ranks, gauge_stress=stress, **{"dtype": F64, **options})), Server(build(name)))
        for stress in (None, condition)
    )
    return [relative_difference(b, a) for a, b in zip(plain, moved, strict=True)]


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["glora", "flexlora", "svd"])
def test_a_method_of_updates_trains_on_as_if_nothing_had_happened(name: str) -> None:
    """Theory: state and readout are functions of the products B_i A_i, which the stress leaves alone. Over five rounds
    of mixed ranks in float64 what is left is round-off times the condition."""
    assert max(drift(name, MIXED, 1000.0, rounds=5)) < 1e-9


@pytest.mark.parametrize("name", ["fedit", "hetlora", "padded-average"])
def test_a_method_of_factors_leaves_its_trajectory(name: str) -> None:
    """Averages of (B_i Q_i, Q_i^-1 A_i) are other averages: by whole parts, from the first round on."""
    moves = drift(name, EQUAL, 10.0)
    assert min(moves) > 0.3


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
