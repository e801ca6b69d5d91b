"""`fedlora compare`: several methods on one config, as an experiment of one axis (`experiment_runs.run_comparison`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.formats import Format, FormatOption
from fedlora.cli.options import Config, DataRoot, Margin, Resume, Sets, Workers, numbers
from fedlora.errors import ConfigError


def compare(
    config: Config,
    methods: Annotated[
        str, typer.Option(help="names or 'all', separated by commas, such as 'glora, glora gamma=1'")
    ] = "glora,flexlora,padded-average",
    seeds: Annotated[str | None, typer.Option(help="0:8 (eight of them), 0,3,5 or 7 (default: the config's)")] = None,
    workers: Workers = "1",
    tune: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUES", help="search for each method first: train.learning_rate=1e-3,3e-3,1e-2"),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="the score to compare (default: 'test, best')")] = None,
    margin: Margin = None,
    set: Sets = None,
    out: Annotated[Path | None, typer.Option(help="folder of the runs (default: runs/<config name>-compare)")] = None,
    resume: Resume = False,
    data_root: DataRoot = None,
    format: FormatOption = Format.table,
) -> None:
    """Run several methods on the same clients, data and seeds: means, and paired intervals against the first one."""
    from fedlora.cli.experiment_runs import run_comparison
    from fedlora.cli.typed import parse_methods, parse_seeds
    from fedlora.experiments.here import worker_count
    from fedlora.experiments.spec import Tune, comparison
    from fedlora.runs.config import load_config, overridden
    from fedlora.runs.reading import flat

    sets, name = set or [], f"{config.stem}-compare"
    worker_count(workers, [])  # first of all, reject what is not a number
    base, labels, overrides = load_config(config, sets), parse_methods(methods), flat(overridden(sets))
    search = None
    if tune is not None:
        key, _, values = tune.partition("=")
        tried = numbers(values, f"--tune {key.strip() or 'KEY'}=NUMBERS (as train.learning_rate=1e-3,3e-3,1e-2)")
        search = Tune.read({"key": key.strip(), "values": tried}, "--tune")
    both = [] if seeds is None else ["run.seed"]
    for key in [*both, *([search.key] if search is not None else [])]:
        if key in overrides:
            raise ConfigError(f"{key} is set twice: by --set, and by --seeds or --tune; give one.")
    if any(key.startswith("method.") for key in overrides) and base.method.name not in labels:
        raise ConfigError(
            f"--set method.... changes the config's method, {base.method.name}, which is not among --methods "
            f"{', '.join(labels)}; write settings after a name, such as 'svd energy=0.9'."
        )
    experiment = comparison(
        base, labels, [base.run.seed] if seeds is None else parse_seeds(seeds, "--seeds"), name=name, metric=metric,
        margin=margin, tune=search,
    )  # fmt: skip
    run_comparison(experiment, out or Path("runs") / name, data_root, workers, resume, format)
