"""Flower's SuperLink in one process, with its own database on disk: its grid, its handlers, and toy nodes.

Only HTTP is missing: flwr's `HttpGrid` calls flwr's handlers, which store in flwr's `SqlLinkState`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Message, MessageType
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from fedlora.flower.site.node import Node


class StoredLink:
    """A SuperLink with a run and a node for each of `nodes`, and the ServerApp's grid to it. database: its file."""

    def __init__(self, database: Path, nodes: Mapping[str, Node]) -> None:
        self.database, self._client = database, SimpleNamespace(event_hooks={})
        store = ObjectStoreFactory(str(database))
        self._state = LinkStateFactory(str(database), NoOpFederationManager(), store).state()
        self._state.federation_manager.linkstate = self._state
        run = self._state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        [facts] = self._state.get_run_info(run_ids=[run])
        self._task: Any = SimpleNamespace(run_id=run)
        self._state.claim_task(facts.primary_task_id)
        self._state.activate_task(facts.primary_task_id)
        self._state._cleanup_expired_task_tokens = lambda: None  # nobody plays the ServerApp's heartbeats
        TaskIdentity._run_id = run
        self.nodes = {}
        for name, node in nodes.items():
            id = self._state.create_node(NOOP_FLWR_AID, "", name.encode(), 3600.0, name=name)
            self._state.activate_node(id, 3600.0)
            self.nodes[id] = (name, node)
        self.grid = HttpGrid("127.0.0.1:1", insecure=True, token="x")
        self.grid.set_run(facts)
        self.grid._client = self  # type: ignore[assignment]

    def __getattr__(self, method: str) -> Any:
        """A call of the ServerApp, as `PushMessages`; before it looks for replies, every node has done its work."""
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in method).lstrip("_")
        handler = getattr(runtime_handlers, name)

        def called(request: Any) -> Any:
            if method == "PullMessages":
                for node in self.nodes:
                    self._work(node)
            return handler(request, self._state, self._task)

        return called

    def _work(self, id: int) -> None:
        """What a SuperNode does: pull, confirm, work, push."""
        proto, state, run = NodeProto(node_id=id), self._state, self._task.run_id
        told = fleet_handlers.pull_messages(fleet_pb2.PullMessagesRequest(node=proto), state, state.object_store)
        for about, tree in zip(told.messages_list, told.message_object_trees, strict=True):
            contents = {
                one.object_id: fleet_handlers.pull_object(
                    message_pb2.PullObjectRequest(node=proto, run_id=run, object_id=one.object_id), state
                ).object_content
                for one in iterate_object_tree(tree)
            }
            key = about.metadata.message_id
            fleet_handlers.confirm_message_received(
                message_pb2.ConfirmMessageReceivedRequest(node=proto, run_id=run, message_object_id=key),
                state, state.object_store,
            )  # fmt: skip
            asked: Any = inflate_object_from_contents(key, contents)
            asked.metadata.__dict__["_message_id"] = key
            node = self.nodes[id][1]
            work = node.measure if about.metadata.message_type == MessageType.EVALUATE else node.work
            self._push(Message(work(asked.content), reply_to=asked), proto)

    def _push(self, reply: Message, proto: NodeProto) -> None:
        reply.metadata.__dict__["_src_node_id"] = proto.node_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        request = fleet_pb2.PushMessagesRequest(
            node=proto, messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )  # fmt: skip
        told = fleet_handlers.push_messages(request, self._state)
        objects = get_all_nested_objects(reply)
        for object_id in told.objects_to_push:
            stored = fleet_handlers.push_object(
                message_pb2.PushObjectRequest(
                    node=proto, run_id=self._task.run_id, object_id=object_id, session_id=told.session_id,
                    object_content=objects[object_id].deflate(),
                ),
                self._state,
            ).stored  # fmt: skip
            assert stored
