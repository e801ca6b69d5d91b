"""The commands of docs/how-to/federation.md, taken from the page: what the tests run is what a reader types.

```sh server        commands at the server
```sh site          commands at each site           ```python server    Python at the server
```sh computer      on the computer with the checkout
```toml run.toml    a file of that name, on that computer
```text             what is seen; not run
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "federation.md"
_FENCE = re.compile(r"^```(\w+)(?: +([^\n]+))?\n(.*?)^```$", re.M | re.S)
KINDS = {
    *(("sh", whom) for whom in ("computer", "server", "site")), ("python", "server"), ("toml", "run.toml"),
    ("text", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, for whom, its text, and the heading above it."""

    language: str
    whom: str
    text: str
    heading: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page in their order."""
    found = []
    for fence in _FENCE.finditer(page):
        above = re.findall(r"^##+ (.+)$", page[: fence.start()], re.M)
        found.append(Block(fence[1], (fence[2] or "").strip(), fence[3], above[-1] if above else ""))
    return found


def under(page: str, headings: Sequence[str]) -> list[Block]:
    """The blocks below these headings. Raises `AssertionError` where one has none, so that a renamed one is noticed."""
    found = [block for block in blocks(page) if block.heading in headings]
    assert {block.heading for block in found} == set(headings), {b.heading for b in blocks(page)}
    return found
