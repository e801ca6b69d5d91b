"""`fedlora flower site | node`: make a site's folder, and take part."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fedlora.cli.flower import ending_for_systemd, needed, typed
from fedlora.cli.screen import Table, console, notes, say
from fedlora.core.folders import replacing_folder
from fedlora.core.text import shown
from fedlora.doing import doing
from fedlora.errors import ConfigError


def site(
    folder: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
    name: Annotated[str, typer.Option(help="this site's name, as the server has it")],
    join: Annotated[Path, typer.Option(help="the server's join.toml")],
    data: Annotated[str, typer.Option(help="this site's examples: .jsonl, .csv, .tsv or .parquet")],
    model: Annotated[
        str, typer.Option(help="the base model: a directory, a .gguf file or a hub id, also owner/name@revision")
    ],
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="another key of site.toml, such as data.text=note"),
    ] = None,
) -> None:
    """At a site: make its folder from the server's join.toml, and check data and base model.

    Data and base model are read, and nothing is sent. Then send FOLDER/key.pub to the server, and start
    `fedlora flower node FOLDER`. FOLDER/site.toml may say more: columns with other names (data.text, ...),
    model.device, run.threads, a program that trains (train.command).

    Another key: ssh-keygen -t ecdsa -b 384 -N "" -f FOLDER/key, send key.pub, and restart the node.
    """
    needed()
    from fedlora.data.hub import repository_and_revision
    from fedlora.flower.site.checks import checked_work
    from fedlora.flower.site.run import fill_site
    from fedlora.flower.terms.joining import JoinFile
    from fedlora.flower.terms.site_file import Site
    from fedlora.runs.config import overridden
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    raw: dict[str, Any] = {"name": name, **overridden(set or [])}
    hub = None if Path(model).exists() else repository_and_revision(model)
    own = {"name": model} if hub is None or hub[1] is None else {"name": hub[0], "revision": hub[1]}
    raw["model"] = {**raw.get("model", {}), **own}
    raw["data"] = {**raw.get("data", {}), "train": data}
    joined, found = JoinFile.read(join), Site.of(raw, Path.cwd())
    notes.print("reading the data and the base model ...")
    with replacing_folder(folder) as building:
        rows = checked_work(joined, found)
        if wrong := [text for _, text, sound in rows if sound is False]:
            raise ConfigError(f"{' '.join(wrong)} {folder} was not made, and nothing was sent.")
        fill_site(building, joined, found)
    table = Table("", "found", "")
    for what, text, _ in rows:
        table.add_row(what, Text(shown(text, 2000)), "ok")
    console.print(table)
    console.print(
        f"{folder}: ready, to take part in {joined.federation} at {joined.address}.\n1. send {folder}/key.pub to the "
        f"server, where it is admitted with: fedlora flower admit FED {name} key.pub\n2. take part: fedlora flower "
        f"node {typed(folder)}, or its unit (docs/how-to/federation.md). It waits until the site is admitted."
    )


def node(
    folder: Annotated[Path, typer.Argument(help="a site's folder, of `fedlora flower site`", show_default=False)],
) -> None:
    """At a site: take part.

    It checks this site, waits until the server lets it in, and then trains what it is asked, until SIGTERM or Ctrl-C.

    If the server cannot be reached, does not know this key yet, or has a certificate that fails the check, the node
    says so and waits. If its SuperNode ends, it ends, and systemd or compose restarts it. Exit codes: 0 after SIGTERM
    or SIGINT; 1, 70: the server is gone, or memory or disk is full (a restart may help); 2: this site's own files are
    wrong, and nothing was sent.
    """
    needed()
    from fedlora.flower.places import SiteFolder
    from fedlora.flower.processes import locked
    from fedlora.flower.site import checks, run
    from fedlora.flower.terms.joining import JoinFile
    from fedlora.runs.quiet import quiet_libraries

    here = SiteFolder(folder.resolve())
    if not here.join.is_file():
        raise ConfigError(f"{folder} was not made by `fedlora flower site`: it has no join.toml.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    say("reading data and base model ...")
    with ending_for_systemd():
        quiet_libraries()
        rows = checks.checked_site(folder, server=False)
        if wrong := [f"{what}: {found}" for what, found, sound in rows if sound is False]:
            found = "; ".join(wrong).removesuffix(".")
            raise ConfigError(f"{found}. Nothing was sent. Repair it, and check with: fedlora doctor {typed(folder)}")
        for what, text, _ in rows:
            say(f"{what}: {shown(text, 2000)}")
        join = JoinFile.read(here.join)
        with locked(here.state / "node.lock", f"runs `fedlora flower node` for {folder}"):
            with doing("waiting until the server lets this site in"):
                run.wait_until_admitted(lambda: checks.look(join, here))
            run.take_part(here, join)
