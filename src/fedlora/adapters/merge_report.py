"""The report of a merge or a resize, and its model card, in which no stranger's text can act as markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedlora.adapters.writer import base_line
from fedlora.core.text import MOST, markdown_cell
from fedlora.errors import counted


@dataclass(frozen=True)
class ModuleReport:
    """One module's result. stacked: the sum of the inputs' ranks. full: the rank of their sum. error: relative, from
    truncation, plus a bound on the sum's own error if terms nearly cancel. norm: of the sum. rounding: relative, from
    writing it in the result's type."""

    module: str
    stacked: int
    full: int
    kept: int
    error: float
    norm: float
    singular_values: tuple[float, ...]
    rounding: float = 0.0


@dataclass(frozen=True)
class MergeReport:
    """What a merge or a resize did.

    out: the folder; written: False after a dry run. of: what `error` is relative to, in words. weights: each adapter's,
    as used. beside: the result's tensors of saved modules. rank: the result's r, which every module has. dtype: the
    result's. error: relative truncation error; rounding: relative error from writing in `dtype`; both over all modules.
    beside_rounding: the largest such error among the saved modules, each relative to its own size: these are whole
    weights, and how much training changed them is unknown here. modules: one by one. lacking: modules that some adapter
    lacks. dropped: heads that `--heads` left out. bytes, bytes_before: size of the result's tensors and of the
    adapters'. rule: a robust rule with its options (`--robust`); counts: each adapter's weight after it.

    Example:
        >>> report = resize("adapter", "of-rank-2", rank=2, dry_run=True)
        >>> report.rank, report.dtype, report.written, [module.module for module in report.modules]
        (2, 'float32', False, ['q', 'v'])
    """

    out: str
    written: bool
    of: str
    adapters: tuple[str, ...]
    weights: tuple[float, ...]
    beside: tuple[str, ...]
    rank: int
    dtype: str
    error: float
    rounding: float
    beside_rounding: float
    modules: tuple[ModuleReport, ...]
    lacking: tuple[str, ...]
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]
    bytes: int
    bytes_before: int
    rule: str = ""
    counts: tuple[float, ...] = ()


def merge_card(report: MergeReport, inputs: Sequence[str], base: str | None, asked: str, by: str) -> str:
    """The README.md of a merged adapter.

    Args:
        inputs: each adapter's name. base: the base model's name. asked: the requested rank, as typed. by: the method.
    """
    rows = [f"| {_cell(name)} | {weight:.6g} |" for name, weight in zip(inputs, report.weights, strict=True)]
    table = "\n".join(["| adapter | weight |", "| --- | --- |", *rows])
    rounding = f", and writing {report.dtype} adds {report.rounding:.2e}" if report.rounding else f" ({report.dtype})"
    dropped = f"\n\nLeft out: {', '.join(map(_cell, report.dropped))}." if report.dropped else ""
    ruled = ""
    if report.rule:
        gone = sum(count == 0 for count in report.counts)
        ruled = f"**Weighed by a robust rule**: {gone} of {len(inputs)} adapters count for nothing.\n\n"
    return f"""---
library_name: peft
{base_line(base)}tags:
- lora
- merge
- fedlora
---
# Merged LoRA adapter

Made of {counted(len(inputs), "adapter")} by {by}, with rank {asked}: over all modules the update is
{report.error:.2e} off {report.of}{rounding}.
Every module is stored at rank {report.rank}, with alpha = r: the update is B A itself.

{ruled}{table}{dropped}
"""


def _cell(text: str) -> str:
    """Text for a Markdown table: a plain name as is, anything else as code, so that no markup takes effect."""
    return text if len(text) <= MOST and re.fullmatch(r"[A-Za-z0-9_.\[\] -]+", text) else markdown_cell(text)
