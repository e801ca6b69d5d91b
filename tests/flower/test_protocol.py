"""Protocols that meet. Kind of evidence: recorded (messages that fedlora/2 wrote, in tests/older), and contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as Proto

from fedlora import Client, Kept, Server, build
from fedlora.core.messages import Download
from fedlora.core.parcels import pack
from fedlora.errors import QuorumNotMet
from fedlora.flower import apps
from fedlora.flower.envelope import PROTOCOL, Envelope, opened
from fedlora.flower.processes import OWNER
from fedlora.flower.records import RecordError, parcel_record, record_parcel, record_upload
from fedlora.flower.site.node import Node
from fedlora.flower.site.trainer import TrainerFailed
from fedlora.flower.terms.facts import Facts
from fedlora.server.server import start
from support.flower_grid import RANKS, RUN, SHAPES, Toy, fates, federation, last_line, play, seed_adapter

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


def test_a_server_refuses_an_older_sites_reply_by_name() -> None:
    _, _, asked = download()
    with pytest.raises(RecordError, match=f"'fedlora/2', and this server speaks {PROTOCOL}"):
        record_upload(recorded("upload"), asked.client, run=RUN, round=0, shapes=SHAPES, roles=asked.roles, heads={})


@pytest.mark.parametrize("protocol", ["fedlora/66", "fedlora/10", "other/1", None, 3, "x" * 10_000])
def test_newer_and_foreign_ones_too(tmp_path: Path, protocol: Any) -> None:
    _, _, asked = download()
    record = parcel_record(pack(asked, None), RUN)
    config = record.config_records["config"]
    if protocol is None:
        del config["protocol"]
    else:
        config["protocol"] = protocol
    with pytest.raises(RecordError, match=f"this site speaks {PROTOCOL}") as error:
        Node("one", Toy(), tmp_path).work(record)
    assert len(str(error.value)) < 300


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


def test_why_a_trainer_failed_is_the_sites_answer_word_for_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The full reason stands in the site's own log alone."""

    def ask(*_: object) -> RecordDict:
        raise TrainerFailed("Disagreement: it's 'no'.", f"in {tmp_path}: it's 'no'.")

    monkeypatch.setattr(apps, "ask", ask)
    asked = Message(RecordDict({"config": ConfigRecord({"parcel": '{"round": 0}'})}), 1, "train")
    reply = apps.train(asked, SimpleNamespace(node_config={"site": str(tmp_path / "site.toml")}))  # type: ignore[arg-type]
    assert reply.error.reason == "Disagreement: it's 'no'."
    said = capfd.readouterr().err  # of the node, whose stderr a ClientApp has
    assert said.startswith("round 1: train failed after 0.0 s: ") and said.endswith(f"in {tmp_path}: it's 'no'.\n")


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


def test_lines_for_a_screen_say_all_that_is_known() -> None:
    trained = {"num-examples": 120, "loss": 0.412}
    assert apps.work_line("train", 3, 14.21, trained) == "round 3: trained in 14.2 s, loss 0.4120; 120 examples here"
    assert apps.work_line("train", 3, 1.0, {"num-examples": 1, "loss": float("nan")}).count("loss nan")
    assert apps.work_line("evaluate", 3, 0.21, {"num-examples": 7}) == "round 3: measured in 0.2 s; 7 examples here"
    assert apps.work_line("train", 4, 0.0, {}, "ValueError: no") == "round 4: train failed after 0.0 s: ValueError: no"


# ---- what server and site agreed on, over Flower's wire --------------------------------------------------------------

FACTS = Facts({"base": "b" * 64, "labels": '["no", "yes"]', "scaling": 2.0, "max_length": 16})


def nodes(folder: Path, **others: Facts) -> dict[str, Node]:
    return {n: Node(n, Toy(), folder / n, facts=others.get(n, FACTS)) for n in RANKS}


def agreeing(folder: Path, facts: Facts, server: Server | None = None, **others: Facts) -> tuple[Any, Any]:
    """A strategy whose clients must have these facts."""
    strategy, grid = federation(folder, server or Server(build("glora")), nodes=nodes(folder, **others))
    strategy._facts = lambda: facts  # type: ignore[method-assign]
    return strategy, grid


def test_settings_and_facts_travel_with_every_message_and_facts_come_back(tmp_path: Path) -> None:
    strategy, grid = agreeing(tmp_path, FACTS)
    strategy._envelope = lambda: Envelope('{"id": "x"}', FACTS.text())
    play(strategy, grid, 2)
    assert strategy.state.round == 2
    for message in grid.sent:
        said = opened(message.content, "a", "b")
        assert said.settings == '{"id": "x"}' and Facts.from_text(said.facts) == FACTS
    reply = nodes(tmp_path / "n")["one"].work(grid.sent[0].content)
    assert Facts.from_text(opened(reply, "a", "b").facts) == FACTS


def test_a_site_with_another_base_model_trains_nothing_and_is_named(tmp_path: Path) -> None:
    odd = FACTS.and_these(base="d" * 64)
    strategy, grid = agreeing(tmp_path, FACTS, Server(build("glora"), round=Kept(quorum=2)), two=odd)
    play(strategy, grid, 1)
    assert not (tmp_path / "two").exists() and (tmp_path / "one").exists()
    [line] = strategy.journal.lines()
    assert "dddddddddddd" in json.dumps(line["fates"]["two"])
    assert line["fates"]["one"]["fate"] == "trained"


@pytest.mark.parametrize(
    "theirs",
    [Facts(), FACTS.and_these(base="d" * 64), FACTS.and_these(labels='["yes", "no"]')],
    ids=["silent", "base", "labels"],
)
def test_the_server_compares_again(tmp_path: Path, theirs: Facts) -> None:
    """A site that trained nevertheless (its code is its own) is refused by what it says, or does not say."""
    strategy, grid = agreeing(tmp_path, FACTS, Server(build("glora"), round=Kept(quorum=2)), two=theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlora.flower.site.node.check", lambda *_: ())
        play(strategy, grid, 1)
    assert fates(strategy) == {"one": "trained", "two": "refused", "three": "trained"}
    why = last_line(strategy)["fates"]["two"]["why"]
    assert "at the server" in why or "does not say" in why


def test_forged_facts_are_refused(tmp_path: Path) -> None:
    strategy, grid = agreeing(tmp_path, FACTS, Server(build("glora"), round=Kept(quorum=2)))
    for round, text in enumerate(("{", "[1]", '{"base": []}', 7, "[" * 100_000)):

        def forge(asked: Message, reply: Message, text: Any = text) -> Message:
            reply.content["config"]["agreement"] = text
            return reply

        grid.meddle = {"two": forge}
        play(strategy, grid, round + 1)
        assert fates(strategy) == {"one": "trained", "two": "refused", "three": "trained"}


def test_nobody_agrees_no_round(tmp_path: Path) -> None:
    strategy, grid = agreeing(tmp_path, FACTS.and_these(labels='["yes", "no"]'))
    with pytest.raises(QuorumNotMet, match="yes"):
        play(strategy, grid, 1)
