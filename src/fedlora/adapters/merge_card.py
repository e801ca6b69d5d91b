"""The model card of a merged adapter: inputs, weights, and the truncation error. It contains no local path, and
strangers' text in it cannot act as markup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedlora.adapters.card_text import base_line, cell
from fedlora.adapters.collection import Collection
from fedlora.adapters.merge_report import MergeReport, Weighed
from fedlora.adapters.reader import WEIGHTS_FILE

_SHOWN = 10  # modules


def merge_card(given: Collection, report: MergeReport, made: str, asked: str) -> str:
    """The README.md, with front matter for the hub. made: what the result is, in words. asked: the requested rank, as
    typed."""
    rows = [
        [cell(file.directory.resolve().name), f"{w:.6g}", file.sha256()]
        for file, w in zip(given.files, report.weights, strict=True)
    ]
    columns = ["adapter", "weight", f"SHA-256 of {WEIGHTS_FILE}"]
    if report.weighed is not None:
        columns[1:2] = ["weight, as given", "counts, after the rule", "why"]
        judged = zip(report.weighed.counts, report.weighed.why, strict=True)
        rows = [
            [*row[:2], f"{c:.6g}", cell(why) if why else "", row[2]] for row, (c, why) in zip(rows, judged, strict=True)
        ]
    worst = sorted(report.modules, key=lambda r: -r.error)[:_SHOWN]
    kept = sorted({r.kept for r in report.modules})
    ranks = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    largest = max((r.norm for r in report.modules), default=0.0)
    norm = largest * math.sqrt(math.fsum((r.norm / largest) ** 2 for r in report.modules)) if largest else 0.0
    rounding = f", and writing {report.dtype} adds {report.rounding:.2e}" if report.rounding else f" ({report.dtype})"
    more = _others(report.module_weights)
    dropped = "".join(f"\n\nLeft out, {kind}: {_names(names)}." for kind, names in sorted(report.dropped.items()))
    errors = [[cell(r.module), str(r.full), str(r.kept), f"{r.error:.2e}"] for r in worst]
    return f"""---
library_name: peft
{base_line(given.spec().base_model)}tags:
- lora
- merge
- fedlora
---
# Merged LoRA adapter

{made} of {len(given.files)} adapters, exact up to the requested rank ({asked}): ranks {ranks},
relative truncation error {report.error:.2e} over all modules (norm of the update {norm:.4g}){rounding}.
Every module is stored at rank {report.rank}, with alpha = r: the update is B A itself.

{_of_rule(report.weighed)}{_table(columns, rows)}{more}{dropped}

The modules that lost most:

{_table(["module", "rank of the sum", "kept", "relative error"], errors)}
"""


def _others(weights: Mapping[str, Sequence[float]]) -> str:
    if not weights:
        return ""
    rows = [[cell(name), ", ".join(f"{w:.6g}" for w in each)] for name, each in list(weights.items())[:_SHOWN]]
    rest = f"\n\nAnd {len(weights) - _SHOWN} more." if len(weights) > _SHOWN else ""
    return f"\n\nOther weights, in the same order:\n\n{_table(['module or tensor', 'weights'], rows)}{rest}"


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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
