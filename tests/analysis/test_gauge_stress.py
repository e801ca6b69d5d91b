"""`server.gauge_stress`: every upload in other coordinates, in every round. Who trains on as if nothing had happened.

Kinds of evidence: *oracle* (the coordinates recovered by dense least squares), *contract* (the trajectory of
gauge-invariant methods is that without stress) and *end-to-end* (the same from a config).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Kept, Server, build, read_adapter
from fedlora.analysis.audit import MOST, random_gauge, relative_difference
from fedlora.core.trainer import Trained
from fedlora.errors import FactorNotShared
from fedlora.simulation import RoundRecord
from support.command_line import Said
from support.federations import EQUAL, MIXED, SHAPES
from support.known_warnings import FUTURE_NAMES
from support.projects import configured, make_project, ran, same_run
from support.toy_trainer import Toy, diverging, run

pytestmark = FUTURE_NAMES

F64 = torch.float64


class Remembering(Toy):
    """The toy trainer, and what it made: (round from 0, client) -> the adapter as it was before any stress."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[tuple[int, str], Adapter] = {}

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        trained = super().train(download, adapter, position)
        self.made[download.round, download.client.id] = trained.adapter
        return trained


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
@pytest.mark.parametrize("condition", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("name", ["glora", "flexlora", "svd"])
def test_a_method_of_updates_trains_on_as_if_nothing_had_happened(name: str, condition: float) -> None:
    """Theory: state and readout are functions of the products B_i A_i, which the stress leaves alone. Over five rounds
    of mixed ranks in float64 what is left is round-off times the condition."""
    assert max(drift(name, MIXED, condition, rounds=5)) < 1e-9


@pytest.mark.parametrize("name", ["fedit", "hetlora", "padded-average"])
def test_a_method_of_factors_leaves_its_trajectory(name: str) -> None:
    """Averages of (B_i Q_i, Q_i^-1 A_i) are other averages: by whole parts, from the first round on."""
    moves = drift(name, EQUAL, 10.0)
    assert min(moves) > 0.3


def test_fedex_lora_is_exact_in_each_round_and_still_leaves_its_trajectory() -> None:
    """The first server update is the mean of the products. The pair that clients then train on is an average of
    factors, so that the next round differs (methods.md: "the next round depends on the gauge")."""
    first, second, third = drift("fedex-lora", EQUAL, 10.0)
    assert first < 1e-11 and min(second, third) > 0.05


def same_uploads(one: RoundRecord, other: RoundRecord) -> None:
    """Bit for bit."""
    for mine, theirs in zip(one.uploads, other.uploads, strict=True):
        for m in SHAPES:
            pairs = zip(mine.adapter.modules[m].factors, theirs.adapter.modules[m].factors, strict=True)
            assert all(torch.equal(x, y) for x, y in pairs)


@lru_cache(maxsize=2)
def stressed(condition: float) -> tuple[tuple[RoundRecord, ...], Remembering]:
    trainer = Remembering()
    return tuple(run("glora", MIXED, trainer, dtype=F64, gauge_stress=condition, seed=3)), trainer


def gauge(upload: Any, made: Adapter, module: str) -> Tensor:
    """Q of B_sent = B_made Q, by dense least squares: B has full column rank here."""
    return torch.linalg.lstsq(made.modules[module].factors[0], upload.adapter.modules[module].factors[0]).solution


@pytest.mark.parametrize("condition", [10.0, 1000.0])
def test_each_upload_means_the_same_in_coordinates_of_that_condition(condition: float) -> None:
    """Q = B^+ B' has s_max / s_min as asked, A' is Q^-1 A, and B' A' = B A; heads and counts stay."""
    records, trainer = stressed(condition)
    for record in records:
        for upload in record.uploads:
            made = trainer.made[record.round - 1, upload.client.id]
            assert all(torch.equal(upload.adapter.heads[n], head) for n, head in made.heads.items())
            for module in SHAPES:
                Q = gauge(upload, made, module)
                s = torch.linalg.svdvals(Q)
                assert float(s[0] / s[-1]) == pytest.approx(condition, rel=1e-6)
                B, A = made.modules[module].factors
                b, a = upload.adapter.modules[module].factors
                torch.testing.assert_close(Q @ a, A, rtol=0, atol=1e-9)
                assert float((b @ a - B @ A).norm()) < 1e-11 * float((B @ A).norm()) * condition
                assert float((b - B).norm()) > 0.1 * float(B.norm()), "they are other coordinates"


def test_the_coordinates_are_new_in_every_round_for_every_client_and_module() -> None:
    """audit.md: fresh ones, every round. No two of all Q of one size are alike; another seed draws others."""
    records, trainer = stressed(10.0)
    drawn = [gauge(u, trainer.made[r.round - 1, u.client.id], m) for r in records for u in r.uploads for m in SHAPES]
    for k, Q in enumerate(drawn):
        assert not any(Q.shape == P.shape and torch.allclose(Q, P, atol=1e-3) for P in drawn[:k])
    other = Remembering()
    (record,) = run("glora", MIXED, other, dtype=F64, gauge_stress=10.0, seed=4, rounds=1)
    (same,) = [r for r in records if r.round == 1]
    for mine, theirs in zip(record.uploads, same.uploads, strict=True):
        (one, _), (two, _) = (u.adapter.modules["attn.q"].factors for u in (mine, theirs))
        assert not torch.allclose(one, two, atol=1e-3)


def test_it_is_a_function_of_seed_and_round() -> None:
    """Twice the same bits; and a run that goes on from its first round's state repeats the rest."""
    whole, _ = stressed(10.0)
    again = list(run("glora", MIXED, Remembering(), dtype=F64, gauge_stress=10.0, seed=3))
    rest = list(run("glora", MIXED, Remembering(), dtype=F64, gauge_stress=10.0, seed=3, state=whole[0].state))
    assert [r.round for r in again] == [1, 2, 3] and [r.round for r in rest] == [2, 3]
    for record in (*again, *rest):
        same_uploads(record, whole[record.round - 1])


def test_one_factor_has_no_coordinates(tmp_path: Path) -> None:
    """FFA-LoRA, RoLoRA and FedSA-LoRA send one factor: there is nothing to re-express, and `simulate` says so."""
    for name in ("ffa-lora", "rolora", "fedsa-lora"):
        with pytest.raises(FactorNotShared):
            next(run(name, EQUAL, gauge_stress=10.0))


def test_a_diverged_client_is_refused_as_without() -> None:
    """With a quorum, NaN of client c in round 2 is left out of it by name, and the others' trajectory is that without
    stress: the check of `Server` comes after the change of coordinates, which must let NaN through."""
    options = {"round": Kept(quorum=3), "dtype": F64}
    plain, moved = (list(run("glora", MIXED, diverging("c", 1), gauge_stress=c, **options)) for c in (None, 100.0))
    for a, b in zip(plain, moved, strict=True):
        assert list(a.refused) == list(b.refused) == (["c"] if a.round == 2 else [])
        assert a.weights == b.weights
    server = Server(build("glora"))
    for a, b in zip(models(plain, server), models(moved, server), strict=True):
        assert relative_difference(b, a) < 1e-9


# ---- from a config ---------------------------------------------------------------------------------------------------

# SGD: Adam would turn a rounding error into a whole step where a gradient is zero.
SGD = (
    "train.optimizer=sgd", "train.learning_rate=0.05", "train.max_steps=4", "train.batch_size=8", "clients.ranks=[4]",
    "clients.count=3", "run.rounds=3", "evaluate.every=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers: with one and as few steps, the updates are nearer to rounding than the bounds below allow for."""
    return make_project(tmp_path_factory.mktemp("project"), layers=2)


@pytest.mark.parametrize(("name", "moves"), [("glora", False), ("fedit", True)])
def test_in_a_real_run_only_a_method_of_factors_becomes_another_run(
    name: str, moves: bool, project: Path, tmp_path: Path
) -> None:
    """Theory, as above, with three rounds of real training in float32 between."""
    runs = [
        ran(configured(project, *SGD, f"method.name={name}", *own), tmp_path / f"{len(own)}")
        for own in ((), ("server.gauge_stress=100",))
    ]
    plain, moved = (read_adapter(run.path / "adapter", scaling=2.0)[0] for run in runs)
    drift = relative_difference(moved.modules, plain.modules)
    assert drift > 0.3 if moves else drift < 2e-3
    first, second = ([line["losses"] for line in run.metrics()] for run in runs)
    assert first[0] == second[0], "the first round trains before anything is aggregated"
    assert (first[1] == pytest.approx(second[1], rel=1e-3)) is not moves


def test_a_stopped_run_goes_on_in_the_same_coordinates(project: Path, tmp_path: Path) -> None:
    """Stopped after one round and resumed: the bits of the run that was never stopped."""
    config = configured(project, *SGD, "method.name=fedit", "server.gauge_stress=10")
    whole = ran(config, tmp_path / "whole")
    stopped = ran(config, tmp_path / "stopped", 1)
    ran(config, stopped.path, resume=True)
    same_run(stopped, whole)


def test_what_can_never_run_is_one_line(project: Path, tmp_path: Path, main: Callable[..., Said]) -> None:
    """One factor has no coordinates; a condition is from 1 to 1e12, at which float64 keeps four digits."""
    for sets, said in (
        (("method.name=ffa-lora", "server.gauge_stress=10"), r"server.gauge_stress .*both factors.* ffa-lora "),
        (("server.gauge_stress=0.5",), r"server\.gauge_stress"),
        (("server.gauge_stress=nan",), r"server\.gauge_stress"),
        (("server.gauge_stress=1e20",), r"server\.gauge_stress.*1e\+20"),
    ):
        words = [word for one in (*SGD, *sets) for word in ("--set", one)]
        assert re.search(said, main("run", project / "config.toml", "--out", tmp_path / "run", *words).error())
        assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"1e\+12.*1e\+20"):
        random_gauge(4, 1e20)
    Q = random_gauge(4, MOST)
    torch.testing.assert_close(torch.linalg.solve(Q, Q), torch.eye(4, dtype=F64), rtol=0, atol=1e-3)
