"""Reading what peft wrote. Kinds of evidence: *oracle* (peft's `get_delta_weight` and logits; base + scaling * B @ A
added densely to a copy of the base weights) and *end-to-end* (peft writes and we read).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig
from torch import nn

from fedlora.adapters import read_adapter
from fedlora.adapters.io import read_model
from fedlora.adapters.reader import CONFIG_FILE, PREFIX
from fedlora.errors import AdapterFormatError
from support.bases import reconfigure, rewrite
from support.command_line import Said
from support.peft_boundary import (
    CAUSAL,
    COMMON,
    READABLE,
    SEQ,
    assert_close,
    assert_same,
    loaded,
    lora,
    stored,
    updates_of,
)
from support.peft_models import dense_logits, peft_updates, saved, trained
from support.tiny_models import bert_of_two_layers, llama, logits

pytestmark = pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers:UserWarning")


@pytest.mark.parametrize("name", READABLE)
def test_the_update_is_the_one_of_peft(name, written_by_peft):
    build, model, _, directory = written_by_peft(name)
    adapter, spec = read_adapter(directory)
    want = peft_updates(model)
    assert set(adapter.modules) == set(want)
    for module, update in updates_of(adapter).items():
        torch.testing.assert_close(update, want[module], rtol=1e-5, atol=1e-6)
    assert spec.scaling == 1.0
    assert_close(dense_logits(build, updates_of(adapter), adapter.heads), logits(model))
    assert (logits(build()) - logits(model)).abs().max() > 0.05


@pytest.mark.parametrize("name", COMMON)
def test_the_common_scaling_gives_the_stored_factors_bit_for_bit(name, written_by_peft):
    _, _, scaling, directory = written_by_peft(name)
    adapter, spec = read_adapter(str(directory), scaling=scaling)
    assert spec.scaling == scaling
    tensors = stored(directory)
    for module, pair in adapter.modules.items():
        for factor, tensor in pair.tensors().items():
            assert torch.equal(tensor, tensors.pop(f"{PREFIX}{module}.lora_{factor}.weight"))
    assert {f"{PREFIX}{head}" for head in adapter.heads} == set(tensors)
    assert all(torch.equal(head, tensors[f"{PREFIX}{path}"]) for path, head in adapter.heads.items())


@pytest.mark.parametrize("keys", [("q_proj", "self_attn.q_proj"), ("self_attn.q_proj", "q_proj")], ids=" > ".join)
def test_of_several_matching_names_the_first_in_the_file_wins(keys, tmp_path):
    """Oracle: peft's own reloaded model. peft sorts the keys as it saves, so the file is edited."""
    alphas = {key: len(key) / 2 for key in keys}
    saved(trained(llama, lora(**CAUSAL, alpha_pattern=alphas)), tmp_path)
    reconfigure(tmp_path, alpha_pattern=alphas)
    want = peft_updates(loaded(llama, tmp_path))
    for module, update in updates_of(read_adapter(tmp_path)[0]).items():
        torch.testing.assert_close(update, want[module], rtol=1e-5, atol=1e-6)


def test_the_spec_keeps_what_a_copy_needs(tmp_path):
    saved(trained(llama, lora(**CAUSAL, lora_dropout=0.25)), tmp_path)
    reconfigure(tmp_path, base_model_name_or_path="some/base", revision="abc", target_modules=r"(a+)+$")
    _, spec = read_adapter(tmp_path)
    kept = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base", "revision": "abc", "lora_dropout": 0.25}
    assert kept.items() <= spec.config.items() and spec.base_model == "some/base"
    assert not {"r", "lora_alpha", "target_modules", "rank_pattern"} & set(spec.config)


def test_old_and_foreign_configs_are_read(plain):
    """Fields of peft 0.2, axolotl and ms-swift, and the few of torchtune: read as the same factors."""
    want, _ = read_adapter(plain)
    reconfigure(
        plain, enable_lora=None, merge_weights=False, lora_dtype="AUTO", lorap_lr_ratio=None, a_field_of_2031=None
    )
    assert_same(read_adapter(plain)[0], want)
    (plain / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    assert_same(read_adapter(plain)[0], want)


# ---- what is refused, and by which word ------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.conv(x).mean(dim=(2, 3)))


def built(build: Callable[[], nn.Module] = llama, **fields):
    return lambda: trained(build, lora(**CAUSAL | fields))


# what -> (the field or key that the refusal names, a model that peft built)
REFUSED = {
    "DoRA": ("use_dora = True.*export --format merged", built(use_dora=True)),
    "PiSSA": ("init_lora_weights = 'pissa'", built(init_lora_weights="pissa")),
    "AdaLoRA": (
        "peft_type = 'ADALORA'",
        lambda: trained(llama, AdaLoraConfig(target_modules=["q_proj"], total_step=9, **CAUSAL)),
    ),
    "lora_bias": ("lora_bias = True", built(bert_of_two_layers, **SEQ, lora_bias=True)),
    "bias": ("bias = 'all'", built(bert_of_two_layers, **SEQ, bias="all")),
    "experts": ("target_parameters = ", built(target_modules=[], target_parameters=["q_proj.weight"])),
    "tokens": ("trainable_token_indices = ", built(trainable_token_indices=[1, 2])),
    "repeated layers": ("layer_replication = ", built(layer_replication=[(0, 1), (0, 2)])),
    "embedding": ("embed_tokens", built(target_modules=["embed_tokens", "q_proj", "v_proj"])),
    "convolution": (r"\bconv\b", lambda: trained(ConvNet, lora(target_modules=["conv", "fc"]))),
}
WAY_OUT = r"merge_and_unload|path_initial_model|target linear layers|no LoRA of a linear|not a LoRA of a linear"


@pytest.mark.parametrize("what", REFUSED)
def test_other_kinds_are_refused_by_name_with_the_way_out(what, tmp_path, main: Callable[..., Said]):
    """In files and in models; validate, merge and inspect say the same line."""
    named, build = REFUSED[what]
    folder = saved(build(), tmp_path / "a")
    with pytest.raises(AdapterFormatError, match=named) as caught:
        read_adapter(folder)
    assert str(folder) in str(caught.value)
    for words in (["validate", folder], ["inspect", folder], ["merge", folder, folder, "-o", tmp_path / "m"]):
        assert str(caught.value).partition(": ")[2][:60] in main(*words).complaint()
    with pytest.raises(AdapterFormatError, match=f"{named.partition('.*')[0]}.*({WAY_OUT})|({WAY_OUT})"):
        read_model(build())
    assert not (tmp_path / "m").exists()


def test_validate_says_of_each_folder_what_is_wrong(plain: Path, tmp_path: Path, main: Callable[..., Said]):
    dora = shutil.copytree(plain, tmp_path / "dora")
    reconfigure(dora, use_dora=True)
    done = main("validate", dora, plain)
    assert done.code == 2 and done.out == f"{plain}: sound\n"
    assert done.err.startswith(f"error: {dora}: refused: use_dora = True") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("targets", "how", "named"),
    [(["lm_head", "q_proj"], "auto", "lm_head.base_layer"), (["v_proj"], True, "(embed_tokens|lm_head)")],
)
def test_a_copy_of_base_weights_is_refused_and_named(targets, how, named, tmp_path):
    """They differ from base to base, and no mean of them has a meaning. peft stores them beside the factors, unless one
    says save_embedding_layers=False: then an adapted output is a linear layer like any other."""
    model = trained(llama, lora(**CAUSAL, target_modules=targets))
    model.save_pretrained(tmp_path / "a", save_embedding_layers=how)
    with pytest.raises(AdapterFormatError, match=rf"{named}.*weight.*save_embedding_layers=False"):
        read_adapter(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", save_embedding_layers=False)
    adapter, _ = read_adapter(tmp_path / "b")
    for module, update in updates_of(adapter).items():
        torch.testing.assert_close(update, peft_updates(model)[module], rtol=1e-5, atol=1e-6)


EDITED = [
    ("init_lora_weights", "some-init-of-2031"),
    ("init_lora_weights", ["gaussian"]),
    ("use_qalora", True),
    ("a_field_of_2031", {}),
    ("rank_pattern", {r"l\.\d": 2}),
    ("alpha_pattern", {"(a+)+$": 2}),
    *(
        (f, {"on": True})
        for f in sorted(x.name for x in dataclasses.fields(LoraConfig) if "is_lora_variant" in x.metadata)
    ),
]


@pytest.mark.parametrize(("field", "value"), EDITED, ids=str)
def test_a_config_is_refused_by_field(field, value, plain):
    reconfigure(plain, **{field: value})
    with pytest.raises(AdapterFormatError, match=rf"\b{field} = "):
        read_adapter(plain)


# ---- names from inside a wrapper -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapped",
    ["model._orig_mod.{}", "{}._checkpoint_wrapped_module", "module.{}", "base_model.model.{}", "model.base_layer.{}"],
)
def test_names_of_a_wrapper_are_no_modules(wrapped, plain, main: Callable[..., Said]):
    """torch.compile, FSDP, checkpointing, DDP, peft around peft: the same layer would count as another module."""

    def rename(tensors):
        for key in [key for key in tensors if "layers.0" in key]:
            module, _, factor = key.removeprefix(PREFIX).rpartition(".lora_")
            tensors[f"{PREFIX}{wrapped.format(module)}.lora_{factor}"] = tensors.pop(key)

    rewrite(plain, rename)
    with pytest.raises(AdapterFormatError, match=r"inside a wrapper.*Unwrap the model"):
        read_adapter(plain)
    assert "wrapper" in main("validate", plain).complaint()


@pytest.mark.parametrize("scaling", [0.0, float("nan"), float("inf")])
def test_a_scaling_must_be_positive(scaling, plain: Path):
    with pytest.raises(AdapterFormatError, match="scaling"):
        read_adapter(plain, scaling=scaling)
    with pytest.raises(AdapterFormatError, match="scaling"):
        read_model(loaded(llama, plain), scaling=scaling)
