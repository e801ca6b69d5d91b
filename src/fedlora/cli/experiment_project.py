"""The input of every `fedlora experiment` command: folders and files, and their contents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedlora.cli.experiment import CLAIMS
from fedlora.cli.screen import notes
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, load_claims
from fedlora.experiments.places import Places
from fedlora.experiments.runnable import left_out
from fedlora.experiments.seed_plan import plan_there
from fedlora.experiments.spec import Experiment, load_all, load_experiment, names_in
from fedlora.experiments.store import read_results


@dataclass(frozen=True)
class Project:
    """experiments: the folder of their files. results, work, data_root: as in `Places`. claims: the file with the
    questions. By default claims.toml in the experiments' folder takes precedence over it, and both may be missing,
    because your own project need not ask anything."""

    experiments: Path
    results: Path
    work: Path
    claims: Path = CLAIMS
    data_root: Path | None = None

    @property
    def places(self) -> Places:
        return Places(self.results, self.work, self.data_root)

    @cached_property
    def all(self) -> list[Experiment]:
        """Every experiment of the folder."""
        return load_all(self.experiments)

    @cached_property
    def asked(self) -> Claims | None:
        """The questions, or None if there is no file. Raises `ConfigError` if a named file does not exist."""
        if self.claims != CLAIMS and not self.claims.is_file():
            raise ConfigError(f"--claims {self.claims}: there is no such file.")
        return None if self.claims_file is None else load_claims(self.claims_file)

    @property
    def claims_file(self) -> Path | None:
        """The file with the questions."""
        beside = [self.experiments / CLAIMS.name] if self.claims == CLAIMS else []
        return next((path for path in (*beside, self.claims) if path.is_file()), None)

    def named(self, name: str) -> Experiment:
        """NAME.toml in the folder, or a path. Raises `ConfigError` if there is none; the message lists the names."""
        path = Path(name) if name.endswith(".toml") else self.experiments / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(names_in(self.experiments)) or "none"
            raise ConfigError(f"there is no experiment {path}; in {self.experiments} there are: {known}.")
        return load_experiment(path)

    def planned(self, experiment: Experiment, profile: str) -> Experiment:
        """The experiment with the seeds of this profile's stored plan, if there is one."""
        plan = plan_there(self.results, experiment.name)
        return experiment if plan is None or plan.profile != profile else experiment.with_seeds(profile, plan.seeds)

    def known(self, experiment: Experiment) -> dict[str, Experiment]:
        """Name -> experiment: this one, from any folder, and all of the folder, because a gate may name them."""
        return {**{one.name: one for one in self.all}, experiment.name: experiment}

    def tell_left_out(self, asked: Iterable[tuple[Experiment, str]]) -> None:
        """Print which finished runs of these experiments and profiles are not shown, and why."""
        places = self.places
        if unclean := read_results(places.unclean):
            for experiment, profile in asked:
                notes.warn(*left_out(places.grid(experiment, profile), unclean, places.unclean))
