"""`fedlora flower`: a federation on Flower. Each command is in a file of its own, and imported when it is called."""

from __future__ import annotations

import typer

from fedlora.cli.lazy import lazy_group

COMMANDS = {
    "init": ("fedlora.cli.flower.init:init", "At the server: write all that a federation needs."),
    "site": (
        "fedlora.cli.flower.site:site",
        "At a site: make its folder, key and checks from the server's file.",
    ),
    "install": ("fedlora.cli.flower.install:install", "At the server, and at a site: install the systemd units."),
    "admit": ("fedlora.cli.flower.sites:admit", "At the server: admit a site, or another key of it."),
    "remove": ("fedlora.cli.flower.sites:remove", "At the server: a site takes part no longer."),
    "renew": ("fedlora.cli.flower.renew:renew", "At the server: the next certificates, and derived files anew."),
    "serve": ("fedlora.cli.flower.serve:serve", "At the server: play the rounds."),
    "status": ("fedlora.cli.flower.serve:status", "At the server: who is online, the round, the losses."),
    "node": ("fedlora.cli.flower.node:node", "At a site: take part."),
    "up": ("fedlora.cli.flower.up:up", "A trial on this machine, start to end."),
}
app = typer.Typer(
    cls=lazy_group(COMMANDS), help="A federation on Flower: SuperLink, SuperNodes, TLS.", no_args_is_help=True
)


@app.callback()
def _group() -> None: ...


__all__ = ["app"]
