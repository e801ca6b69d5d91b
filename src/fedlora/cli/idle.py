"""Options that were typed and would do nothing: an error, never silence."""

from __future__ import annotations

from collections.abc import Mapping

import typer
from click.core import ParameterSource

from fedlora.errors import ConfigError


def refuse_idle(context: typer.Context, idle: Mapping[str, str]) -> None:
    """Raises `ConfigError` for the first of these parameters that the user typed.

    idle: parameter -> why it does nothing here, as the rest of a sentence that begins with the option's name.
    """
    flags = {parameter.name: parameter.opts[-1] for parameter in context.command.params}
    for name, why in idle.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{flags[name]} {why}. Leave it out.")
