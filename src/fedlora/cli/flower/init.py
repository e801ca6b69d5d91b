"""`fedlora flower init`: make a federation's folder at its server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower import needed, typed
from fedlora.cli.options import fetched
from fedlora.cli.screen import console, notes
from fedlora.core.folders import check_target
from fedlora.errors import ConfigError, counted


def init(
    folder: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
    config: Annotated[Path, typer.Option(help="a TOML file as for `fedlora run`, without any site's data")],
    server_name: Annotated[
        str, typer.Option(metavar="NAME", help="the name by which sites reach this server, such as fl.example.org")
    ],
    sites: Annotated[
        str, typer.Option(metavar="NAME=RANK,...", help="the sites and their ranks, such as acme=8,berlin=4")
    ],
    labels: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="the classes, in the order of their numbers, such as no,yes")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="a PEFT directory, or owner/name@revision, to start from, such as FED/server/adapter",
            callback=fetched,
        ),
    ] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the proxy, where sites connect")] = 443,
    superlink_port: Annotated[int, typer.Option(min=1, max=65535, help="the SuperLink's port, on loopback")] = 18080,
) -> None:  # fmt: skip
    """At the server: make FOLDER with settings, certificates and join.toml, which goes to every site.

    FOLDER/federation.toml is the config with an id and [network]. model.name is the server's copy of the base model;
    the sites' copies must be the same. To begin with another federation's adapter: --start FED/server/adapter.
    """
    needed()
    from fedlora.flower.terms import policy

    check_target(folder)  # before a model is loaded
    clients, name, classes = policy.sites(sites), policy.server_name(server_name), _classes(labels)
    from fedlora.flower.server.init import federation, make_federation
    from fedlora.flower.terms.privacy import promise
    from fedlora.flower.terms.settings import NetworkSection
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    notes.print("checking the start ..." if start else "loading the model, for the common start ...")
    network = NetworkSection(name=name, port=port, superlink_port=superlink_port)
    made = federation(config, set or [], network, clients, classes, start)
    make_federation(folder, made)
    fed, settings = typed(folder), made.settings
    console.print(
        f"{folder}: ready, for {counted(len(clients), 'site')} ({', '.join(clients)}). Next:\n"
        f"  1. the proxy and the units: docs/how-to/federation.md\n  2. fedlora doctor {fed}\n"
        f"  3. hand every site {folder}/join.toml; it holds no secret\n"
        f"  4. admit each with the key that it sends back: fedlora flower admit {fed} NAME key.pub"
    )
    if settings.privacy is not None:
        console.print(
            f"Private: {promise(settings.privacy, settings.run.rounds)}. The server asks all sites in every round, and "
            f"a missing site counts as zero. Members, rounds and [privacy] cannot change later."
        )


def _classes(labels: str | None) -> list[str] | None:
    if labels is None:
        return None
    found = [name.strip() for name in labels.split(",")]
    if not all(found) or len(set(found)) < max(2, len(found)):
        raise ConfigError(f"--labels must name at least two classes, each once, such as no,yes; got {labels!r}.")
    return found
