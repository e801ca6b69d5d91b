"""`fedlora flower serve | status | up`: the server's side of the rounds, and all of it on one machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

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
    """At the server: which sites are online and when each was last heard; losses and sites of the last rounds.

    It shows the last outcome of each site, even while the server is not running."""
    needed()
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.server.status import status_of

    place = FederationFolder(folder.resolve())
    if json:
        print_json(status_of(place, rounds))
    else:
        _show(status_of(place), rounds)


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
    """Print the table of rounds and the next step. command: the call that continues.

    Raises `typer.Exit` with code 130 if Ctrl-C ended it before its last round.
    """
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.server.federation import ending
    from fedlora.flower.server.status import status_of
    from fedlora.given_files import RECORDS, parse_json, read_given

    place = FederationFolder(folder)
    if not now.why:
        say(f"{now.done} of {counted(now.rounds, 'round')} done; `fedlora flower {command}` continues")
        if stop.signalled == signal.SIGINT:
            raise typer.Exit(130)
        return
    found = status_of(place)
    console.print(_rounds_table(found["last_rounds"][-20:]))
    _tell_rule(found)
    summary = parse_json(read_given(place.summary, RECORDS), nan_as_none=True)
    console.print(f"{now.name}, {place.path}: {ending(summary)}")


def _tell_rule(found: Mapping[str, Any]) -> None:
    """Print what the robust rule did in the last round, if there is one."""
    from fedlora.server.judged import in_words

    if found["last_rounds"] and (last := found["last_rounds"][-1].get("robust")):
        console.print(f"robust rule, last round: {in_words(last) or 'all changes counted in full'}")


def _show(found: Mapping[str, Any], rounds: int) -> None:
    from fedlora.flower.server.status import headline, since

    console.print(headline(found))
    scored = any(site["score"] is not None for site in found["sites"].values())
    more = [f"its {found['metric']}"] if scored else []
    table = Table("site", "rank", "node", "last seen", "last round", "loss", *more, "rounds")
    for name, site in found["sites"].items():
        seen = f"{since(site['last_seen'])} ago" if site["last_seen"] else "never" if found["superlink"] else "unknown"
        mine = [*([_number(site["score"])] if scored else []), str(site["fates"].get("trained", 0))]
        table.add_row(
            cell(name), cell(site["rank"]), site["node"], seen, cell(site["fate"] or "-"), _number(site["loss"]),
            *mine,
        )  # fmt: skip
    console.print(table)
    for name, site in found["sites"].items():
        if site["why"]:
            console.print(f"{name}, last round: {site['fate']}: {site['why']}")
    _tell_rule(found)
    if rounds and found["last_rounds"]:
        console.print(_rounds_table(found["last_rounds"][-rounds:]))
    if "privacy" in found:
        console.print(f"private: {found['privacy']['promise']}.")
    console.print(f"{decimal(found['disk_free_bytes'])} of disk are free")


def _rounds_table(rounds: Sequence[Mapping[str, Any]]) -> Table:
    from fedlora.flower.server.journal import fates_of, spent_of
    from fedlora.privacy.accounting import epsilon_up

    names = sorted({str(name) for line in rounds for name in line.get("metrics") or {}})
    at_sites = sorted({str(name) for line in rounds for name in line.get("site_mean") or {}} - {"examples"})
    private = any(spent_of(line) is not None for line in rounds)
    spent = ("epsilon", "of planned") if private else ()
    measured = [*names, *(f"{name} at the sites" for name in at_sites)]
    table = Table("round", *spent, "train loss", "seconds", "trained", "not", *measured)
    for line in rounds:
        cells: list[Any] = [epsilon_up(x) for x in spent_of(line) or ()]
        fates = fates_of(line)
        others = ", ".join(f"{name} {fate}" for name, fate in fates.items() if fate != "trained")
        trained = sum(fate == "trained" for fate in fates.values())
        cells += [_number(line.get("loss")), _number(line.get("seconds"), 0), str(trained), cell(others or "-")]
        scores = [(line.get("metrics") or {}).get(name) for name in names]
        scores += [(line.get("site_mean") or {}).get(name) for name in at_sites]
        table.add_row(str(line["round"]), *cells, *map(_number, scores))
    return table


def _number(value: Any, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"
