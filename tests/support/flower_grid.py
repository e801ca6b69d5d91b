"""Flower in one process: a grid whose messages go through its wire format, and toy nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")  # a test file that imports this is skipped with it

from flwr.app import ArrayRecord, Error, Message, MessageType, MetricRecord
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedlora import Adapter, LoRA, Server
from fedlora.core.trainer import Trained
from fedlora.flower.grid import BoundedGrid
from fedlora.flower.records import to_array
from fedlora.flower.site.node import Node
from fedlora.flower.strategy import FedLoRA
from support.federations import noise

TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1  # no `Message` can be made without

SHAPES = {"a.q": (12, 9), "b.v": (7, 10)}
RANKS: dict[str, Any] = {"one": 2, "two": 4, "three": 3}
RUN = "test"
Meddle = Callable[[Message, Message], Any]


class Toy:
    """A trainer of pure arithmetic: what it gives is a function of what it gets, and of nothing else."""

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        name = download.client.id
        modules = {}
        for module, lora in adapter.modules.items():
            parts = {}
            for factor, tensor in lora.tensors().items():
                moves = getattr(download.roles, factor) != "frozen"
                step = noise(tuple(tensor.shape), name, module, factor, position, download.round, dtype=torch.float32)
                base = (adapter.base or {}).get(module)
                if base is not None:
                    step = step + float(base.norm())
                parts[factor] = tensor + 0.3 * step if moves else tensor
            modules[module] = LoRA(parts["B"], parts["A"])
        heads = {n: h + (download.roles.heads != "frozen") * 0.1 * (position + 1) for n, h in adapter.heads.items()}
        trained = replace(adapter, modules=modules, heads=heads)
        return Trained(trained, 10 + len(name), 0.5 + 0.1 * position, position + 3)


class Watching(Toy):
    """Also remembers what each client was given to train, as bits."""

    def __init__(self) -> None:
        self.got: dict[tuple[str, int], Any] = {}
        self.bases: dict[tuple[str, int, str], Tensor] = {}  # a site adds up steps: rounding differs

    def train(self, download: Any, adapter: Adapter, position: int) -> Trained:
        self.got[download.client.id, download.round] = bits(replace(adapter, base=None))
        for module, change in (adapter.base or {}).items():
            self.bases[download.client.id, download.round, module] = change.delta()
        return super().train(download, adapter, position)


class LocalGrid(Grid):
    """Flower's grid in one process: every message goes through Flower's protobuf, both ways.

    meddle: node name -> what becomes of its reply. offline: nodes that are not there. waiting: replies that were not
    pulled yet, in the order in which they will be.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = {k + 1001: (name, node) for k, (name, node) in enumerate(nodes.items())}
        self.meddle: dict[str, Callable[[Message, Message], Message | list[Message] | None]] = {}
        self.offline: set[str] = set()
        self.sent: list[Message] = []
        self.waiting: list[Message] = []

    def set_run(self, run_id: int) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        assert isinstance(messages, list)  # a generator is answered with HTTP 500 in deployment
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            self.sent.append(message)
            ids.append(message.metadata.message_id)
            name, node = self.nodes[message.metadata.dst_node_id]
            asked = wired(message)
            try:
                work = node.measure if message.metadata.message_type == MessageType.EVALUATE else node.work
                reply = Message(work(asked.content), reply_to=asked)
            except Exception as error:
                reply = Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=asked)
            found = self.meddle[name](asked, reply) if name in self.meddle else reply
            self.waiting += [wired(m) for m in (found if isinstance(found, list) else [found] if found else [])]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found, self.waiting = self.waiting, []  # all, as a grid that is no SuperLink's may give them
        return found

    def get_node_ids(self) -> Iterable[int]:
        return [i for i, (name, _) in self.nodes.items() if name not in self.offline]

    def get_nodes(self) -> Iterable[Any]:
        return [NodeInfo(node_id=i, name=self.nodes[i][0]) for i in self.get_node_ids()]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return list(self.pull_messages(self.push_messages(messages)))


class FastClock:
    """A clock on which waiting takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds


def wired(message: Message) -> Message:
    return message_from_proto(type(message_to_proto(message)).FromString(message_to_proto(message).SerializeToString()))


def seed_adapter(rank: int = 4) -> Adapter:
    modules = {
        m: LoRA(torch.zeros(d_out, rank), noise((rank, d_in), "seed", m, dtype=torch.float32))
        for m, (d_out, d_in) in SHAPES.items()
    }
    return Adapter(modules, {"head.weight": noise((3, 5), "head", dtype=torch.float32)})


def changed(**numbers: Any) -> Meddle:
    """A reply with other numbers."""

    def meddle(asked: Message, reply: Message) -> Message:
        told = {name.replace("_", "-"): value for name, value in numbers.items()}
        reply.content["metrics"] = MetricRecord({**dict(reply.content["metrics"]), **told})
        return reply

    return meddle


def nan(asked: Message, reply: Message) -> Message:
    found = dict(reply.content["arrays"])
    found["B/a.q"] = to_array(torch.full(tuple(found["B/a.q"].shape), float("nan")))
    reply.content["arrays"] = ArrayRecord(found)
    return reply


def federation(
    folder: Path, server: Server, ranks: Mapping[str, Any] = RANKS, *, trainer: Any = None, **more: Any
) -> tuple[FedLoRA, LocalGrid]:  # fmt: skip
    """A strategy that goes on in FOLDER/server, and toy nodes whose states are in FOLDER/nodes."""
    strategy = FedLoRA(
        server, ranks, adapter=seed_adapter(max(ranks.values())), run=RUN, folder=folder / "server", **more
    )
    return strategy, LocalGrid({name: Node(name, trainer or Toy(), folder / "nodes" / name) for name in ranks})


def play(strategy: FedLoRA, grid: LocalGrid, rounds: int, **more: Any) -> Any:
    """Rounds until so many are done, on a clock on which waiting takes no time."""
    return strategy.start(BoundedGrid(grid, clock=FastClock()), num_rounds=rounds, **more)


def last_line(strategy: FedLoRA) -> dict[str, Any]:
    """The line of the last round."""
    return strategy.journal.lines()[-1]


def fates(strategy: FedLoRA) -> dict[str, str]:
    """What became of each client in the last round."""
    return {name: str(one["fate"]) for name, one in last_line(strategy)["fates"].items()}


def bits(value: Any, path: str = "") -> dict[str, Any]:
    """Every tensor and number of a state by its place."""
    from fedlora.core.checkpoint import _encode

    tensors: dict[str, Tensor] = {}
    tree = _encode(value, path, tensors)
    return {"tree": json.dumps(tree, sort_keys=True)} | {
        k: t.contiguous().view(torch.uint8).tolist() for k, t in tensors.items()
    }


def close(got: Any, want: Any) -> None:
    from fedlora.core.checkpoint import _encode

    mine: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    _encode(got, "", mine)
    _encode(want, "", theirs)
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if "total" not in key and "steps" not in key:  # their factors are one of many
            torch.testing.assert_close(mine[key], tensor, atol=1e-4, rtol=1e-4, msg=key)
