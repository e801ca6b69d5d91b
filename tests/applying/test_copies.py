"""One tensor of a model under several names of a file. Kind of evidence: oracle (peft, beside the model, float64).

peft stores an embedding and an output under one name or four, by what else the adapter has there, and loads what a base
ties into one tensor: the name that it loads last counts. An attacker changed one of the copies, and we computed another
model than peft; two honest sites stored other names, and we wrote a file that we then refused.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fedlora.adapters import merge, resize
from fedlora.adapters.reader import WEIGHTS_FILE, AdapterFile
from fedlora.applying.apply import apply_adapter
from fedlora.applying.base_folder import BaseFiles
from fedlora.errors import FedLoRAError
from support.peft_cases import randomise, seeded, without_card

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's, of much that these kinds are about

VOCABULARY, GROWN, WIDTH = 12, 14, 8


def llama(tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=10,
            num_key_value_heads=1, max_position_embeddings=8, initializer_range=0.3, tie_word_embeddings=tied,
        )
    )  # fmt: skip


MODELS = {"tied": seeded(lambda: llama(tied=True)), "untied": seeded(lambda: llama(tied=False))}
BOTH = {"embed_tokens": [12, 13], "lm_head": [12, 13]}
KINDS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "LoRA of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "saved together": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [12, 13]},
    "tokens of both": {"trainable_token_indices": BOTH},
}


@functools.cache
def _grown(base: str, seed: int) -> Any:
    model = MODELS[base]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.resize_token_embeddings(GROWN, mean_resizing=False)
    return model


def grown(base: str, seed: int) -> Any:
    """The model with two words more, whose rows each site draws anew; where nothing is tied the rows of all are alike,
    for peft does not store those of an output beside an embedding with LoRA."""
    return copy.deepcopy(_grown(base, seed if base == "tied" else 0))


def trained(base: str, kind: str, seed: int, folder: Path) -> Path:
    fields = copy.deepcopy({"target_modules": ["q_proj"]} | KINDS[kind])  # peft appends in place
    found = get_peft_model(grown(base, seed), LoraConfig(r=2, task_type="CAUSAL_LM", **fields))
    randomise(found, seed)
    # By itself ("auto") peft stores the embeddings where it finds the smaller base that the config names.
    without_card(found).save_pretrained(folder, save_embedding_layers=True)
    return folder


@torch.no_grad()
def dense(base: str, folder: Path) -> dict[str, Tensor]:
    """What peft's model computes with each weight, asked of its own layers: unit vectors in, columns out."""
    model = PeftModel.from_pretrained(grown(base, 0), folder).eval().base_model.model
    layer = model.model.layers[0]
    linear = {"lm_head": model.lm_head, "q": layer.self_attn.q_proj, "up": layer.mlp.up_proj}
    words = torch.arange(GROWN)
    return {name: module(torch.eye(WIDTH).double()) for name, module in linear.items()} | {
        "embed_tokens": model.model.embed_tokens(words)
    }


def off(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def apply_says(base: Path, adapter: Path, folder: Path) -> dict[str, Tensor]:
    apply_adapter(AdapterFile(adapter, with_base=True), BaseFiles(base), folder)
    full = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    layer = full.model.layers[0]
    linear = {"lm_head": full.lm_head, "q": layer.self_attn.q_proj, "up": layer.mlp.up_proj}
    found = {name: module.weight.detach().mT for name, module in linear.items()}
    return found | {"embed_tokens": full.model.embed_tokens.weight.detach()}


@pytest.mark.quick(2)
@pytest.mark.parametrize("base", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_of_a_file_counts_as_peft_loads_it_or_is_refused(base: str, kind: str, tmp_path: Path) -> None:
    """Each stored tensor beside the pairs is changed, and then left out, alone: what is written is still peft's model
    of that very file. As peft wrote it, it is accepted everywhere."""
    grown(base, 0).save_pretrained(tmp_path / "base")
    whole = load_file(trained(base, kind, 1, tmp_path / "a") / WEIGHTS_FILE)
    beside = [key for key in whole if "lora_" not in key]
    edits = [None, *((key, change) for key in beside for change in ("changed", "left out"))]
    accepted = 0
    for number, edit in enumerate(edits):
        tensors = {key: t for key, t in whole.items() if edit != (key, "left out")}
        if edit is not None and edit[1] == "changed":
            tensors[edit[0]] = tensors[edit[0]] + 0.5
        save_file(tensors, tmp_path / "a" / WEIGHTS_FILE, metadata={"format": "pt"})
        try:
            want = dense(base, tmp_path / "a")
        except KeyError:  # peft's own, of what it needs
            want = {}
        results = {
            "resized": lambda out: (resize(tmp_path / "a", out, rank=2), dense(base, out))[1],
            "applied": lambda out: apply_says(tmp_path / "base", tmp_path / "a", out),
        }
        for result, made in results.items():
            try:
                got = made(tmp_path / f"{result}-{number}")
            except FedLoRAError as error:
                assert edit is not None and re.search("lm_head|embed_tokens|trainable_token_indices", str(error)), error
                continue
            except KeyError:  # peft's, of the result
                assert not want
                continue
            accepted += 1
            assert want and off(got, want) < 1e-9, (edit, result)
    assert accepted >= 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], tuple[Path, dict[str, Tensor]]]:
    """(base, kind, seed) -> what a site trained, and peft's model of it, made once: sixteen means read each."""
    home = tmp_path_factory.mktemp("sites")

    @functools.cache
    def made(base: str, kind: str, seed: int) -> tuple[Path, dict[str, Tensor]]:
        folder = trained(base, kind, seed, home / f"{base}-{kind}-{seed}")
        return folder, dense(base, folder)

    return made


@pytest.mark.quick(1)
@pytest.mark.parametrize("base", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_of_sites_that_grew_the_vocabulary_by_themselves(
    base: str, kind: str, site: Callable[[str, str, int], tuple[Path, dict[str, Tensor]]], tmp_path: Path
) -> None:
    """peft's model of the mean is the mean of peft's models, whatever names each site stored; and the result passes
    what `apply` asks of it, which begins with `validate --base`. Each two kinds meet twice, in either order."""
    grown(base, 0).save_pretrained(tmp_path / "base")
    for number, other in enumerate(KINDS):
        (one, view), (two, another) = site(base, kind, 1), site(base, other, 2)
        out = tmp_path / f"m{number}"
        try:
            merge([one, two], out)
        except FedLoRAError as error:
            assert "--heads" in str(error) and not out.exists()
            continue
        want = {name: (view[name] + another[name]) / 2 for name in view}
        assert off(dense(base, out), want) < 1e-9, (kind, other)
        assert off(apply_says(tmp_path / "base", out, tmp_path / f"f{number}"), want) < 1e-9, (kind, other)
