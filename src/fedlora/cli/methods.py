"""`fedlora methods`, `methods check` and `ranks`: list methods, check one, and show rank profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedlora.cli.options import AsJson
from fedlora.cli.screen import Table, console, print_json, red
from fedlora.errors import ConfigError, counted
from fedlora.runs.rank_profiles import FLEXLORA_TYPES, RankProfile, RankType, brings_types, rank_counts, total_rank

if TYPE_CHECKING:
    from fedlora.methods.registry import Listed

app = typer.Typer(help="List the methods, built in and installed, or check one.", invoke_without_command=True)


@app.callback()
def methods(context: typer.Context, json: AsJson = False) -> None:
    """List the methods, built in and installed, with their papers and hyper-parameters."""
    context.obj = json
    if context.invoked_subcommand is not None:
        return
    from fedlora.methods.registry import listed

    rows = listed()
    if json:
        print_json({row.name: _facts(row) for row in rows})
        return
    table = Table("method", "paper", "hyper-parameters", title="Methods")
    for row in rows:
        name = row.name if row.package is None else f"{row.name} ({row.package})"
        if row.error is not None:
            table.add_row(name, "", red(row.error))
            continue
        shown = ", ".join(f"{k}={v}" for k, v in row.defaults.items())
        table.add_row(name, row.paper, shown or "none")
    console.print(table)


@app.command()
def check(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="from `fedlora methods`, or your own module:Class")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="hyper-parameters")] = None,
    json: AsJson = False,
) -> None:
    """Run every contract on a method: its claim and the measurement. Exit code 1 if something does not hold."""
    from fedlora.cli.typed import parse_method
    from fedlora.testing import check as checked
    from fedlora.testing import sound

    label = " ".join([name, *(settings or [])])
    method = parse_method(name, settings or []).build()
    findings = checked(method)
    good = sound(findings)
    if json or context.obj:
        contracts = [vars(finding) for finding in findings]
        print_json({"method": label, "claims": sorted(method.claims), "sound": good, "contracts": contracts})
        raise typer.Exit(0 if good else 1)
    table = Table("contract", "claimed", "measured", "holds", title=f"Contracts of {label}")
    for finding in findings:
        holds = red("no") if finding.holds is False else "yes" if finding.holds else "-"
        table.add_row(finding.contract, finding.claimed, finding.measured, holds)
    console.print(table)
    for finding in findings:
        if finding.why is not None:
            console.print(finding.why, style="red")
    raise typer.Exit(0 if good else 1)


def ranks(
    profile: Annotated[list[str] | None, typer.Argument(help="names of profiles (default: all)")] = None,
    ranks: Annotated[str, typer.Option(help="ranks to distribute, separated by commas")] = "4,8,16,32,64",
    clients: Annotated[int, typer.Option(min=1, help="number of clients")] = 50,
    participation: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of clients in a round")] = 0.5,
    json: AsJson = False,
) -> None:
    """Show how many clients of which rank a profile (clients.profile) makes."""
    chosen = {name: _counts(name, ranks, clients) for name in profile or get_args(RankProfile)}
    if json:
        print_json({name: {str(kind): n for kind, n in counts.items()} for name, counts in chosen.items()})
    else:
        table = Table(
            "profile", "clients by rank (attention/feed-forward)", "sum of r_i", "of it a round",
            title=f"Rank profiles over {counted(clients, 'client')}",
        )  # fmt: skip
        for name, counts in chosen.items():
            total = total_rank(counts)
            shown = ", ".join(f"{n} of {kind}" for kind, n in counts.items())
            table.add_row(name, shown, f"{total:g}", f"{total * participation:g}")
        console.print(table)
        console.print("sums over attention modules, mean over rounds", style="dim")


def _facts(row: Listed) -> dict[str, Any]:
    """A method's row for programs; with its package if it is not fedlora's, and the error if it cannot be used."""
    facts: dict[str, Any] = {"paper": row.paper, "hyper-parameters": row.defaults}
    if row.error is not None:
        facts = {"error": row.error}
    return facts if row.package is None else {**facts, "package": row.package}


def _counts(profile: str, ranks: str, clients: int) -> dict[RankType, int]:
    if profile not in get_args(RankProfile):
        raise ConfigError(f"unknown rank profile {profile!r}; known: {', '.join(get_args(RankProfile))}.")
    try:
        typed = sorted({int(part) for part in ranks.split(",")})
    except ValueError as error:
        raise ConfigError(f"--ranks takes whole numbers separated by commas; got {ranks!r}.") from error
    if typed[0] < 1:
        raise ConfigError(f"ranks must be at least 1; got {typed[0]}.")
    types = FLEXLORA_TYPES if brings_types(profile) else tuple(RankType(r, r) for r in typed)  # type: ignore[arg-type]
    return dict(zip(types, rank_counts(profile, len(types), clients), strict=True))  # type: ignore[arg-type]
