"""`fedlora flower node`: a site takes part."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower.common import ending_for_systemd, needed, say, typed
from fedlora.errors import ConfigError


def node(
    folder: Annotated[Path, typer.Argument(help="a site's folder, of `fedlora flower site`", show_default=False)],
    check: Annotated[bool, typer.Option(help="read data and base model first; refuse what no round could use")] = True,
) -> None:
    """At a site: take part.

    Runs this site's SuperNode until SIGTERM or Ctrl-C, starts it again when it ends, and says what happens. Waits where
    the server is away, does not know the key yet, or cannot be believed, and says why. Exit codes: 0 after SIGTERM or
    SIGINT, and never otherwise; 1: no memory, no room, it may pass; 2: this site's own files are wrong, and nothing was
    sent.
    """
    needed()
    from fedlora.flower.places import SiteFolder
    from fedlora.flower.site.node_process import NodeProcess, files_checked, supernode_command
    from fedlora.flower.site.reach import Found, Server, look
    from fedlora.flower.site.rotation import asked
    from fedlora.flower.terms.joining import JoinFile

    here = SiteFolder(folder.resolve())
    if not here.join.is_file():
        raise ConfigError(f"{folder} is no folder of `fedlora flower site`: it has no join.toml.")
    join = JoinFile.read(here.join)
    if check:
        say("reading data and base model ...")
        with ending_for_systemd():
            wrong, told = files_checked(here.path)
        if wrong:
            found = "; ".join(wrong).removesuffix(".")
            raise ConfigError(f"{found}. Nothing was sent. Mend it, and see with: fedlora doctor {typed(folder)}")
        for line in told:
            say(line)
    server = Server(join.server, join.port, here.ca)

    key = here.key

    def ask() -> Found:
        nonlocal key
        found, now = asked(here, lambda with_: look(server, with_))
        if now != key and now == here.next_key:
            say("the server has this site's new key: it is in use (--rotate once more deletes the old).")
        key = now
        return found

    process = NodeProcess(here, look=ask, command=lambda: supernode_command(here, join.address, key), say=say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, process.stop)
    say(f"site {join.site} of {join.federation}, server {join.address}, log {here.logs / 'node.log'}")
    with ending_for_systemd():
        raise typer.Exit(process.run())
