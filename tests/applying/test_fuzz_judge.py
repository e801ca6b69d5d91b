"""Hostile changes of real adapters on real bases: what the judge accepts is what peft makes beside the base. Kinds of
evidence: property and oracle (peft's own logits, float64).

`tests/adapters/test_fuzz.py` draws the same changes for bases that are no models of transformers, which no judge sees.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from peft import PeftModel
from transformers import LlamaForCausalLM

from fedlora.adapters.reader import AdapterFile
from fedlora.applying.apply import apply_adapter, check_adapter
from fedlora.applying.base_folder import BaseFiles
from fedlora.errors import FedLoRAError
from support.bases import said, small
from support.hostile import MUTATIONS, Block, Draft, Kind
from support.tiny_models import TOKENS

pytestmark = pytest.mark.filterwarnings("ignore")

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "linear": {},
    "saved": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": {"embed_tokens": [1, 7]}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
}
CHANGES = [change for group in ("config", "config", "config", "header", "data") for change in MUTATIONS[group]]


class Real:
    """One adapter of each kind, and its base."""

    def __init__(self, home: Path) -> None:
        self.home, self.made = home, {}
        for name, fields in FIELDS.items():
            adapter, base = small(home / name, torch.float64, **fields)
            config = json.loads((adapter / "adapter_config.json").read_text())
            tensors = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
            self.made[name] = (config, {key: tensor.double().numpy() for key, tensor in tensors.items()}, base)
        self.seen: Counter[str] = Counter()

    def drawn(self, draw: st.DrawFn) -> tuple[str, Path, Path] | None:
        """(what was done, the adapter's folder, its base); None where the draft is no file."""
        name = draw(st.sampled_from(sorted(self.made)))
        config, tensors, base = self.made[name]
        paths = {key.removeprefix("base_model.model.").split(".lora_")[0] for key in tensors if ".lora_" in key}
        draft = Draft(copy.deepcopy(config), {key: Block(x.shape, "F64", x) for key, x in tensors.items()})
        kind = Kind(dict.fromkeys(paths, ("linear", 32, 32)), draft.config, {n: x.shape for n, x in tensors.items()})
        words = [name]
        for change in draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=2)):
            try:
                words.append(change(draw, draft, kind))
            except (KeyError, AttributeError, TypeError, ValueError):  # no such thing in this draft
                words.append("nothing")
        work = self.home / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            return ", ".join(words), draft.write(work), base
        except (KeyError, AttributeError, TypeError, ValueError, OSError):
            return None

    def judge(self, words: str, folder: Path, base: Path) -> None:
        """Refused by an error of ours, by both commands alike; or applied, and then peft's own model."""
        try:
            file = AdapterFile(folder, with_base=True)
        except FedLoRAError:
            self.seen["the reader refuses"] += 1
            return
        try:
            check_adapter(file, BaseFiles(base))
        except FedLoRAError:
            self.seen["the judge refuses"] += 1
            with pytest.raises(FedLoRAError):
                apply_adapter(file, BaseFiles(base), folder.parent / "full")
            return
        try:
            apply_adapter(file, BaseFiles(base), folder.parent / "full")
        except FedLoRAError:  # numbers, which the judge does not read
            self.seen["its numbers are refused"] += 1
            return
        beside = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).eval()
        want = said(beside, {"input_ids": TOKENS})
        got = said(LlamaForCausalLM.from_pretrained(folder.parent / "full").eval(), {"input_ids": TOKENS})
        assert float((want - got).abs().max() / want.abs().max().clamp(min=1)) < 1e-9, words
        self.seen["accepted"] += 1


def played(home: Path, number: int, examples: int) -> Counter[str]:
    real = Real(home)

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    @given(st.data())
    def all_of_them(data: st.DataObject) -> None:
        found = real.drawn(data.draw)
        if found is not None:
            real.judge(*found)

    all_of_them()
    return real.seen


def test_what_the_judge_accepts_is_what_peft_makes(tmp_path: Path) -> None:
    """A few, always the same: so many that each end is seen."""
    seen = played(tmp_path, 3, 20)
    assert seen["accepted"] and seen["the judge refuses"] and seen["the reader refuses"], seen


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(4))
def test_many_more_that_the_judge_accepts(number: int, tmp_path: Path) -> None:
    assert played(tmp_path, 100 + number, 500)["accepted"]
