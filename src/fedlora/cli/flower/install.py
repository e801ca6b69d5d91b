"""`fedlora flower install`: the systemd units of a federation's server or of a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower.common import needed


def install(
    folder: Annotated[Path, typer.Argument(help="the folder that `flower init` or `site` made", show_default=False)],
    name: Annotated[str, typer.Option(help="name of the units, if this machine has several: fedlora-site-NAME")] = "",
    user: Annotated[str | None, typer.Option(help="the user that runs them (default: the folder's owner)")] = None,
    memory: Annotated[
        str | None, typer.Option(help="the memory limit (default: 8G at the server, 16G at a site)")
    ] = None,
) -> None:
    """At the server, and at a site: print the script that installs and starts the systemd units of FOLDER.

    Call it as the user who owns FOLDER, and save the script where only you can write it (`> units.sh`). Read it, and
    run it as root (`sudo sh units.sh`): the units are root's own files in /etc/systemd/system. Call it again after an
    upgrade, after fedlora moved, or for other options: the script replaces the old units.
    """
    needed()
    from fedlora.cli.screen import notes
    from fedlora.flower.setup.installing import steps

    todo = steps(folder, user=user, memory=memory, label=name)
    typer.echo("\n".join(["set -e", *(step.shown() for step in todo)]))
    units = [Path(step.words[-1]) for step in todo if step.said]
    again = f", and then systemctl restart {' '.join(unit.name for unit in units)}" if units[0].exists() else ""
    notes.print(f"This is a script. Read it, and run it as root{again}.")
