"""`fedlora flower`: a federation on Flower. Each command has its own file, imported when the command is called."""

from __future__ import annotations

import typer

from fedlora.cli.lazy import lazy_group

COMMANDS = {
    "init": "init:init", "site": "site:site", "install": "install:install", "admit": "sites:admit",
    "remove": "sites:remove", "renew": "renew:renew", "serve": "serve:serve", "status": "serve:status",
    "node": "node:node", "up": "up:up",
}  # fmt: skip
app = typer.Typer(
    cls=lazy_group(__name__, COMMANDS), help="A federation on Flower: SuperLink, SuperNodes, TLS.", no_args_is_help=True
)


@app.callback()
def _group() -> None: ...
