"""`fedlora flower node`: take part as a site."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.flower.common import ending_for_systemd, needed, typed
from fedlora.cli.screen import say
from fedlora.core.text import shown
from fedlora.doing import doing
from fedlora.errors import ConfigError


def node(
    folder: Annotated[Path, typer.Argument(help="a site's folder, of `fedlora flower site`", show_default=False)],
) -> None:
    """At a site: take part.

    It checks this site, waits until the server lets it in, and then runs as its SuperNode until SIGTERM or Ctrl-C.

    If the server cannot be reached, does not know this key yet, or has a certificate that fails the check, the node
    says so and waits. If the SuperNode ends, systemd or compose restarts it. Exit codes: 0 after SIGTERM or SIGINT; 1,
    70: the server is gone, or memory or disk is full (a restart may help); 2: this site's own files are wrong, and
    nothing was sent.
    """
    needed()
    from fedlora.flower.places import SiteFolder
    from fedlora.flower.site import node_process, site_checks
    from fedlora.flower.site.reach import look
    from fedlora.flower.terms.joining import JoinFile
    from fedlora.runs.quiet import quiet_libraries

    here = SiteFolder(folder.resolve())
    if not here.join.is_file():
        raise ConfigError(f"{folder} was not made by `fedlora flower site`: it has no join.toml.")
    join = JoinFile.read(here.join)
    say("reading data and base model ...")
    with ending_for_systemd():
        quiet_libraries()
        rows = site_checks.checked_site(folder, server=False)
    wrong = [f"{what}: {found}" for what, found, sound in rows if sound is False]
    if wrong:
        found = "; ".join(wrong).removesuffix(".")
        raise ConfigError(f"{found}. Nothing was sent. Repair it, and check with: fedlora doctor {typed(folder)}")
    for what, found, _ in rows:
        say(f"{what}: {shown(found, 2000)}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    waiting = doing("waiting until the server lets this site in")
    with ending_for_systemd(), node_process.held(here) as lock, waiting:
        node_process.wait_until_admitted(lambda: look(join, here), say)
        node_process.become_supernode(node_process.supernode_command(here, join.address), here, lock)
