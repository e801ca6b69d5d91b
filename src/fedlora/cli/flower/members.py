"""`fedlora flower admit | remove | renew`: who may take part, and the server's certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower import Folder, needed
from fedlora.cli.screen import console


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
    done = admitted(folder, name, rank, key)
    changed = "" if done.before in (None, done.rank) else f" in place of {_rank(done.before)}"
    keys = {"new": "its key is admitted", "another": "another key is admitted, and the old one no longer",
            "the same": "its key is as before"}  # fmt: skip
    console.print(f"{name}: {keys[done.key]}, rank {_rank(done.rank)}{changed}.")


def remove(folder: Folder, name: Annotated[str, typer.Argument(help="the site", show_default=False)]) -> None:
    """At the server: remove a site and its key. A running server puts it out within seconds."""
    needed()
    from fedlora.flower.server.members import remove as removed

    removed(folder, name)
    console.print(f"{name}: removed.")


def renew(folder: Folder) -> None:
    """At the server: sign the next certificate, and write join.toml anew.

    For a certificate that expires soon, another name or port in federation.toml, an upgrade. It leaves keys, settings,
    policy and results alone. Then restart the proxy and the server.
    """
    needed()
    from fedlora.flower.server.members import renew as renewed

    changed = renewed(folder)
    console.print(f"{folder}: a new certificate. Restart the proxy and the server.")
    if changed:
        console.print(f"{folder}/join.toml is another one: hand it to every site, which puts it in place of its own.")


def _rank(rank: object) -> str:
    return str(rank) if isinstance(rank, int) else "by module"
