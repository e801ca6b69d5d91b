"""`fedlora flower serve | status | up`: the server's side of the rounds, and all of it on one machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.flower import Folder, ending_for_systemd, needed, typed
from fedlora.cli.options import AsJson
from fedlora.cli.screen import Table, cell, console, print_json, say
from fedlora.errors import ConfigError, counted


def serve(folder: Folder) -> None:
    """At the server: play the rounds to their end.

    It starts the SuperLink and the run, watches both, and stops both.

    It waits for sites as long as needed, and prints a line for each round, and one with the reason for each site that
    did not train. SIGTERM and Ctrl-C end it in order. If one of its processes dies, it stops the others. systemd or
    compose then restarts it, and it continues after the last finished round. Exit code 0: all rounds are done, or it
    was told to stop. 1: a process died or could not start; a restart may help. 2: an error in the folder; a restart
    will not help.
    """
    needed()
    from fedlora.flower.server.opening import opening
    from fedlora.flower.server.serve import Supervisor
    from fedlora.flower.server.superlink import SuperLink

    link = SuperLink(folder)
    with ending_for_systemd(), stopping() as stop:
        supervisor = Supervisor(link, say, stop=stop)
        opening(link.folder.path, say)  # what the rounds would refuse is said now, not when the sites are there
        now = supervisor.serve()
    tell_end(folder, now, stop, f"serve {typed(folder)}")


def up(
    config: Annotated[Path, typer.Argument(help="a TOML file as for `fedlora run`", show_default=False)],
    out: Annotated[Path, typer.Option(help="the federation's folder; if it is there, its rounds continue")],
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key")] = None,
    superlink_port: Annotated[int, typer.Option(min=1, max=65535, help="the SuperLink's port, on loopback")] = 18080,
) -> None:
    """On this machine alone: deal a run's data to sites, and play it as a server and its sites, on loopback.

    A node that ends is started again. If the server's processes die, it stops the others, with exit code 1. Call it
    again to continue after the last finished round. Ctrl-C ends it in order.
    """
    needed()
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.server.up import make, play
    from fedlora.runs.config import load_config
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    if not FederationFolder(out).settings.is_file():
        if idle := make(out, load_config(config, set or []), superlink_port):
            say(f"without effect in a federation: {', '.join(idle)}")
    elif set:
        raise ConfigError(
            f"{out} is there already: its settings are in {FederationFolder(out).settings}, not in --set."
        )
    with ending_for_systemd(), stopping() as stop:
        now = play(out, say, stop)
    tell_end(out, now, stop, f"up {typed(config)} --out {typed(out)}")
    if not now.why and not stop.signalled:
        raise typer.Exit(1)


def status(
    folder: Folder,
    json: AsJson = False,
    rounds: Annotated[int, typer.Option(min=0, help="how many of the last rounds to show")] = 5,
) -> None:
    """At the server: which sites are online, the last outcome of each, and the last rounds as the journal has them.

    Also while the server is not running."""
    needed()
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.server.status import status_of

    found = status_of(FederationFolder(folder.resolve()), rounds)
    if json:
        print_json(found)
    else:
        _show(found)


class Stop(threading.Event):
    """Set when the user requests the end. signalled: the signal's number; 0: something else set it."""

    signalled = 0

    def by_signal(self, number: int, frame: object) -> None:
        self.signalled = number
        self.set()


@contextmanager
def stopping() -> Iterator[Stop]:
    """An event that SIGTERM and SIGINT set, while the block runs."""
    stop = Stop()
    before = {number: signal.signal(number, stop.by_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_end(folder: Path, now: Any, stop: Stop, command: str) -> None:
    """Print how the rounds ended, and the next step. command: the call that continues.

    Raises `typer.Exit` with code 130 if Ctrl-C ended it before its last round.
    """
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.server.federation import ending
    from fedlora.given_files import RECORDS, parse_json, read_given

    place = FederationFolder(folder)
    if not now.why:
        say(f"{now.done} of {counted(now.rounds, 'round')} done; `fedlora flower {command}` continues")
        if stop.signalled == signal.SIGINT:
            raise typer.Exit(130)
        return
    summary = parse_json(read_given(place.summary, RECORDS), nan_as_none=True)
    console.print(f"{now.name}, {place.path}: {ending(summary)}")


def _show(found: Mapping[str, Any]) -> None:
    from fedlora.flower.server.journal import beside, round_line, scores_line
    from fedlora.flower.server.status import headline

    console.print(headline(found))
    table = Table("site", "rank", "node", "last round", "loss", f"its {found['metric']}", "rounds")
    for name, site in found["sites"].items():
        mine = _number(site["loss"]), _number(site["score"]), str(site["fates"].get("trained", 0))
        table.add_row(cell(name), cell(site["rank"]), site["node"], cell(site["fate"] or "-"), *mine)
    console.print(table)
    for line in found["last_rounds"]:
        for text in (round_line(line), *beside(line), scores_line(line["round"], line)):
            if text:
                console.print(text)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
