"""`fedlora flower init | admit | remove | renew`: a federation's folder at its server, who may take part, and its
certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower import Folder, needed, typed
from fedlora.cli.options import fetched
from fedlora.cli.screen import console, notes
from fedlora.core.folders import check_target
from fedlora.errors import counted


def init(
    folder: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
    config: Annotated[Path, typer.Option(help="a TOML file as for `fedlora run`, without any site's data")],
    server_name: Annotated[
        str, typer.Option(metavar="NAME", help="the name by which sites reach this server, such as fl.example.org")
    ],
    sites: Annotated[
        str, typer.Option(metavar="NAME=RANK,...", help="the sites and their ranks, such as acme=8,berlin=4")
    ],
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
    clients, name = policy.sites(sites), policy.server_name(server_name)
    from fedlora.flower.server.init import make_federation
    from fedlora.flower.terms.privacy import promise
    from fedlora.flower.terms.settings import NetworkSection
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    notes.print("checking the start ..." if start else "loading the model, for the common start ...")
    network = NetworkSection(name=name, port=port, superlink_port=superlink_port)
    settings = make_federation(folder, config, set or [], network, clients, start)
    fed = typed(folder)
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


def admit(
    folder: Folder,
    site: Annotated[str, typer.Argument(metavar="NAME[=RANK]", help="the site, and its rank if it is new or changes")],
    key: Annotated[Path | None, typer.Argument(help="the key.pub that the site sent", show_default=False)] = None,
) -> None:
    """At the server: admit a site with the public key that it sent, or give one another key or rank.

    Compare the key with the site's by telephone: `ssh-keygen -l -f key.pub` prints the same line on both sides. A
    running server takes the change within seconds, a rank in the next round.

    A site:         fedlora flower admit fed acme acme.pub
    A new site:     fedlora flower admit fed dublin=4 dublin.pub
    Another key:    fedlora flower admit fed acme new.pub
    Another rank:   fedlora flower admit fed acme=16
    """
    needed()
    from fedlora.flower.server.members import admit as admitted
    from fedlora.flower.terms.policy import named_rank

    name, rank = named_rank(site)
    rank = admitted(folder, name, rank, key)
    console.print(f"{name}: admitted{', by this key alone' if key is not None else ''}, at rank {rank}.")


def remove(folder: Folder, name: Annotated[str, typer.Argument(help="the site", show_default=False)]) -> None:
    """At the server: remove a site and its key. A running server puts it out within seconds."""
    needed()
    from fedlora.flower.server.members import remove as removed

    removed(folder, name)
    console.print(f"{name}: removed.")


def renew(folder: Folder) -> None:
    """At the server: sign the next certificate, and write join.toml anew.

    For a certificate that expires soon, a change in federation.toml, an upgrade. It leaves keys, settings, policy and
    results alone. Then restart the proxy and the server.
    """
    needed()
    from fedlora.flower.server.members import renew as renewed

    changed = renewed(folder)
    console.print(f"{folder}: a new certificate. Restart the proxy and the server.")
    if changed:
        console.print(f"{folder}/join.toml is another one: every site puts it in place of its own.")
