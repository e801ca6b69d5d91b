"""`fedlora flower site`: make a site's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fedlora.cli.flower.common import needed, typed
from fedlora.cli.screen import Table, console, notes
from fedlora.core.folders import replacing_folder
from fedlora.core.text import shown
from fedlora.errors import ConfigError


def site(
    folder: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
    join: Annotated[Path | None, typer.Option(help="the server's join.toml for this site")] = None,
    data: Annotated[str | None, typer.Option(help="this site's examples: .jsonl, .csv, .tsv or .parquet")] = None,
    model: Annotated[
        str | None, typer.Option(help="the base model: a directory, a .gguf file or a hub id, also owner/name@revision")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="column of the sentence, if its name differs from the server's")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="column of a second sentence")] = None,
    label: Annotated[str | None, typer.Option(help="column of the class")] = None,
    prompt: Annotated[str | None, typer.Option(help="column of an instruction")] = None,
    response: Annotated[str | None, typer.Option(help="column of its answer")] = None,
    messages: Annotated[str | None, typer.Option(help="column of conversations")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: the best there is)")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="threads of the processor")] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="make another key for an existing folder")] = False,
) -> None:
    """At a site: make its folder from the server's join file, and check data, base model and connection.

    Data and base model are read, and nothing is sent. Then send FOLDER/request.toml to the server, and start
    `fedlora flower node FOLDER`.

    If the folder exists: --rotate makes a new key and request, in place of the old ones. A running node keeps the old
    key until the server admits the new one. --join alone takes the server's new join file.
    """
    needed()
    from fedlora.flower.site.site_checks import is_site
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    columns = {"text": text, "pair": pair, "label": label, "prompt": prompt, "response": response, "messages": messages}
    asked = {**columns, "data": data, "model": model, "device": device, "threads": threads}
    given = {name: value for name, value in asked.items() if value is not None}
    if rotate:
        others = [f"--{name}" for name in ("join" if join else "", *given) if name]
        if others:
            raise ConfigError(
                f"--rotate makes a new key and nothing else; leave out {', '.join(others)}, or edit site.toml."
            )
        if not is_site(folder):
            raise ConfigError(f"{folder} was not made by `fedlora flower site`, and --rotate needs such a folder.")
        _rotate(folder)
    elif join is not None and is_site(folder) and not given:
        _take(folder, join)
    else:
        for name, there in (("join", join), ("data", data), ("model", model)):
            if there is None:
                raise ConfigError(
                    f"--{name} is missing: a site's folder needs the server's join file (--join), the site's "
                    f"examples (--data) and its copy of the base model (--model)."
                )
        assert join is not None
        _make(folder, join, given)


def _rotate(folder: Path) -> None:
    from fedlora.flower.places import SiteFolder
    from fedlora.flower.site.site_folder import rotate_key

    request, here = rotate_key(folder), SiteFolder(folder.resolve())
    console.print(
        f"{folder}: a new key, {request.fingerprint}, in place of the old one. Send {here.request} to the server, "
        f"where it is admitted with: fedlora flower admit FED request.toml --rotate. A running node keeps the old key "
        f"until then, and takes the new one by itself; one that starts before waits for it."
    )


def _take(folder: Path, join: Path) -> None:
    """Take the server's new join file into an existing folder."""
    from fedlora.flower.places import SiteFolder
    from fedlora.flower.site.site_folder import take_join
    from fedlora.flower.terms.joining import JoinFile

    before, said = JoinFile.read(SiteFolder(folder).join), take_join(folder, join)
    if said == before:
        console.print(f"{join} is the file that {folder} already has: nothing was changed.")
        return
    console.print(
        f"{folder}: now has the server's new file ({said.address}). Restart its unit (systemctl restart "
        f"fedlora-site), and see with: fedlora doctor {typed(folder)}"
    )


def _make(folder: Path, join: Path, settings: Mapping[str, Any]) -> None:
    """settings: the options typed for site.toml."""
    from fedlora.flower.places import SiteFolder
    from fedlora.flower.site.site_checks import checked_server, checked_work
    from fedlora.flower.site.site_folder import fill_site, refuse_existing
    from fedlora.flower.terms.joining import JoinFile
    from fedlora.flower.terms.site_file import Site
    from fedlora.runs.reading import checked

    refuse_existing(folder)
    here, said = SiteFolder(folder.resolve()), JoinFile.read(join)
    found = checked(Site, {"name": said.site, **settings}).located(Path.cwd())
    notes.print("reading the data and the base model ...")
    with replacing_folder(folder) as building:
        rows, facts = checked_work(said, found)
        if wrong := [text for _, text, sound in rows if sound is False]:
            raise ConfigError(f"{' '.join(wrong)} {folder} was not made, and nothing was sent.")
        request = fill_site(building, join.read_bytes(), found, facts.table())
    rows.insert(0, ("site", f"{said.site}, rank {said.rank}, of {said.federation} at {said.address}", True))
    server = [row for row in checked_server(said, here) if not row[2]]
    table = Table("", "found", "")
    for what, text, sound in [*rows, *server]:
        table.add_row(what, Text(shown(text, 2000)), "ok" if sound else "not yet")
    console.print(table)
    console.print(
        f"{folder}: ready, with the key {request.fingerprint}.\n1. send {here.request} to the server, where it is "
        f"admitted with: fedlora flower admit FED request.toml\n2. take part: fedlora flower install "
        f"{typed(folder)} > units.sh, a script for root: sudo sh units.sh\n"
        f"   or, in this shell: fedlora flower node {typed(folder)}\n   Either waits until the site is admitted."
    )
