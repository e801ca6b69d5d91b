"""The built-in methods: an entry for each with its formula, what travels, and its settings."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from typing import Any

from fedlora.core.method import Role, Roles
from fedlora.methods.registry import METHODS, Listed, listed
from generate.config_keys import split
from generate.markdown import entry, line, linked, prose

_DOES: dict[Role, str] = {
    "shared": "trained and sent",
    "local": "trained, and never leaves the client",
    "frozen": "received, not trained, not sent",
}


def entries() -> dict[str, str]:
    """Method -> its entry, which its section of reference/methods.md begins with."""
    return {row.name: _entry(row) for row in listed() if row.name in METHODS}


def formulas(doc: str) -> list[str]:
    """The indented paragraphs of a module's docstring. What stands there in columns stands below each other here."""
    return [_narrow(textwrap.dedent(part).rstrip()) for part in doc.split("\n\n") if re.match(r" {4}", part)]


def meanings(row: Listed) -> dict[str, str]:
    """Setting -> what its class's docstring says of it."""
    return split(inspect.getdoc(METHODS[row.name]) or "", list(row.defaults))[1] if row.defaults else {}


def toml(value: object) -> str:
    """As TOML has it; what is not set has no word there."""
    if isinstance(value, str):
        return f'"{value}"'
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def papers(text: str) -> str:
    """With its papers' numbers as links."""
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", text)


def _entry(row: Listed) -> str:
    cls = METHODS[row.name]
    doc = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    cost = re.search(r"\bCost:? .*", doc, flags=re.S)
    said = [papers(prose(" ".join(doc.split("\n\n")[0].split())))]
    if not re.search(r"\d{4}\.\d{5}", said[0]):
        said.append(f"Source: {papers(prose(row.paper))}.")
    said += [f"```text\n{text}\n```" for text in formulas(doc)]
    if cost:
        said.append(linked(line(cost[0])))
    said += _travels(cls())
    known = meanings(row)
    said += [
        entry(key, [f"default `{toml(value)}`" if value is not None else "not set"], line(known.get(key, "")))
        for key, value in row.defaults.items()
    ]
    return "\n\n".join(said) + "\n"


def _narrow(block: str) -> str:
    """A page is narrower than a file: each column of a line is a line, and one that is no formula is indented."""
    lines = []
    for row in block.splitlines():
        first, *others = re.split(r"(?<=\S) {3,}(?![ =])", row)
        lines += [first, *(text if re.match(r"\w+ (<-|=) ", text) else f"    {text}" for text in others)]
    return "\n".join(lines)


def _travels(method: Any) -> list[str]:
    """What differs from the default, by which B, A and heads are shared."""
    first, second = method.roles(0), method.roles(1)
    said = [_owners(first)] if first != Roles() else []
    if first != second:
        said = [f"In rounds 0, 2, 4 ...: {_owners(first)} In rounds 1, 3, 5 ...: {_owners(second)}"]
    if method.moves_base:
        said.append("Changes of the base weight W0 travel to the clients besides.")
    return [f"**Travels.** {' '.join(said)}"] if said else []


def _owners(roles: Roles) -> str:
    """Who owns what, as the method declares it."""
    parts = {"B": roles.B, "A": roles.A, "heads": roles.heads}
    by_role: dict[Role, list[str]] = {}
    for part, role in parts.items():
        by_role.setdefault(role, []).append(part)
    return "; ".join(f"{', '.join(held)}: {_DOES[role]}" for role, held in by_role.items()) + "."
