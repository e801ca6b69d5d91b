"""docs/how-to/runbook.md: its commands are those that there are, its words those that are said. Kind: structural."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

pytest.importorskip("flwr")

import fedlora
import fedlora.cli

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "runbook.md"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def commands() -> list[str]:
    """Every `fedlora ...` of the page that has an argument: in lines of their own and in sentences."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    fedlora ")]
    joined = re.sub(r"\s+", " ", text)
    return list(dict.fromkeys([*lines, *re.findall(r"`(fedlora [^`]+)`", joined)]))


@pytest.mark.parametrize("line", commands())
def test_each_command_is_one(line: str) -> None:
    """Its words are taken by the command line as it is; nothing is run."""
    command: click.Command = typer.main.get_command(fedlora.cli.app)
    words = shlex.split(line.partition(" > ")[0])[1:]  # without the shell's "into that file"
    context = click.Context(command, info_name="fedlora")
    named = 0
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, info_name=name, parent=context)
        named += 1
    if words:  # "`fedlora flower serve` is not running" names a command and calls none
        command.make_context("page", words, parent=context.parent)
    assert named


def test_the_page_has_what_it_promises() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    for words in ("Add a site", "Remove a site", "Another key", "another machine", "More rounds", "Certificates",
                  "Upgrade", "Back up", "server moves", "disk is full"):  # fmt: skip
        assert any(words in title for title in titles), words
    assert len(commands()) > 12


def test_what_is_seen_is_what_is_said() -> None:
    """The words of the table stand in the code that says them."""
    package = Path(fedlora.__file__).parent / "flower" / "site"
    code = re.sub(r'"\s*f?"', "", "".join(path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))))
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) > 8
    parts = [part.strip(" .,") for row in rows for part in row.split("...")]
    assert [part for part in parts if part and part not in code] == []
