"""The input of every `fedlora experiment` command: folders and files, and their contents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.experiments.places import Places
from fedlora.experiments.spec import Experiment, load_experiment, names_in


@dataclass(frozen=True)
class Project:
    """experiments: the folder of their files. results, work, data_root: as in `Places`."""

    experiments: Path
    results: Path
    work: Path
    data_root: Path | None = None

    @property
    def places(self) -> Places:
        return Places(self.results, self.work, self.data_root)

    def named(self, name: str) -> Experiment:
        """NAME.toml in the folder, or a path. Raises `ConfigError` if there is none; the message lists the names."""
        path = Path(name) if name.endswith(".toml") else self.experiments / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(names_in(self.experiments)) or "none"
            raise ConfigError(f"there is no experiment {path}; in {self.experiments} there are: {known}.")
        return load_experiment(path)
