"""What peft and transformers warn of in every test that uses them; all other warnings are errors."""

from __future__ import annotations

import pytest

# peft 0.21 asks transformers 5 for a property of its old name, whenever an adapter is added.
FUTURE_NAMES = pytest.mark.filterwarnings(
    r"ignore:.is_gradient_checkpointing. is deprecated:FutureWarning:transformers\.modeling_utils"
)
# peft says so whenever it adapts a Conv1D, and then does the right thing.
CONV1D = pytest.mark.filterwarnings(
    r"ignore:fan_in_fan_out is set to False but the target module is .Conv1D:UserWarning:peft\.tuners\.lora\.layer"
)


# peft looks for the base model's config on the hub, to see whether the vocabulary was resized.
NOT_ON_THE_HUB = pytest.mark.filterwarnings(
    r"ignore:Could not find a config file in:UserWarning:peft\.utils\.save_and_load"
)
# peft's save_pretrained takes every lora_B.bias for a damaged matrix: lora_bias=True cannot be saved without it.
LORA_BIAS = pytest.mark.filterwarnings(
    r"ignore:Adapter 'default'. \d+ LoRA tensor.s. have invalid shape:UserWarning:peft\.utils\.save_and_load"
)
