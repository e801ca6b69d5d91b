"""`fedlora methods` and `fedlora ranks`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.table import Table

from fedlora.cli.screen import console, import_plots, plotted, print_json
from fedlora.errors import ConfigError
from fedlora.methods.registry import METHODS
from fedlora.runs.rank_profiles import FLEXLORA_TYPES, RankProfile, RankType, brings_types, rank_counts, total_rank

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def methods(json: AsJson = False) -> None:
    """List the methods with their papers, hyper-parameters and presets."""
    listed: dict[str, dict[str, Any]] = {}
    for name, cls in METHODS.items():
        defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
        presets: Mapping[str, Mapping[str, object]] = getattr(cls, "PRESETS", {})
        listed[name] = {
            "paper": cls.paper, "hyper-parameters": defaults, "presets": {k: dict(v) for k, v in presets.items()},
        }  # fmt: skip
    if json:
        print_json(listed)
        return
    table = Table("method", "paper", "hyper-parameters", "presets", title="Methods")
    for name, facts in listed.items():
        shown = ", ".join(f"{k}={v}" for k, v in facts["hyper-parameters"].items())
        table.add_row(name, facts["paper"], shown or "none", ", ".join(facts["presets"]))
    console.print(table)


def ranks(
    profile: Annotated[list[str] | None, typer.Argument(help="names of profiles (default: all)")] = None,
    ranks: Annotated[str, typer.Option(help="ranks to distribute, separated by commas")] = "4,8,16,32,64",
    clients: Annotated[int, typer.Option(min=1)] = 50,
    participation: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of clients a round")] = 0.5,
    plot: Annotated[Path | None, typer.Option(help="write a picture")] = None,
    json: AsJson = False,
) -> None:
    """Show how many clients of which rank a profile (clients.profile) makes."""
    chosen = {name: _counts(name, ranks, clients) for name in profile or get_args(RankProfile)}
    if json:
        print_json({name: {str(kind): n for kind, n in counts.items()} for name, counts in chosen.items()})
    else:
        table = Table(
            "profile", "clients by rank (attention/feed-forward)", "sum of r_i", "of it a round",
            title=f"Rank profiles over {clients} clients",
        )  # fmt: skip
        for name, counts in chosen.items():
            total = total_rank(counts)
            shown = ", ".join(f"{n} of {kind}" for kind, n in counts.items())
            table.add_row(name, shown, f"{total:g}", f"{total * participation:g}")
        console.print(table)
        console.print("sums are of attention modules, in the mean over rounds", style="dim")
    if plot is not None:
        plotted(lambda: [import_plots().plot_ranks(chosen, plot)])


def _counts(profile: str, ranks: str, clients: int) -> dict[RankType, int]:
    if profile not in get_args(RankProfile):
        raise ConfigError(f"unknown rank profile {profile!r}; known: {', '.join(get_args(RankProfile))}.")
    try:
        typed = sorted({int(part) for part in ranks.split(",")})
    except ValueError as error:
        raise ConfigError(f"--ranks takes whole numbers separated by commas; got {ranks!r}.") from error
    if typed[0] < 1:
        raise ConfigError(f"ranks are at least 1; got {typed[0]}.")
    types = FLEXLORA_TYPES if brings_types(profile) else tuple(RankType(r, r) for r in typed)  # type: ignore[arg-type]
    return dict(zip(types, rank_counts(profile, len(types), clients), strict=True))  # type: ignore[arg-type]
