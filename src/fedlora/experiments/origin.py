"""Which code on which machine made a run: it may have been stopped and gone on, and its uploads merged again later.

    parts.json    in a run's folder, written before anything is computed: a part for each code and machine

A part is noted before it computes, so that one which was killed is never forgotten. It may be one too many: what it did
was perhaps done again. Parts before which nothing was kept (no checkpoint) are dropped, for everything was.
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
    """Commit and machine of what computes now. manifest: of this process, not a stored one."""
    machine = {
        "device": torch.cuda.get_device_name() if manifest["device"].startswith("cuda") else "cpu",
        "threads": manifest["threads"],
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
    }
    return {"commit": manifest["commit"], "machine": machine}


def note(folder: RunFolder, manifest: Mapping[str, Any]) -> None:
    """Note that this code goes on with the run, where it is another one than before. manifest: of this process."""
    kept = folder.exists() and checkpoint.newest_round(folder.checkpoints) is not None
    done = len(folder.metrics()) if kept else 0
    parts, now = noted(folder) if done else [], made_by(manifest)
    if parts and {key: parts[-1][key] for key in now} == now:
        return
    folder.check_place()
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_json(PARTS, {"parts": [*parts, {"after": done, **now}]})


def noted(folder: RunFolder) -> list[dict[str, Any]]:
    """The parts of a run; none where nothing was noted. Raises `CheckpointError` for a file that cannot be read."""
    return list(folder.read_json(PARTS)["parts"]) if os.path.lexists(folder.path / PARTS) else []
