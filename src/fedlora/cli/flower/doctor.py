"""`fedlora doctor`: check whether this machine, and a federation's folder on it, can run Flower."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version
from rich.text import Text

from fedlora.cli.flower import needed
from fedlora.cli.options import AsJson
from fedlora.cli.screen import Table, cell, complain, console, print_json, red
from fedlora.core.text import shown
from fedlora.versions import installed, least

_LIBRARIES = ("torch", "transformers", "peft", "flwr", "cryptography")


def doctor(
    folder: Annotated[Path | None, typer.Argument(help="a folder of `fedlora flower init` or `site`")] = None,
    json: AsJson = False,
) -> None:
    """Check this machine for a federation: versions, ports, certificates, and what the folder's rounds would refuse."""
    rows: list[tuple[str, str, bool | None]] = [*_versions()]
    if folder is not None:
        needed()
        from fedlora.flower.site.checks import checked_site, is_site
        from fedlora.runs.quiet import quiet_libraries

        quiet_libraries()
        if is_site(folder):
            rows += checked_site(folder)
        else:
            from fedlora.flower.server.doctor import checked_folder

            rows += checked_folder(folder)
    if json:
        print_json([{"what": what, "found": found, "sound": sound} for what, found, sound in rows])
    else:
        table = Table("", "found", "")
        for what, found, sound in rows:
            sign = "ok" if sound else "not yet" if sound is None else red("no")
            table.add_row(cell(what), Text(shown(found, 2000)), sign)
        console.print(table)
    if any(sound is False for _, _, sound in rows):
        wrong = "; ".join(f"{what}: {found}" for what, found, sound in rows if sound is False)
        if any(what in _LIBRARIES for what, _, sound in rows if sound is False):
            wrong += ". What a federation needs: pip install 'fedlora[flower]'"
        raise typer.Exit(complain(wrong))


def _versions() -> list[tuple[str, str, bool]]:
    rows = [("Python", sys.version.split()[0], sys.version_info >= (3, 11))]
    for name in _LIBRARIES:
        found = installed(name)
        sound = found is not None and Version(found) >= Version(least(name))
        rows.append((name, found or "not installed", sound))
    return rows
