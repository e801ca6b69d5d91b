"""Commands that are imported when they are called: `fedlora --help` and a shell's completion need no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_type_hints

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import ArgumentInfo


def lazy_group(commands: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """The class of a group of commands, for `typer.Typer(cls=...)`.

    Args:
        commands: name -> (where, help). where: "module:name" of a command's function, or of a `typer.Typer` with more
            commands. help: the first line of its docstring, repeated here so that a list of commands imports none.

    Example::

        app = typer.Typer(cls=lazy_group({"merge": ("fedlora.cli.merge:merge", "Merge adapters into one.")}))
    """

    class Lazy(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            _suggest_once(self)
            self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in commands.items()}

        def resolve_command(
            self, ctx: click.Context, args: list[str]
        ) -> tuple[str | None, click.Command | None, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            if name is not None and name in commands:
                command = loaded(name, commands[name][0])
            return name, command, rest

    return Lazy


@functools.cache
def loaded(name: str, where: str) -> click.Command:
    """The command itself, imported and built."""
    module, _, attribute = where.partition(":")
    found = getattr(import_module(module), attribute)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.callback()(lambda: None)  # a group, whatever is in it
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name)(found)
    group = get_command(alone)
    assert isinstance(group, TyperGroup)
    _explain_arguments(group.commands[name])
    _suggest_once(group.commands[name])
    return group.commands[name]


def _suggest_once(command: click.Command) -> None:
    """A mistyped command gets its "Did you mean ...?" from click 8.4 and from typer 0.20: one of them is enough."""
    if isinstance(command, TyperGroup) and hasattr(click.exceptions, "NoSuchCommand"):
        vars(command)["suggest_commands"] = False
        for inner in command.commands.values():
            _suggest_once(inner)


def _explain_arguments(command: click.Command) -> None:
    """Give arguments their help back: arguments of click 8.5 have one, too, and forget that of typer 0.20."""
    for inner in getattr(command, "commands", {}).values():
        _explain_arguments(inner)
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
    for parameter in command.params:
        for said in getattr(hints.get(str(parameter.name)), "__metadata__", ()):
            if isinstance(said, ArgumentInfo):
                vars(parameter)["help"] = said.help
