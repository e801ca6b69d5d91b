"""GPUs dealt to the processes of a grid, so that each sees its own alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from fedlora.errors import ConfigError, counted
from fedlora.experiments.plan import PlannedRun
from fedlora.runs.quiet import quiet_libraries

_SEEN = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The names of this process's GPUs, as in CUDA_VISIBLE_DEVICES, which may leave some out."""
    names = [name.strip() for name in os.environ.get(_SEEN, "").split(",")]
    count = torch.cuda.device_count()
    return names[:count] if all(names) else [str(number) for number in range(count)]


def dealt(workers: int, runs: Sequence[PlannedRun]) -> list[str]:
    """What each worker sees: an equal part of the GPUs, or one that it shares, if there are more workers than GPUs.
    Nothing is dealt to a single worker, to runs on the CPU, or without a GPU: then the list is empty.

    Raises:
        ConfigError: a run needs other GPUs than those of its worker.
    """
    gpus = visible()
    asked = {run.config.model.device: run for run in runs if run.config.model.device != "cpu"}
    if workers == 1 or not gpus or not asked:
        return []
    each = max(1, len(gpus) // workers)
    for device, run in asked.items():
        if device.startswith("cuda:"):
            raise ConfigError(
                f"{run.label}: model.device = {device!r} names one GPU, but --workers {workers} deals "
                f"{counted(len(gpus), 'GPU')} to its processes. Set model.device = 'cuda', or use --workers 1."
            )
    return [",".join(gpus[k * each % len(gpus) :][:each]) for k in range(workers)]


def begin(gpus: str) -> None:
    """How a worker begins. gpus: its own, as in `dealt`; "" leaves it those of its parent."""
    if gpus:
        os.environ[_SEEN] = gpus  # CUDA reads it when the process first uses a GPU
    quiet_libraries()
