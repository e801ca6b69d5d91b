"""The two-pass sketch. Kinds of evidence: oracle (the dense consensus projection in float64), property (sums in any
order, one client's message is what its formula says), the flat spectrum that it must refuse.
"""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import Tensor

from fedlora.core.lora import LoRA
from fedlora.errors import HyperparameterError, RankMismatch, ShapeError
from fedlora.linalg import svd_of_product
from fedlora.server.sketch import SketchPlan, core_message, range_basis, range_message, sketched
from support.federations import noise

D_OUT, D_IN = 60, 45


def shared(clients: int, r: int = 4, common: int = 6, tail: float = 1e-3) -> list[LoRA]:
    """Updates in a common column space, up to a tail of that size."""
    space = torch.linalg.qr(noise((D_OUT, common), "space", dtype=torch.float64))[0]
    made = []
    for k in range(clients):
        B = space @ noise((common, r), k, "mix", dtype=torch.float64)
        B = B + tail * noise((D_OUT, r), k, "tail", dtype=torch.float64)
        made.append(LoRA(B.float(), noise((r, D_IN), k, "A", dtype=torch.float32)))
    return made


def flat(clients: int, r: int = 4) -> list[LoRA]:
    return [
        LoRA(noise((D_OUT, r), k, "B", dtype=torch.float32), noise((r, D_IN), k, "A", dtype=torch.float32))
        for k in range(clients)
    ]


def run(loras: list[LoRA], counts: list[float], plan: SketchPlan, **options: float):  # type: ignore[no-untyped-def]
    pairs = list(zip(loras, counts, strict=True))
    basis = range_basis(functools.reduce(operator.add, [range_message(x, n, plan) for x, n in pairs]), plan)
    return sketched(
        functools.reduce(operator.add, [core_message(x, n, basis, plan) for x, n in pairs]), basis, plan, **options
    )


def dense(loras: list[LoRA], counts: list[float]) -> tuple[Tensor, Tensor]:
    """(K, the mean update) in float64."""
    K, mean = torch.zeros(D_OUT, D_OUT, dtype=torch.float64), torch.zeros(D_OUT, D_IN, dtype=torch.float64)
    for lora, n in zip(loras, counts, strict=True):
        x = lora.map(Tensor.double)
        U = torch.linalg.svd(x.delta(), full_matrices=False)[0][:, : lora.rank]
        K += n / sum(counts) * U @ U.mT
        mean += n / sum(counts) * x.delta()
    return K, mean


def update(result) -> Tensor:  # type: ignore[no-untyped-def]
    s = result.spectrum
    return (s.U.double() * s.s.double()) @ s.Vh.double()


@pytest.mark.parametrize("clients", [1, 5, 40])
def test_clients_that_share_a_subspace_are_averaged_well(clients: int) -> None:
    """Against the mean projected on the R strongest eigenvectors of the dense K, and the mean: to ten tails."""
    loras, counts = shared(clients), [1.0 + k % 3 for k in range(clients)]
    plan = SketchPlan(D_OUT, D_IN, rank=6, seed=1, oversample=10)
    result = run(loras, counts, plan)
    K, mean = dense(loras, counts)
    P = torch.linalg.eigh(K)[1][:, -6:]
    want = P @ (P.mT @ mean)
    assert float((update(result) - want).norm() / mean.norm()) < 1e-2
    assert float((update(result) - mean).norm() / mean.norm()) < 1e-2
    assert 0.999 < result.captured <= 1 + 1e-9


def test_a_sketch_as_wide_as_the_matrix_is_exact() -> None:
    """Q spans everything: U_ref is K's own, the bound is zero, captured is the dense share."""
    loras, counts = flat(5), [2.0, 1.0, 1.0, 3.0, 1.0]
    plan = SketchPlan(D_OUT, D_IN, rank=20, seed=2, oversample=40)
    result = run(loras, counts, plan)
    K, mean = dense(loras, counts)
    assert plan.width == D_OUT and result.error_bound < 1e-5
    assert float((update(result) - mean).norm() / mean.norm()) < 1e-5  # rank 20 holds all five clients of rank 4
    assert result.captured == pytest.approx(1.0, abs=1e-5)
    few = run(loras, counts, SketchPlan(D_OUT, D_IN, rank=7, seed=2, oversample=60), least_captured=0.0, most_error=1.0)
    share = float(torch.linalg.eigvalsh(K)[-7:].sum() / torch.trace(K))
    assert few.captured == pytest.approx(share, abs=1e-4)


def test_independent_clients_are_refused_and_the_bound_says_how_bad_it_is() -> None:
    loras = flat(40)
    plan = SketchPlan(D_OUT, D_IN, rank=6, seed=3, oversample=4)
    with pytest.raises(RankMismatch, match=r"do not\s+share a subspace"):
        run(loras, [1.0] * 40, plan)
    result = run(loras, [1.0] * 40, plan, least_captured=0.0, most_error=1.0)
    basis = range_basis(functools.reduce(operator.add, [range_message(x, 1.0, plan) for x in loras]), plan).double()
    _, mean = dense(loras, [1.0] * 40)
    outside = float((mean - basis @ (basis.mT @ mean)).norm())
    error, size = float((update(result) - mean).norm()), float(mean.norm())
    assert outside < error <= result.error_bound * size and result.error_bound > 0.5
    assert outside <= result.missed * size


@pytest.mark.parametrize("rank", [2, 4, 8])
def test_the_bound_counts_what_is_sketched_and_then_left_out(rank: int) -> None:
    """Clients that share 12 dimensions, sketched along 24 and cut to fewer: the error lies in span(Q), and is known."""
    loras, counts = shared(20, common=12, tail=0.0), [1.0] * 20
    result = run(
        loras, counts, SketchPlan(D_OUT, D_IN, rank=rank, seed=1, oversample=16), least_captured=0.0, most_error=1.0
    )
    _, mean = dense(loras, counts)
    error = float((update(result) - mean).norm() / mean.norm())
    assert error > 0.2
    assert result.error_bound == pytest.approx(error, rel=1e-3)


def test_sums_in_any_order_and_in_groups() -> None:
    """Plain sums: to float32 rounding the same whoever adds first, as secure aggregation would."""
    loras, counts = shared(9), [float(k + 1) for k in range(9)]
    plan = SketchPlan(D_OUT, D_IN, rank=6, seed=1)
    first = [range_message(x, n, plan) for x, n in zip(loras, counts, strict=True)]
    forward = functools.reduce(operator.add, first)
    grouped = (first[8] + (first[0] + first[3])) + functools.reduce(
        operator.add, [first[k] for k in (7, 1, 2, 6, 5, 4)]
    )
    torch.testing.assert_close(forward.Y, grouped.Y, rtol=1e-5, atol=1e-4)
    assert float(forward.examples) == float(grouped.examples) == 45
    with pytest.raises(TypeError):
        _ = forward + core_message(loras[0], 1.0, range_basis(forward, plan), plan)


def test_the_gauge_does_not_matter() -> None:
    loras = shared(6)
    plan = SketchPlan(D_OUT, D_IN, rank=6, seed=1)
    Q = torch.linalg.qr(noise((4, 4), "Q", dtype=torch.float64))[0] * torch.tensor([1.0, 3.0, 10.0, 0.3])
    moved = [
        LoRA((x.factors[0].double() @ Q).float(), torch.linalg.solve(Q, x.factors[1].double()).float()) for x in loras
    ]
    a, b = (update(run(x, [1.0] * 6, plan)) for x in (loras, moved))
    assert float((a - b).norm() / a.norm()) < 1e-4


def test_the_message_is_its_formula() -> None:
    (lora,) = shared(1)
    plan = SketchPlan(D_OUT, D_IN, rank=6, seed=1)
    B, A = (t.double() for t in lora.factors)
    U = svd_of_product(B, A, tolerance=1e-9).U
    message = range_message(lora, 3.0, plan)
    want = 3 * U @ (U.mT @ plan.omega().double())
    assert float((message.Y.double() - want).norm() / want.norm()) < 1e-5 and float(message.trace) == 12
    assert torch.equal(plan.omega(), SketchPlan(D_OUT, D_IN, 6, 1).omega())
    assert not torch.equal(plan.omega(), SketchPlan(D_OUT, D_IN, 6, 2).omega())


def test_impossible_plans_and_strangers_are_refused() -> None:
    for bad in ({"rank": 0}, {"rank": D_OUT + 1}, {"rank": 3, "oversample": -1}):
        with pytest.raises(HyperparameterError, match="a sketch has a rank"):
            SketchPlan(D_OUT, D_IN, seed=0, **bad)
    plan = SketchPlan(D_OUT, D_IN, rank=6, seed=1)
    with pytest.raises(ShapeError, match="plan is of a matrix"):
        range_message(LoRA(torch.ones(3, 1), torch.ones(1, D_IN)), 1.0, plan)
    with pytest.raises(RankMismatch, match="nobody took part"):
        range_basis(range_message(shared(1)[0], 0.0, plan), plan)
