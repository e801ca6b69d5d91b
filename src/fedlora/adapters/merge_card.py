"""The model card of a merged adapter: of what, with which weights, and what the cut cost."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from fedlora.adapters.merge import Collection
from fedlora.adapters.reader import WEIGHTS_FILE
from fedlora.adapters.truncation import ModuleReport, total_error


def merge_card(given: Collection, method: str, rank: str, reports: Sequence[ModuleReport]) -> str:
    """The README.md, with the front matter that the hub reads. method, rank: as they were typed."""
    base = given.files[0].base_model
    rows = "\n".join(
        f"| {file.directory.name} | {w:.6g} | {_sha256(file.directory / WEIGHTS_FILE)} |"
        for file, w in zip(given.files, given.weights, strict=True)
    )
    worst = sorted(reports, key=lambda r: -r.error)[:10]
    errors = "\n".join(f"| {r.module} | {r.full} | {r.kept} | {r.error:.2e} |" for r in worst)
    kept = sorted({r.kept for r in reports})
    ranks = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    what = "The weighted mean of the updates B A" if method == "svd" else f"The server update of {method}"
    norm = math.sqrt(math.fsum(r.norm**2 for r in reports))
    return f"""---
library_name: peft
{f"base_model: {base}{chr(10)}" if base else ""}tags:
- lora
- merge
- fedlora
---

# Merged LoRA adapter

{what} of {len(given.files)} adapters, exact up to the asked rank ({rank}): ranks {ranks},
relative truncation error {total_error(reports):.2e} over all modules (norm of the update {norm:.4g}). alpha = r, so the
update is B A itself.

| adapter | weight | SHA-256 of {WEIGHTS_FILE} |
|---|---|---|
{rows}

The modules that lost most:

| module | rank of the mean | kept | relative error |
|---|---|---|---|
{errors}
"""


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
