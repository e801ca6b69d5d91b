"""`fedlora flower node`: what it waits for, its trainer, what it holds out. Kinds: a scripted server, real processes,
contract (the same work in this process), *attack*."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import RecordDict

from fedlora import Client, Server, build
from fedlora.core.parcels import pack
from fedlora.data import TextData
from fedlora.errors import ConfigError, DataError
from fedlora.flower.envelope import Envelope, enclose
from fedlora.flower.places import SiteFolder
from fedlora.flower.records import parcel_record, to_tensor
from fedlora.flower.site import trainer
from fedlora.flower.site.checks import Found
from fedlora.flower.site.node import Node
from fedlora.flower.site.run import GONE, held, supernode_command, wait_until_admitted
from fedlora.flower.site.supernode import watched
from fedlora.flower.site.trainer import TrainerFailed, answer, ask, held_out, listening_at, told_to_server
from fedlora.flower.terms.settings import FederationSettings
from fedlora.server.server import start
from support.deployed_folders import federation_folder, site_folder
from support.flower_grid import RUN, Toy, seed_adapter
from support.processes import Program

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


def test_two_cannot_run_in_one_folder(tmp_path: Path) -> None:
    with (
        held(SiteFolder(tmp_path)),
        pytest.raises(ConfigError, match=rf"already runs for .* \(process {os.getpid()}\)"),
        held(SiteFolder(tmp_path)),
    ):
        pass
    with held(SiteFolder(tmp_path)):
        pass


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
import os, subprocess, sys
from pathlib import Path
from fedlora.flower.places import SiteFolder
from fedlora.flower.site import run
from fedlora.flower.terms.facts import Facts
from fedlora.flower.terms.joining import JoinFile
run.Trainer = lambda site: None
run.supernode_command = lambda *_: [sys.executable, "-c", {child!r}]
here = SiteFolder(Path({site!r}))
with run.held(here):
    run.take_part(here, JoinFile("f", "x", 1, "CA", "{{}}", Facts()))
"""
CHILD = """
import os, sys, time
from pathlib import Path
from fedlora.core.process import killed_with
killed_with(os.getppid())
Path({mine!r}).write_text(f"{{os.getpid()}} {{os.environ['FEDLORA_NODE_PID']}}")
while not Path({end!r}).exists(): time.sleep(0.05)
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "the SuperNode ends"])
def test_node_and_supernode_end_together(how: str, tmp_path: Path) -> None:
    """However one of them ends. What the node makes is for this user only."""
    mine, end = tmp_path / "mine", tmp_path / "end"
    code = NODE.format(child=CHILD.format(mine=str(mine), end=str(end)), site=str(tmp_path))
    node, until = subprocess.Popen([sys.executable, "-c", code]), time.monotonic() + 60
    try:
        while not (mine.is_file() and mine.read_text()):
            assert time.monotonic() < until and node.poll() is None
            time.sleep(0.05)
        supernode, owner = map(int, mine.read_text().split())
        assert owner == node.pid and mine.stat().st_mode & 0o077 == 0
        if how == "the SuperNode ends":
            end.write_text("")
            assert node.wait(20) == 7
        else:
            node.send_signal(getattr(signal, how))
            node.wait(20)
        gone = time.monotonic() + 10
        while Path(f"/proc/{supernode}").exists() and time.monotonic() < gone:
            time.sleep(0.05)
        assert not Path(f"/proc/{supernode}").exists()
    finally:
        node.kill()
        node.wait()


def test_the_command_of_a_supernode(tmp_path: Path) -> None:
    """Absolute, by this interpreter; Flower reads the node's configuration back as it was meant."""
    from flwr.common.config import parse_config_args

    site = SiteFolder(tmp_path / "a site's folder, with blanks")
    command = supernode_command(site, "fl.example.org:443", "/the/ca")
    assert command[:4] == [sys.executable, "-m", "fedlora.flower.site.supernode", str(os.getpid())]
    config = command[command.index("--node-config") + 1]
    assert parse_config_args([config]) == {"site": str(site.site)}
    assert command[command.index("--auth-supernode-private-key") + 1] == str(site.key)
    assert "--insecure" not in command and command[command.index("--max-wait-time") + 1] == str(GONE)


def test_that_it_is_online_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """At Flower's first pull."""
    came, given = [5, 6], dict.fromkeys(("get_run", "get_fab", "object_store", "state"))
    pull = watched(lambda *, receive, **more: receive())
    assert [pull(receive=came.pop, **given) for _ in list(came)] == [6, 5]
    assert capfd.readouterr().err == "admitted: online, waiting for work.\n"


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


def test_who_says_nothing_or_nonsense_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_PATIENCE", 0.2)
    site = SiteFolder(tmp_path)
    serving(site, lambda do, record: record)
    monkeypatch.chdir(site.state)  # a socket's path is short
    for frame in (b"not json", b'{"said": {}, "records": {}}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as odd:
            odd.connect("trainer.sock")
            Connection(odd.detach()).send_bytes(frame)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect("trainer.sock")
        assert ask(site.site, "train", question())


def test_an_error_of_the_data_stays_at_home(tmp_path: Path) -> None:
    """A server hears its kind alone; the site hears all of it. Paths of the site are not told either."""

    def work(do: str, record: RecordDict) -> RecordDict:
        raise DataError("row 3: label 'Jane Doe, HIV' is not among the classes")

    site = SiteFolder(tmp_path)
    serving(site, work)
    with pytest.raises(TrainerFailed) as error:
        ask(site.site, "train", question())
    assert "Jane" not in str(error.value) and "DataError" in str(error.value) and "Jane Doe" in error.value.full
    assert str(tmp_path) not in told_to_server(ConfigError(f"{tmp_path}/x is missing"), tmp_path)


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


def test_no_server_changes_what_is_held_out(tmp_path: Path) -> None:
    """By another seed or share in its messages than in the site's join.toml: nothing is loaded or trained."""
    tables: dict[str, Any] = {"id": "f", "data": {"label_names": ["no", "yes"]}, "lora": {"target_modules": ["q"]}}
    site, settings = site_folder(tmp_path / "s", federation_folder(tmp_path / "fed")), FederationSettings(**tables)
    for other in ({"run": {"seed": 1}}, {"data": {"label_names": ["no", "yes"], "validation": 0.0}}):
        asked = question()
        enclose(asked, Envelope(FederationSettings(**{**tables, **other}).travelling()))
        with pytest.raises(ConfigError, match=r"join\.toml"):
            trainer.Trainer(site)("train", asked)
    with pytest.raises(ConfigError, match="nowhere"):  # the site's model is not there: it went on
        asked = question()
        enclose(asked, Envelope(settings.travelling()))
        trainer.Trainer(site)("train", asked)


def test_a_file_without_a_row_to_train_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="none to train on"):
        held_out((texts(["a"]), texts([]), texts([])), seed=0, validation=0.99, test=0.0099)
