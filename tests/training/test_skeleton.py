"""A model without its weights has the same shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlora.errors import ConfigError
from fedlora.training.settings import LoRASettings
from fedlora.training.skeleton import Skeleton
from support.known_warnings import CONV1D, FUTURE_NAMES
from support.local_training import Loader

pytestmark = [FUTURE_NAMES, CONV1D]
LANGUAGE = LoRASettings(targets=["q_proj", "v_proj"])


def test_shapes_are_those_of_the_real_model(
    load: Loader, load_language_model: Loader, classifier: Path, language_model: Path
) -> None:
    lora = LoRASettings(targets=["query", "value"])
    for real, bare in ((load(dropout=0.1), Skeleton(classifier, "classification", lora, 3, dropout=0.1)),
                       (load_language_model(), Skeleton(language_model, "causal-lm", LANGUAGE, 0))):  # fmt: skip
        adapter, _ = real.seed_adapter(1, seed=0)
        shapes = {name: (len(lora.factors[0]), lora.factors[1].shape[1]) for name, lora in adapter.modules.items()}
        assert bare.shapes.modules == shapes
        assert bare.shapes.heads == {name: tuple(head.shape) for name, head in adapter.heads.items()}


def test_no_model_and_no_such_target_are_told(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be built"):
        Skeleton(tmp_path, "causal-lm", LANGUAGE, 0)
    with pytest.raises(ConfigError, match=r"'q_proj' .* matches no module"):
        Skeleton(classifier, "classification", LANGUAGE, 3)
