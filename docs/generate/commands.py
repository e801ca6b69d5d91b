"""Every command with its arguments and options, from the program itself."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator

import click
from typer.main import get_command

from fedlora.cli import app
from generate.markdown import entry, line, linked, prose

_KINDS = {"integer range": "integer", "float": "number", "float range": "number"}  # click's names -> a reader's


def commands() -> Iterator[tuple[str, click.Command]]:
    """("fedlora merge", the command) for every command and group, each group before what is in it."""
    root = get_command(app)
    yield from _below(root, "fedlora")


def page() -> str:
    """As Markdown. An argument that needs no words stands in the line of usage alone, what several commands have
    at the head, and a command's options that are another's in one line."""
    of = dict(commands())
    told = {path: [_parameter(p) for p in parameters(c) if getattr(p, "help", None)] for path, c in of.items()}
    many = Counter(entry for entries in told.values() for entry in entries)
    common = sorted(entry for entry, count in many.items() if count > 1)
    parts, seen = ["## Options of several commands", *common], dict[str, str]()
    for path, command in of.items():
        depth = "#" * min(2 + (path.count(" ") > 1), 3)
        pieces = command.collect_usage_pieces(click.Context(command, info_name=path))
        parts += [f"{depth} `{path}`", "\n\n".join(_paragraphs(command.help or ""))]
        if pieces != ["[OPTIONS]"]:
            parts.append(f"```text\n{path} {' '.join(pieces)}\n```")
        first = seen.setdefault(repr(told[path]), path)
        if first != path and told[path]:
            parts.append(f"Arguments and options are those of `{first}`.")
            continue
        parts += [entry for entry in told[path] if entry not in common]
        if also := [entry.partition(" · ")[0].partition("\n")[0] for entry in told[path] if entry in common]:
            parts.append(f"And {', '.join(also)}.")
    return "\n\n".join(parts) + "\n"


def parameters(command: click.Command) -> list[click.Parameter]:
    """What is shown: not --help, nor what typer adds to the program for the shell."""
    return [
        p
        for p in command.params
        if p.name not in ("help", "install_completion", "show_completion") and not getattr(p, "hidden", False)
    ]


def _below(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            child = command.resolve_command(context, [name])[1]
            if child is not None:
                yield from _below(child, f"{path} {name}")


def _paragraphs(text: str) -> list[str]:
    """Paragraphs of a docstring flow; indented lines and columns, such as examples, stay as they are."""
    found = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text.replace("\b", ""))):
        lines = part.splitlines()
        columns = any(re.search(r"\S {3,}\S", one) for one in lines)
        kept = len(lines) > 1 and (columns or all(one.startswith(" ") for one in lines))
        found.append(f"```text\n{inspect.cleandoc(part)}\n```" if kept else linked(prose(part)))
    return found


def _parameter(parameter: click.Parameter) -> str:
    help_text = getattr(parameter, "help", None) or ""
    if isinstance(parameter, click.Argument):
        name = parameter.make_metavar(click.Context(click.Command("x")))
        return entry(name, ["required" if parameter.required else "optional"], line(help_text))
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    flag = getattr(parameter, "is_flag", False)
    kind = "" if flag else _KINDS.get(parameter.type.name, parameter.type.name)
    if isinstance(parameter.type, click.Choice):
        kind = " or ".join(f"`{getattr(choice, 'value', choice)}`" for choice in parameter.type.choices)
    value = parameter.default
    plain = value is not None and not callable(value) and value not in ((), [], "", False)
    shown = f"default `{getattr(value, 'value', value)}`" if plain and "Sentinel" not in repr(value) else ""
    facts = ["required" if parameter.required else "", kind, shown, "repeatable" if parameter.multiple else ""]
    return entry(names, facts, linked(line(help_text)))
