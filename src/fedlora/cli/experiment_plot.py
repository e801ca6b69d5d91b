"""`fedlora experiment plot`: an experiment's pictures as files, of what is decided or of what has been run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.experiment_decide import answers_of
from fedlora.cli.experiment_files import (
    CLAIMS,
    EXPERIMENTS,
    RESULTS,
    WORK,
    Claimed,
    Directory,
    ProfileName,
    Results,
    Work,
    beside,
    load_named,
    tell_left_out,
    there,
)  # fmt: skip
from fedlora.cli.screen import plotted
from fedlora.errors import ConfigError
from fedlora.experiments.claims import load_claims
from fedlora.experiments.decision_words import by_score, margins
from fedlora.experiments.decisions import Answers
from fedlora.experiments.plan import mains
from fedlora.experiments.runner import Places
from fedlora.experiments.seed_plan import awaited, open_plans
from fedlora.experiments.spec import load_all
from fedlora.experiments.tables import spendings


def draw(
    name: Annotated[str, typer.Argument(help="an experiment")],
    out: Annotated[Path | None, typer.Option(help="picture to write (default: results/plots/NAME-PROFILE.png)")] = None,
    profile: ProfileName = "mini",
    experiments: Directory = EXPERIMENTS,
    results: Results = RESULTS,
    work: Work = WORK,
    claims: Claimed = CLAIMS,
) -> None:
    """Curves over rounds, dots of merged runs, or a map.

    With `budgets` scores by epsilon; of what docs/claims.toml asks the heat map, and the panels in NAME-setups.png."""
    experiment = loaded = load_named(name, experiments)
    target = out or results / "plots" / f"{experiment.name}-{profile}.png"
    places = Places(results, work, None)
    tell_left_out(places, [(experiment, profile)])
    done, given_up = places.finished(), places.given_up()
    asked = load_claims(claims) if there(claims) else None
    families = {} if asked is None else asked.of(experiment.name)
    decided: list[Answers] = []
    if asked is not None and profile in {family.profile for family in families.values()}:
        decided = answers_of(asked, experiment, load_all(experiments), places)
        if waiting := [one for one in decided if not one.complete]:
            raise ConfigError(
                f"{waiting[0].there} of {waiting[0].wanted} planned seeds of {experiment.name} are there, and nothing "
                f"of it is drawn before all of them are. Go on with: fedlora experiment run {experiment.name} "
                f"--profile {profile}"
            )
        experiment = experiment.of_first_seeds(profile, decided[0].wanted)
    shown = {run.digest for run in mains(experiment, profile, done, given_up) if run.digest in done}
    for one in awaited(open_plans(results, beside(loaded, experiments), done, given_up), shown):
        raise ConfigError(f"{one.words}, and nothing of these runs is drawn before all of them are.")

    def pictures() -> list[Path]:
        from fedlora.experiments.pictures import curve_panels, plot_budgets, plot_curves, plot_dots, plot_map

        if experiment.budgets is not None:
            found = spendings(experiment, profile, done, given_up)
            if not found:
                raise ConfigError(f"experiment {name} has no result of profile {profile}; run some first.")
            return [plot_budgets(found, experiment.title, experiment.budgets.lines, target)]
        made = []
        for k, (score, of) in enumerate(by_score(decided).items()):
            made.append(plot_map(of, target if k == 0 else target.with_stem(f"{target.stem}-{score}")))
        panels = target.with_stem(f"{target.stem}-setups") if decided else target
        if experiment.merged or not curve_panels(experiment, profile, done, given_up):
            return [*made, plot_dots(experiment, profile, done, panels, given_up, margins(decided))]
        against = experiment.reference if decided else None
        return [*made, plot_curves(experiment, profile, done, panels, given_up, against)]

    plotted(pictures)
