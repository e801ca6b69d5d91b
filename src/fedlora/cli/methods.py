"""`fedlora methods` and `methods check`: list methods, and check one."""

from __future__ import annotations

from typing import Annotated

import typer

from fedlora.cli.options import AsJson
from fedlora.cli.screen import Table, console, print_json, red

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
