"""A key of the config that was given as an option, `--rounds 3`: which `--set` is meant."""

from __future__ import annotations

from typing import get_args

import click


def meant(error: click.NoSuchOption) -> str | None:
    """A line for somebody who typed the name of a key as an option; None where the command or the config has none such.

    Example: `--rounds` of `fedlora run` -> "run.rounds is a key of the config: --set run.rounds=VALUE"
    """
    takes_keys = error.ctx is not None and any("--set" in option.opts for option in error.ctx.command.params)
    found = _keys(error.option_name.lstrip("-").replace("-", "_")) if takes_keys else []
    if not found:
        return None
    if len(found) == 1:
        return f"{found[0]} is a key of the config: --set {found[0]}=VALUE"
    return f"Keys of the config are {', '.join(found)}: --set KEY=VALUE"


def _keys(name: str) -> list[str]:
    """All keys that end in `name` or its plural, or the `name` of the table that is called so: `method.name`."""
    from fedlora.runs.config import RunConfig  # pydantic and torch: only where somebody has mistyped

    found = []
    for section, field in RunConfig.model_fields.items():
        table = next((kind for kind in get_args(field.annotation) if hasattr(kind, "model_fields")), field.annotation)
        keys = getattr(table, "model_fields", {})
        found += [f"{section}.{key}" for key in (name, f"{name}s") if key in keys]
        if name == section and "name" in keys:
            found.append(f"{section}.name")
    return found
