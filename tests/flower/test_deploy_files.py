"""The static files of examples/deploy, as they are: what the proxy lets pass, what units and containers may write, and
the image. Whether nginx and systemd do so: tests/deployment. Kinds: *contract* (Flower's own routes and messages),
*enumeration*."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("yaml")  # transformers brings it

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from fedlora.cli.flower import COMMANDS
from fedlora.flower.places import FederationFolder, SiteFolder
from support.containers import PLACE, services
from support.flower_grid import TaskIdentity

assert TaskIdentity.run_id  # without one flwr makes no `Message`

NGINX = (PLACE / "nginx.conf").read_text(encoding="utf-8")
UNITS = sorted(PLACE.glob("*.service"))
FED, SITE = FederationFolder(Path("/srv/fedlora/fed")), SiteFolder(Path("/srv/fedlora/site"))
WRITES = {
    "fedlora-server.service": {FED.server, FED.state}, "fedlora-proxy.service": {FED.proxy},
    "fedlora-site.service": {SITE.state},
}  # fmt: skip
HELD = {  # what the kernel is to keep from the app; the lines that a unit of root's could do without have no place here
    "User": "fedlora", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "read-only",
    "PrivateTmp": "yes", "TemporaryFileSystem": "/run:ro /dev/shm:mode=1777", "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes", "SystemCallFilter": "@system-service", "ProtectProc": "invisible", "UMask": "0077",
    "RestartPreventExitStatus": "2",
}  # fmt: skip


def limit(location: str) -> int:
    """The bytes that a body may have there."""
    found = re.search(rf"location {re.escape(location)} {{\s+client_max_body_size (\d+)([km])", NGINX)
    assert found is not None
    return int(found[1]) * {"k": 2**10, "m": 2**20}[found[2]]


# ---- nginx -----------------------------------------------------------------------------------------------------------


def test_the_calls_that_pass_are_those_that_flowers_superlink_answers_nodes() -> None:
    """Flower's own routes of the fleet: another version of Flower with other calls fails here, and not at a site."""
    from flwr.superlink.routers.fleet.router import router

    (calls,) = re.findall(r"\^POST /v1/fleet/\(([a-z|-]+)\) HTTP", NGINX)
    routes = {(method, route.path) for route in router.routes for method in route.methods}
    assert routes == {("POST", f"/v1/fleet/{name}") for name in calls.split("|")}


def test_bodies_have_room_for_what_flower_sends_and_for_little_more() -> None:
    """An object is a chunk or the app; of a reply's list of objects each has 80 bytes; other calls carry a key."""
    from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

    assert max(FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE) * 1.5 <= limit("= /v1/fleet/push-object")
    tensors = 2000
    arrays = {f"B/model.layers.{k}.q_proj": Array("float32", (2,), "fedlora.raw", b"%08d" % k) for k in range(tensors)}
    asked = Message(RecordDict(), 7, "train", group_id="g")
    asked.metadata.__dict__["_message_id"] = "a" * 64
    made = Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=asked)
    made.metadata.__dict__["_message_id"] = made.object_id
    call = PushMessagesRequest(
        node=Node(node_id=2**63), messages_list=[message_to_proto(remove_content_from_message(made))],
        message_object_trees=[get_object_tree(made)],
    )  # fmt: skip
    assert 1.5 * call.ByteSize() < limit("= /v1/fleet/push-messages") < 6 * call.ByteSize()
    assert limit("/") == 2**14


# ---- units and containers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_no_unit_can_write_what_is_run_or_believed(unit: Path) -> None:
    """Only the places that its programs write; settings, keys, certificates and the program are not among them."""
    lines = [line.partition("=")[::2] for line in unit.read_text().splitlines() if re.match(r"\w+=", line)]
    said = dict(reversed(lines))
    assert HELD.items() <= said.items(), HELD.items() - said.items()
    assert (said.get("PrivateUsers") == "yes") == (unit.name != "fedlora-proxy.service")
    writable = {Path(word) for key, value in lines if key == "ReadWritePaths" for word in value.split()}
    assert writable == WRITES[unit.name]
    assert not any("Exec" in key and value.startswith(("+", "!")) for key, value in lines)  # none of it as root


def test_units_and_compose_call_commands_that_there_are() -> None:
    found = services("server.yaml", FED="/srv/fed", OWNER="7:7", NAME="fl.example.org")
    found |= services("site.yaml", SITE="/srv/acme", OWNER="7:7")
    calls = [service["command"] for name, service in found.items() if name != "proxy"]
    calls += [shlex.split(line)[1:] for line in "".join(p.read_text() for p in UNITS).splitlines()
              if line.startswith("ExecStart=/srv/fedlora/env/bin")]  # fmt: skip
    assert len(calls) == 4
    for group, command, _ in calls:
        module, _, function = COMMANDS[command].partition(":")
        assert group == "flower" and callable(
            getattr(importlib.import_module(f"fedlora.cli.flower.{module}"), function)
        )
    for name, service in found.items():
        place = "/srv/acme" if name == "site" else "/srv/fed"
        assert service["cap_drop"] == ["ALL"] and service["read_only"] and service["user"] == "7:7", name
        assert f"{place}:{place}:ro" in service["volumes"]
        for volume in service["volumes"][1:]:
            assert volume.split(":")[0].removeprefix(f"{place}/") in ("server", "state", "proxy")
