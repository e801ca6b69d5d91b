"""Every built-in method: its paper, its hyper-parameters with their defaults, its presets, its own words."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap

from fedlora.methods.registry import METHODS, listed
from generate.markdown import prose


def page() -> str:
    """As Markdown: a table, and a section each."""
    rows = [row for row in listed() if row.name in METHODS]
    head = ["| method | hyper-parameters | presets |", "|---|---|---|"]
    for row in rows:
        shown = ", ".join(f"`{key} = {_shown(value)}`" for key, value in row.defaults.items()) or "none"
        head.append(f"| [{row.name}](#{row.name}) | {shown} | {', '.join(row.presets) or 'none'} |")
    parts = ["\n".join(head)]
    for row in rows:
        words = sys.modules[METHODS[row.name].__module__].__doc__ or ""
        parts += [f"({row.name})=\n## `{row.name}`", f"Source: {_linked(prose(row.paper))}", *_words(words)]
    return "\n\n".join(parts) + "\n"


def _words(doc: str) -> list[str]:
    """The module's own words; formulas, which are indented, stay as they are."""
    found = []
    for part in inspect.cleandoc(doc).split("\n\n"):
        formula = any(one.startswith("    ") for one in part.splitlines())
        found.append(f"```text\n{textwrap.dedent(part).rstrip()}\n```" if formula else prose(part))
    return found


def _shown(value: object) -> str:
    """As TOML has it; what is not set has no word there."""
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _linked(text: str) -> str:
    """With its papers' numbers as links."""
    return re.sub(r"arXiv:? ?(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
