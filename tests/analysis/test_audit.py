"""What the audit measures. Kind of evidence: oracle (dense float64 computations, and closed forms beside each test)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.analysis.audit import (
    MOST,
    audit,
    mean_update,
    padded_average_error,
    random_gauge,
    regauge,
)
from fedlora.errors import ConfigError
from support.federations import EQUAL, FULL, MIXED, SHAPES, noise, rounds
from support.projects import configured
from support.states import content
from support.toy_trainer import run

F64 = torch.float64


def lora(d_out: int, rank: int, d_in: int, *seed: str | int) -> LoRA:
    return LoRA(noise((d_out, rank), *seed, "B"), noise((rank, d_in), *seed, "A"))


def upload(client: str, n: float, x: LoRA | Mapping[str, LoRA]) -> Upload:
    modules = {"m": x} if isinstance(x, LoRA) else x
    return Upload(Client(client, {name: pair.rank for name, pair in modules.items()}), n, Adapter(modules))


def test_mean_update_is_the_dense_mean_over_the_holders() -> None:
    """Weights .2 .3 .5: "m" is held by all, "n" by a and b only, whose weights become .4 and .6."""
    a = {"m": lora(9, 2, 7, "am"), "n": lora(5, 2, 6, "an")}
    b = {"m": lora(9, 3, 7, "bm"), "n": lora(5, 1, 6, "bn")}
    c = {"m": lora(9, 1, 7, "cm")}
    got = mean_update([upload("a", 1, a), upload("b", 1, b), upload("c", 1, c)], {"a": 0.2, "b": 0.3, "c": 0.5})
    want_m = 0.2 * a["m"].delta() + 0.3 * b["m"].delta() + 0.5 * c["m"].delta()
    torch.testing.assert_close(got["m"].delta(), want_m, rtol=0, atol=1e-14)
    torch.testing.assert_close(got["n"].delta(), 0.4 * a["n"].delta() + 0.6 * b["n"].delta(), rtol=0, atol=1e-14)


def padded_error(sent: Sequence[Upload], weights: Mapping[str, float], rank: int) -> float:
    """The same number dense in float64: ||(sum p [B 0]) (sum p [A; 0]) - sum p B A|| / ||sum p B A||, all modules."""
    gap = size = 0.0
    for module, (d_out, d_in) in SHAPES.items():
        B, A = torch.zeros(d_out, rank, dtype=F64), torch.zeros(rank, d_in, dtype=F64)
        mean = torch.zeros(d_out, d_in, dtype=F64)
        for u in sent:
            B_i, A_i = (t.double() for t in u.adapter.modules[module].factors)
            p, r = weights[u.client.id], B_i.shape[1]
            B[:, :r] += p * B_i
            A[:r] += p * A_i
            mean += p * B_i @ A_i
        gap += float((B @ A - mean).square().sum())
        size += float(mean.square().sum())
    return math.sqrt(gap / size)


@pytest.mark.parametrize("ranks", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("name", ["glora", "flexlora"])
def test_padded_average_error_is_the_dense_one(name: str, ranks: dict[str, int]) -> None:
    """Over three rounds, with heads, whatever method runs."""
    for played in rounds(Server(build(name)), ranks, FULL):
        assert played.after.tally is not None
        weights = played.after.tally.weights
        got = padded_average_error(played.before, played.uploads, weights)
        assert got == pytest.approx(padded_error(played.uploads, weights, max(ranks.values())), rel=1e-10)
        assert got > 0.1  # factor averaging is far off here: the number says something


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("rank", [2, 4, 16])
def test_a_random_gauge_has_the_asked_condition(rank: int, condition: float) -> None:
    """kappa_2 = s_max / s_min by numpy-free SVD in float64; and the scale is symmetric: s_max s_min = 1."""
    Q = random_gauge(rank, condition, "test", rank)
    s = torch.linalg.svdvals(Q)
    assert (Q.dtype, tuple(Q.shape)) == (F64, (rank, rank))
    assert float(s[0] / s[-1]) == pytest.approx(condition, rel=1e-7)
    assert float(s[0] * s[-1]) == pytest.approx(1.0, rel=1e-7)


def test_regauge_changes_the_factors_and_not_the_update() -> None:
    """B A stays to round-off times the condition; heads, client and count stay; float32 comes out as float64."""
    x = lora(9, 3, 7, "x").map(Tensor.float)
    sent = Upload(Client("a", 3), 5, Adapter({"m": x}, {"h": torch.ones(2)}))
    moved = regauge(sent, 10.0)
    B, A = moved.adapter.modules["m"].factors
    assert (moved.client, moved.num_examples, B.dtype) == (sent.client, 5, F64)
    assert torch.equal(moved.adapter.heads["h"], torch.ones(2))
    assert float((B @ A - x.map(Tensor.double).delta()).norm()) < 1e-12
    assert float((B - x.factors[0]).norm()) > 0.1
    assert not torch.allclose(regauge(sent, 10.0, seed=1).adapter.modules["m"].factors[0], B)


def test_the_start_has_the_uploads_rank_though_their_mean_has_less() -> None:
    """Two of three slots hold something. fedrot-lora turns every pair to the start's slots, and keeps as many."""
    B, A = pad(noise((30, 2), "B"), (0, 1)), noise((3, 20), "A")
    sent = [Upload(Client(c, 3), 1, Adapter({"m": LoRA(B * k, A / k)})) for c, k in (("a", 1.0), ("b", 2.0))]
    assert audit("fedrot-lora", build("fedrot-lora"), sent, draws=1).modules["m"]["rank"] == 3


# ---- server.gauge_stress: every upload in other coordinates ---


def test_gauge_stress_is_a_function_of_seed_and_round() -> None:
    """A run that goes on from its first round's state sends the same bits; another round or seed other ones."""
    whole = list(run("glora", MIXED, dtype=F64, gauge_stress=10.0, seed=3))
    rest = list(run("glora", MIXED, dtype=F64, gauge_stress=10.0, seed=3, state=whole[0].state))
    other = list(run("glora", MIXED, dtype=F64, gauge_stress=10.0, seed=4, rounds=1))
    assert [content(r.uploads) for r in rest] == [content(r.uploads) for r in whole[1:]]
    assert content(other[0].uploads) != content(whole[0].uploads)


@pytest.mark.parametrize("condition", ["0.5", "nan", "1e20"])
def test_a_condition_is_from_1_to_1e12(project: Path, condition: str) -> None:
    """At which float64 keeps four digits. That one factor has no coordinates: tests/runs/test_robust.py."""
    with pytest.raises(ConfigError, match=r"server\.gauge_stress"):
        configured(project, f"server.gauge_stress={condition}")
    with pytest.raises(ValueError, match=r"1e\+12"):
        random_gauge(4, float(condition))
    Q = random_gauge(4, MOST)
    torch.testing.assert_close(torch.linalg.solve(Q, Q), torch.eye(4, dtype=F64), rtol=0, atol=1e-3)
