"""DoRA: read, inspected, compared, and merged with its base. Kind of evidence: oracle (peft, unmerged, in float64).

peft computes m (W + s B A) / |W + s B A| by rows beside the base; the merged model must answer the same. What averages
updates refuses DoRA by name, as do vLLM and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import LlamaForCausalLM

from fedlora.adapters.reader import AdapterFile
from fedlora.errors import AdapterFormatError
from support.bases import reconfigure, refused, rewrite, said, small
from support.command_line import Said
from support.tiny_models import TOKENS, gpt2, llama

pytestmark = pytest.mark.filterwarnings("ignore")
Main = Callable[..., Said]
M = ".lora_magnitude_vector"


def dora(folder: Path, **fields: Any) -> tuple[Path, Path]:
    """(adapter, base) in float64; magnitudes positive, far from the norms of the weights' rows."""
    adapter, base = small(folder, torch.float64, build=lambda: llama().double(), use_dora=True, **fields)

    def positive(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key].abs() + 0.5 if key.endswith(M) else tensors[key].double()

    rewrite(adapter, positive)
    return adapter, base


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"use_rslora": True, "rank_pattern": {"q_proj": 5}, "target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["lm_head", "k_proj"], "bias": "none"},
    ],
)
def test_the_merged_model_answers_as_peft(fields: dict[str, Any], tmp_path: Path, main: Main) -> None:
    adapter, base = dora(tmp_path, **fields)
    done = main("export", adapter, "--for", "merged", "--base", base, "-o", tmp_path / "full")
    assert done.code == 0 and main("validate", adapter, "--base", base).code == 0, done.err
    fresh = LlamaForCausalLM.from_pretrained(base, dtype=torch.float64)
    plain = said(fresh, {"input_ids": TOKENS})
    want = said(PeftModel.from_pretrained(fresh, adapter).eval(), {"input_ids": TOKENS})
    got = said(LlamaForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float64).eval(), {"input_ids": TOKENS})
    assert float((want - plain).abs().max()) > 0.05
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_what_cannot_have_it_says_why(tmp_path: Path, main: Main) -> None:
    adapter, base = dora(tmp_path)
    with pytest.raises(AdapterFormatError, match="use_dora"):
        AdapterFile(adapter)
    for command in (
        ["merge", adapter, adapter],
        ["resize", adapter, "--rank", "1"],
        ["export", adapter, "--for", "gguf", "--base", base],
    ):
        complaint = main(*command, "-o", tmp_path / "out").error()
        assert "use_dora" in complaint and "export --for merged" in complaint and not (tmp_path / "out").exists()


def test_files_that_are_no_dora_are_refused(tmp_path: Path, main: Main) -> None:
    """A missing, a lone and a misshapen magnitude; weights whose rows are inputs; a quantised base."""
    key = f"base_model.model.model.layers.1.self_attn.q_proj{M}"
    for name, change, why in (
        ("less", lambda t: t.pop(key), "not every module has a lora_magnitude_vector"),
        ("more", lambda t: t.update({key.replace("q_proj", "o_proj"): t[key].clone()}), "not every module has"),
        ("wide", lambda t: t.update({key: torch.ones(3)}), r"has shape \(3,\)"),
    ):
        adapter, base = dora(tmp_path / name)
        rewrite(adapter, change)
        refused(main, adapter, base, why)
    adapter, base = small(tmp_path / "gpt2", build=gpt2, use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True)
    refused(main, adapter, base, "DoRA of a layer whose weight is stored transposed")
    adapter, base = dora(tmp_path / "quantised")
    reconfigure(adapter, base_model_name_or_path="org/tiny-bnb-4bit")
    assert "tiny-bnb-4bit" in main("validate", adapter, "--base", base).err
    reconfigure(base, quantization_config={"quant_method": "gptq"})
    refused(main, adapter, base, "the sum is then of that model's weights")
    adapter, base = small(tmp_path / "off", target_modules=["q_proj"])
    rewrite(adapter, lambda t: t.update({key: torch.ones(32)}))
    refused(main, adapter, base, "is neither a factor")
