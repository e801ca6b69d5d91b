"""The page of a federation: each command is one, and the words of its table are said. Kind: *enumeration*. Whether its
blocks lead to an adapter: tests/deployment/test_road.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

pytest.importorskip("flwr")

import fedlora
import fedlora.cli
from support.page import PAGE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = PAGE.read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every `fedlora ...` of the page: in lines of their own and in sentences."""
    lines = [line.strip() for line in TEXT.splitlines() if line.startswith("fedlora ")]
    return list(dict.fromkeys([*lines, *re.findall(r"`(fedlora [^`]+)`", re.sub(r"\s+", " ", TEXT))]))


@pytest.mark.parametrize("line", commands())
def test_each_command_is_one(line: str) -> None:
    """Its words are taken by the command line as it is; nothing is run."""
    command: click.Command = typer.main.get_command(fedlora.cli.app)
    words = [word for word in shlex.split(line)[1:] if word != "..."]
    whole, context = "..." not in line, click.Context(command, info_name="fedlora")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, info_name=name, parent=context)
    if words and whole:  # "`fedlora flower serve` is not running" names a command and calls none
        command.make_context("page", words, parent=context.parent)


def test_what_is_seen_is_what_is_said() -> None:
    """The words of the table stand in the code that says them."""
    package = Path(fedlora.__file__).parent / "flower" / "site"
    code = re.sub(r'"\s*f?"', "", "".join(path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py"))))
    rows = re.findall(r"^\| `([^`]+)` \|", TEXT, re.MULTILINE)
    assert len(rows) > 5
    parts = [part.strip(" .,") for row in rows for part in row.split("...")]
    assert [part for part in parts if part and part not in code] == []
