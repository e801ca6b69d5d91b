"""A Flower app for tests against a real SuperLink: three toy clients, of which one may send whatever it likes.

Run by Flower's processes, which find it by PYTHONPATH. $BOMB_APP is a folder: what comes of it goes there, and
`plan.json` says what the client "bomb" sends in each round.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

MB = 10**6
NAMES = ("one", "two", "bomb")
server_app, client_app = ServerApp(), ClientApp()


def home() -> Path:
    return Path(os.environ["BOMB_APP"])


def toys() -> Any:
    """Of tests in one process, which give it an identity as a task; this one has another already."""
    from flwr.supercore.task_identity import TaskIdentity

    mine = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
    from support import flower_grid

    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = mine
    return flower_grid


def peak() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def claimed_names(grid: Grid, count: int, seconds: float = 60.0) -> Mapping[str, int]:
    """Names as nodes say them, asked of each once `count` are there: these have no registered ones."""
    until = time.monotonic() + seconds
    while len(list(grid.get_node_ids())) < count and time.monotonic() < until:
        time.sleep(0.2)
    asked = [
        Message(RecordDict({"hello": ConfigRecord({"fedlora": 1})}), node, MessageType.QUERY, ttl=120.0)
        for node in grid.get_node_ids()
    ]
    names = {}
    for reply in grid.send_and_receive(asked, timeout=120.0):
        if not reply.has_error():
            names[str(reply.content.config_records["hello"]["client"])] = reply.metadata.src_node_id
    return names


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    from fedlora import Kept, Server, build
    from fedlora.flower import strategy as module
    from fedlora.flower.inside import Limit
    from fedlora.flower.server.waiting import Nodes
    from fedlora.flower.strategy import FedLoRA

    module.reply_limit = lambda *_: Limit(20 * MB, 200, 2 * MB)  # room for one piece of flwr's
    plan = json.loads((home() / "plan.json").read_text())
    names, ranks = claimed_names(grid, len(NAMES)), dict.fromkeys(NAMES, 4)
    peaks = [peak()]

    class Claimed(Nodes):
        """These nodes have no registered names."""

        def online(self, grid: Grid, clients: Any) -> dict[str, int]:
            return dict(names)

    def after(round: int, _: Any) -> bool:
        peaks.append(peak())
        (home() / "peaks.json").write_text(json.dumps(peaks))
        return False

    server = Server(build("glora"), round=Kept(quorum=1), seed=3)
    strategy = FedLoRA(server, ranks, adapter=toys().seed_adapter(), folder=home())
    strategy.nodes = Claimed("registered")
    strategy.start(grid, num_rounds=len(plan), timeout=90, should_stop=after)


@client_app.query()
def hello(message: Message, context: Context) -> Message:
    return Message(
        RecordDict({"hello": ConfigRecord({"client": str(context.node_config["client"])})}), reply_to=message
    )


@client_app.train()
def train(message: Message, context: Context) -> Message:
    from fedlora.flower.site.node import Node

    name = str(context.node_config["client"])
    reply = Node(name, toys().Toy(), home() / "nodes" / name).work(message.content)
    if name == "bomb":
        plan = json.loads((home() / "plan.json").read_text())
        round = int(message.metadata.group_id.split("-")[-2])
        kind, size = plan[round - 1]
        if kind == "equal":
            reply["arrays"] = ArrayRecord(
                {"B/a.q": Array("float32", (size * MB // 4,), "fedlora.raw", bytes(size * MB))}
            )
        elif kind == "distinct":
            data = os.urandom(size * MB)
            reply["arrays"] = ArrayRecord({"B/a.q": Array("float32", (size * MB // 4,), "fedlora.raw", data)})
        elif kind == "said":
            reply["config"] = ConfigRecord({"upload": "x" * (size * MB)})
    return Message(reply, reply_to=message)
