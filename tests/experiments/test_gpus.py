"""GPUs dealt to the processes of a grid, and one model on several. Nobody needs a GPU: CUDA's answers are stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch

from fedlora.cli.batches import worker_count
from fedlora.errors import ConfigError
from fedlora.experiments.gpus import dealt


def run(device: str, **model: Any) -> Any:
    return Space(label="GLoRA, seed 0", config=Space(model=Space(device=device, **model), run=Space(workers=2)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """A machine with so many visible GPUs, and what CUDA_VISIBLE_DEVICES says."""

    def has(gpus: int, seen: str) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        if not seen:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return has


@pytest.mark.parametrize(
    ("gpus", "seen", "workers", "device", "found"),
    [
        (4, "", 4, "auto", ["0", "1", "2", "3"]),
        (4, "", 2, "cuda", ["0,1", "2,3"]),
        (8, "", 3, "cuda", ["0,1", "2,3", "4,5"]),
        (2, "", 3, "cuda", ["0", "1", "0"]),
        (2, "5,7", 2, "cuda", ["5", "7"]),
        (2, "GPU-a,GPU-b", 2, "auto", ["GPU-a", "GPU-b"]),
        (4, "", 1, "cuda", []),
        (4, "", 4, "cpu", []),
        (0, "", 4, "auto", []),
    ],
)
def test_each_worker_gets_its_part(
    machine: Callable[[int, str], None], gpus: int, seen: str, workers: int, device: str, found: list[str]
) -> None:
    """By hand: worker k the k-th part; those that share one are dealt in turn."""
    machine(gpus, seen)
    assert dealt(workers, [run("cpu"), run(device)]) == found


def test_what_does_not_fit_together_is_refused(machine: Callable[[int, str], None]) -> None:
    machine(4, "")
    with pytest.raises(ConfigError, match=r"'cuda:1' names one GPU, but --workers 2 deals 4 GPUs"):
        dealt(2, [run("cuda:1")])


@pytest.mark.parametrize(("gpus", "devices", "count"), [(4, ["auto"], 4), (4, ["cpu"], 3), (0, ["auto"], 3)])
def test_auto_takes_a_worker_for_each_gpu(
    machine: Callable[[int, str], None], monkeypatch: pytest.MonkeyPatch, gpus: int, devices: list[str], count: int
) -> None:
    """Or for each of the three cores."""
    machine(gpus, "")
    monkeypatch.setattr("fedlora.cli.batches.available", lambda: 3)
    assert worker_count("auto", [run(device) for device in devices] * 5) == count
