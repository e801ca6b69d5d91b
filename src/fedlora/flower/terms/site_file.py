"""site.toml: a site's name, its data and its base model, and nothing else.

name = "acme"
data = "notes.csv"          # CSV, JSONL or Parquet; relative paths start at the file's own folder
model = "/models/bert"      # a directory, a GGUF file, a hub id, or a packaged model
text = "note"               # columns of its own file, if the federation has other names for them
device = "cuda"             # the device; `threads` sets the number of threads
command = ["python", "my_train.py"]     # trains here in place of fedlora's loop; time_limit: in seconds
method = "ours:Method"      # a method by module and class, if the server names one: its module is imported here
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, field_validator

from fedlora.data.demo import PACKAGED
from fedlora.data.hub import is_hub
from fedlora.errors import ConfigError
from fedlora.flower.terms.names import check_site
from fedlora.given_files import read_toml
from fedlora.runs.config import located_command
from fedlora.runs.reading import checked
from fedlora.runs.train_section import Command, Seconds
from fedlora.training.settings import Section

COLUMNS = ("text", "pair", "label", "prompt", "response", "messages")


class Site(Section):
    """A site's own settings. Nothing of this travels.

    data: its file, or a data set "hf://..."; model: the base model, as model.path of a run. text to messages: columns
    of its file, if their names differ from the federation's settings. device, threads: as model.device and run.threads;
    default: the best device, and the settings' threads. command, time_limit: as train.command of a run; the settings'
    [train] then has no effect here. method: the one "module:Class" that the server may name as its method; default:
    only methods of fedlora and of installed packages.

    Example:
        >>> Site(name="acme", data="notes.csv", model="demo", text="note").columns
        {'text': 'note'}
    """

    name: str
    data: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    text: str | None = None
    pair: str | None = None
    label: str | None = None
    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    device: str | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    command: Command | None = None
    time_limit: Seconds | None = None
    method: str | None = None

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        check_site(name)
        return name

    @property
    def columns(self) -> dict[str, str]:
        """The columns for which this file gives other names."""
        return {column: found for column in COLUMNS if (found := getattr(self, column)) is not None}

    @property
    def program(self) -> dict[str, Any]:
        """The table [train] of a site that trains by a program of its own."""
        limit = {} if self.time_limit is None else {"time_limit": self.time_limit}
        return {"command": self.command, **limit}

    def toml(self) -> str:
        """The text of site.toml."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @classmethod
    def read(cls, path: Path) -> Site:
        """Read site.toml, with paths made absolute. It does not check that the files exist.

        Raises:
            ConfigError: an error in the file, with a line for each one.
        """
        raw = read_toml(path, "the site file")
        try:
            return checked(cls, raw).located(path.parent)
        except ConfigError as error:
            hint = (
                " Classes, lengths, ranks and training settings come from the server."
                if {*raw} - {*cls.model_fields}
                else ""
            )
            raise ConfigError(f"the site file {path}: {error}.{hint}") from error

    def located(self, folder: Path) -> Site:
        """The site with its paths absolute; relative ones start at `folder`."""
        changes: dict[str, Any] = {}
        if not is_hub(self.data):
            changes["data"] = str((folder / self.data).resolve())
        if self.model not in PACKAGED and (folder / self.model).exists():
            changes["model"] = str((folder / self.model).resolve())
        if self.command is not None:
            changes["command"] = located_command(self.command, folder)
        return self.model_copy(update=changes)


__all__ = ["COLUMNS", "Site"]
