"""What the page of a method says from the code: formulas, what travels, what was measured, settings, examples."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from fedlora.core.method import Role, Roles
from fedlora.methods.registry import METHODS, Listed, listed
from generate.config_keys import split
from generate.markdown import entry, line, prose

MEASURED = Path(__file__).parent.parent / "explanation" / "methods.md"  # holds what benchmarks/method_table.py prints
PROPERTIES = "../../explanation/methods.md#properties"  # as seen from reference/methods/NAME.md
_DOES: dict[Role, str] = {
    "shared": "trained and sent",
    "local": "trained, and never leaves the client",
    "frozen": "received, not trained, not sent",
}


def pages() -> dict[str, str]:
    """ "NAME.facts" and "NAME.use" -> Markdown, which reference/methods/NAME.md includes before and after its words."""
    found = {}
    for row in listed():
        if row.name in METHODS:
            found |= {f"{row.name}.facts": facts(row), f"{row.name}.use": use(row)}
    return found


def facts(row: Listed) -> str:
    """The first sentence, the source, the formulas, what travels, and the measured answers."""
    cls = METHODS[row.name]
    doc = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "")
    about, cost = " ".join(doc.split("\n\n")[0].split()), re.search(r"\bCost:? .*", doc, flags=re.S)
    said = [prose(about), f"Source: {linked(prose(row.paper))}.", *(f"```text\n{text}\n```" for text in formulas(doc))]
    if cost:
        told = re.sub(
            r"docs/explanation/(\w+)\.md", r"[\1](../../explanation/\1.md)", line(cost[0]).replace("\\_", "_")
        )
        said.append(told.replace("_", "\\_"))
    said += ["## What travels", _travels(cls()), "## Measured", _measured(row.name)]
    return "\n\n".join(said) + "\n"


def use(row: Listed) -> str:
    """The settings with their defaults and meanings, the presets, and three lines each of a file and of Python."""
    said = ["## Settings", _settings(row) or "None."]
    for name, values in row.presets.items():
        said.append(f'`preset = "{name}"` sets {", ".join(f"`{key} = {toml(held)}`" for key, held in values.items())}.')
    key, value = next(((k, v) for k, v in row.defaults.items() if v is not None), (None, None))
    setting = "" if key is None else f", {key}={json.dumps(value)}"
    file = [f'name = "{row.name}"', *([] if key is None else [f"{key} = {toml(value)}"])]
    said += [
        "## Example",
        "In the file of a run (`fedlora run my.toml`):",
        "```toml\n[method]\n" + "\n".join(file) + "\n```",
        "In Python:",
        f'```python\nfrom fedlora import Server, build\n\nserver = Server(build("{row.name}"{setting}))\n```',
    ]
    return "\n\n".join(said) + "\n"


def formulas(doc: str) -> list[str]:
    """The indented paragraphs of a module's docstring. What stands there in columns stands below each other here."""
    return [_narrow(textwrap.dedent(part).rstrip()) for part in doc.split("\n\n") if re.match(r" {4}", part)]


def _narrow(block: str) -> str:
    """A page is narrower than a file: each column of a line is a line, and one that is no formula is indented."""
    lines = []
    for row in block.splitlines():
        first, *others = re.split(r"(?<=\S) {3,}(?![ =])", row)
        lines += [first, *(text if re.match(r"\w+ (<-|=) ", text) else f"    {text}" for text in others)]
    return "\n".join(lines)


def meanings(row: Listed) -> dict[str, str]:
    """Setting -> what its class's docstring says of it."""
    return split(inspect.getdoc(METHODS[row.name]) or "", list(row.defaults))[1] if row.defaults else {}


def toml(value: object) -> str:
    """As TOML has it; what is not set has no word there."""
    if isinstance(value, str):
        return f'"{value}"'
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def linked(text: str) -> str:
    """With its papers' numbers as links."""
    return re.sub(r"arXiv:? ?(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _settings(row: Listed) -> str:
    known = meanings(row)
    return "\n\n".join(
        entry(key, [f"default `{toml(value)}`" if value is not None else "not set"], line(known.get(key, "")))
        for key, value in row.defaults.items()
    )


def _travels(method: Any) -> str:
    first, second = method.roles(0), method.roles(1)
    said = [_owners(first)] if first == second else [
        f"In rounds 0, 2, 4 ...:\n\n{_owners(first)}", f"In rounds 1, 3, 5 ...:\n\n{_owners(second)}"
    ]  # fmt: skip
    if first.moves_base:
        said.append("Changes of the base weight W0 travel to the clients besides.")
    return "\n\n".join(said)


def _owners(roles: Roles) -> str:
    """Who owns what, as the method declares it."""
    return "\n".join(f"* {part}: {_DOES[getattr(roles, key)]}." for part, key in _PARTS)


_PARTS = (("B", "B"), ("A", "A"), ("Heads", "heads"))


def _measured(name: str) -> str:
    """The method's rows of the measured table, with what the columns mean in one line."""
    table = MEASURED.read_text(encoding="utf-8").split("<!-- benchmarks/method_table.py -->\n")[1].split("<!--")[0]
    head, rule, *rows = table.strip().splitlines()
    own = [row for row in rows if row.split("|")[1].split()[0] == name]
    about = (
        f"On four clients of one rank ([how, and what the columns mean]({PROPERTIES})): traffic in units of FedIT's; "
        "by how much the server's update is off the mean of the clients' updates; by how much the result moves "
        "when clients send the same updates in other coordinates."
    )
    return "\n".join([about, "", head, rule, *own])
