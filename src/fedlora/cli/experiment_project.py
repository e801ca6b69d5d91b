"""What every command of `fedlora experiment` is given: folders and files, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedlora.cli.experiment import CLAIMS
from fedlora.cli.screen import notes
from fedlora.errors import ConfigError
from fedlora.experiments.claims import Claims, load_claims
from fedlora.experiments.grid import Grid
from fedlora.experiments.places import Places
from fedlora.experiments.runnable import left_out
from fedlora.experiments.seed_plan import plan_there
from fedlora.experiments.spec import Experiment, load_all, load_experiment, names_in
from fedlora.experiments.store import read_results


@dataclass(frozen=True)
class Project:
    """experiments: the folder of their files. results, work, data_root: as `Places`. claims: the file of what is
    asked. Unless another is named, claims.toml beside the experiments goes before it, and both may be missing: a
    project of one's own need not ask anything."""

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
        """None where there is none. Raises `ConfigError` for a named file that is not there."""
        if self.claims != CLAIMS and not self.claims.is_file():
            raise ConfigError(f"--claims {self.claims}: there is no such file.")
        return None if self.claims_file is None else load_claims(self.claims_file)

    @property
    def claims_file(self) -> Path | None:
        """Where the questions are."""
        beside = [self.experiments / CLAIMS.name] if self.claims == CLAIMS else []
        return next((path for path in (*beside, self.claims) if path.is_file()), None)

    def grid(self, experiment: Experiment, profile: str, *, unclean: bool = False) -> Grid:
        """With what has come of it. unclean: also of code that no commit describes."""
        done = self.places.finished(unclean=unclean)
        return Grid(experiment, profile, done, self.places.given_up(), self.places.failed_by_machine())

    def named(self, name: str) -> Experiment:
        """NAME.toml of the folder, or a path. Raises `ConfigError` for none, with those that there are."""
        path = Path(name) if name.endswith(".toml") else self.experiments / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(names_in(self.experiments)) or "none"
            raise ConfigError(f"there is no experiment {path}; in {self.experiments} there are: {known}.")
        return load_experiment(path)

    def planned(self, experiment: Experiment, profile: str) -> Experiment:
        """With the seeds of a stored plan of this profile in place of the profile's: no others are planned."""
        plan = plan_there(self.results, experiment.name)
        return experiment if plan is None or plan.profile != profile else experiment.with_seeds(profile, plan.seeds)

    def known(self, experiment: Experiment) -> dict[str, Experiment]:
        """By name: the experiment, which may be of another place, and all of the folder, which a gate may name."""
        return {**{one.name: one for one in self.all}, experiment.name: experiment}

    def tell_left_out(self, asked: Iterable[tuple[Experiment, str]]) -> None:
        """Of which finished runs of these experiments and profiles nothing is shown, and why."""
        places = self.places
        if unclean := read_results(places.unclean):
            told = places.finished(), unclean, places.unclean, places.given_up()
            for experiment, profile in asked:
                notes.warn(*left_out(experiment, profile, *told))
