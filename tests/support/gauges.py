"""Uploads in other coordinates, and with columns that say nothing: what no result may depend on."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedlora import Adapter, Client, LoRA, Upload
from fedlora.analysis.audit import regauge


def in_other_coordinates(uploads: list[Upload], condition: float, seed: int) -> list[Upload]:
    """Each update in random coordinates of that condition."""
    return [regauge(u, condition, seed=seed) for u in uploads]


def padded(upload: Upload, more: int) -> Upload:
    """The same update with `more` zero columns, of a client whose rank is that."""
    modules = {}
    for name, lora in upload.adapter.modules.items():
        B, A = lora.factors
        modules[name] = LoRA(
            torch.cat([B, B.new_zeros(B.shape[0], more)], 1), torch.cat([A, A.new_zeros(more, A.shape[1])], 0)
        )
    ranks = {name: lora.rank for name, lora in modules.items()}
    return replace(upload, client=Client(upload.client.id, ranks), adapter=Adapter(modules, upload.adapter.heads))
