"""`fedlora flower init`: make a federation's folder, on its server or as a trial on one machine with its sites."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.cli.flower.common import needed, typed
from fedlora.cli.options import fetched, refuse_idle
from fedlora.cli.screen import console, notes
from fedlora.core.folders import check_target
from fedlora.errors import ConfigError, counted
from fedlora.given_files import read_toml

if TYPE_CHECKING:
    from fedlora.flower.setup.project import Federation


def init(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
    server_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="the name by which sites reach this server, such as fl.example.org"),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(metavar="NAME=RANK,...", help="the sites and their ranks, such as acme=8,berlin=4")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="a TOML file as for `fedlora run` (a trial's default: the demo, three sites)")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="the classes, in the order of their numbers, such as no,yes")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="a PEFT directory, or owner/name@revision, to start from; then no base model is loaded",
            callback=fetched,
        ),
    ] = None,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the proxy, where sites connect")] = 443,
    superlink_port: Annotated[int, typer.Option(min=1, max=65535, help="the SuperLink's port, on loopback")] = 18080,
) -> None:
    """At the server: make FOLDER with settings, certificates and a join file for each site.

    With --server-name and --sites: a real federation; send FOLDER/join/NAME.toml to each site. Without both: a trial on
    this machine, with its sites in FOLDER/sites."""
    needed()
    from fedlora.flower.terms import names

    check_target(folder)  # before a model is loaded
    if (server_name is None) != (sites is None):
        given, lacks = ("--server-name", "--sites") if sites is None else ("--sites", "--server-name")
        raise ConfigError(
            f"{given} is given and {lacks} is missing. A federation needs both: --server-name fl.example.org --sites "
            f"acme=8,berlin=4. Leave out both for a trial on this machine."
        )
    if server_name is None or sites is None:
        alone = (
            "is for a federation of several machines (--server-name and --sites), and this is a trial: it takes "
            "classes and start from the run's file, and has no proxy (--superlink-port sets the SuperLink's port)"
        )
        refuse_idle(context, dict.fromkeys(("labels", "start", "port"), alone))
        _trial(folder, config, set or [], superlink_port)
        return
    if config is None:
        raise ConfigError(
            "--config is missing: a TOML file as for `fedlora run` that says what to train ([model] path and task, "
            "[lora], [train], [run] rounds), without [data] train or clients, because each site has its own."
        )
    clients, name, classes = names.sites(sites), names.server_name(server_name), _classes(labels)
    from fedlora.flower.setup.project import federation, make_federation
    from fedlora.runs.quiet import quiet_libraries

    quiet_libraries()
    notes.print("checking the start ..." if start else "loading the model, for the common start ...")
    made = federation(config, set or [], name, clients, classes, start, port, superlink_port)
    make_federation(folder, made)
    console.print("\n".join(_next_steps(folder, made)))


def _next_steps(folder: Path, made: Federation) -> list[str]:
    """The next steps with a new federation's folder."""
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.serving.standing import standing
    from fedlora.flower.terms.privacy import promise

    here, fed, now = folder.resolve(), typed(folder), standing(FederationFolder(folder))
    lines = [
        f"{folder}: ready, for {counted(len(now.clients), 'site')} ({', '.join(now.clients)}). Next:",
        f"  1. fedlora flower install {fed} > units.sh, a script for root: sudo sh units.sh",
        f"     (or, in two shells: fedlora flower serve {fed}, and nginx -c {typed(here / 'proxy' / 'nginx.conf')},",
        "     which needs CAP_NET_BIND_SERVICE for a port below 1024)",
        f"  2. fedlora doctor {fed}",
        f"  3. hand each site its file, {here}/join/NAME.toml; it holds no secret",
        f"  4. admit them with the requests that they send back: fedlora flower admit {fed} REQUEST.toml ...",
    ]
    if now.privacy is None:
        needs = f"With these settings {now.needs} ({here}/federation.toml: server.quorum, or what the rule needs)."
        return [*lines, needs]
    return [
        *lines,
        f"Private: {promise(now.privacy, now.rounds)}. The server asks all sites in every round, and a missing site "
        f"counts as zero. The first round begins once all are online. Members, rounds and [privacy] cannot change "
        f"later. To see what was spent: fedlora privacy {typed(now.privacy.ledger)}",
    ]


def _trial(folder: Path, config: Path | None, sets: list[str], superlink_port: int) -> None:
    from fedlora.flower.setup.trial_folder import trial
    from fedlora.runs.config import load_config, located, override_in, parse_config
    from fedlora.runs.quiet import quiet_libraries

    if config is not None:
        loaded = load_config(config, sets)
    else:
        raw = read_toml(Path(sys.modules["fedlora"].__file__ or "").parent / "demo.toml", "the config")
        raw["server"].pop("quorum")  # the file's is of six sites; a private trial has none
        three = (
            "clients.count=3", "clients.ranks=[2,4,8]", "run.rounds=3", "run.threads=1", "evaluate.every=1",
            "evaluate.clients_at_end=false",
        )  # fmt: skip
        for key in (*three, *sets):
            override_in(raw, key)
        loaded = located(parse_config(raw), Path.cwd())
    quiet_libraries()
    notes.print("loading the model, for the common start ...")
    trial(folder, loaded, superlink_port)
    console.print(f"{folder}: ready. Try it on this machine: fedlora flower up {typed(folder)}")


def _classes(labels: str | None) -> list[str] | None:
    if labels is None:
        return None
    found = [name.strip() for name in labels.split(",")]
    if not all(found) or len(set(found)) < max(2, len(found)):
        raise ConfigError(f"--labels must name at least two classes, each once, such as no,yes; got {labels!r}.")
    return found
