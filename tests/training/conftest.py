"""Tiny models on disk, saved once, and how they are loaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.local_training import Loader


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import bert
    from support.training_data import save_model

    return save_model(tmp_path_factory.mktemp("classifier"), bert(), classifies=True)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.training_data import save_encoder

    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.tiny_models import llama
    from support.training_data import save_model

    return save_model(tmp_path_factory.mktemp("llama"), llama(), classifies=False)


@pytest.fixture(scope="session")
def load(classifier: Path) -> Loader:
    """A fresh copy of the classifier in memory, or of another model; without dropout unless asked for."""
    from support.local_training import loader

    return loader(classifier)


@pytest.fixture(scope="session")
def load_language_model(load: Loader, language_model: Path) -> Loader:
    return functools.partial(
        load, language_model, task="causal-lm", labels=(), lora={"target_modules": ["q_proj", "v_proj"], "scaling": 2.0}
    )
