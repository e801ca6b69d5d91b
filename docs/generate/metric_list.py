"""The numbers of a federation for Prometheus, from the docstring of `fedlora.flower.serving.metrics`."""

from __future__ import annotations

import re

from fedlora.flower.serving import metrics


def page() -> str:
    """As a Markdown table: the name with its labels, and what it is."""
    rows = re.findall(r"^    (fedlora_\S+) +(.*)$", metrics.__doc__ or "", re.MULTILINE)
    return "\n".join(["| metric | meaning |", "|---|---|", *(f"| `{name}` | {said} |" for name, said in rows)])
