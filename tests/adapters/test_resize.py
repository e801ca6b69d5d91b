"""`fedlora resize`: an adapter at another rank. Kinds of evidence: oracle (dense SVD in float64), peft as reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedlora import read_adapter
from fedlora.adapters import resize
from fedlora.errors import ConfigError, FedLoRAError
from support.adapter_folders import HEADS, bare, saved, updates
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.peft_models import peft_updates
from support.tiny_models import bert_of_two_layers

pytestmark = [FUTURE_NAMES, LORA_BIAS]
Q, V = "layer.0.q", "layer.1.v"


def test_smaller_is_the_best_of_its_rank(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Eckart-Young, module by module; what lies beside the pairs stays, bit for bit; the command is the function."""
    a = saved(tmp_path, "a", 6)
    report = resize(a, tmp_path / "m", rank=4)
    for module, update in updates(a).items():
        U, s, Vh = torch.linalg.svd(update, full_matrices=False)
        torch.testing.assert_close(updates(tmp_path / "m")[module], U[:, :4] * s[:4] @ Vh[:4], rtol=0, atol=1e-4)
    assert report.rank == 4 and 0 < report.error < 1
    for path in HEADS:
        assert torch.equal(read_adapter(a)[0].heads[path], read_adapter(tmp_path / "m")[0].heads[path])
    assert main("resize", a, "--rank", "4", "-o", tmp_path / "n").code == 0
    for file in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        assert (tmp_path / "m" / file).read_bytes() == (tmp_path / "n" / file).read_bytes()


def test_larger_is_padded_and_says_so(tmp_path: Path, main: Callable[..., Said]) -> None:
    """The same update for peft, at rank 8: slots beyond the update's rank are zero in both factors."""
    from peft import PeftModel

    a = saved(tmp_path, "a", 3)
    done = main("resize", a, "--rank", "8", "-o", tmp_path / "m", "--json")
    said = json.loads(done.out)
    assert (said["rank"], said["error"]) == (8, 0) and "cannot train" in said["warnings"][0]
    assert {t.shape[0] for k, t in load_file(tmp_path / "m" / "adapter_model.safetensors").items() if "_A" in k} == {8}
    found = peft_updates(PeftModel.from_pretrained(bert_of_two_layers(), tmp_path / "m"))
    for module, update in updates(a).items():
        torch.testing.assert_close(found[module].double(), update, rtol=0, atol=1e-4)


def test_modules_of_several_ranks_become_one(tmp_path: Path) -> None:
    a = bare(tmp_path / "a", {Q: 2, V: 6})
    resize(a, tmp_path / "m", rank=4)
    assert read_adapter(tmp_path / "m")[0].ranks == {Q: 4, V: 4}


def test_a_type_a_limit_and_a_dry_run(tmp_path: Path, main: Callable[..., Said]) -> None:
    a = bare(tmp_path / "a", {Q: 6, V: 6})
    assert resize(a, tmp_path / "m", rank="energy=0.9", dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="nothing was written"):
        resize(a, tmp_path / "n", rank=1, max_error=0.01)
    assert main("resize", a, "--rank", "2", "--dry-run", "-o", tmp_path / "n").code == 0
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("rank", ["0", "-1", "x", "1.5", "energy=2", ""])
def test_a_rank_that_is_none(rank: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    a = bare(tmp_path / "a", {Q: 6})
    with pytest.raises(FedLoRAError):
        resize(a, tmp_path / "m", rank=rank)
    main("resize", a, f"--rank={rank}", "-o", tmp_path / "m").complaint()


@pytest.mark.parametrize(
    ("dtype", "size", "to"),
    [
        ("float32", 1e-14, "float16"),  # nothing of it is left: squares of such updates are zero in float32
        ("float32", 3e-12, "float16"),
        ("float32", 1e-12, "bfloat16"),
        ("float32", 1e-15, "bfloat16"),
        ("float64", 1e-100, "float32"),  # and these in float64
        ("float64", 1e-15, "float32"),
    ],
)
def test_rounding_of_tiny_updates_is_measured(dtype: str, size: float, to: str, tmp_path: Path) -> None:
    """|written - meant| / |meant| from the dense matrices of both files, scaled to 1 before anything is squared."""
    numbers = torch.Generator().manual_seed(3)
    B, A = (torch.randn(shape, generator=numbers, dtype=torch.float64) * size for shape in ((12, 4), (4, 9)))
    a = bare(tmp_path / "a", {Q: 4})
    names = [f"base_model.model.{Q}.lora_{side}.weight" for side in "BA"]
    stored = {n: t.to(getattr(torch, dtype)) for n, t in zip(names, (B, A), strict=True)}
    assert set(load_file(a / "adapter_model.safetensors")) == set(stored)
    save_file(stored, a / "adapter_model.safetensors")
    report = resize(a, tmp_path / "m", rank=4, dtype=to)
    written = load_file(tmp_path / "m" / "adapter_model.safetensors")
    scaling = json.loads((tmp_path / "m" / "adapter_config.json").read_text())
    factor = scaling["lora_alpha"] / scaling["r"]
    before = json.loads((a / "adapter_config.json").read_text())
    scaled = before["lora_alpha"] / before["r"]
    meant = (stored[names[0]].double() / size) @ (stored[names[1]].double() / size) * scaled
    found = (written[names[0]].double() / size) @ (written[names[1]].double() / size) * factor
    want = float((found - meant).norm() / meant.norm())
    assert want > 1e-9 and report.rounding == pytest.approx(want, rel=1e-4)


def test_sizes_before_and_after_are_in_one_measure(tmp_path: Path) -> None:
    """Bytes of tensors: the same rank and type are the same size, whatever the headers of the files take."""
    report = resize(saved(tmp_path, "a", 3), tmp_path / "same", rank=3)
    assert report.bytes == report.bytes_before
