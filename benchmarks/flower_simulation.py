"""A federation's folder in Flower's own simulation engine (Ray), on one machine, to measure it: `fedlora run` does the
same work without Ray, bit for bit.

Nodes have no registered names there; each is the client of its partition's number, in the policy's order, and says so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import SWITCHES
from fedlora.flower.server.federation import play
from fedlora.flower.server.waiting import Nodes
from fedlora.flower.site.trainer import Do, Trainer
from fedlora.flower.terms.policy import Policy

log = logging.getLogger(__name__)


def claimed_names(grid: Grid, count: int, seconds: float = 60.0) -> Mapping[str, int]:
    """Names as nodes say them, asked of each once `count` are there. For simulation only: nobody else could tell."""
    until = time.monotonic() + seconds
    while len(list(grid.get_node_ids())) < count and time.monotonic() < until:
        time.sleep(0.2)
    asked = [
        Message(RecordDict({"hello": ConfigRecord({"fedlora": 1})}), node, MessageType.QUERY, ttl=120.0)
        for node in grid.get_node_ids()
    ]
    names = {}
    for reply in grid.send_and_receive(asked, timeout=120.0):
        if reply.has_error():
            log.warning("a node did not say who it is: %s", reply.error.reason)
        else:
            names[str(reply.content.config_records["hello"]["client"])] = reply.metadata.src_node_id
    return names


def simulate_federation(folder: Path, *, cpus: int = 1) -> dict[str, Any]:
    """All rounds of a federation's folder that are not played yet, in Flower's simulation engine.

    Raises:
        ConfigError: Ray is missing. FedLoRAError: the run failed; its reason.
    """
    try:
        import ray  # type: ignore[import-not-found, unused-ignore] # noqa: F401
    except ImportError as error:
        raise ConfigError("Flower's simulation needs Ray: pip install 'flwr[simulation]'.") from error
    from flwr.simulation import run_simulation

    os.environ.update(SWITCHES)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    home = str(folder.resolve())
    names = list(Policy.read(folder / "policy.toml").clients)
    found: dict[str, Any] = {}
    server_app, client_app = ServerApp(), ClientApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            known = claimed_names(grid, len(names))
            Nodes.online = lambda self, grid, clients: dict(known)  # type: ignore[method-assign]
            found.update(play(grid, Path(home)))
        except FedLoRAError as error:
            found["error"] = str(error)

    @client_app.query()
    def hello(message: Message, context: Context) -> Message:
        name = names[int(context.node_config["partition-id"])]
        return Message(RecordDict({"hello": ConfigRecord({"client": name})}), reply_to=message)

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        name = names[int(context.node_config["partition-id"])]
        return Message(_work(home, name)("train", message.content), reply_to=message)

    @client_app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        name = names[int(context.node_config["partition-id"])]
        return Message(_work(home, name)("evaluate", message.content), reply_to=message)

    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(names),
        backend_config={
            "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
            "init_args": {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "log_to_driver": False},
        },
    )
    if "error" in found or not found:
        raise FedLoRAError(f"the simulation did not complete: {found.get('error', 'Flower gave no reason')}")
    return found


@lru_cache(maxsize=64)
def _work(home: str, name: str) -> Callable[[Do, RecordDict], RecordDict]:
    """A client's work, kept in Ray's process for the next round."""
    return Trainer(FederationFolder(Path(home)).site(name))
