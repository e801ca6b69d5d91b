"""One thread and no network for every test, and where the shape annotations are checked."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Bitwise tests need a fixed thread count; small matrices are fastest with one."""
    torch.set_num_threads(1)
