"""What the proxy's configuration says. Whether nginx does so: tests/deployment/test_proxy.py. Kind: *contract*."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from fedlora.errors import ConfigError
from fedlora.flower.setup.proxy import BODY_LIMIT, CALL_LIMIT, FLEET, listed_limit, nginx_configuration
from support.flower_grid import TaskIdentity

assert TaskIdentity.run_id  # without one flwr makes no `Message`


def test_the_calls_that_pass_are_those_that_flowers_superlink_answers_nodes() -> None:
    """Flower's own routes of the fleet: another version of Flower with other calls fails here, and not at a site."""
    from flwr.superlink.routers.fleet.router import router

    routes = {(method, route.path) for route in router.routes for method in route.methods}
    assert routes == {("POST", f"/v1/fleet/{name}") for name in FLEET}


def test_a_chunk_of_flower_and_its_largest_app_fit_into_the_body_limit() -> None:
    from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

    assert max(FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE) * 1.5 <= BODY_LIMIT


def reply(tensors: int, megabytes: int = 0) -> Message:
    """What a node answers with, of so many tensors; the first of them of so many MB."""
    arrays = {f"B/model.layers.{k}.q_proj": Array("float32", (2,), "fedlora.raw", b"%08d" % k) for k in range(tensors)}
    if megabytes:
        data = b"".join(k.to_bytes(8, "big") * 2**17 for k in range(megabytes))
        arrays["B/model.layers.0.q_proj"] = Array("float32", (len(data) // 4,), "fedlora.raw", data)
    record = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"loss": 1.0})})
    record["config"] = ConfigRecord({"upload": "{}"})
    asked = Message(RecordDict(), 7, "train", group_id="fed-4f21c0-100-3")
    asked.metadata.__dict__["_message_id"] = "a" * 64
    made = Message(record, reply_to=asked)
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


def pushed(message: Message) -> PushMessagesRequest:
    """The call that flwr's node makes of it."""
    return PushMessagesRequest(
        node=Node(node_id=2**63), messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "megabytes"),
    [(0, 0), pytest.param(1, 600, marks=pytest.mark.exhaustive), (8, 0), (448, 0), (2000, 100)],
)
def test_an_honest_list_of_objects_passes_and_one_that_is_made_up_does_not(tensors: int, megabytes: int) -> None:
    """Measured on flwr's own messages. A list that a site makes up costs the SuperLink a quarter of a millisecond for
    each object, while nobody else can write: with 16 MB it was a minute."""
    call = pushed(reply(tensors, megabytes))
    assert call.ByteSize() + 2000 < listed_limit(tensors)
    tree = call.message_object_trees[0]
    for k in range(500 + 5 * tensors):
        tree.children.add(object_id=f"{k:064d}")
    assert call.ByteSize() > listed_limit(tensors)


def test_a_failure_that_a_site_explains_passes_too() -> None:
    asked = Message(RecordDict(), 7, "train", group_id="g")
    asked.metadata.__dict__["_message_id"] = "a" * 64
    made = Message(Error(2, "x" * 8000), reply_to=asked)
    made.metadata.__dict__["_message_id"] = made.object_id
    assert pushed(made).ByteSize() < listed_limit(1)


def test_calls_that_carry_no_object_are_small() -> None:
    """Each request of the fleet but the two, with every id and text of 100 letters, and a key."""
    from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, run_pb2

    calls = [
        fleet_pb2.RegisterNodeFleetRequest(public_key=b"k" * 400),
        fleet_pb2.ActivateNodeRequest(public_key=b"k" * 400, heartbeat_interval=30.0),
        fleet_pb2.PullMessagesRequest(node=Node(node_id=2**63)),
        heartbeat_pb2.SendNodeHeartbeatRequest(node=Node(node_id=2**63), heartbeat_interval=30.0),
        run_pb2.GetRunRequest(node=Node(node_id=2**63), run_id=2**63),
        message_pb2.PullObjectRequest(node=Node(node_id=2**63), run_id=2**63, object_id="a" * 64),
        message_pb2.ConfirmMessageReceivedRequest(node=Node(node_id=2**63), run_id=2**63, message_object_id="a" * 64),
    ]
    assert max(call.ByteSize() for call in calls) * 10 < CALL_LIMIT


def test_no_answer_is_a_page_of_nginx() -> None:
    text = nginx_configuration(Path("fed"), name="fl.example.org", tensors=8)
    covered = {code for line in re.findall(r"error_page ([^;]*);", text) for code in re.findall(r"\b\d{3}\b", line)}
    assert {"400", "403", "404", "405", "408", "413", "414", "494", "495", "500", "502", "503", "504"} <= covered


def test_every_header_that_flowers_nodes_send_goes_on() -> None:
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore import constant

    text = nginx_configuration(Path("fed"), name="fl.example.org", tensors=8)
    for header in (
        TIMESTAMP_HEADER, constant.FLEET_HTTP_PUBLIC_KEY_HEADER, constant.FLEET_HTTP_SIGNATURE_HEADER,
        constant.FLWR_PACKAGE_NAME_METADATA_KEY, constant.FLWR_PACKAGE_VERSION_METADATA_KEY,
        constant.FLWR_COMPONENT_NAME_METADATA_KEY,
    ):  # fmt: skip
        assert f"proxy_set_header {header} $http_" in text
    assert "proxy_pass_request_headers off" in text and "Authorization" not in text


@pytest.mark.parametrize("odd", ['fe"d', "fe$d", "fe\nd", "fe;d", "fe{d", "fe\\d"])
def test_what_nginx_would_read_otherwise_is_refused(tmp_path: Path, odd: str) -> None:
    with pytest.raises(ConfigError, match="'s configuration"):
        nginx_configuration(tmp_path / odd, name="fl.example.org", tensors=8)
    with pytest.raises(ConfigError, match="'s configuration"):
        nginx_configuration(tmp_path, name=odd, tensors=8)
