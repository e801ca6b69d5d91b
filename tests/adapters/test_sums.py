"""Sums of updates of one matrix, cut to a rank. Kinds of evidence: dense float64, numpy's long doubles, by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedlora import LoRA
from fedlora.adapters import merge, resize
from fedlora.adapters.merge_report import ModuleReport
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import RankRule, combine, overall
from fedlora.errors import AdapterFormatError, ConfigError, HyperparameterError, ShapeError
from support.adapter_folders import bare, lora, updates
from support.bases import rewrite

EXACT = RankRule("exact")
B_KEY, A_KEY = ("base_model.model.q.lora_B.weight", "base_model.model.q.lora_A.weight")


def summed(loras: Sequence[LoRA], weights: Sequence[float], rule: RankRule = EXACT) -> tuple[LoRA, ModuleReport]:
    return combine("m", loras, weights).cut(rule)


def dense(loras: Sequence[LoRA], weights: Sequence[float]) -> Tensor:
    return sum((w * x.map(Tensor.double).delta() for w, x in zip(weights, loras, strict=True)), torch.zeros(()))


def test_an_exact_merge_is_the_dense_mean() -> None:
    """sum w_i B_i A_i in float64; its rank is the stacked one while that fits; nothing is lost; both factors have one
    size, and each column of B begins with the sign that makes its largest entry positive."""
    for ranks in ((2,), (3, 5), (4, 4, 6)):
        pairs, weights = [lora(20, r, 12, k) for k, r in enumerate(ranks)], [1 / (k + 2) for k in range(len(ranks))]
        merged, report = summed(pairs, weights)
        want, full = dense(pairs, weights), min(12, sum(ranks))
        torch.testing.assert_close(merged.delta(), want, rtol=0, atol=1e-12)
        assert (report.stacked, report.full, report.kept, report.error) == (sum(ranks), full, full, 0)
        assert report.norm == pytest.approx(float(want.norm()))
        B, A = merged.factors
        torch.testing.assert_close(B.mT @ B, A @ A.mT, rtol=0, atol=1e-10)
        assert bool((B.amax(dim=0) == B.abs().amax(dim=0)).all())
    with pytest.raises(ShapeError, match=r"\(20, 12\), \(20, 13\)"):
        summed([lora(20, 2, 12, 0), lora(20, 2, 13, 1)], [0.5, 0.5])


def test_energy_keeps_the_least_rank_that_holds_it() -> None:
    """By hand: singular values 3, 2, 1 hold 9/14, 13/14 and all of the energy, whatever their size; any share is one
    component at least, and of nothing nothing is kept."""
    values = torch.diag(torch.tensor([3.0, 2.0, 1.0]).double())
    for share, kept in ((1e-12, 1), (0.6, 1), (9 / 14, 1), (0.65, 2), (13 / 14, 2), (0.95, 3), (1.0, 3)):
        for size in (1.0, 1e-30, 1e30):
            pair = LoRA(values * size, torch.eye(3).double())
            assert summed([pair], [1.0], RankRule("energy", share))[1].kept == kept
    even = LoRA(torch.eye(5).double(), torch.eye(5).double())  # 1 - 0.8 is a little less than 0.2
    assert summed([even], [1.0], RankRule("energy", 0.8))[1].kept == 4
    zero = summed([LoRA(torch.zeros(3, 3), torch.eye(3))], [1.0], RankRule("energy", 0.5))[1]
    assert (zero.kept, zero.error, zero.norm) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["plain", "one gauge", "more slots than rows"])
def test_the_sum_is_exact_in_every_type(dtype: torch.dtype, how: str) -> None:
    """Against the dense float64 sum of what was stored: nothing is rounded before the result. A gauge of condition 1e4
    takes the slower way."""
    ranks = (40, 50) if how == "more slots than rows" else (4, 6)
    pairs = [lora(60, r, 48, how, k) for k, r in enumerate(ranks)]
    if how == "one gauge":
        Q = torch.diag(torch.logspace(-2, 2, ranks[0], dtype=torch.float64))
        pairs[0] = LoRA(pairs[0].factors[0] @ Q, torch.linalg.inv(Q) @ pairs[0].factors[1])
    pairs = [pair.map(lambda t: t.to(dtype)) for pair in pairs]
    merged, report = summed(pairs, [0.7, 0.3])
    want = dense(pairs, [0.7, 0.3])
    assert float((merged.delta() - want).norm() / want.norm()) < (1e-13 if dtype == torch.float64 else 1e-8)
    assert report.error == 0 and (report.full == int(torch.linalg.matrix_rank(want)) or dtype.itemsize < 8)


def test_components_that_the_result_cannot_tell_from_zero_are_dropped() -> None:
    """The same adapter twice has its own rank again; so has one whose two halves are equal up to float32's rounding."""
    pair = lora(60, 5, 48, 1, dtype=torch.float32)
    assert summed([pair, pair], [0.5, 0.5])[1].full == 5
    assert summed([pair, LoRA(pair.factors[0] * (1 + 1e-8), pair.factors[1])], [0.9, 0.1])[1].full == 5


def test_updates_beyond_every_number_are_refused() -> None:
    with pytest.raises(AdapterFormatError, match="overflows"):
        combine("m", [lora(20, 2, 12, "huge").map(lambda t: t * 1e155)], [1.0])


def test_a_rank_that_is_none_is_refused() -> None:
    for text in ("0", "-3", "1.5", "1000000", "energy=0", "energy=1.5", "energy=x", "all", "", True):
        with pytest.raises(HyperparameterError, match="999999, 'exact', or"):
            RankRule.parse(text)


def test_the_total_error_weighs_modules_by_their_size() -> None:
    """By hand: errors 0.1 of norm 3 and 0.5 of norm 4: sqrt(0.09 + 4) / 5."""
    reports = [ModuleReport("a", 2, 2, 2, 0.1, 3.0, ()), ModuleReport("b", 2, 2, 2, 0.5, 4.0, ())]
    assert overall(reports, [r.error for r in reports]) == pytest.approx(math.sqrt(0.09 + 4) / 5)


# ---- of files --------------------------------------------------------------------------------------------------------


def test_factors_of_two_types_are_read_in_the_one_that_holds_both(tmp_path: Path) -> None:
    """Reference: the product of what is stored, in float64; alpha / r is 2."""
    folder = bare(tmp_path / "a", {"q": 2}, dtype=torch.float16)
    rewrite(folder, lambda t: t.update({A_KEY: t[A_KEY].bfloat16()}))
    tensors = load_file(folder / "adapter_model.safetensors")
    want = 2 * tensors[B_KEY].double() @ tensors[A_KEY].double()
    torch.testing.assert_close(AdapterFile(tmp_path / "a").lora("q").delta().double(), want, rtol=1e-5, atol=1e-5)


def stored_update(folder: Path, number: Any = np.float64) -> Any:
    """alpha / r B A of the numbers in the file, in numpy."""
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    B, A = (tensors[key].double().numpy().astype(number) for key in (B_KEY, A_KEY))
    return B @ A * config["lora_alpha"] / config["r"]


def second(folder: Path, factor: float | Tensor) -> Path:
    """A copy beside it with B times a factor."""
    two = shutil.copytree(folder, folder.parent / "two")
    rewrite(two, lambda t: t.update({B_KEY: (t[B_KEY].double() * factor).to(t[B_KEY].dtype)}))
    return two


@pytest.mark.parametrize(("stored", "step"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_what_is_left_when_adapters_nearly_cancel_is_right(stored: torch.dtype, step: float, tmp_path: Path) -> None:
    """33 / 7 has no end in binary: rounding it into B would leave noise as large as what remains."""
    one = bare(tmp_path / "one", {"q": 7}, dtype=stored, lora_alpha=33)
    two = second(one, 1 + step * torch.linspace(-1, 1, 7))
    merge([one, two], tmp_path / "out", sum=True, weights=[1, -1], dtype="float64")
    want = stored_update(one) - stored_update(two)
    assert np.linalg.norm(stored_update(tmp_path / "out") - want) <= 1e-9 * np.linalg.norm(want)


@pytest.mark.parametrize("left", [1e-9, 1e-12, 1e-13])
def test_what_float64_cannot_tell_counts_as_error(left: float, tmp_path: Path) -> None:
    """B and -(1 + left) B in float64: what remains is as large as the rounding of the sum. Reference: the factors in
    numpy's long doubles. The reported error covers the true one, and --max-error refuses it."""
    one = bare(tmp_path / "one", {"q": 4}, dtype=torch.float64)
    two = second(one, -(1 + left))
    report = merge([one, two], tmp_path / "out", sum=True)
    want = stored_update(one, np.longdouble) + stored_update(two, np.longdouble)
    off = (stored_update(tmp_path / "out", np.longdouble) - want).astype(float)
    true = float(np.linalg.norm(off) / np.linalg.norm(want.astype(float)))
    assert true <= report.error <= max(1e-4, 1000 * true) and (left > 1e-10 or report.error > 1e-5)
    with pytest.raises(ConfigError, match=r"--max-error 1e-07"):
        merge([one, two], tmp_path / "no", sum=True, max_error=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_type_is_kept_and_what_rounding_costs_is_measured(dtype: torch.dtype, tmp_path: Path) -> None:
    """rounding: the distance of what was written from the dense mean of what was read, to a tenth of a percent."""
    a, b = bare(tmp_path / "a", {"q": 2}, dtype=dtype), bare(tmp_path / "b", {"q": 4}, dtype=dtype)
    report = merge([a, b], tmp_path / "m")
    assert {t.dtype for t in load_file(tmp_path / "m" / "adapter_model.safetensors").values()} == {dtype}
    want = (updates(a)["q"] + updates(b)["q"]) / 2
    off = float((updates(tmp_path / "m")["q"] - want).norm() / want.norm())
    low, high = {2: (1e-4, 1e-2), 4: (1e-9, 1e-7), 8: (0, 1e-14)}[dtype.itemsize]
    assert low <= off < high and report.rounding == pytest.approx(off, rel=1e-3, abs=1e-14)


def test_rounding_of_tiny_updates_is_measured(tmp_path: Path) -> None:
    """|written - meant| / |meant|, scaled to 1 before anything is squared: squares of such numbers are zero."""
    a = bare(tmp_path / "a", {"q": 4}, dtype=torch.float64, scale=1e-100)
    report = resize(a, tmp_path / "m", rank=4, dtype="float32")
    small, large = (stored_update(folder) * 1e100 * 1e100 for folder in (tmp_path / "m", a))
    want = float(np.linalg.norm(small - large) / np.linalg.norm(large))
    assert want > 1e-9 and report.rounding == pytest.approx(want, rel=1e-4)
