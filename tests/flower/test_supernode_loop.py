"""A reply that Flower's loop left over is sent when nothing else is to do. Kind: unit, against Flower's own state."""

from __future__ import annotations

import hashlib
import inspect
import io
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedlora.flower.bundle import bundle
from fedlora.flower.site.supernode import left_over, watched


def entry(name: str, run: int, reply_to: str, sent: bool) -> SimpleNamespace:
    metadata = SimpleNamespace(message_id=name, run_id=run, reply_to_message_id=reply_to)
    return SimpleNamespace(message=SimpleNamespace(metadata=metadata), is_retrieved=sent)


def test_an_idle_loop_sends_what_is_left_over() -> None:
    """None stays None where only questions, and replies that were sent, are there; Flower's own state marks a reply as
    sent when the loop takes it, so that nothing is sent twice."""
    state = InMemoryNodeState(object_store=None)
    assert left_over(state) is None
    state.msg_store.update(a=entry("a", 5, "", False), b=entry("b", 6, "a", True))
    assert left_over(state) is None
    state.msg_store["c"] = entry("c", 7, "a", False)
    came, given = [None, 9], dict.fromkeys(("get_run", "get_fab", "object_store"))
    pulled = watched(lambda *, receive, **more: receive())
    assert pulled(state=state, receive=came.pop, **given) == 9, "a message that came goes first"
    assert pulled(state=state, receive=came.pop, **given) == 7
    assert [found.metadata.message_id for found in state.get_messages_legacy(is_reply=True)] == ["c"]
    assert left_over(state) is None


def test_flower_s_loop_is_the_one_that_we_know() -> None:
    """It pulls by keyword, `state` among them, and sends after each pull that returned a run."""
    source = inspect.getsource(loop.start_client_internal)
    assert "_pull_and_store_message(\n                state=state" in source
    assert source.index("if run_id is None:") < source.index("_push_messages(")


def question() -> Message:
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 5, 1, 3
    asked = Message(RecordDict(), 7, "train")
    asked.metadata.__dict__["_message_id"] = "asked"
    return asked


def test_only_the_bytes_of_this_fedlora_get_to_flower(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The received bytes count, not the hash that the server claims. The answer is an error in the same words. Before,
    Flower unpacked and ran any bytes."""
    ours, opened, answers = bundle(), list[bytes](), list[Message]()
    other, found = ours + b"!", hashlib.sha256(ours).hexdigest()
    sent = [other]

    def flower(*, receive: Any, get_run: Any, get_fab: Any, **more: object) -> int:
        receive()
        opened.append(get_fab(get_run(5).fab_hash, 5).content)
        return 5

    pull = watched(flower)
    before = {"fab_hash": found, "fab_version": "1.0.0", "fab_id": "fedlora/fedlora-app"}  # ours, it claims
    run = SimpleNamespace(**before)
    given: dict[str, Any] = {
        "get_run": lambda asked: run, "state": None, "object_store": None, "receive": lambda: (question(), None),
        "get_fab": lambda claimed, run: SimpleNamespace(content=sent[0]),
    }  # fmt: skip
    monkeypatch.setattr(loop, "_insert_message", lambda reply, state, store: answers.append(reply))
    assert pull(**given) == 5 and not opened
    assert answers[0].has_error() and answers[0].metadata.reply_to_message_id == "asked"
    assert "waiting: the server's Flower app" in capfd.readouterr().err
    assert found in answers[0].error.reason and hashlib.sha256(other).hexdigest() in answers[0].error.reason
    sent[0] = ours
    for name, value in (("fab_hash", "0" * 64), ("fab_version", "1.0.0/../../evil"), ("fab_id", "../..")):
        run.__dict__.update({**before, name: value})  # the folder in which Flower looks for the unpacked app
        assert pull(**given) == 5 and not opened and value in answers[-1].error.reason
    run.__dict__.update(before)
    assert pull(**given) == 5 and opened == [ours]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_server_of_this_fedlora_sends_the_same_two_shims() -> None:
    """No compression, no time and no path in it: nothing of the machine that packs it. Reference: Flower's packer."""
    from flwr.cli.build import build_fab_from_files

    with zipfile.ZipFile(io.BytesIO(bundle())) as found:
        assert {entry.compress_type for entry in found.infolist()} == {zipfile.ZIP_STORED}
        assert {entry.date_time for entry in found.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        ours = {name: found.read(name) for name in found.namelist()}
    with zipfile.ZipFile(io.BytesIO(build_fab_from_files(ours)[0])) as theirs:
        assert sorted(theirs.namelist()) == sorted(ours)
        same = [name for name in ours if name.endswith((".py", "LICENSE"))]
        assert {name: theirs.read(name) for name in same} == {name: ours[name] for name in same}
    code = {name for name in ours if name.endswith(".py")}
    assert code == {f"fedlora_app/{name}.py" for name in ("__init__", "client_app", "server_app")}
