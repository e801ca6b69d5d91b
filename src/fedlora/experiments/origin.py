"""Which code on which machine made a run, because it may stop and continue.

    parts.json    in a run's folder, written before anything is computed: a part for each code and machine

A part is recorded before it computes, so that a killed one is never forgotten. It may be one too many, if all that it
did was done again. Parts before which nothing was kept (no checkpoint) are dropped, because everything was done again.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

from fedlora.core import checkpoint
from fedlora.runs.folder import PARTS, RunFolder


def made_by(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Commit and machine of the current computation. manifest: this process's, not a stored one."""
    machine = {
        "device": torch.cuda.get_device_name() if manifest["device"].startswith("cuda") else "cpu",
        "threads": manifest["threads"],
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
    }
    return {"commit": manifest["commit"], "machine": machine}


def note(folder: RunFolder, manifest: Mapping[str, Any]) -> None:
    """Record that this code continues the run, if it differs from the code before. manifest: this process's."""
    kept = folder.exists() and checkpoint.newest_round(folder.checkpoints) is not None
    done = len(folder.metrics()) if kept else 0
    parts, now = noted(folder) if done else [], made_by(manifest)
    if parts and {key: parts[-1][key] for key in now} == now:
        return
    folder.check_place()
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_json(PARTS, {"parts": [*parts, {"after": done, **now}]})


def noted(folder: RunFolder) -> list[dict[str, Any]]:
    """The parts of a run; empty if none were recorded. Raises `CheckpointError` for a file that cannot be read."""
    return list(folder.read_json(PARTS)["parts"]) if os.path.lexists(folder.path / PARTS) else []
