"""Protocols that meet. Kind of evidence: recorded (messages that fedlora/2 wrote, in tests/older), and contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as Proto

from fedlora import Client, Server, build
from fedlora.core.messages import Download
from fedlora.core.parcels import pack
from fedlora.flower.processes import OWNER
from fedlora.flower.records import RecordError, parcel_record, record_parcel
from fedlora.flower.site.node import Node
from fedlora.flower.terms import PROTOCOL
from fedlora.server.server import start
from support.flower_grid import RUN, Toy, seed_adapter

OLDER = Path(__file__).parents[1] / "older" / "messages"


def recorded(name: str) -> Any:
    return message_from_proto(Proto.FromString((OLDER / f"{name}.bin").read_bytes())).content


def download() -> tuple[Server, Any, Download]:
    server = Server(build("glora"))
    state = start(server, seed_adapter()).server
    return server, state, server.download(state, Client("one", 2))


def test_a_node_refuses_an_older_servers_message_by_name(tmp_path: Path) -> None:
    assert recorded("parcel")["config"]["protocol"] == "fedlora/2" != PROTOCOL
    node = Node("one", Toy(), tmp_path)
    words = rf"the server .*'fedlora/2', .*{PROTOCOL}: install one version"
    for work in (node.work, node.measure):
        with pytest.raises(RecordError, match=words):
            work(recorded("parcel"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        {"tensor": "/nothing"},
        {"dataclass": "os.path", "fields": {}},
        {"dataclass": "client/1", "fields": {"id": "one", "rank": 2}},
        {"dataclass": "fedlora.core.parcels.Parcel", "fields": {"round": 0}},
    ],
)
def test_a_parcel_that_is_none_is_refused(tree: Any) -> None:
    _, _, asked = download()
    record = parcel_record(pack(asked, None), RUN)
    record.config_records["config"]["parcel"] = json.dumps({"run": RUN, "parcel": tree})
    with pytest.raises(RecordError, match="cannot be read"):
        record_parcel(record)


def test_a_client_app_ends_with_its_node(tmp_path: Path) -> None:
    """If a node was started by hand, nothing else ends a ClientApp that hangs: it waits for a trainer that is gone, or
    for a node that accepts no answer."""
    code = (
        "import time; from types import SimpleNamespace as N; from fedlora.flower import apps\n"
        "apps.ask = lambda *_: (print('asked', flush=True), time.sleep(600))\n"
        "from flwr.app import RecordDict; said = N(node_config={'site': 'site.toml'})\n"
        "apps._answered(N(content=RecordDict()), said, 'train')\n"
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as node:
        env = {**os.environ, OWNER: str(node.pid)}
        app = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
        try:
            assert app.stdout is not None and app.stdout.readline() == b"asked\n"
            node.kill()
            assert app.wait(30) == 1
        finally:
            app.kill()
            app.wait()
            app.stdout.close()  # type: ignore[union-attr]
