"""A model without its weights: the same shapes, and the memory that training takes.

Kinds of evidence: *oracle* (what autograd keeps of the real model), *measured* (the peak of a process).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlora.errors import ConfigError
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings, TrainSettings
from fedlora.training.skeleton import Skeleton, _storage
from support.known_warnings import CONV1D, FUTURE_NAMES
from support.local_training import Loader

pytestmark = [FUTURE_NAMES, CONV1D]
LANGUAGE = LoRASettings(targets=["q_proj", "v_proj"])


def kept(model: AdaptedModel, examples: int, tokens: int, *, classifies: bool) -> int:
    """The bytes that autograd keeps of a real forward pass, the weights aside."""
    weights = {_storage(parameter) for parameter in model.network.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in weights:
            found[_storage(tensor)] = tensor
        return tensor

    ids, mask = torch.full((examples, tokens), 7), torch.ones(examples, tokens, dtype=torch.long)
    mask[0, -1] = 0  # padded
    model.trainable()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.network.train()(input_ids=ids, attention_mask=mask, labels=ids[:, 0] * 0 if classifies else ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def test_shapes_and_activations_are_those_of_the_real_model(
    load: Loader, load_language_model: Loader, classifier: Path, language_model: Path
) -> None:
    """Kernels of attention on the meta device keep other small tensors: within 5 % of so small a model."""
    lora = LoRASettings(targets=["query", "value"])
    for real, bare in ((load(dropout=0.1), Skeleton(classifier, "classification", lora, 3, dropout=0.1)),
                       (load_language_model(), Skeleton(language_model, "causal-lm", LANGUAGE, 0))):  # fmt: skip
        adapter, _ = real.seed_adapter(1, seed=0)
        shapes = {name: (len(lora.factors[0]), lora.factors[1].shape[1]) for name, lora in adapter.modules.items()}
        assert bare.shapes.modules == shapes
        assert bare.shapes.heads == {name: tuple(head.shape) for name, head in adapter.heads.items()}
        all_kept, _ = bare.activations(5, 12)
        assert all_kept == pytest.approx(kept(real, 5, 12, classifies=bool(adapter.heads)), rel=0.05)


@pytest.mark.filterwarnings(
    r"ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning:transformers\.modeling_utils"
)
def test_checkpointing_bfloat16_and_an_optimiser_without_state_take_less(language_model: Path) -> None:
    def memory(checkpointing: bool = False, optimizer: str = "adam", dtype: str = "float32", bf16: bool = False) -> int:
        bare = Skeleton(language_model, "causal-lm", LANGUAGE, 0, checkpointing=checkpointing)
        train = TrainSettings(batch_size=8, optimizer=optimizer)
        ranks = [dict.fromkeys(bare.shapes.modules, r) for r in (2, 4)]
        return bare.memory(
            ranks, train, 16, device="cuda", dtype=dtype, bf16=bf16, four_bit=False, scored=1,
        ).total  # fmt: skip

    usual = memory()
    assert memory(checkpointing=True) < usual and memory(optimizer="sgd") < usual
    assert memory(dtype="bfloat16", bf16=True) < memory(bf16=True) < usual + 2 * 2**20


def test_no_model_and_no_such_target_are_told(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be built"):
        Skeleton(tmp_path, "causal-lm", LANGUAGE, 0)
    with pytest.raises(ConfigError, match=r"'q_proj' .* matches no module"):
        Skeleton(classifier, "classification", LANGUAGE, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["demo 16 64 0", "demo 32 128 1", "smollm2 2 256 0", "smollm2 2 256 1"])
def test_the_estimate_is_right_within_a_factor_of_two(case: str) -> None:
    """The allocator of glibc keeps freed blocks: up to 1.75 of the estimate was seen, without that 0.88 to 1.13."""
    script = Path(__file__).parents[1] / "support" / "peak_memory.py"
    said = subprocess.run([sys.executable, str(script), *case.split()], capture_output=True, text=True, check=True)
    measured, planned = map(int, said.stdout.split()[-2:])
    assert planned / 2 < measured < planned * 2
