"""`fedlora flower install`: the systemd units of a federation's server or of a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower.common import needed


def install(
    folder: Annotated[Path, typer.Argument(help="the folder that `flower init` or `site` made", show_default=False)],
    print_: Annotated[
        bool, typer.Option("--print", help="print the script that root should run, and do nothing")
    ] = False,
    name: Annotated[str, typer.Option(help="name of the units, if this machine has several: fedlora-site-NAME")] = "",
    user: Annotated[str | None, typer.Option(help="the user that runs them (default: the folder's owner)")] = None,
    memory: Annotated[
        str | None, typer.Option(help="the memory limit (default: 8G at the server, 16G at a site)")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="address where the server answers Prometheus, such as 127.0.0.1:9464"),
    ] = None,
) -> None:
    """At the server, and at a site: install and start the systemd units of FOLDER.

    They are root's own files in /etc/systemd/system. Call it as the user who owns FOLDER. It shows the units and the
    commands, and then runs them with sudo, which asks for the password. Call it again after
    an upgrade, after fedlora moved, or for other options: it replaces the old units, and names those to restart.
    """
    needed()
    from fedlora.flower.setup.installing import carry_out, steps

    todo = steps(folder, user=user, memory=memory, metrics=metrics, label=name)
    typer.echo("\n".join(step.shown() for step in todo))
    if not print_:
        ran = [Path(step.words[-1]).name for step in todo if step.said and Path(step.words[-1]).exists()]
        carry_out(todo)
        if ran:
            typer.echo(f"A unit that was running still runs as before: sudo systemctl restart {' '.join(ran)}")
