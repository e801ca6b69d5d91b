"""What peft refuses to load is refused here: every field of its configs is drawn, and peft itself loads the files."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import nn

from fedlora.adapters.reader import AdapterFile
from fedlora.errors import AdapterFormatError

PAIRS = ("layers.0.q", "layers.1.q")
VALUES: dict[str, list[Any]] = {
    "task_type": [None, "CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "some"],
    "peft_version": ["0.21.0", 7],
    "base_model_name_or_path": [None, "base"],
    "r": [1, 2, 3, 0, "2"],
    "lora_alpha": [1, 4.5, 0, "4"],
    "target_modules": [["q"], ["q", "head"], "all-linear", ".*q", None, [], ["layers.0.q"], {"q": 1}],
    "exclude_modules": [None, [], ["q"], ["head"], r".*\.0\.q", ""],
    "modules_to_save": [None, [], ["head"], ["q"], ["nothing"], "head"],
    "layers_to_transform": [None, [], [0], [0, 1], 0, 1, "0", [True]],
    "layers_pattern": [None, [], "layers", ["layers"], ["h"]],
    "rank_pattern": [{}, None, {"q": 2}, {"0.q": 3}, {"layers.0.q.lora_E": [True, False]},
                     {"layers.0.q.lora_E": [True], "layers.1.q.lora_E": [True, True]}, {"q": [True]}],
    "alpha_pattern": [{}, None, {"q": 2}, {"q": "2"}],
    "init_lora_weights": [True, False, None, "gaussian", "eva", "orthogonal", "olora", "Gaussian", 1],
    "eva_config": [None, {}, {"rho": 0.5}, {"rho": "2"}, {"tau": 2}, {"more": 1}, {"rho": 2.0, "tau": 1}, [],
                   {"tau": None}],
    "corda_config": [None, {}, {"more": 1}, {"cache_file": 1}, []],
    "lora_ga_config": [None, {}, {"direction": 3}, {"more": 1}, "x"],
    "loftq_config": [None, {}, {"loftq_bits": 4}],
    "bias": ["none", "all", "lora_only", None, "some"],
    "trainable_token_indices": [None, [], [1], {}, {"head": [1]}, {"embed_tokens": [1, 2]}, [1, 2]],
    "layer_replication": [None, []],
    "target_parameters": [None, [], ["q.weight"], "q.weight"],
    "megatron_config": [None, {}, {"a": 1}],
    "total_step": [10, None, 0, -1, 2.5, "10"],
    "tinit": [0, 5, 20, None, -3], "tfinal": [0, 5, 20, None],
    "init_r": [2, 1, 3, 0], "target_r": [1, "x"], "orth_reg_weight": [0.5, -1, None],
    "alora_invocation_tokens": [None, [], [1]],
}  # fmt: skip
SWITCHES = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "inference_mode",
    "ensure_weight_tying",
)
OBJECTS = ("velora_config", "kasa_config", "arrow_config", "use_bdlora", "monteclora_config", "runtime_config")


class Base(nn.Module):
    """Two layers, a head and an embedding; a config as far as peft looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4)}) for _ in range(2))
        self.head = nn.Linear(4, 6)
        self.config = {"model_type": "some", "tie_word_embeddings": False}

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def prepare_inputs_for_generation(self) -> None:
        return None


def drawn(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A config that is nearly right, of LoRA or AdaLoRA, and the tensors of a file."""
    ada = draw(st.integers(0, 3)) == 0
    fields: dict[str, Any] = {"peft_type": "LORA", "target_modules": ["q"], "r": 2, "lora_alpha": 4}
    if ada:
        fields |= {"peft_type": "ADALORA", "init_r": 2, "total_step": 10}
    known = [f.name for f in dataclasses.fields(AdaLoraConfig if ada else LoraConfig) if f.init]
    known = [name for name in known if name in VALUES or name in SWITCHES or name in OBJECTS]
    for name in draw(st.lists(st.sampled_from(known), max_size=4, unique=True)):
        values = VALUES.get(name) or ([True, False, None] if name in SWITCHES else [None, {}])
        fields[name] = draw(st.sampled_from(values))
    rank = draw(st.sampled_from([2, 2, 2, 1, 3]))
    tensors = {}
    for path in PAIRS:
        end = "" if ada else ".weight"
        tensors |= {f"{path}.lora_A{end}": torch.ones(rank, 4), f"{path}.lora_B{end}": torch.ones(4, rank)}
        if ada:
            tensors[f"{path}.lora_E"] = torch.ones(rank, 1)
        elif fields.get("lora_bias"):
            tensors[f"{path}.lora_B.bias"] = torch.ones(4)
    if fields.get("modules_to_save") and draw(st.booleans()):
        tensors |= {"head.weight": torch.ones(6, 4), "head.bias": torch.ones(6)}
    if fields.get("trainable_token_indices") is not None and draw(st.booleans()):
        tensors["embed_tokens.token_adapter.trainable_tokens_delta"] = torch.ones(draw(st.integers(1, 2)), 4)
    return fields, {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}


cases = st.composite(drawn)()


def put(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def peft_loads(folder: Path) -> str | None:
    """None, or what peft says instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            PeftModel.from_pretrained(Base(), folder)
        except Exception as error:  # whatever it is: it is not loaded
            return f"{type(error).__name__}: {error}"
    return None


def refused(folder: Path) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            AdapterFile(folder).check()
        except AdapterFormatError as error:
            return str(error)
    return None


@settings(max_examples=75, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(cases)
def test_what_peft_refuses_to_load_is_refused(case: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = put(Path(name), *case)
        if refused(folder) is None:
            assert peft_loads(folder) is None


LORA, ADALORA = (
    {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]},
    {"peft_type": "ADALORA", "init_r": 2, "total_step": 10, "lora_alpha": 4, "target_modules": ["q"]},
)
TOGETHER: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "lora_bias, gaussian": (LORA | {"lora_bias": True, "init_lora_weights": "gaussian"}, {}, "true or false only"),
    "a rho below 1": (LORA | {"init_lora_weights": "eva", "eva_config": {"rho": 0.5}}, {}, "a rho from 1"),
    "a variant, {}": (LORA | {"velora_config": {}}, {}, "switches it on"),
    "orthogonal, odd": (LORA | {"r": 3, "init_lora_weights": "orthogonal"}, {}, "even ranks only"),
    "layer and parameter": (LORA | {"target_parameters": ["q.weight"]}, {}, "peft takes one"),
    "no steps": (ADALORA | {"total_step": None}, {}, "AdaLoRA needs a whole number of steps"),
    "no steps left": (ADALORA | {"tinit": 20, "tfinal": 5}, {}, "leave no step between them"),
    "a mask of fewer": (ADALORA | {"rank_pattern": {"layers.0.q.lora_E": [True, False]}}, {},
                        "has rank 2, but its config says 1"),
    "a mask too short": (ADALORA | {"rank_pattern": {"layers.0.q.lora_E": [True]}}, {}, "began with init_r = 2"),
    "another rank": (ADALORA | {"init_r": 3}, {}, "has rank 2, but its config says 3"),
    "no rows": (LORA | {"trainable_token_indices": [1]}, {}, "no rows of them"),
    "other rows": (LORA | {"trainable_token_indices": [1, 3]},
                   {"embed_tokens.token_adapter.trainable_tokens_delta": (3, 4)},
                   "names 2"),
    "not saved": (LORA | {"modules_to_save": ["head"]}, {}, "no tensor of it"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(TOGETHER))
def test_what_does_not_go_together_is_refused_by_both(what: str, tmp_path: Path) -> None:
    config, more, why = TOGETHER[what]
    ada, rank = config["peft_type"] == "ADALORA", 3 if config.get("r") == 3 else 2
    end = "" if ada else ".weight"
    shapes = {
        f"{path}.lora_{letter}{end}": shape for path in PAIRS for letter, shape in (("A", (rank, 4)), ("B", (4, rank)))
    }
    shapes |= {f"{path}.lora_E": (rank, 1) for path in PAIRS} if ada else {}
    shapes |= {f"{path}.lora_B.bias": (4,) for path in PAIRS} if config.get("lora_bias") else {}
    tensors = {f"base_model.model.{name}": torch.ones(shape) for name, shape in (shapes | more).items()}
    folder = put(tmp_path, config, tensors)
    assert why in (refused(folder) or "")
    assert "velora" in str(config) or peft_loads(folder) is not None  # velora is loaded: another update
