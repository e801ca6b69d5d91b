"""Code of the documentation, run as it stands in a user's project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from fedlora import Adapter, Download
from fedlora.core.trainer import Trained


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run_page(page: Path, folder: Path) -> dict[str, Any]:
    """All blocks of a page in order, in one namespace: what it holds in the end. A block that begins with the name of
    a file ("NAME.py: ..." as its docstring) becomes that file in `folder`, the directory where it runs."""
    found: dict[str, Any] = {"__name__": "__main__"}  # as a script
    for block in python_blocks(page):
        named = re.match(r'"""(\w+\.py)', block)
        if named:
            (folder / named[1]).write_text(block)
        else:
            exec(compile(block, page.name, "exec"), found)
    return found


class Toy:
    """Stands for training: moves every number a little; eight examples a round, of forty. Processes import it."""

    def train(self, download: Download, adapter: Adapter, position: int) -> Trained:
        g = torch.Generator().manual_seed(position + len(download.client.id) + download.client.rank)
        return Trained(adapter.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=g)), 40, 0.5, position + 8)
