"""Sums of updates, cut to a rank: of matrices, and of adapters as files. Kinds of evidence: oracle (dense float64 and
numpy's long doubles), by hand, PEFT round trips.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlora import LoRA, read_adapter
from fedlora.adapters import merge
from fedlora.adapters.collection import used_weights
from fedlora.adapters.io import pad_rank
from fedlora.adapters.merge_report import ModuleReport
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.truncation import RankRule, combine, overall
from fedlora.errors import AdapterFormatError, ConfigError, HyperparameterError, ShapeError
from support.adapter_folders import HEADS, SHAPES, bare, lora, saved
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.peft_models import peft_updates
from support.tiny_models import bert_of_two_layers, logits

pytestmark = [FUTURE_NAMES, LORA_BIAS]


# ---- one module ------------------------------------------------------------------------------------------------------


def merged_by(loras: Sequence[LoRA], weights: Sequence[float], rule: RankRule) -> tuple[LoRA, ModuleReport]:
    return combine("m", loras, weights).cut(rule)


@pytest.mark.parametrize("ranks", [(2,), (3, 5), (4, 4, 6)])
def test_an_exact_merge_is_the_dense_mean(ranks: Sequence[int]) -> None:
    """sum w_i B_i A_i in float64; its rank is the stacked one while that fits; nothing is lost."""
    pairs = [lora(20, r, 12, k) for k, r in enumerate(ranks)]
    weights = [1 / (k + 2) for k in range(len(ranks))]
    merged, report = merged_by(pairs, weights, RankRule("exact"))
    want = sum(w * x.delta() for w, x in zip(weights, pairs, strict=True))
    torch.testing.assert_close(merged.delta(), want, rtol=0, atol=1e-12)
    assert (report.stacked, report.full, report.kept) == (sum(ranks), min(12, sum(ranks)), min(12, sum(ranks)))
    assert report.error == 0 and report.norm == pytest.approx(float(want.norm()))  # type: ignore[union-attr]
    B, A = merged.factors
    torch.testing.assert_close(B.mT @ B, A @ A.mT, rtol=0, atol=1e-10)  # balanced


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_cut_is_the_best_of_its_rank_and_its_error_is_known(rank: int) -> None:
    """Eckart-Young by the dense SVD."""
    pairs = [lora(20, 4, 12, k) for k in range(2)]
    merged, report = merged_by(pairs, [0.3, 0.7], RankRule("rank", rank))
    U, s, Vh = torch.linalg.svd(0.3 * pairs[0].delta() + 0.7 * pairs[1].delta(), full_matrices=False)
    torch.testing.assert_close(merged.delta(), U[:, :rank] * s[:rank] @ Vh[:rank], rtol=0, atol=1e-12)
    assert report.error == pytest.approx(float(s[rank:].norm() / s.norm()), abs=1e-12)


def test_a_share_of_the_energy_is_one_component_at_least() -> None:
    """The largest component holds any share that is small enough; only of nothing nothing is kept."""
    pair = LoRA(torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.eye(3))
    for size in (1.0, 1e-30, 1e30):
        small = LoRA(pair.factors[0] * size, pair.factors[1])
        assert merged_by([small], [1.0], RankRule("energy", 1e-12))[1].kept == 1
    assert merged_by([LoRA(torch.zeros(3, 3), torch.eye(3))], [1.0], RankRule("energy", 0.5))[1].kept == 0


def test_energy_keeps_the_least_rank_that_holds_it() -> None:
    """By hand: singular values 3, 2, 1 hold 9/14, 13/14 and all of the energy."""
    pair = LoRA(torch.diag(torch.tensor([3.0, 2.0, 1.0]).double()), torch.eye(3).double())
    for share, kept in ((0.6, 1), (9 / 14, 1), (0.65, 2), (13 / 14, 2), (0.95, 3), (1.0, 3)):
        assert merged_by([pair], [1.0], RankRule("energy", share))[1].kept == kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["plain", "close", "padded", "one gauge", "more slots than rows"])
def test_the_sum_is_exact_in_every_type(dtype: torch.dtype, how: str) -> None:
    """Against the dense float64 sum of what was stored: nothing is rounded before the result. Clients that are close,
    idle slots and gauges of condition 1e4 take the slower way."""
    ranks = (40, 50) if how == "more slots than rows" else (4, 6)
    pairs = [lora(60, r, 48, how, k) for k, r in enumerate(ranks)]
    if how == "close":
        pairs[1] = LoRA(*(a + 1e-4 * b for a, b in zip(pairs[0].factors, lora(60, 4, 48, 7).factors, strict=True)))
    if how == "padded":
        pairs = [pad_rank(pair, 8) for pair in pairs]
    if how == "one gauge":
        Q = torch.diag(torch.logspace(-2, 2, ranks[0], dtype=torch.float64))
        pairs[0] = LoRA(pairs[0].factors[0] @ Q, torch.linalg.inv(Q) @ pairs[0].factors[1])
    pairs = [pair.map(lambda t: t.to(dtype)) for pair in pairs]
    merged, report = merged_by(pairs, [0.7, 0.3], RankRule("exact"))
    want = sum(w * x.map(Tensor.double).delta() for w, x in zip((0.7, 0.3), pairs, strict=True))
    off = float((merged.delta() - want).norm() / want.norm())  # type: ignore[union-attr]
    assert off < (1e-13 if dtype == torch.float64 else 1e-8) and report.error == 0
    assert report.full == int(torch.linalg.matrix_rank(want)) or dtype.itemsize < 8  # type: ignore[arg-type]


def test_components_that_the_result_cannot_tell_from_zero_are_dropped() -> None:
    """The same adapter twice has its own rank again; so has one whose two halves are equal up to float32's rounding."""
    pair = lora(60, 5, 48, 1, dtype=torch.float32)
    assert merged_by([pair, pair], [0.5, 0.5], RankRule("exact"))[1].full == 5
    again = LoRA(pair.factors[0] * (1 + 1e-8), pair.factors[1])
    assert merged_by([pair, again], [0.9, 0.1], RankRule("exact"))[1].full == 5


def test_other_matrices_do_not_add_up() -> None:
    with pytest.raises((ShapeError, RuntimeError)):
        merged_by([lora(20, 2, 12, 0), lora(20, 2, 13, 1)], [0.5, 0.5], RankRule("exact"))


@pytest.mark.parametrize("text", ["0", "-3", "energy=0", "energy=1.5", "energy=x", "all", "", "1e3"])
def test_a_rank_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(HyperparameterError, match="999999, 'exact', or"):
        RankRule.parse(text)


def test_the_total_error_weighs_modules_by_their_size() -> None:
    """By hand: errors 0.1 of norm 3 and 0.5 of norm 4: sqrt(0.09 + 4) / 5."""
    _, a = merged_by([lora(9, 2, 9, 0)], [1.0], RankRule("exact"))
    reports = [type(a)("a", 2, 2, 2, 0.1, 3.0, ()), type(a)("b", 2, 2, 2, 0.5, 4.0, ())]
    assert overall(reports, [r.error for r in reports]) == pytest.approx(math.sqrt(0.09 + 4) / 5)


# ---- files and the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_A", [torch.bfloat16, torch.float32, torch.float64])
def test_factors_of_two_types_are_read_in_the_one_that_holds_both(of_A: torch.dtype, tmp_path: Path) -> None:
    """Reference: the product of what is stored, in float64; alpha / r is 2."""
    weights = bare(tmp_path / "a", {"q": 2}, dtype=torch.float16) / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors["base_model.model.q.lora_A.weight"] = tensors["base_model.model.q.lora_A.weight"].to(of_A)
    save_file(tensors, weights, metadata={"format": "pt"})
    B, A = (tensors[f"base_model.model.q.lora_{side}.weight"].double() for side in "BA")
    torch.testing.assert_close(AdapterFile(tmp_path / "a").lora("q").delta().double(), 2 * B @ A, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [33, 8])
def test_what_is_left_when_adapters_nearly_cancel_is_right(stored: torch.dtype, alpha: int, tmp_path: Path) -> None:
    """Their difference, from the numbers in the files in numpy's float64: alpha / r has no end in binary, and rounding
    it into B would leave noise as large as what remains (0.3 % before, reported as 0)."""
    q, head = "base_model.model.q.lora_B.weight", torch.rand(3, 4)
    bare(tmp_path / "one", {"q": 7}, dtype=stored, lora_alpha=alpha, beside={"score.weight": head},
         modules_to_save=["score"], task_type="SEQ_CLS")  # fmt: skip
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    tensors = load_file(tmp_path / "two" / "adapter_model.safetensors")
    step = 2e-2 if stored == torch.bfloat16 else 1e-5
    tensors[q] = (tensors[q].double() * (1 + step * torch.linspace(-1, 1, 7))).to(stored)
    tensors["base_model.model.score.weight"] = head / 3
    save_file(tensors, tmp_path / "two" / "adapter_model.safetensors", metadata={"format": "pt"})

    def dense(name: str) -> Any:
        found = load_file(tmp_path / name / "adapter_model.safetensors")
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        B, A = (found[f"base_model.model.q.lora_{x}.weight"].double().numpy() for x in "BA")
        return B @ A * (config["lora_alpha"] / config["r"])

    merge(
        [tmp_path / "one", tmp_path / "two"], tmp_path / "out", sum=True, weights=[1, -1], heads="drop", dtype="float64"
    )
    want = dense("one") - dense("two")
    assert np.linalg.norm(dense("out") - want) <= 1e-9 * np.linalg.norm(want)
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "mean", weights=[1, 2], dtype="float64")
    means = load_file(tmp_path / "mean" / "adapter_model.safetensors")
    torch.testing.assert_close(
        means["base_model.model.score.weight"], head.double() / 3 + (head / 3).double() * 2 / 3, rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("left", [1e-9, 1e-12, 1e-13])
def test_what_float64_cannot_tell_counts_as_error(left: float, tmp_path: Path) -> None:
    """B and -(1 + left) B in float64: what remains is as large as the rounding of the sum. Reference: the factors in
    numpy's long doubles. The reported error covers the true one, and --max-error refuses it."""
    bare(tmp_path / "one", {"q": 4}, dtype=torch.float64)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    tensors = load_file(tmp_path / "two" / "adapter_model.safetensors")
    tensors["base_model.model.q.lora_B.weight"] *= -(1 + left)
    save_file(tensors, tmp_path / "two" / "adapter_model.safetensors", metadata={"format": "pt"})

    def dense(name: str) -> Any:
        found = load_file(tmp_path / name / "adapter_model.safetensors")
        B, A = (found[f"base_model.model.q.lora_{x}.weight"].numpy().astype(np.longdouble) for x in "BA")
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        return B @ A * config["lora_alpha"] / config["r"]

    report = merge([tmp_path / "one", tmp_path / "two"], tmp_path / "out", sum=True, weights=[1, 1])
    want = dense("one") + dense("two")
    true = float(np.linalg.norm((dense("out") - want).astype(float)) / np.linalg.norm(want.astype(float)))
    assert true <= report.error <= max(1e-4, 1000 * true) and (left > 1e-10 or report.error > 1e-5)
    with pytest.raises(ConfigError, match=r"--max-error 1e-07"):
        merge([tmp_path / "one", tmp_path / "two"], tmp_path / "no", sum=True, weights=[1, 1], max_error=1e-7)


def test_two_adapters_merge_in_one_line_and_peft_loads_them(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Update and logits of base + the dense mean, and heads their mean; different ranks; scale 1 in the config."""
    from peft import PeftModel

    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 5)
    done = main("merge", a, b, "-o", tmp_path / "m", "--weights", "1,3")
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "m" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 7
    model = PeftModel.from_pretrained(bert_of_two_layers(), tmp_path / "m")
    inputs = [read_adapter(path)[0] for path in (a, b)]
    updates = peft_updates(model)
    for module in SHAPES:
        want = sum(w * x.modules[module].map(Tensor.double).delta() for w, x in zip((0.25, 0.75), inputs, strict=True))
        torch.testing.assert_close(updates[module].double(), want, rtol=0, atol=2e-5)
    for head in HEADS:
        want = 0.25 * inputs[0].heads[head] + 0.75 * inputs[1].heads[head]
        torch.testing.assert_close(read_adapter(tmp_path / "m")[0].heads[head], want)
    assert bool(torch.isfinite(logits(model)).all())
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| a | 0.25 |" in card and "base_model: tiny" in card


def test_merge_json_ranks_and_limits(tmp_path: Path, main: Callable[..., Said]) -> None:
    """A cut says what it costs; beyond --max-error nothing is written."""
    a, b = saved(tmp_path, "a", 4), saved(tmp_path, "b", 4)
    done = main("merge", a, b, "-o", tmp_path / "m", "--rank", "3", "--json")
    said = json.loads(done.out)
    assert [m["kept"] for m in said["modules"]] == [3, 3] and 0.1 < said["error"] < 1
    refused = main("merge", a, b, "-o", tmp_path / "n", "--rank", "3", "--max-error", "0.01")
    assert refused.code == 2 and "nothing was written" in refused.err and not (tmp_path / "n").exists()


def test_a_module_that_one_lacks_is_zero_or_left_out_of_the_mean(tmp_path: Path, main: Callable[..., Said]) -> None:
    """By hand: half of the other's update, or all of it."""
    first, second = SHAPES
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 2, modules=[first])
    for rule, factor in (("zero", 0.5), ("renormalise", 1.0)):
        assert main("merge", a, b, "-o", tmp_path / rule, "--missing", rule).code == 0
        got = read_adapter(tmp_path / rule)[0].modules[second].delta()
        want = factor * read_adapter(a)[0].modules[second].delta()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["a", "--weights", "1,2"], "2 weights for 1 adapters"),
        (["a", "--weights", "x"], "--weights takes numbers"),
        (["a", "--weights", "0"], "not all be zero"),
        (["a", "--rank", "none"], "a rank is a whole number"),
        (["a", "--rank", "1000000"], "999999, 'exact'"),
        (["a", "--method", "glora rho=x"], "a hyper-parameter has a wrong type"),
        (["a", "--method", "glora rank=s"], "whole rank budget"),
        (["a", "--missing", "skip"], "--missing must be one of"),
        (["a", "--weights", "1", "--weights-from", "num_examples"], "not both"),
        (["a", "other"], "different base models"),
        (["a", "nothing"], "is not a PEFT adapter"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, main: Callable[..., Said], args: list[str], said: str
) -> None:
    saved(tmp_path, "a", 2)
    saved(tmp_path, "other", 2, base="another")
    paths = [tmp_path / x if x in ("a", "other", "nothing") else x for x in args]
    done = main("merge", *paths, "-o", tmp_path / "m")
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
    assert not (tmp_path / "m").exists()


def test_an_adapter_of_other_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match=r"rank 2.* config .*3"):
        path = saved(tmp_path, "a", 2)
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
        AdapterFile(path)


# ---- tensors beside the pairs ----------------------------------------------------------------------------------------


def test_a_head_that_only_some_have(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 2)
    bare = load_file(b / "adapter_model.safetensors")
    save_file({k: t for k, t in bare.items() if "classifier" not in k}, b / "adapter_model.safetensors")
    config = json.loads((b / "adapter_config.json").read_text())  # or peft would miss the head that it names
    (b / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": None, "task_type": None}))
    done = main("merge", a, b, "-o", tmp_path / "o")
    assert done.code == 2 and "--heads first" in done.err and not (tmp_path / "o").exists()
    assert main("merge", a, b, "--heads", "first", "-o", tmp_path / "o").code == 0
    for path, head in read_adapter(a)[0].heads.items():
        torch.testing.assert_close(read_adapter(tmp_path / "o")[0].heads[path], head)
    assert main("merge", a, b, "--heads", "drop", "-o", tmp_path / "p").code == 0
    assert not read_adapter(tmp_path / "p")[0].heads


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    """A mean divides by the sum, a sum does not."""
    assert used_weights(2, [1, 3]) == (0.25, 0.75) and used_weights(2, [1, -3], sum=True) == (1, -3)
    assert used_weights(3) == (1 / 3, 1 / 3, 1 / 3) and used_weights(3, sum=True) == (1, 1, 1)
    assert used_weights(1, [1e-12], sum=True) == (1e-12,)


@pytest.mark.parametrize(
    ("weights", "sum", "said"),
    [
        ([1, 2, 3], False, "3 weights for 2 adapters"),
        ([1, math.nan], True, "up to 1e[+]12"),
        ([1, math.inf], False, "up to 1e[+]12"),
        ([10**400, 1], False, "up to 1e[+]12"),
        ([5e-324, 1], False, "1e-12"),
        ([1e-9, 1e9], True, "beside the largest"),
        ([-1, 2], False, "--sum"),
        ([0, 0], False, "all be zero"),
        (["1", 2], False, "weights must be numbers"),
        ([True, 2], False, "weights must be numbers"),
    ],
)
def test_absurd_weights_are_refused(weights: list[float], sum: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        used_weights(2, weights, sum=sum)
