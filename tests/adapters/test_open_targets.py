"""Targets that a config leaves to the base model: what peft loads on that base is the measure, module by module."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fedlora.adapters.io import read_adapter
from fedlora.adapters.merging import resize
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.apply import apply_adapter
from fedlora.applying.base_folder import BaseFiles
from fedlora.errors import AdapterFormatError
from support.command_line import invoke

Q, K, V = (tuple(f"model.layers.{layer}.self_attn.{n}_proj" for layer in (0, 1)) for n in "qkv")
LINEAR = tuple(
    f"model.layers.{layer}.{n}_proj"
    for layer in (0, 1)
    for n in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
)
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("base"))


def _model(folder: Path, *, tied: bool = False, **changes: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).double().save_pretrained(folder)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def put(folder: Path, modules: tuple[str, ...], **config: Any) -> Path:
    """An adapter of rank 2 of these modules, in float64."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name in modules:
        rows = 20 if name in (HEAD, EMBEDDING) else 12 if name.endswith(("gate_proj", "up_proj")) else 8
        shapes = (rows, 2), (2, 12 if name.endswith("down_proj") else 8)
        B, A = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        stored = {"embedding_A": B.T, "embedding_B": A.T} if name == EMBEDDING else {"A.weight": A, "B.weight": B}
        tensors |= {f"base_model.model.{name}.lora_{key}": t.contiguous() for key, t in stored.items()}
    folder.mkdir(parents=True)
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def loaded_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The merged weights that peft makes."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(merged.state_dict())


ALL = {"target_modules": "all-linear"}
TIES = {"target_modules": ["q_proj", "v_proj"], "ensure_weight_tying": True}
# What peft leaves out of these, it leaves out on any base model.
LEFT_OUT: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all-linear, excluded": (Q + V, ALL | {"exclude_modules": ["v_proj"]}),
    "all-linear, excluded by a pattern": (Q + V, ALL | {"exclude_modules": r".*\.1\..*"}),
    "ALL-Linear, saved in full": (Q + V, {"target_modules": "ALL-Linear", "modules_to_save": ["v_proj"]}),
    "all-linear, a head": ((*Q, HEAD), ALL),
    "all-linear, an embedding": ((*Q, EMBEDDING), ALL),
    "tying, excluded": (Q + V, TIES | {"exclude_modules": ["v_proj"]}),
    "tying, not named": (Q + K, TIES),
    "tying, a head and no embedding": ((*Q, HEAD), TIES),
    "null, excluded": (Q + V, {"target_modules": None, "exclude_modules": ["v_proj"]}),
    "null, other layers": (Q, {"target_modules": None, "layers_to_transform": [0]}),
    "a classifier's head": (("score",), {"target_modules": ["score"], "task_type": "SEQ_CLS"}),
}


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("case", list(LEFT_OUT))
def test_what_no_base_model_makes_a_target_is_refused_without_one(
    case: str, with_base: bool, base: Path, tmp_path: Path
) -> None:
    modules, config = LEFT_OUT[case]
    folder = put(tmp_path / "a", modules, **config)
    with pytest.raises(AdapterFormatError, match="peft would leave"):
        apply_or_open(folder, base if with_base else None, tmp_path / "full")


def apply_or_open(folder: Path, base: Path | None, out: Path) -> None:
    if base is None:
        AdapterFile(folder)
    else:
        apply_adapter(AdapterFile(folder, with_base=True), BaseFiles(base), out)


@pytest.mark.parametrize("config", [{"target_modules": None}, {}], ids=["null", "absent"])
def test_no_targets_are_those_of_the_base_models_type(config: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """peft's table has q_proj and v_proj for a Llama."""
    folder, more = put(tmp_path / "a", Q + V, **config), put(tmp_path / "more", Q + K, **config)
    for adapter in (folder, more):
        with pytest.raises(AdapterFormatError, match="target_modules is null"):
            AdapterFile(adapter)
        with pytest.raises(AdapterFormatError, match="target_modules is null"):
            resize(adapter, tmp_path / "small", rank=1)
    apply_adapter(AdapterFile(folder, with_base=True), BaseFiles(base), tmp_path / "full")
    _same(load_file(tmp_path / "full" / "model.safetensors"), loaded_by_peft(base, folder))
    with pytest.raises(AdapterFormatError, match=r"k_proj.*peft would leave out"):
        apply_adapter(AdapterFile(more, with_base=True), BaseFiles(base), tmp_path / "none")
    before = dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).state_dict())
    assert torch.equal(loaded_by_peft(base, more)[f"{K[0]}.weight"], before[f"{K[0]}.weight"])  # peft leaves it out


def test_all_linear_is_asked_with_a_base_and_told_without(base: Path, tmp_path: Path) -> None:
    some = put(tmp_path / "some", Q + K, **ALL)
    with pytest.raises(AdapterFormatError, match=r"mlp\.down_proj.*no factors"):
        apply_adapter(AdapterFile(some, with_base=True), BaseFiles(base), tmp_path / "full")
    folder = put(tmp_path / "a", LINEAR, **ALL)
    apply_adapter(AdapterFile(folder, with_base=True), BaseFiles(base), tmp_path / "full")
    _same(load_file(tmp_path / "full" / "model.safetensors"), loaded_by_peft(base, folder))
    report = resize(folder, tmp_path / "same", rank=2)
    assert any("target_modules = all-linear" in line for line in report.warnings)
    _same(loaded_by_peft(base, tmp_path / "same"), loaded_by_peft(base, folder))
    with pytest.warns(UserWarning, match="all-linear, the base model decides"):
        read_adapter(folder)
    said = invoke("validate", str(folder))
    assert said.exit_code == 0 and "fedlora validate --base" in said.stderr
    said = invoke("validate", str(folder), "--json")
    assert "the base model decides" in json.loads(said.stdout)[str(folder)]["notes"][0]
    said = invoke("validate", str(folder), "--base", str(base))
    assert said.exit_code == 0 and "decides" not in said.stderr


def test_what_is_tied_to_a_target_is_one_where_the_base_model_ties_it(base: Path, tmp_path: Path) -> None:
    config = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    folder = put(tmp_path / "a", (*Q, EMBEDDING, HEAD), **config)
    tensors, path = load_file(folder / "adapter_model.safetensors"), "base_model.model."
    for factor, other in (("A", "B"), ("B", "A")):  # the embedding's pair, as peft stores what is tied to it
        tied = tensors[f"{path}{EMBEDDING}.lora_embedding_{other}"]
        tensors[f"{path}{HEAD}.lora_{factor}.weight"] = tied.T.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    assert re.search("ensure_weight_tying, the base model.* 'lm_head'", AdapterFile(folder).notes[0])
    with pytest.raises(AdapterFormatError, match=r"lm_head.*peft would leave out"):
        apply_adapter(AdapterFile(folder, with_base=True), BaseFiles(base), tmp_path / "none")
    before = dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).state_dict())
    assert torch.equal(loaded_by_peft(base, folder)["lm_head.weight"], before["lm_head.weight"])


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-6)
