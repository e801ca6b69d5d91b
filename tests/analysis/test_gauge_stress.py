"""`server.gauge_stress`: every upload in other coordinates, in every round. Who trains on as if nothing had happened.

Kinds of evidence: *oracle* (the coordinates recovered by dense least squares; bytes by hand from shapes), *contract*
(the trajectory of gauge-invariant methods is that without stress) and *end-to-end* (the same from a config).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from fedlora.runs.folder import RunFolder
from fedlora.simulation import RoundRecord, Traffic
from support.command_line import Said, invoke
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


@pytest.mark.parametrize("name", ["glora", "flexlora"])
def test_in_float32_it_is_the_rounding_of_float32(name: str) -> None:
    """Stressed uploads are rounded to float32 in their new coordinates: 6e-8 times the condition, a few times over."""
    moves = drift(name, MIXED, 100.0, rounds=4, dtype=torch.float32)
    assert 0 < max(moves) < 1e-4


@pytest.mark.parametrize("name", ["fedit", "hetlora", "padded-average"])
def test_a_method_of_factors_leaves_its_trajectory(name: str) -> None:
    """Averages of (B_i Q_i, Q_i^-1 A_i) are other averages: by whole parts, from the first round on."""
    moves = drift(name, EQUAL, 10.0)
    assert min(moves) > 0.3


def test_fedrot_lora_leaves_its_trajectory_too() -> None:
    """It undoes orthogonal coordinates; those of condition 10 are none (methods.md: "general ones are not")."""
    assert min(drift("fedrot-lora", EQUAL, 10.0)) > 0.3


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


@pytest.mark.parametrize(("name", "ranks"), [("glora", MIXED), ("fedit", EQUAL)])
def test_no_stress_is_no_change_at_all(name: str, ranks: dict[str, int]) -> None:
    """gauge_stress = None is the default: the same bits as a call without it."""
    for one, other in zip(run(name, ranks), run(name, ranks, gauge_stress=None), strict=True):
        same_uploads(one, other)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize(("name", "ranks"), [("glora", MIXED), ("fedit", EQUAL), ("flora", EQUAL)])
def test_bytes_are_counted_as_without(name: str, ranks: dict[str, int], dtype: torch.dtype) -> None:
    """The stress is an experiment on the server's side, and not what travels. By hand for glora and fedit: 16 slots of
    92 numbers and 4 heads of 93, each way, in the dtype in which clients train."""
    plain, moved = ([r.bytes for r in run(name, ranks, dtype=dtype, gauge_stress=c)] for c in (None, 100.0))
    size = dtype.itemsize
    if name != "flora":
        assert plain == [Traffic(16 * 92 * size, 4 * 93 * size, 16 * 92 * size, 4 * 93 * size, 0)] * 3
    assert moved == plain


def test_one_factor_has_no_coordinates(tmp_path: Path) -> None:
    """FFA-LoRA, RoLoRA and FedSA-LoRA send one factor: there is nothing to re-express, and `simulate` says so."""
    for name in ("ffa-lora", "rolora", "fedsa-lora"):
        with pytest.raises(FactorNotShared):
            next(run(name, EQUAL, gauge_stress=10.0))


def test_a_client_of_rank_one_has_a_number_for_coordinates() -> None:
    """GLoRA on ranks 1, 1, 2, 3: B times a number, A divided by it."""
    assert max(drift("glora", {"a": 1, "b": 1, "c": 2, "d": 3}, 1000.0)) < 1e-9


def test_absent_clients_and_their_return_change_nothing_about_it() -> None:
    """Half of the clients a round: histories of missing clients, too, are functions of updates."""
    assert max(drift("glora", MIXED, 100.0, rounds=5, participation=0.5)) < 1e-9


def test_a_client_that_sends_zero_is_stressed_too() -> None:
    """(0 Q, Q^-1 A) is zero, like (0, A). A trainer whose client a always returns B = 0."""

    def trainer() -> Toy:
        def zero(download: Any, trained: Trained) -> Trained:
            if download.client.id != "a":
                return trained
            modules = {n: replace(x, B=torch.zeros_like(x.factors[0])) for n, x in trained.adapter.modules.items()}
            return replace(trained, adapter=Adapter(modules, trained.adapter.heads))

        return Toy(zero)

    server = Server(build("glora"))
    plain, moved = (list(run("glora", MIXED, trainer(), dtype=F64, gauge_stress=c)) for c in (None, 100.0))
    for a, b in zip(models(plain, server), models(moved, server), strict=True):
        assert relative_difference(b, a) < 1e-9


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
Runs = dict[float | None, RunFolder]


def written(folder: RunFolder) -> Adapter:
    return read_adapter(folder.path / "adapter", scaling=2.0)[0]


def apart(one: RunFolder, other: RunFolder) -> float:
    """The larger of the relative differences of the final updates and of the final heads."""
    a, b = written(one), written(other)
    heads = [float((b.heads[n] - head).norm() / head.norm()) for n, head in a.heads.items()]
    return max(relative_difference(b.modules, a.modules), *heads)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers: with one and as few steps, the updates are nearer to rounding than the bounds below allow for."""
    return make_project(tmp_path_factory.mktemp("project"), layers=2)


OF_UPDATES = ["glora", pytest.param("flexlora", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module", params=[*OF_UPDATES, "fedit"])
def stress(request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`fedlora run` on a real model, without stress and at conditions 1 and 100. Tests read them and change nothing."""
    out = tmp_path_factory.mktemp("stress")
    runs: Runs = {}
    for condition in (None, 1.0, 100.0):
        own = () if condition is None else (f"server.gauge_stress={condition}",)
        sets = [a for s in (*SGD, f"method.name={request.param}", *own) for a in ("--set", s)]
        runs[condition] = RunFolder(out / str(condition))
        invoke("run", project / "config.toml", "--out", runs[condition].path, *sets)
    return runs


@pytest.mark.quick(1)
def test_the_first_round_trains_before_anything_is_aggregated(stress: Runs) -> None:
    """So its losses are those without stress, bit for bit."""
    assert len({tuple(folder.metrics()[0]["losses"].items()) for folder in stress.values()}) == 1


@pytest.mark.parametrize("stress", OF_UPDATES, indirect=True)
def test_in_a_real_run_the_condition_does_not_matter_to_methods_of_updates(stress: Runs) -> None:
    """Theory, as above: condition 100 against condition 1, three rounds of real training in float32 between. GLoRA also
    chooses components by their alignment, so its rounding can swap one at the edge of noise."""
    assert apart(stress[1.0], stress[100.0]) < 2e-3
    for one, other in zip(stress[1.0].metrics(), stress[100.0].metrics(), strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-3)
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-2)


@pytest.mark.parametrize("stress", OF_UPDATES, indirect=True)
def test_in_a_real_run_stress_does_not_matter_to_methods_of_updates(stress: Runs) -> None:
    """The same against the run without any."""
    assert apart(stress[None], stress[100.0]) < 2e-3


@pytest.mark.parametrize("stress", ["fedit"], indirect=True)
def test_in_a_real_run_a_method_of_factors_becomes_another_run(stress: Runs) -> None:
    """Orthogonal coordinates are enough to ruin an average of factors; from the second round on clients train on it."""
    for condition in (1.0, 100.0):
        assert apart(stress[None], stress[condition]) > 0.3
        assert stress[None].metrics()[1]["losses"] != stress[condition].metrics()[1]["losses"]


def test_what_travels_up_is_counted_as_without(stress: Runs) -> None:
    """By hand: three clients of rank 4, four modules of 32 x 32, float32; a head of 3 labels."""
    for folder in stress.values():
        for line in folder.metrics():
            assert line["bytes"]["up_adapter"] == 3 * 4 * 4 * (32 + 32) * 4
            assert line["bytes"]["up_heads"] == line["bytes"]["down_heads"] == 3 * (3 * 32 + 3) * 4


def test_what_travels_down_is_counted_as_without(stress: Runs) -> None:
    """By hand, as above: clients train in float32, whatever the experiment does to their uploads."""
    for folder in stress.values():
        for line in folder.metrics():
            assert line["bytes"]["down_adapter"] == 3 * 4 * 4 * (32 + 32) * 4


def test_a_stopped_run_goes_on_in_the_same_coordinates(project: Path, tmp_path: Path) -> None:
    """Stopped after one round and resumed: the bits of the run that was never stopped."""
    config = configured(project, *SGD, "method.name=fedit", "server.gauge_stress=10")
    whole = ran(config, tmp_path / "whole")
    stopped = ran(config, tmp_path / "stopped", 1)
    ran(config, stopped.path, resume=True)
    same_run(stopped, whole)


@pytest.mark.parametrize("method", ["ffa-lora", "rolora", "fedsa-lora"])
def test_a_method_of_one_factor_is_refused(
    project: Path, tmp_path: Path, main: Callable[..., Said], method: str
) -> None:
    """`prepare` promises to refuse what can never run as written: exit code 2, one line, nothing written."""
    sets = (*SGD, f"method.name={method}", "server.gauge_stress=10")
    said = main("run", project / "config.toml", "--out", tmp_path / "run", *(a for s in sets for a in ("--set", s)))
    assert re.search(f"server.gauge_stress .*both factors.* {method} ", said.error())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["0.5", "0", "-1", "nan", "inf", "much"])
def test_an_impossible_condition_is_one_line(
    project: Path, tmp_path: Path, main: Callable[..., Said], value: str
) -> None:
    """A condition number is at least 1, and finite."""
    said = main("run", project / "config.toml", "--out", tmp_path / "run", "--set", f"server.gauge_stress={value}")
    assert "server.gauge_stress" in said.complaint()
    assert not (tmp_path / "run").exists()


def test_coordinates_that_float64_does_not_bear_are_refused(project: Path, main: Callable[..., Said]) -> None:
    """1e20 ended in a traceback of a singular matrix. At the bound the update is still there, to four digits."""
    said = main("run", project / "config.toml", "--set", "server.gauge_stress=1e20").complaint()
    assert "server.gauge_stress" in said and "1e+20" in said
    with pytest.raises(ValueError, match=r"1e\+12.*1e\+20"):
        random_gauge(4, 1e20)
    Q = random_gauge(4, MOST)
    assert relative_to(torch.linalg.solve(Q, Q), torch.eye(4, dtype=F64)) < 1e-3


def relative_to(got: Tensor, meant: Tensor) -> float:
    return float((got - meant).norm() / meant.norm())
