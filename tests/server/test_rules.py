"""Robust rules as pure functions of a Gram matrix: by hand, against ByzFL's results, and inside their bounds.

The expected values: numbers worked out by hand; `tests/golden/robust_rules.json`, which ByzFL 0.0.11 made
(make_robust_rules.py); dense float64 vectors, from which each Gram matrix here is computed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlora.errors import HyperparameterError
from fedlora.runs.robust import RobustSection
from fedlora.server import rules
from fedlora.server.judged import verdicts
from fedlora.server.rules import NNM, CenteredClipping, GeometricMedian, Krum, MultiKrum, NormClipping, Rule
from fedlora.testing.federations import noise

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "robust_rules.json").read_text())
ALL: dict[str, Callable[[int], Rule]] = {
    "norm-clipping": lambda f: NormClipping(),
    "centered-clipping": lambda f: CenteredClipping(),
    "geometric-median": lambda f: GeometricMedian(),
    "krum": Krum,
    "multi-krum": MultiKrum,
    "geometric-median after mixing": lambda f: NNM(GeometricMedian(), f),
    "krum after mixing": lambda f: NNM(Krum(f), f),
    "multi-krum after mixing": lambda f: NNM(MultiKrum(f), f),
}


def of(rule: Rule, X: Tensor, p: Tensor | None = None) -> Tensor:
    """The coefficients, from vectors (n, d); without p clients count alike."""
    return rule.coefficients(X @ X.mT, torch.full((len(X),), 1 / len(X), dtype=torch.float64) if p is None else p)


def line(*at: float) -> Tensor:
    return torch.tensor(at, dtype=torch.float64)[:, None]


def weights(p: list[float]) -> Tensor:
    return torch.tensor(p, dtype=torch.float64)


def close(c: Tensor, *wanted: float, atol: float = 1e-9) -> None:
    torch.testing.assert_close(c, weights(list(wanted)), rtol=0, atol=atol)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_norm_clipping_by_hand() -> None:
    """Norms 1, 4, 10 and 0. The lower median of four is 1. A client that sent no change counts in full."""
    close(of(NormClipping(threshold=2.0), line(1, -4, 10, 0)), 1 / 4, 1 / 8, 1 / 20, 1 / 4)
    close(of(NormClipping(), line(1, -4, 10, 0)), 1 / 4, 1 / 16, 1 / 40, 1 / 4)
    close(of(NormClipping(), line(0, 0, 0, 5)), 1 / 4, 1 / 4, 1 / 4, 0)


def test_krum_and_multi_krum_by_hand() -> None:
    """0, 1, 2, 3 and 10 with f = 1: the three nearest others give 14, 6, 6, 14 and 49 + 64 + 81. Of two that are equal,
    the first by id is chosen."""
    X = line(0, 1, 2, 3, 10)
    close(of(Krum(1), X), 0, 1, 0, 0, 0)
    close(of(MultiKrum(1), X), 1 / 4, 1 / 4, 1 / 4, 1 / 4, 0)
    close(of(MultiKrum(1), X, weights([0.1, 0.2, 0.3, 0.2, 0.2])), 1 / 8, 2 / 8, 3 / 8, 2 / 8, 0)


@pytest.mark.parametrize(("angle", "inside"), [(60.0, True), (119.0, True), (121.0, False), (170.0, False)])
def test_the_geometric_median_of_a_triangle_is_fermats_point(angle: float, inside: bool) -> None:
    """From 120 degrees on it is that corner, and the others get exactly 0; below, each side is seen under 120."""
    half = math.radians(angle) / 2
    X = 1 + torch.tensor([[0, 0], [math.cos(half), math.sin(half)], [math.cos(half), -math.sin(half)]]).double()
    c = of(GeometricMedian(), X)
    if not inside:
        assert c.tolist() == [1.0, 0.0, 0.0]
        return
    views = torch.nn.functional.normalize(X - c @ X, dim=1)
    close((views @ views.mT)[[0, 1, 2], [1, 2, 0]], -0.5, -0.5, -0.5, atol=1e-6)


def test_the_geometric_median_on_a_line_is_the_weighted_median() -> None:
    """Sorted, the weights pass one half at 1.4, beside outliers of any size. Between two equal clients and at twins
    there is more than one median: all of them count, by weight."""
    X = line(1e12, -1e9, 1.0, 1.4, 1.1)
    close(of(GeometricMedian(), X, weights([0.33, 0.2, 0.01, 0.24, 0.22])), 0, 0, 0, 1, 0)
    close(of(GeometricMedian(), line(1, 5)), 1 / 2, 1 / 2)
    p = weights([0.1, 0.35, 0.1, 0.45])
    close(of(GeometricMedian(), line(2, 2, 2, 9), p), 2 / 11, 7 / 11, 2 / 11, 0)


@pytest.mark.parametrize("far", [1e3, 1e8, 1e12])
def test_a_change_that_is_the_median_is_found_beside_far_ones(far: float) -> None:
    """Pulls of 0.2 at right angles sum to 0.346, below the weight 0.4 of the first change. Pulls of 0.2, 0.2 and 0.24
    sum to 0.371, above 0.36: the median is elsewhere, where the slope is 0."""
    X = torch.cat([torch.zeros(1, 3), torch.diag(torch.tensor([1.0, 2.0, far]))]).double() + 1
    assert of(GeometricMedian(), X, weights([0.4, 0.2, 0.2, 0.2])).tolist() == [1.0, 0.0, 0.0, 0.0]
    p = weights([0.36, 0.2, 0.2, 0.24])
    z = of(GeometricMedian(), X, p) @ X
    assert float((p @ torch.nn.functional.normalize(X - z, dim=1)).norm()) < 1e-6


def test_the_iteration_starts_at_a_change_and_leaves_it() -> None:
    """The plain mean of these is the first of them, where Weiszfeld's iteration would divide by zero and stay. It is no
    median: three pull to the right, one to the left."""
    X = torch.tensor([[0, 0], [1, 0.5], [1, 0], [1, -0.5], [-3, 0]], dtype=torch.float64)
    z = of(GeometricMedian(), X) @ X
    assert float(z[0]) > 0.5 and float(torch.nn.functional.normalize(X - z, dim=1).sum(0).norm()) < 1e-6


def test_equal_scores_and_equal_changes_are_equal_beside_rounding() -> None:
    """As other coordinates move the entries of G: the first of equal clients by id, and exact zeros."""
    for seed in range(8):
        near = line(0, 1, 2, 3, 10) + 1e-8 * noise((5, 1), "near", seed)
        close(of(Krum(1), near), 0, 1, 0, 0, 0)
        close(of(MultiKrum(1), near[:4]), 1 / 3, 1 / 3, 1 / 3, 0)
        between = line(0, 5, 7) + 1e-9 * noise((3, 1), "between", seed)  # 0 and 5 are medians: 1/2 against 1/2
        close(of(GeometricMedian(), between, weights([0.5, 0.25, 0.25])), 2 / 3, 1 / 3, 0)
        X = torch.cat([1 + noise((1, 6), "twins").repeat(3, 1), noise((2, 6), "others")])
        G = X @ X.mT
        G = G * (1 + 1e-15 * (noise((5, 5), "G", seed) + noise((5, 5), "G", seed).mT))
        close(GeometricMedian().coefficients(G, weights([0.2] * 5)), 1 / 3, 1 / 3, 1 / 3, 0, 0, atol=1e-15)


# ---- ByzFL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GOLDEN))
def test_results_are_those_of_byzfl_on_the_vectors(name: str) -> None:
    X = torch.tensor(GOLDEN[name]["changes"], dtype=torch.float64)
    for one in GOLDEN[name]["rules"]:
        rule = RobustSection.model_validate(one["keys"]).build()
        assert rule is not None
        want = torch.tensor(one["aggregate"], dtype=torch.float64)
        assert float((of(rule, X) @ X - want).norm() / want.norm()) < 1e-6, one["keys"]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def lies(S: Tensor, f: int, kind: str) -> Tensor:
    """What f clients send who know all others: (f, d)."""
    mean, r = S.mean(0), float((S - S.mean(0)).norm(dim=1).max())
    away = torch.nn.functional.normalize(noise((S.shape[1],), "away"), dim=0)
    return {
        "far": (mean + 1e9 * away).repeat(f, 1),
        "near": (mean + 2 * r * away).repeat(f, 1),
        "inside": (mean + 0.7 * r * away).repeat(f, 1),
        "minus": -3 * mean.repeat(f, 1),
        "copies": S[:1].repeat(f, 1),
        "apart": mean + r * noise((f, S.shape[1]), "apart"),
    }[kind]


@pytest.mark.parametrize("kind", ["far", "near", "inside", "minus", "copies", "apart"])
def test_what_liars_do_stays_inside_the_bounds_of_the_docstrings(kind: str) -> None:
    """||result - X_S||^2 against kappa V_S, over rounds of 5 to 19 clients with the most byzantine clients that a rule
    allows."""
    for seed in range(12):
        f = 1 + seed % 4
        n = 2 * f + 3 + 2 * (seed % 3)
        S = noise((12,), "common", seed) * (seed % 3) + noise((n - f, 12), "own", seed)
        X = torch.cat([S, lies(S, f, kind)])[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
        spread = (S - S.mean(0)).square().sum(1)
        V, less = float(spread.mean()), (n - f) / (n - 2 * f)
        kappa = {"krum": 6 * less, "geometric-median": 4 * less**2}
        kappa |= {f"{name} after mixing": 8 * f / (n - f) * (kappa[name] + 1) for name in ("krum", "geometric-median")}
        kappa["multi-krum"] = 2 * less * (2 + float(spread.max()) / V)
        for name, most in kappa.items():
            off = float((of(ALL[name](f), X) @ X - S.mean(0)).square().sum())
            assert off <= most * V * (1 + 1e-9), (name, seed, off / V, most)


def test_clipping_bounds_what_one_client_moves() -> None:
    """Whatever it sends: p_i threshold; for centered clipping p_i tau in each of the iterations, twice that apart."""
    S = noise((6, 8), "honest")
    for rule, most in ((NormClipping(threshold=0.7), 0.7 / 7), (CenteredClipping(tau=0.7, iterations=4), 4 * 0.7 / 7)):
        at = [
            (of(rule, X) @ X)
            for x in (0.0, 1.0, -50.0, 1e12)
            for X in [torch.cat([S, x * noise((1, 8), "byzantine client")])]
        ]
        assert max(float((a - at[0]).norm()) for a in at) <= 2 * most


@pytest.mark.parametrize("sizes", [(4e4, 3e15), (1e-2, 2e12), (1e12, 1e15)])
def test_far_liars_behind_mixing_carry_nothing_away(sizes: tuple[float, float]) -> None:
    """Two of seven, of sizes beside which float64 has few digits left for the others."""
    for seed in range(20):
        X = 1 + 0.4 * noise((7, 8), "X", seed)
        X[:2] = torch.nn.functional.normalize(noise((2, 8), "far", seed), dim=1) * torch.tensor(sizes)[:, None]
        center = X[2:].mean(0)
        radius = float((X[2:] - center).norm(dim=1).max())
        for name in ("geometric-median after mixing", "multi-krum after mixing"):
            assert float((of(ALL[name](2), X) @ X - center).norm()) < 2 * radius, (name, seed)


# ---- every rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALL))
def test_names_places_and_units_change_no_coefficient(name: str) -> None:
    """Clients in another order get the same; a rotation and another unit change no distance's rank."""
    X, p = noise((9, 12), "X"), torch.arange(1, 10, dtype=torch.float64) / 45
    rule, turn = ALL[name](2), torch.tensor([3, 0, 8, 6, 2, 5, 1, 4, 7])
    c = of(rule, X, p)
    assert bool((c >= 0).all()) and 0 < float(c.sum()) <= 1 + 1e-12
    torch.testing.assert_close(of(rule, X[turn], p[turn]), c[turn], rtol=1e-8, atol=1e-12)
    Q = torch.linalg.qr(noise((12, 12), "Q")).Q
    torch.testing.assert_close(of(rule, 1e-4 * X @ Q, p), c, rtol=1e-6, atol=1e-9)


def test_how_many_clients_a_rule_needs() -> None:
    """Krum: its paper's n >= 2 f + 3. Mixing: a majority. A share is of the round, rounded up."""
    needs = {
        Krum(2): 7, Krum(0.0): 3, MultiKrum(0.2): 7, MultiKrum(0.21): 9, GeometricMedian(): 1,
        NNM(NormClipping(), 3): 7, NNM(Krum(3), 3): 9,
    }  # fmt: skip
    assert {rule: rule.least(10) for rule in needs} == needs
    for f in (-1, 0.5, True, math.nan, "2"):
        with pytest.raises(HyperparameterError, match="how many may be Byzantine"):
            Krum(f)  # type: ignore[arg-type]


def test_the_report_has_coefficient_norm_and_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1, 2, 3 and -7 on a line, cut to 2. A change 1e13 times too large is left out: it would leave a history."""
    X = line(1, 2.05, 3, -7, 2e13)
    found = verdicts(NormClipping(threshold=2.0), X @ X.mT, dict.fromkeys("abcde", 0.2))
    assert [one.coefficient for one in found.values()] == pytest.approx(
        [0.2, 0.2 * 2 / 2.05, 0.2 * 2 / 3, 0.2 * 2 / 7, 0.0]
    )
    assert [one.norm for one in found.values()] == pytest.approx([1, 2.05, 3, 7, 2e13])
    assert [client for client, one in found.items() if one.reason] == ["c", "d", "e"] and found["e"].coefficient == 0
    assert re.search(r"7\.6.*2\.4", found["d"].reason), "far from the result, and from where the median client is"
    monkeypatch.setattr(rules, "_ITERATIONS", 1)
    verdicts(GeometricMedian(), X @ X.mT, dict.fromkeys("abcde", 0.2))
    assert not caplog.text, "2.05 is the median of these: nothing had to be iterated"
    assert float(of(GeometricMedian(), noise((5, 3), "X")).sum()) == pytest.approx(1)
    assert "after 1 iterations" in caplog.text


@pytest.mark.parametrize("scale", [1e6, 1e14, 1e29])
def test_a_change_of_any_size_moves_the_geometric_median_by_no_more_than_its_bound(scale: float) -> None:
    """One of five is hostile, and `scale` long. By hand: at most 2 (n - f) / (n - 2 f) sqrt(V) from the honest mean."""
    X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[4] *= scale / X[4].norm()
    c = GeometricMedian().coefficients(X @ X.mT, torch.full((5,), 0.2, dtype=torch.float64))
    honest = X[:4].mean(0)
    spread = (X[:4] - honest).square().sum(1).mean().sqrt()
    assert float((c @ X - honest).norm()) <= 2 * 4 / 3 * float(spread)
