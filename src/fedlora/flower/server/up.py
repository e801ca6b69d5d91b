"""`fedlora flower up`: a run's file played as a federation's server and its sites, all on this machine, on loopback.

The run's data are dealt as `fedlora run` deals them: each site gets a folder like one on a machine of its own, with its
share as a file, and the server what was held out of one common file. Server and sites are those of `serve` and `node`;
only the proxy is missing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomlkit

from fedlora.core.folders import replacing_folder
from fedlora.core.process import end, how_ended
from fedlora.data import TextData
from fedlora.data.rows import Rows
from fedlora.errors import ConfigError
from fedlora.flower import processes
from fedlora.flower.places import FederationFolder
from fedlora.flower.server.init import agreed_text, checked_federation, write_federation
from fedlora.flower.server.members import admit
from fedlora.flower.server.serve import Say, Supervisor
from fedlora.flower.server.status import Standing, standing
from fedlora.flower.server.superlink import SuperLink
from fedlora.flower.site.run import fill_site
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.settings import ELSEWHERE, NetworkSection, without_effect
from fedlora.flower.terms.site_file import OWN, Site
from fedlora.runs.client_data import deal
from fedlora.runs.config import RunConfig
from fedlora.runs.preparation import prepare

_COLUMNS = ("text", "text_pair", "label", "prompt", "response", "messages")  # of `Rows.of` they have their defaults
_DEALT = ("data.max_train", "data.max_test")  # are done with when the data are dealt


def make(folder: Path, config: RunConfig, port: int) -> list[str]:
    """Make the folder of a federation whose sites are in `folder`/sites, admitted. port: the SuperLink's. Returns the
    keys of the run's file that have no effect here.

    Raises:
        ConfigError: data that cannot be written as a site's file; keys that a federation does not have.
    """
    if config.data.task == "superni":
        raise ConfigError("data.task = 'superni' scores answers that no file of a site can hold; fedlora run plays it.")
    if config.attack.kind != "none":
        raise ConfigError("[attack] simulates byzantine clients, which only `fedlora run` does: leave it out.")
    prepared = prepare(config, None)
    clients = {client.id: client.rank for client in prepared.clients if isinstance(client.rank, int)}
    if len(clients) < len(prepared.clients):
        raise ConfigError("a site has one rank for all modules; ranks by module are of `fedlora run`: leave them out.")
    with replacing_folder(folder) as building:
        there = FederationFolder(building)
        raw = _federation(config, prepared.parts, folder.resolve(), building)
        text, settings = agreed_text(raw, folder.resolve(), NetworkSection(port=port, superlink_port=port), clients)
        known = checked_federation(settings, clients, prepared.seed_adapter)
        write_federation(building, text, settings, clients, (prepared.seed_adapter, prepared.spec), known)
        for name in clients:
            own = {table: _own(config, table) for table in OWN}
            own["data"] = {"train": config.data.clients.get(name, "data.jsonl")}
            site = there.site(name)
            site.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if name not in config.data.clients:
                Rows.of(prepared.parts[name]).write(site.path / "data.jsonl")
            tables = {table: keys for table, keys in own.items() if keys}
            fill_site(site.path, JoinFile.read(there.join), Site(name, tables))
            admit(building, name, None, site.public_key)
    given = config.model_dump(mode="json", exclude_defaults=True)
    return [key for key in without_effect(given) if ELSEWHERE[key] == ELSEWHERE["run.workers"]]


def _own(config: RunConfig, table: str) -> dict[str, Any]:
    """The keys of a site's own that the run's file sets. A trial's maker also operates its sites."""
    given = getattr(config, table).model_dump(mode="json", exclude_defaults=True)
    return {key: value for key, value in given.items() if key in OWN[table]}


def _federation(config: RunConfig, parts: Mapping[str, TextData], home: Path, building: Path) -> dict[str, Any]:
    """The run's tables without what was dealt. What one file holds out is written for the server."""
    raw: dict[str, Any] = {"data": {}, **config.model_dump(mode="json", exclude_defaults=True)}
    for key in (*without_effect(raw), *_DEALT):
        table, _, name = key.partition(".")
        raw.get(table, {}).pop(name, None) if name else raw.pop(table)
    first = next(iter(parts.values()))
    if config.model.task == "sequence-classification":
        raw["data"]["label_names"] = list(first.label_names)
    if not config.data.clients:
        raw["data"] = {key: value for key, value in raw["data"].items() if key not in _COLUMNS}
        raw["data"] |= {"text_pair": "pair"} if first.pair is not None else {}
        raw["data"] |= {"messages": "messages"} if first.history is not None else {}
        dealt = deal(config, None)
        for part in ("validation", "test"):
            held = TextData.concat(list(getattr(dealt, part).values()))
            raw["data"][part] = str(home / f"{part}.jsonl") if len(held) else 0.0
            if len(held):
                Rows.of(held).write(building / f"{part}.jsonl")
    return dict(tomlkit.parse(tomlkit.dumps(raw)).unwrap())


def play(folder: Path, say: Say, stop: threading.Event) -> Standing:
    """Serve the folder, with a node for each of its sites, which is started again when it ends.

    Raises:
        ConfigError: the folder's sites are on machines of their own. Others, as `Supervisor.serve`.
    """
    there, link = FederationFolder(folder.resolve()), SuperLink(folder)
    names = [name for name in standing(there).ranks if there.site(name).site.is_file()]
    if not names:
        raise ConfigError(
            f"{folder} was not made by `fedlora flower up`: its sites are on machines of their own. `fedlora flower "
            f"serve` plays the server's side."
        )
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    ending = threading.Event()

    def keep(name: str) -> None:
        """As its unit would: start it again when it ends, but not for a fault in its own files. After a kill the
        SuperLink takes the old node for online for a minute, and refuses the new one."""
        home, log = there.site(name).state / "flwr", there.logs / f"node-{name}.log"
        command = [sys.executable, "-m", "fedlora.cli", "flower", "node", str(there.site(name).path)]
        while not ending.is_set():
            processes.end_all_of(home)  # what an earlier call left
            nodes[name] = processes.started(command, log, processes.environment(home))
            code = nodes[name].wait()
            if ending.is_set() or name not in standing(there).ranks:
                return
            say(f"the node of {name} ended {how_ended(code)}: {processes.last_line(log)}")
            if code == 2:
                stop.set()
            ending.wait(10.0)

    @contextlib.contextmanager
    def running() -> Iterator[None]:
        try:
            for name in names:
                threading.Thread(target=keep, args=(name,), daemon=True).start()
            say(f"nodes: {', '.join(names)} (their lines are in {there.logs}/node-NAME.log)")
            yield
        finally:  # while the SuperLink hears that they leave: it takes others for online for a minute
            ending.set()
            for process in list(nodes.values()):  # signal all first, so that they end in parallel
                process.terminate()
            for name, process in list(nodes.items()):
                end(process)
                processes.end_all_of(there.site(name).state / "flwr")

    return Supervisor(link, say, stop=stop, beside=running).serve()
