"""Model cards. Strangers' text in them is escaped, so that it cannot act as markup; no local path is in one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fedlora.adapters.base_names import is_path
from fedlora.adapters.merge_report import MergeReport, Weighed
from fedlora.core.text import MOST, markdown_cell, yaml_string
from fedlora.errors import counted

_SHOWN = 10  # modules


def plain_card(base: str | None) -> str:
    front = f"---\nlibrary_name: peft\n{base_line(base)}tags:\n- lora\n- fedlora\n---\n"
    return f"{front}\nA LoRA adapter written by fedlora.\n"


def merge_card(report: MergeReport, inputs: Sequence[tuple[str, str]], base: str | None, made: str, asked: str) -> str:
    """The README.md of a merged adapter.

    Args:
        inputs: each adapter's name and the SHA-256 of its weights. base: the base model's name. made: what the result
            is, in words. asked: the requested rank, as typed.
    """
    rows = [f"| {cell(name)} | {w:.6g} | {sha} |" for (name, sha), w in zip(inputs, report.weights, strict=True)]
    table = "\n".join(["| adapter | weight | SHA-256 of its weights |", "| --- | --- | --- |", *rows])
    rounding = f", and writing {report.dtype} adds {report.rounding:.2e}" if report.rounding else f" ({report.dtype})"
    dropped = f"\n\nLeft out: {_names(report.dropped)}." if report.dropped else ""
    return f"""---
library_name: peft
{base_line(base)}tags:
- lora
- merge
- fedlora
---
# Merged LoRA adapter

{made} of {counted(len(inputs), "adapter")}, exact up to the requested rank ({asked}):
relative truncation error {report.error:.2e} over all modules{rounding}.
Every module is stored at rank {report.rank}, with alpha = r: the update is B A itself.

{_of_rule(report.weighed)}{table}{dropped}
"""


def cell(text: str) -> str:
    """Text for a Markdown table: a plain name as is, anything else as code, so that no markup takes effect."""
    return text if len(text) <= MOST and re.fullmatch(r"[A-Za-z0-9_.\[\] -]+", text) else markdown_cell(text)


def base_line(base: str | None) -> str:
    """The front matter line `base_model: ...`; "" if the base is not named, or is a path on this machine."""
    if not base or len(base) > MOST or is_path(base) or not base.isprintable() or os.path.lexists(base):
        return ""
    return f"base_model: {yaml_string(base)}\n"


def _of_rule(weighed: Weighed | None) -> str:
    if weighed is None:
        return ""
    gone = sum(c == 0 for c in weighed.counts)
    return (
        f"**Weighed by a robust rule**, {cell(weighed.rule)}: {gone} of {len(weighed.counts)} adapters count for "
        f"nothing. Errors are of the mean that it weighs, which is {weighed.apart:.2e} off their plain mean.\n\n"
    )


def _names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(cell(name) for name in names[:_SHOWN])}{rest}"
