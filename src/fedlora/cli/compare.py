"""`fedlora compare`: several methods on one config, as an experiment of one axis. Its work is in compare_runs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.formats import Format, FormatOption, JsonAlias, chosen
from fedlora.cli.options import Config, DataRoot, Sets
from fedlora.cli.runs import WorkersHelp


def compare(
    config: Config,
    methods: Annotated[
        str, typer.Option(help="names or 'all', separated by commas, such as 'glora, glora gamma=1'")
    ] = "glora,flexlora,padded-average",
    seeds: Annotated[
        str | None, typer.Option(help="such as 0:8 (eight seeds), 0,3,5 or 7 (default: the config's)")
    ] = None,
    workers: Annotated[str, WorkersHelp] = "1",
    tune: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUES", help="search for each method first: train.learning_rate=1e-3,3e-3,1e-2"),
    ] = None,
    tune_seeds: Annotated[
        str | None, typer.Option(help="seeds of the search; none may be a compared seed (default: 1000)")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="the method to compare the others with (default: the first)")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="the score to compare (default: 'test, best', at the best validation round)")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="a difference that does not matter: then each difference gets a verdict")
    ] = None,
    set: Sets = None,
    out: Annotated[Path | None, typer.Option(help="folder of the runs (default: runs/<config name>-compare)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the comparison in the folder")] = False,
    data_root: DataRoot = None,
    format: FormatOption = Format.table,
    json: JsonAlias = False,
) -> None:
    """Run several methods on the same clients, data and seeds: means and paired intervals."""
    from fedlora.cli.compare_runs import Asked, compare_all  # imports torch, which `--help` does not need

    asked = Asked(methods, seeds, tune, tune_seeds, reference, metric, margin)
    compare_all(config, set or [], asked, workers, out, resume, data_root, chosen(format, json))
