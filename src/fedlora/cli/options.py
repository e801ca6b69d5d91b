"""Options that several commands share, with one text each; errors for idle options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

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

Workers = Annotated[
    str, typer.Option(metavar="N|auto", help="processes with one run each; auto: as many as cores or GPUs")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue what is in the folder")]
Margin = Annotated[float | None, typer.Option(help="a difference that does not matter, for verdicts")]


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
    typer.Argument(help="PEFT folders, or owner/name@revision on the hub", show_default=False, callback=fetched),
]
OneAdapter = Annotated[
    Path,
    typer.Argument(help="a PEFT folder, or owner/name@revision on the hub", show_default=False, callback=fetched),
]
DType = Annotated[
    str | None,
    typer.Option(
        help="float16, bfloat16, float32, float64 (default: the adapters'; of a merged model: the base's)",
        show_default=False,
    ),
]
BaseModel = Annotated[
    str | None, typer.Option("--model", help="the base model: its folder, demo, or owner/name@revision")
]
Force = Annotated[bool, typer.Option("--force", help="replace a folder that holds an adapter or a model alone")]
MaxBytes = Annotated[
    int | None, typer.Option(min=1, help="the largest weights file to open (default: 64 GiB)", show_default=False)
]


def numbers(text: str, option: str, *, least: float = -math.inf, most: float = math.inf) -> list[float]:
    """Finite numbers from "1,2.5,1e3". Raises `ConfigError`, which names the option and the numbers that it takes."""
    try:
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
