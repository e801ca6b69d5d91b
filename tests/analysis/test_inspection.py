"""What an adapter holds and how two differ. Kind of evidence: oracle (by hand), and the same from the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedlora import LoRA
from fedlora.analysis.audit import random_gauge
from fedlora.analysis.inspection import difference, facts, overlap
from support.adapter_folders import SHAPES, lora, saved
from support.command_line import Said


def test_facts_by_hand() -> None:
    """diag(3, 4) in a rank-3 pair with one dead slot: norm 5, energy shares 9/25 and 16/25, exp of their entropy."""
    B = torch.zeros(5, 3, dtype=torch.float64)
    A = torch.zeros(3, 4, dtype=torch.float64)
    B[0, 0], B[1, 1], A[0, 0], A[1, 1] = 3.0, 4.0, 1.0, 1.0
    x = facts(LoRA(B, A))
    assert (x.rank, x.numerical, x.dead) == (3, 2, 1) and x.norm == pytest.approx(5)
    assert x.effective == pytest.approx(math.exp(-(9 / 25 * math.log(9 / 25) + 16 / 25 * math.log(16 / 25))))
    assert x.balance == pytest.approx(5 / math.sqrt(2)) and x.singular_values == pytest.approx((4, 3))


def test_overlap_is_the_mean_squared_cosine() -> None:
    """By hand: e1, e2 against e1 and (e2 + e3)/sqrt 2: cosines 1 and 1/sqrt 2; itself 1; orthogonal 0."""
    eye = torch.eye(4, dtype=torch.float64)
    A = torch.eye(2, dtype=torch.float64)
    one = LoRA(eye[:, :2], A)
    other = LoRA(torch.stack([eye[:, 0], (eye[:, 1] + eye[:, 2])], dim=1), A)
    assert overlap(one, other) == pytest.approx(0.75) and overlap(one, one) == pytest.approx(1)
    assert overlap(one, LoRA(eye[:, 2:], A)) == pytest.approx(0, abs=1e-15)


def test_a_difference_sees_through_the_gauge() -> None:
    """(B Q, Q^-1 A) is the same update in another gauge; the same factors are the same; twice the update is another."""
    x = lora(12, 3, 9, "x")
    B, A = x.factors
    Q = random_gauge(3, 10.0, "d")
    moved = difference(x, LoRA(B @ Q, torch.linalg.solve(Q, A)))
    assert "another gauge" in moved.verdict and moved.update < 1e-13 and moved.angle < 1e-10
    assert difference(x, x).verdict == "the same factors"
    twice = difference(x, LoRA(2 * B, A))
    assert twice.verdict == "another update" and twice.update == pytest.approx(1) and twice.angle < 1e-10


def test_an_angle_is_the_largest_principal_one() -> None:
    """By hand: a column turned by 30 degrees."""
    turn = math.radians(30)
    one = LoRA(torch.tensor([[1.0], [0.0], [0.0]]).double(), torch.ones(1, 2).double())
    other = LoRA(torch.tensor([[math.cos(turn)], [math.sin(turn)], [0.0]]).double(), torch.ones(1, 2).double())
    assert difference(one, other).angle == pytest.approx(30)


def test_inspect_diff_and_validate_from_the_command_line(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 3)
    said = json.loads(main("inspect", a, b, "--json").out)
    assert said["adapters"][str(a)][next(iter(SHAPES))]["rank"] == 2 and said["overlap"][0][0] == pytest.approx(1)
    assert "effective" in main("inspect", a).out
    assert json.loads(main("diff", a, a, "--json").out)["verdict"] == "the same factors"
    assert "another update" in main("diff", a, b).out
    assert main("validate", a, b).code == 0
    (b / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    done = main("validate", a, b)
    assert done.code == 2 and "sound" in done.out and "refused" in done.err
    assert "Traceback" not in done.err and done.err.count("\n") == 1
