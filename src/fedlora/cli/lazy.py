"""Commands that are imported when they are called or shown: `fedlora merge` imports nothing of `fedlora run`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo


def lazy_group(package: str, commands: Mapping[str, str]) -> type[TyperGroup]:
    """The class of a group of commands, for `typer.Typer(cls=...)`.

    Args:
        package: the package with the commands' files. commands: name -> "file:name" of its function, or of a
            `typer.Typer` with more commands.

    Example::

        app = typer.Typer(cls=lazy_group("fedlora.cli", {"merge": "merge:merge"}))
    """

    class Lazy(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = {name: TyperCommand(name) for name in commands}  # click searches it for similar names

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return loaded(package, cmd_name, commands[cmd_name]) if cmd_name in commands else None

    return Lazy


@functools.cache
def loaded(package: str, name: str, where: str) -> click.Command:
    """The command itself, imported and built."""
    module, _, attribute = where.partition(":")
    found = getattr(import_module(f"{package}.{module}"), attribute)
    alone = typer.Typer(add_completion=False, suggest_commands=False)  # click 8.4 suggests, and once is enough
    alone.callback()(lambda: None)  # makes it a group, whatever it contains
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name)(found)
    group = typer.main.get_command(alone)
    assert isinstance(group, TyperGroup)
    _explain_arguments(group.commands[name])
    return group.commands[name]


def _explain_arguments(command: click.Command) -> None:
    """Restore the help of arguments: arguments in click 8.5 have their own and lose that from typer 0.20."""
    for inner in getattr(command, "commands", {}).values():
        _explain_arguments(inner)
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True) if command.callback else {}
    for parameter in command.params:
        hint = hints.get(str(parameter.name))
        for argument in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(argument, ArgumentInfo):
                vars(parameter)["help"] = argument.help
