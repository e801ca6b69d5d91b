"""Every built-in method in one table: a link to its page, its paper, its settings with their defaults, its presets."""

from __future__ import annotations

from fedlora.methods.registry import METHODS, listed
from generate.markdown import prose
from generate.method_pages import linked, toml


def page() -> str:
    """As Markdown. Each name is an anchor too, for links from before a method had a page of its own."""
    head = ["| method | source | hyper-parameters | presets |", "|---|---|---|---|"]
    for row in listed():
        if row.name in METHODS:
            shown = ", ".join(f"`{key} = {toml(value)}`" for key, value in row.defaults.items()) or "none"
            name = f'<a id="{row.name}"></a>[{row.name}](methods/{row.name}.md)'
            head.append(f"| {name} | {linked(prose(row.paper))} | {shown} | {', '.join(row.presets) or 'none'} |")
    return "\n".join(head) + "\n"
