"""Our SuperLink: an answer counts only under the name of the key that signed it. Kind of evidence: *attack*."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fastapi import HTTPException

from fedlora.flower.server.superlink_process import SAYS, under_own_name
from fedlora.flower.site.checks import private_key
from fedlora.flower.terms import certificates
from support.small_apps import packed, small_link


def pushed(signer: int, *senders: int) -> list[Any]:
    """What came to Flower's handler of a request by `signer` with messages of `senders`."""
    taken = list[Any]()
    names = {1: "acme", 2: "cork"}
    state = SimpleNamespace(
        get_node_info=lambda node_ids: [SimpleNamespace(node_id=k, name=names[k]) for k in node_ids if k in names]
    )
    messages = [SimpleNamespace(metadata=SimpleNamespace(src_node_id=sender)) for sender in senders]
    request = SimpleNamespace(node=SimpleNamespace(node_id=signer), messages_list=messages)
    under_own_name(lambda request, state: taken.append(request))(request=request, state=state)
    return taken


def test_what_is_signed_by_one_and_says_another_never_gets_to_flower(capfd: pytest.CaptureFixture[str]) -> None:
    """Also if only one of several messages does, and if the other node does not exist."""
    assert len(pushed(1, 1)) == 1 and len(pushed(2)) == 1
    for senders, other in (((2,), "cork"), ((1, 2), "cork"), ((0,), "node 0"), ((7,), "node 7")):
        with pytest.raises(HTTPException) as refused:
            pushed(1, *senders)
        assert refused.value.status_code == 409
        said = capfd.readouterr().err
        assert said.startswith(SAYS) and re.search(f"acme .* {other}: refused", said)


@pytest.mark.deployment_all
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_site_that_knows_another_s_message_cannot_answer_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real SuperLink and two nodes by Flower's own client. On Flower alone "forged" is what the server gets, and the
    real answer is dropped in silence."""
    import httpx
    from flwr.app import Error, Message
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supernode.fleet_http_connection import http_request_response

    link, replies = small_link(tmp_path / "fed"), tmp_path / "fed" / "replies"
    ca = (link.folder.certificates / "ca.crt").read_bytes()
    with ExitStack() as stack:
        stack.callback(link.stop)
        link.start()
        nodes = {}
        for name in ("acme", "cork"):
            for file, content in zip((name, f"{name}.pub"), certificates.new_key(), strict=True):
                (tmp_path / file).write_bytes(content)
            link.keep_keys({path.stem: path for path in tmp_path.glob("*.pub")})
            key = private_key(tmp_path / name)
            node = http_request_response(link.address, False, ca, (key, key.public_key()), max_retries=0)
            nodes[name] = node.__enter__()
            stack.callback(node.__exit__, None, None, None)  # of an exception it would make a line of its log
        app = packed()
        monkeypatch.setattr("fedlora.flower.server.superlink.bundle", lambda: app)
        link.run()
        asked, until = dict[str, Message](), time.monotonic() + 60
        while len(asked) < 2:
            assert time.monotonic() < until
            for name, (_, receive, *_) in nodes.items():
                if (came := receive()) is not None:
                    asked[name] = came[0]
            time.sleep(0.2)

        def answer(name: str, to: Message, words: str) -> None:
            _, _, send, _, _, _, push_object, _ = nodes[name]
            reply = Message(Error(0, words), reply_to=to)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            for object_id in wanted:
                push_object(to.metadata.run_id, session, object_id, reply.deflate())

        try:
            answer("cork", asked["acme"], "forged")
        except httpx.HTTPStatusError as error:
            assert error.response.status_code == 409 and "another node's name" in error.response.text
        answer("acme", asked["acme"], "of acme")
        answer("cork", asked["cork"], "of cork")
        while not replies.is_file() or len(replies.read_text().splitlines()) < 2:
            assert time.monotonic() < until + 60
            time.sleep(0.2)
        assert sorted(replies.read_text().splitlines()) == ["of acme", "of cork"]
        assert re.search(f"{re.escape(SAYS)}cork .* acme: refused", link.log.read_text())
