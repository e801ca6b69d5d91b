"""A Flower app for tests against a real SuperLink: three toy clients, of which one may send whatever it likes.

Run by Flower's processes, which find it by PYTHONPATH. $BOMB_APP is a folder: what comes of it goes there, and
`plan.json` says what the client "bomb" sends in each round.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
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


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    from fedlora import Kept, Server, build
    from fedlora.flower import strategy as module
    from fedlora.flower.inside import Limit
    from fedlora.flower.strategy import FedLoRA

    module.reply_limit = lambda *_: Limit(20 * MB, 200, 2 * MB)  # room for one piece of flwr's
    plan = json.loads((home() / "plan.json").read_text())
    peaks = [peak()]

    def after(round: int, _: Any) -> bool:
        peaks.append(peak())
        (home() / "peaks.json").write_text(json.dumps(peaks))
        return False

    server = Server(build("glora"), round=Kept(quorum=1), seed=3)
    strategy = FedLoRA(server, NAMES, adapter=toys().seed_adapter(), folder=home(), names="order")
    strategy.start(grid, num_rounds=len(plan), timeout=90, should_stop=after)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    from fedlora.flower.records import record_parcel
    from fedlora.flower.site.node import Node

    name = record_parcel(message.content)[0].client.id
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
