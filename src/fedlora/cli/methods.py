"""`fedlora methods`, `methods check` and `experiment ranks`: list methods, check one, and show rank profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, get_args

import typer

from fedlora.cli.options import AsJson, numbers
from fedlora.cli.screen import Table, console, print_json, red
from fedlora.errors import ConfigError, counted
from fedlora.runs.rank_profiles import RankProfile, RankType, assign_types

app = typer.Typer(help="List the methods, built in and installed, or check one.", invoke_without_command=True)


@app.callback()
def methods(context: typer.Context, json: AsJson = False) -> None:
    """List the methods, built in and installed, with their papers and hyper-parameters."""
    context.obj = json
    if context.invoked_subcommand is not None:
        return
    from fedlora.methods.registry import listed

    table, found = Table("method", "paper", "hyper-parameters", title="Methods"), {}
    for row in listed():
        known = ", ".join(f"{k}={v}" for k, v in row.defaults.items()) or "none"
        columns = ("", red(row.error)) if row.error is not None else (row.paper, known)
        table.add_row(row.name if row.package is None else f"{row.name} ({row.package})", *columns)
        facts = {"paper": row.paper, "hyper-parameters": row.defaults} if row.error is None else {"error": row.error}
        found[row.name] = facts if row.package is None else {**facts, "package": row.package}
    print_json(found) if json else console.print(table)


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
    else:
        table = Table("contract", "claimed", "measured", "holds", title=f"Contracts of {label}")
        for finding in findings:
            holds = red("no") if finding.holds is False else "yes" if finding.holds else "-"
            table.add_row(finding.contract, finding.claimed, finding.measured, holds)
        console.print(table)
        for finding in findings:
            if finding.why is not None:
                console.print(finding.why, style="red")
    raise typer.Exit(0 if good else 1)


def show_ranks(profile: Sequence[str], ranks: str, clients: int, participation: float, json: bool) -> None:
    """Show a row for each profile; all without a name."""
    chosen = {name: _counts(name, ranks, clients) for name in profile or get_args(RankProfile)}
    if json:
        print_json({name: {str(kind): n for kind, n in counts.items()} for name, counts in chosen.items()})
    else:
        table = Table(
            "profile", "clients by rank (attention/feed-forward)", "sum of r_i", "of it a round",
            title=f"Rank profiles over {counted(clients, 'client')}",
        )  # fmt: skip
        for name, counts in chosen.items():
            total = sum(kind.attention * n for kind, n in counts.items())
            shown = ", ".join(f"{n} of {kind}" for kind, n in counts.items())
            table.add_row(name, shown, f"{total:g}", f"{total * participation:g}")
        console.print(table)
        console.print("sums over attention modules, mean over rounds", style="dim")


def _counts(profile: str, ranks: str, clients: int) -> dict[RankType, int]:
    known: dict[str, RankProfile] = {name: name for name in get_args(RankProfile)}
    if profile not in known:
        raise ConfigError(f"unknown rank profile {profile!r}; known: {', '.join(known)}.")
    found = numbers(ranks, "--ranks", least=1)
    if odd := [rank for rank in found if rank % 1]:
        raise ConfigError(f"--ranks takes whole numbers; got {odd[0]:g}.")
    types = [RankType(int(rank), int(rank)) for rank in {*found}]
    assigned = assign_types([str(k) for k in range(clients)], types, known[profile], seed=0)
    return dict(sorted(Counter(assigned.values()).items()))
