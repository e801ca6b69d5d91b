"""The processes that were started for a folder, from their environments."""

from __future__ import annotations

from pathlib import Path

import psutil

from fedlora.flower.processes import OF


def started_for(flower_home: Path) -> list[psutil.Process]:
    """All of them, with those that an earlier launcher left."""
    found = psutil.process_iter(["environ"])
    return [one for one in found if (one.info["environ"] or {}).get(OF) == str(flower_home)]
