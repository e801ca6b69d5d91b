"""The page of a federation: each of its commands is one. Kind: *enumeration*. Whether its blocks lead to an adapter:
tests/deployment/test_road.py."""

from __future__ import annotations

import re
import shlex

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
