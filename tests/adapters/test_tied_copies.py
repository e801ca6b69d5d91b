"""Tensors that a file holds twice because the base model ties them: one word for both, or a refusal.

Evidence: an attacker changed one of the two copies; peft then loads lm_head's for both, and ours wrote another model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedlora.adapters import merge
from fedlora.adapters.reader import AdapterFile
from fedlora.errors import AdapterFormatError
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.peft_cases import randomise, tied_llama

PREFIX = "base_model.model."
pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]


def saved(folder: Path, seed: int, **fields: object) -> Path:
    """What peft saves of a tied model whose trainable parts are drawn anew."""
    torch.manual_seed(0)
    model = get_peft_model(tied_llama().double(), LoraConfig(r=4, task_type="CAUSAL_LM", **fields))  # type: ignore[arg-type]
    randomise(model, seed)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def changed(folder: Path, key: str, new: Tensor) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), key: new}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "factor", ["embed_tokens.lora_embedding_A", "embed_tokens.lora_embedding_B", "lora_A", "lora_B"]
)
@pytest.mark.parametrize("named", [["q_proj", "embed_tokens"], ["q_proj", "embed_tokens", "lm_head"]], ids=len)
def test_pairs_that_are_tied_are_one_update(factor: str, named: list[str], tmp_path: Path) -> None:
    """As peft saves them they are read; with one of four tensors changed they are refused, with both names."""
    folder = saved(tmp_path / "a", 1, target_modules=named, ensure_weight_tying=True)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(AdapterFile(folder).modules) == 3
    key = f"{PREFIX}model.{factor}" if "embed" in factor else f"{PREFIX}lm_head.{factor}.weight"
    changed(folder, key, tensors[key] + 0.1)
    with pytest.raises(AdapterFormatError, match=r"'lm_head' and 'model\.embed_tokens'.*ensure_weight_tying"):
        AdapterFile(folder)


def test_a_trained_head_that_is_tied_is_no_copy_of_the_base(tmp_path: Path) -> None:
    """Of a tied GPT-2 peft stores the trained head beside the saved embedding, and rewrites modules_to_save so that it
    names that one alone. Beside an adapter without a head, a merge held the first one's whole, and not the sum."""
    generator = torch.Generator().manual_seed(0)
    for name, heads in (("one", ["lm_head", "transformer.wte"]), ("two", ["transformer.wte"])):
        whole = torch.randn(8, 4, generator=generator)
        pair = {f"{PREFIX}transformer.h.0.c_attn.lora_{k}.weight": torch.ones(4, 4) for k in "AB"}
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": true, '
            '"modules_to_save": ["wte", "transformer.wte"], "ensure_weight_tying": true}'
        )
        stored = {f"{PREFIX}{head}.weight": whole.clone() for head in heads}
        save_file({**pair, **stored}, tmp_path / name / "adapter_model.safetensors", metadata={"format": "pt"})
    for order in (("one", "two"), ("two", "one")):
        with pytest.raises(AdapterFormatError, match=r"two has no 'lm_head\.weight'.*--heads first"):
            merge([tmp_path / name for name in order], tmp_path / "out", weights=[0.7, 0.3])
