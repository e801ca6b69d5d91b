"""`fedlora flower node`: what it waits for, its trainer, what it holds out. Kinds: a scripted server, real processes,
contract (the same work in this process), *attack*."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import RecordDict

from fedlora import Client, Server, build
from fedlora.core.parcels import pack
from fedlora.data import TextData
from fedlora.errors import ConfigError, DataError
from fedlora.flower.envelope import enclose
from fedlora.flower.places import SiteFolder
from fedlora.flower.processes import OWNER
from fedlora.flower.records import RecordError, parcel_record, record_parcel, to_tensor
from fedlora.flower.site.checks import Found
from fedlora.flower.site.node import Node
from fedlora.flower.site.run import wait_until_admitted
from fedlora.flower.site.trainer import TrainerFailed, answer, ask, held_out, listening_at, told_to_server
from fedlora.flower.terms import PROTOCOL
from fedlora.flower.terms.joining import Address, JoinFile
from fedlora.flower.terms.settings import FederationSettings
from fedlora.server.server import start
from support.flower_grid import RUN, Toy, seed_adapter
from support.processes import Program, wait_for

ADMITTED = Found("admitted", "fl:443 answers and knows this site's key.")


def question(client: str = "one") -> RecordDict:
    server = Server(build("glora"))
    state = start(server, seed_adapter()).server
    return parcel_record(pack(server.download(state, Client(client, 2)), None), RUN)


def serving(site: SiteFolder, work: Any) -> None:
    """A node with that work, for as long as this test's process lives."""
    site.state.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=answer, args=(listening_at(site), work, site.path), daemon=True).start()


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_it_waits_until_it_is_admitted_and_tells_each_reason_once(capfd: pytest.CaptureFixture[str]) -> None:
    down, nobody = Found("closed", "port?"), Found("not admitted", "key?")
    left = [down, down, nobody, nobody, nobody, ADMITTED]
    wait_until_admitted(lambda: left.pop(0), pauses=(0.01, 0.02))
    assert not left and capfd.readouterr().err == "waiting: port?\nwaiting: key?\n"


# ---- the SuperNode ---------------------------------------------------------------------------------------------------

WRAPPED = """
import os, sys, threading, time, types
fake = types.ModuleType("flwr.supernode.cli")
def flower_supernode():
    threading.Thread(target=time.sleep, args=(30,)).start()  # as its API's thread: no daemon
    {body}
fake.flower_supernode = flower_supernode
sys.modules["flwr.supernode.cli"] = fake
sys.argv[1:] = [str(os.getppid())]
from fedlora.flower.site.supernode import main
main()
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("pass", "the SuperNode ends: the connection"),
        ("t = threading.Thread(target=lambda: 1 / 0, name='heart'); t.start(); time.sleep(30)",
         "the SuperNode ends: the thread heart ended"),
    ],
)  # fmt: skip
def test_a_supernode_never_stays_as_a_shell(
    body: str, words: str, tmp_path: Path, program: Callable[..., Program]
) -> None:
    """flwr's main function returns, or its heartbeat dies, and the process would live on without taking part."""
    (tmp_path / "wrapped.py").write_text(WRAPPED.format(body=body))
    done = program(tmp_path / "wrapped.py").ended(20)
    assert done.returncode == 70 and words in done.stderr


NODE = """
import signal, sys
from pathlib import Path
from fedlora.flower.places import SiteFolder
from fedlora.flower.site import run
from fedlora.flower.terms.joining import Address, JoinFile
run.Trainer = lambda site: None
run.supernode_command = lambda *_: [sys.executable, "-S", "-c", {child!r}]
site = SiteFolder(Path({site!r}))
site.state.mkdir()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as the command has it
run.take_part(site, JoinFile(federation="f", server=Address(name="x", port=1, ca="CA"), agreed={{}}, facts={{}}))
"""
CHILD = """
import os, sys, time
from pathlib import Path
Path({mine!r}).write_text(f"{{os.getpid()}} {{os.environ['FEDLORA_NODE_PID']}}")
while not Path({end!r}).exists(): time.sleep(0.05)
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "the SuperNode ends"])
def test_node_and_supernode_end_together(how: str, tmp_path: Path, program: Callable[..., Program]) -> None:
    """Whichever of them ends. What the node makes is for this user only. kill -9: test_deployment.py."""
    mine, end = tmp_path / "mine", tmp_path / "end"
    child = CHILD.format(mine=str(mine), end=str(end))
    (tmp_path / "node.py").write_text(NODE.format(child=child, site=str(tmp_path)))
    node = program(tmp_path / "node.py")
    wait_for(node.process, lambda: mine.is_file() and bool(mine.read_text()))
    supernode, owner = map(int, mine.read_text().split())
    assert owner == node.process.pid and mine.stat().st_mode & 0o077 == 0
    if how == "SIGTERM":
        node.process.terminate()
    else:
        end.write_text("")
    code = node.ended(20).returncode
    assert code == (0 if how == "SIGTERM" else 7) and not psutil.pid_exists(supernode)


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


# ---- the trainer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_the_trainer_answers_over_its_socket(tmp_path: Path, deep: bool) -> None:
    """The same as in this process, also in a folder whose path no socket can have; an exception comes as its words."""
    site = SiteFolder(tmp_path / ("d" * 60 + "/" + "e" * 60 if deep else "s"))
    node = Node("one", Toy(), tmp_path / "state")
    serving(site, lambda do, record: node.work(record))
    record = question()
    reply, alone = ask(site.site, "train", record), Node("one", Toy(), tmp_path / "other").work(record)
    for name, array in alone["arrays"].items():
        assert torch.equal(to_tensor(array, array.shape, name), to_tensor(reply["arrays"][name], array.shape, name))
    assert all(dict(reply[part]) == dict(alone[part]) for part in ("metrics", "config"))
    with pytest.raises(TrainerFailed, match=r"'one', .* for 'two'"):
        ask(site.site, "train", question("two"))


def test_an_error_of_the_data_stays_at_home(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server hears its kind alone; the site hears all of it. Paths of the site are not told either."""

    def work(do: str, record: RecordDict) -> RecordDict:
        raise DataError("row 3: label 'Jane Doe, HIV' is not among the classes")

    site = SiteFolder(tmp_path)
    serving(site, work)
    with pytest.raises(TrainerFailed) as error:
        ask(site.site, "train", question())
    assert "Jane" not in str(error.value) and "DataError" in str(error.value)
    assert "Jane Doe" in capfd.readouterr().err
    told = told_to_server(ConfigError(f"{tmp_path}/x is missing, and '/mnt/jane/notes.csv'; see owner/name"), tmp_path)
    assert told == "ConfigError: x is missing, and 'notes.csv'; see owner/name"


def test_a_node_that_is_gone_is_told(tmp_path: Path) -> None:
    SiteFolder(tmp_path).state.mkdir()
    with pytest.raises(TrainerFailed, match="its node has ended"):
        ask(tmp_path / "site.toml", "train", question())


# ---- what is held out ------------------------------------------------------------------------------------------------


def texts(names: list[str]) -> TextData:
    return TextData(
        "classification", tuple(names), labels=tuple(k % 2 for k in range(len(names))), label_names=("no", "yes")
    )


def sides(names: list[str], seed: int = 0) -> dict[str, int]:
    """Row -> its part, however the file was split."""
    half = len(names) // 2
    drawn = texts(names[:half]), texts(names[half:]), texts([])
    parts = held_out(drawn, seed=seed, validation=0.2, test=0.1)
    return {text: k for k, part in enumerate(parts) for text in part.text}


def test_a_row_stays_on_its_side_whatever_becomes_of_the_file() -> None:
    """Grown, sorted otherwise, or with other case and spaces; the shares are met on average (5 deviations)."""
    names = [f"note {k}" for k in range(2000)]
    before = sides(names)
    after = sides([*reversed(names), *(f"new {k}" for k in range(500))])
    assert len(before) == 2000 and all(after[name] == before[name] for name in names)
    shouted = sides([name.upper() + " " for name in names])
    assert all(side == before[name.strip().lower()] for name, side in shouted.items())
    counts = [list(before.values()).count(k) for k in range(3)]
    for count, share in zip(counts, (0.7, 0.2, 0.1), strict=True):
        assert abs(count - 2000 * share) < 5 * (2000 * share * (1 - share)) ** 0.5
    assert sides(names, seed=1) != before


def test_no_server_plays_by_other_terms_than_the_join_file_has(tmp_path: Path) -> None:
    """Another seed, share or base model at the server: nothing is trained or measured. More rounds are the same."""

    def terms(base: str = "b", rounds: int = 3, **data: Any) -> str:
        tables: dict[str, Any] = {"data": {"label_names": ["no", "yes"], **data}, "run": {"rounds": rounds}}
        agreed = FederationSettings(id="f", lora={"target_modules": ["q"]}, **tables).agreed()  # type: ignore[arg-type]
        address = Address(name="x", port=1, ca="")
        return JoinFile(federation="f", server=address, agreed=agreed, facts={"base": base}).terms()

    assert len({terms(), terms("c"), terms(validation=0.0), terms(test=0.3)}) == 4 and terms(rounds=9) == terms()
    node, asked = Node("one", Toy(), tmp_path, terms=terms()), question()
    for work in (node.work, node.measure):
        with pytest.raises(ConfigError, match=r"join\.toml"):
            work(enclose(asked, terms("c")))
    assert not [*tmp_path.iterdir()]
    assert node.work(enclose(asked, terms()))["arrays"]


def test_a_file_without_a_row_to_train_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="none to train on"):
        held_out((texts(["a"]), texts([]), texts([])), seed=0, validation=0.99, test=0.0099)


# ---- what a server sends ---------------------------------------------------------------------------------------------


def test_a_node_refuses_an_older_servers_message_by_name(tmp_path: Path) -> None:
    old, node = question(), Node("one", Toy(), tmp_path)
    old.config_records["config"]["protocol"] = "fedlora/2"
    for work in (node.work, node.measure):
        with pytest.raises(RecordError, match=rf"the server .*'fedlora/2', .*{PROTOCOL}: install one version"):
            work(old)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tree",
    [None, {"tensor": "/nothing"}, {"dataclass": "os.path", "fields": {}},
     {"dataclass": "client/1", "fields": {"id": "one", "rank": 2}}],
)  # fmt: skip
def test_a_parcel_that_is_none_is_refused(tree: Any) -> None:
    record = question()
    record.config_records["config"]["parcel"] = json.dumps({"run": RUN, "parcel": tree})
    with pytest.raises(RecordError, match="cannot be read"):
        record_parcel(record)
