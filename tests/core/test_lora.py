"""The values: construction, what is refused, norms without products, stable fresh rows. Kinds: oracle, structural."""

from __future__ import annotations

import math

import pytest
import torch

from fedlora import LoRA
from fedlora.core.lora import filled, fresh_rows
from fedlora.errors import FactorNotShared, FedLoRAError, ShapeError


def test_what_is_no_factor_pair_is_refused() -> None:
    for B, A in ((None, None), (torch.zeros(3), torch.zeros(1, 4)), (torch.zeros(3, 2), torch.zeros(3, 4))):
        with pytest.raises(ShapeError):
            LoRA(B, A)
    assert issubclass(ShapeError, ValueError), "every error of ours is also a plain ValueError"


def test_an_absent_factor_says_so() -> None:
    half = LoRA(None, torch.zeros(2, 4))
    assert half.rank == 2
    with pytest.raises(FactorNotShared, match="receive"):
        _ = half.factors
    assert issubclass(FactorNotShared, FedLoRAError)


@pytest.mark.parametrize("cond", [1.0, 1e5])
def test_the_norm_is_that_of_the_product_in_any_gauge(cond: float) -> None:
    """Against the dense float64 norm; the trace form would be off by 2e-8 at condition 1e5."""
    generator = torch.Generator().manual_seed(0)
    B, A = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((20, 3), (3, 15)))
    Q = torch.diag(torch.tensor([1.0, math.sqrt(cond), cond], dtype=torch.float64))
    moved = LoRA(B @ Q, torch.linalg.solve(Q, A))
    assert moved.norm() == pytest.approx(float(torch.linalg.matrix_norm(B @ A)), rel=1e-10)
    assert LoRA(torch.zeros(5, 2), torch.zeros(2, 4)).norm() == 0


def test_fresh_rows_are_lora_rows_and_stable() -> None:
    """Uniform on +-1/sqrt(d_in), as peft's kaiming_uniform(a = sqrt 5); pinned bits, for they must never change."""
    rows = fresh_rows(200, 64, 7, 1, "site", like=torch.zeros(1, dtype=torch.float64))
    assert float(rows.abs().max()) <= 1 / 8
    assert float(rows.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.03)
    assert torch.equal(rows[:2], fresh_rows(200, 64, 7, 1, "site", like=rows)[:2])
    assert not torch.equal(rows, fresh_rows(200, 64, 7, 2, "site", like=rows))
    assert fresh_rows(1, 2, 7, like=rows).tolist() == [PINNED]


PINNED = [-0.45739693559074474, -0.5540262647800573]


def test_filled_touches_dead_and_missing_slots_only() -> None:
    B, A = torch.ones(4, 3), torch.ones(3, 5)
    B[:, 1:] = 0  # B zero, A not: alive
    rows = torch.arange(20.0).reshape(4, 5) + 7
    assert filled(LoRA(B, A), 3, lambda: pytest.fail("no slot needs a row")).factors[1] is A
    A = A.clone()
    A[1] = 0
    made = filled(LoRA(B, A), 4, lambda: rows)
    assert torch.equal(made.factors[1][[1, 3]], rows[[1, 3]]) and torch.equal(made.factors[1][[0, 2]], A[[0, 2]])
    assert not bool(made.factors[0][:, 3].any())
    torch.testing.assert_close(made.delta(), B @ A)
