"""What the commands of `fedlora experiment` share: their options, and an experiment by its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.screen import notes
from fedlora.errors import ConfigError
from fedlora.experiments.plan import left_out
from fedlora.experiments.runner import Places
from fedlora.experiments.spec import Experiment, load_all, load_experiment
from fedlora.experiments.store import read_results

Names = Annotated[list[str], typer.Argument(help="names of experiments/NAME.toml, or paths", show_default=False)]
ProfileName = Annotated[str, typer.Option("--profile", help="of the experiment's file: mini, paper, or another it has")]
Directory = Annotated[Path, typer.Option("--experiments", help="where the experiments' files are")]
Results = Annotated[Path, typer.Option("--results", help="where results are kept")]
Work = Annotated[Path, typer.Option("--work", help="where run folders, failures and unclean results go")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
Claimed = Annotated[Path, typer.Option("--claims", help="the file of questions and claims")]
EXPERIMENTS, RESULTS, WORK = Path("experiments"), Path("results"), Path("runs/experiments")
CLAIMS = Path("docs/claims.toml")


def load_named(name: str, folder: Path) -> Experiment:
    """`folder`/NAME.toml, or a path. Raises `ConfigError` for none, with those that there are."""
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.toml") if p.stem != "paper_numbers")) or "none"
        raise ConfigError(f"there is no experiment {path}; in {folder} there are: {known}.")
    return load_experiment(path)


def beside(experiment: Experiment, folder: Path) -> list[Experiment]:
    """The experiment, which may be of another place, and every other one of the folder."""
    return [*(each for each in load_all(folder) if each.name != experiment.name), experiment]


def there(claims: Path) -> bool:
    """Whether there are claims. The default file may be missing: a project of one's own need not ask anything. Raises
    `ConfigError` for a named file that is not there."""
    if claims.is_file():
        return True
    if claims != CLAIMS:
        raise ConfigError(f"--claims {claims}: there is no such file.")
    return False


def tell(lines: Sequence[str]) -> None:
    """In yellow, beside the result."""
    for line in lines:
        notes.print(line, style="yellow", markup=False, soft_wrap=True)


def tell_left_out(places: Places, asked: Iterable[tuple[Experiment, str]]) -> None:
    """Of which finished runs of these experiments and profiles nothing is shown, and why."""
    unclean = read_results(places.unclean)
    if unclean:
        results, failed = places.finished(), places.given_up()
        for experiment, profile in asked:
            tell(left_out(experiment, profile, results, unclean, places.unclean, failed))
