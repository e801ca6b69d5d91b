"""Options that several commands share, with one text each; errors for idle options and for keys typed as options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import click
import typer
from click.core import ParameterSource

from fedlora.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]

# For runs.
Config = Annotated[Path, typer.Argument(help="the run's TOML file", show_default=False)]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key: run.rounds=5")]
DataRoot = Annotated[
    Path | None,
    typer.Option(envvar="FEDLORA_DATA_ROOT", help="where the files of data.task are (folders glue, superni)"),
]


# For commands that read adapters.
def fetched(value: Path | list[Path] | None) -> Path | list[Path] | None:
    """Adapter folders, those written owner/name@revision in the hub's cache."""
    if "@" not in str(value):
        return value
    from fedlora.data.hub import ADAPTER_FILES, local_folder  # imports numpy

    if isinstance(value, list):
        return [local_folder(each, ADAPTER_FILES) for each in value]
    return local_folder(str(value), ADAPTER_FILES)


Adapters = Annotated[
    list[Path],
    typer.Argument(
        help="PEFT adapter directories, or owner/name@revision on the hub", show_default=False, callback=fetched
    ),
]
OneAdapter = Annotated[
    Path,
    typer.Argument(
        help="a PEFT adapter directory, or owner/name@revision on the hub", show_default=False, callback=fetched
    ),
]
DType = Annotated[
    str | None,
    typer.Option(
        help="float16, bfloat16, float32, float64 (default: the adapters' own; of export --format merged: the base's)",
        show_default=False,
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--model", help="the base model: its directory, demo, or owner/name@revision"),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="replace any folder that holds only what is written, an adapter or a model, also a trained one"
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(min=1, help="bytes of the largest weights file to open (default: 64 GiB)", show_default=False),
]


def numbers(text: str, option: str, *, least: float = -math.inf, most: float = math.inf) -> list[float]:
    """Finite numbers from "1,2.5,1e3". Raises `ConfigError`, which names the option and the numbers that it takes."""
    try:
        if not text.isascii() or "_" in text:
            raise ValueError("letters that only Python takes for digits")
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers separated by commas; got {text[:80]!r}.") from error
    if not all(math.isfinite(x) and least <= x <= most for x in found):
        limits = [f"of at least {least:g}"] * math.isfinite(least) + [f"at most {most:g}"] * math.isfinite(most)
        raise ConfigError(f"{option} takes finite numbers {' and '.join(limits)}".rstrip() + f"; got {text[:80]!r}.")
    return found


def refuse_idle(context: typer.Context, idle: Mapping[str, str]) -> None:
    """Reject an option that was typed but would do nothing, instead of ignoring it: the first such parameter.

    Args:
        idle: parameter -> why it does nothing here; the sentence begins with the option's name.

    Raises:
        ConfigError: one of them was typed.
    """
    flags = {parameter.name: parameter.opts[-1] for parameter in context.command.params}
    for name, why in idle.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"{flags[name]} {why}. Leave it out.")


def meant(error: click.NoSuchOption) -> str | None:
    """A hint for a key typed as an option; None if the command or the config has no such key.

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
    """All keys called `name` or its plural, and `name` of the table with that name: `method.name`."""
    from fedlora.runs.config import KEYS  # imports pydantic and torch, so only after a typing error

    return [key for key in KEYS if key.partition(".")[2] in (name, f"{name}s") or key == f"{name}.name"]
