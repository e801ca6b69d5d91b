"""The model card of a merged adapter: of what, with which weights, and what the cut cost. No path of this machine is in
it, and no word of a stranger's acts as markup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedlora.adapters.card_text import base_line, cell
from fedlora.adapters.collection import Collection
from fedlora.adapters.reader import WEIGHTS_FILE
from fedlora.adapters.truncation import ModuleReport
from fedlora.adapters.writer import AdapterSpec

_SHOWN = 10  # modules


@dataclass(frozen=True)
class CardFacts:
    """What a card says. made: of what the result is made, in words. asked: the rank, as it was typed. weights: of each
    adapter; other_weights: of modules and tensors that have others. rank: that all modules are stored at, 0 where each
    has its own. dropped: kind -> the names of what was left out. weighed: by a robust rule."""

    made: str
    asked: str
    weights: Sequence[float]
    other_weights: Mapping[str, Sequence[float]]
    rank: int
    dtype: str
    error: float
    rounding: float
    modules: Sequence[ModuleReport]
    dropped: Mapping[str, Sequence[str]]
    weighed: RuleFacts | None = None


class RuleFacts(Protocol):
    """What a card says of a robust rule (`merging.Weighed`)."""

    @property
    def rule(self) -> str: ...
    @property
    def counts(self) -> Sequence[float]: ...
    @property
    def why(self) -> Sequence[str]: ...
    @property
    def apart(self) -> float | None: ...


class ClientFacts(Protocol):
    """What a client's card says of its adapter (`merging.ClientReport`)."""

    @property
    def client(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, int]: ...
    @property
    def modules(self) -> int: ...
    @property
    def error(self) -> float: ...


def merge_card(given: Collection, facts: CardFacts) -> str:
    """The README.md, with the front matter that the hub reads."""
    base = given.spec().base_model
    rows = [
        [cell(file.directory.resolve().name), f"{w:.6g}", file.sha256()]
        for file, w in zip(given.files, facts.weights, strict=True)
    ]
    columns = ["adapter", "weight", f"SHA-256 of {WEIGHTS_FILE}"]
    if facts.weighed is not None:
        columns[1:2] = ["weight, as given", "counts, after the rule", "why"]
        judged = zip(facts.weighed.counts, facts.weighed.why, strict=True)
        rows = [
            [*row[:2], f"{c:.6g}", cell(why) if why else "", row[2]] for row, (c, why) in zip(rows, judged, strict=True)
        ]
    reports = facts.modules
    worst = sorted(reports, key=lambda r: -r.error)[:_SHOWN]
    kept = sorted({r.kept for r in reports})
    ranks = str(kept[0]) if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    largest = max((r.norm for r in reports), default=0.0)
    norm = largest * math.sqrt(math.fsum((r.norm / largest) ** 2 for r in reports)) if largest else 0.0
    padded = f"Every module is stored at rank {facts.rank}" if facts.rank else "Each module has its own rank"
    rounding = f", and writing {facts.dtype} adds {facts.rounding:.2e}" if facts.rounding else f" ({facts.dtype})"
    more = _others(facts.other_weights)
    dropped = "".join(f"\n\nLeft out, {kind}: {_names(names)}." for kind, names in sorted(facts.dropped.items()))
    errors = [[cell(r.module), str(r.full), str(r.kept), f"{r.error:.2e}"] for r in worst]
    return f"""---
library_name: peft
{base_line(base)}tags:
- lora
- merge
- fedlora
---

# Merged LoRA adapter

{facts.made} of {len(given.files)} adapters, exact up to the asked rank ({facts.asked}): ranks {ranks},
relative truncation error {facts.error:.2e} over all modules (norm of the update {norm:.4g}){rounding}.
{padded}, with alpha = r: the update is B A itself.

{_of_rule(facts.weighed)}{_table(columns, rows)}{more}{dropped}

The modules that lost most:

{_table(["module", "rank of the sum", "kept", "relative error"], errors)}
"""


def client_card(spec: AdapterSpec, label: str, report: ClientFacts, modules: int) -> str:
    """The README.md of the adapter that a client goes on from. modules: that the global update has."""
    least, largest = report.ranks
    ranks = str(least) if least == largest else f"{least} to {largest}"
    held = "" if report.modules == modules else f" It has {report.modules} of {modules} modules."
    return f"""---
library_name: peft
{base_line(spec.base_model)}tags:
- lora
- fedlora
---

# LoRA adapter of one client

What client {cell(report.client)} goes on from after a round of {cell(label)}:
rank {ranks}, relative distance {report.error:.2e} from the global update, over all modules.{held}
That update itself is the adapter two folders above.
"""


def _others(weights: Mapping[str, Sequence[float]]) -> str:
    if not weights:
        return ""
    rows = [[cell(name), ", ".join(f"{w:.6g}" for w in each)] for name, each in list(weights.items())[:_SHOWN]]
    rest = f"\n\nAnd {len(weights) - _SHOWN} more." if len(weights) > _SHOWN else ""
    return f"\n\nOther weights, in the same order:\n\n{_table(['module or tensor', 'weights'], rows)}{rest}"


def _of_rule(weighed: RuleFacts | None) -> str:
    if weighed is None:
        return ""
    gone = sum(c == 0 for c in weighed.counts)
    apart = f", which is {weighed.apart:.2e} off their plain mean" if weighed.apart is not None else ""
    return (
        f"**Weighed by a robust rule**, {cell(weighed.rule)}: {gone} of {len(weighed.counts)} adapters count for "
        f"nothing. Errors are of the mean that it weighs{apart}.\n\n"
    )


def _names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(cell(name) for name in names[:_SHOWN])}{rest}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
