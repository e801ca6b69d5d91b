"""The model card of a full model with an adapter in it. The base's own card follows below, marked as such."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedlora.adapters.base_names import is_path
from fedlora.adapters.card import base_line, cell
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.base_folder import SideFile
from fedlora.applying.model import Built
from fedlora.given_files import read_given

CARD = "README.md"
_FRONT = re.compile(r"---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)
_LICENSE = re.compile(r"^license: [A-Za-z0-9.-]{1,40}$", re.MULTILINE)
_MOST_CLASSES = 20  # listed in a card


def card_of(kept: Sequence[SideFile]) -> str:
    """The base model's own card, "" if it has none."""
    for file in kept:
        if file.name == CARD:
            return read_given(file.source, 2**28).decode(errors="replace")
    return ""


def full_card(file: AdapterFile, base: str | None, of_base: str, changed: int, added: int, head: Built) -> str:
    """README.md, with front matter for the hub. base: the base model's name. of_base: its card."""
    front = _FRONT.match(of_base)
    license = _LICENSE.search(front[1]) if front else None
    whose = f"The base model {cell(base)}" if base and not is_path(base) else "A base model"
    ranks = sorted(set(file.ranks.values()))
    rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    classes = f" Classes: {', '.join(cell(name) for name in head.labels[:_MOST_CLASSES])}" if head.labels else ""
    rest = f" and {len(head.labels) - _MOST_CLASSES} more" if len(head.labels) > _MOST_CLASSES else ""
    load = f"\n\n`transformers.{head.auto}` loads it.{classes}{rest}{'.' if classes else ''}" if head.auto else ""
    body = of_base[front.end() :] if front else of_base
    below = f"\n\n# The card of the base model\n\nIt is of another model:\n\n{body.strip()}" if body.strip() else ""
    return f"""---
library_name: transformers
{f"{license[0]}{chr(10)}" if license else ""}{base_line(base)}tags:
- lora
- fedlora
---

# A full model with a LoRA adapter in it

{whose} with an adapter of {len(file.ranks)} modules, {rank}, written into its weights by fedlora:
{changed} tensors changed, {added} added. Measurements of the base model alone do not hold for it.{load}{below}
"""
