"""A reply that Flower's loop left over is sent when nothing else is to do. Kind: unit, against Flower's own state."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedlora.flower.site.supernode import with_replies_left


def message(name: str, run: int, reply_to: str) -> SimpleNamespace:
    metadata = SimpleNamespace(message_id=name, run_id=run, reply_to_message_id=reply_to)
    return SimpleNamespace(metadata=metadata)


def entry(name: str, run: int, reply_to: str, sent: bool) -> SimpleNamespace:
    return SimpleNamespace(message=message(name, run, reply_to), is_retrieved=sent)


def test_an_idle_loop_sends_what_is_left_over() -> None:
    """None stays None where only questions, and replies that were sent, are there; Flower's own state marks a reply as
    sent when the loop takes it, so that nothing is sent twice."""
    state = InMemoryNodeState(object_store=None)
    pulled = with_replies_left(lambda *, state, receive: receive())
    assert pulled(state=state, receive=lambda: None) is None
    state.msg_store.update(a=entry("a", 5, "", False), b=entry("b", 6, "a", True))
    assert pulled(state=state, receive=lambda: None) is None
    state.msg_store["c"] = entry("c", 7, "a", False)
    assert pulled(state=state, receive=lambda: 9) == 9, "a message that came goes first"
    assert pulled(state=state, receive=lambda: None) == 7
    assert [found.metadata.message_id for found in state.get_messages_legacy(is_reply=True)] == ["c"]
    assert pulled(state=state, receive=lambda: None) is None


def test_flower_s_loop_is_the_one_that_we_know() -> None:
    """It pulls by keyword, `state` among them, and sends after each pull that returned a run."""
    source = inspect.getsource(loop.start_client_internal)
    assert "_pull_and_store_message(\n                state=state" in source
    assert source.index("if run_id is None:") < source.index("_push_messages(")
