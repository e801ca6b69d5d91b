"""A site's node: what it waits for, and that it becomes Flower's SuperNode. Kinds of evidence: a scripted server, real
processes, Flower's own loop in place of which a test pulls. Who starts it again: `support.machines`' systemctl."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.node_process import GONE, held, supernode_command, wait_until_admitted
from fedlora.flower.site.reach import Found
from fedlora.flower.site.supernode import watched
from support.processes import Program

ADMITTED = Found("admitted", "fl:443 answers and knows this site's key.")


def waited(*found: Found) -> list[str]:
    """What is said of a server that answers so, one after the other, with short pauses."""
    said, left = list[str](), list(found)
    wait_until_admitted(lambda: left.pop(0), said.append, pauses=(0.01, 0.02))
    assert not left
    return said


def test_it_waits_until_it_is_admitted_and_tells_each_reason_once() -> None:
    nobody = Found("not admitted", "key?")
    down = Found("closed", "port?")
    assert waited(down, down, nobody, nobody, nobody, ADMITTED) == [
        "waiting: port?", "waiting: key?",
    ]  # fmt: skip
    assert waited(ADMITTED) == []


def test_two_cannot_run_in_one_folder(tmp_path: Path) -> None:
    with (
        held(SiteFolder(tmp_path)),
        pytest.raises(ConfigError, match=rf"already runs for .* \(process {os.getpid()}\)"),
        held(SiteFolder(tmp_path)),
    ):
        pass
    with held(SiteFolder(tmp_path)):
        pass


def test_the_node_is_the_supernode_from_then_on(tmp_path: Path) -> None:
    """Of the same number, by which its trainer knows whom it works for; the folder stays locked until it ends, however
    it does, and what it makes is for this user only."""
    words = f"import os; open({str(tmp_path / 'mine')!r}, 'w').write(os.environ['FEDLORA_NODE_PID'])"
    becomes = (
        "import sys\nfrom pathlib import Path\nfrom fedlora.flower.places import SiteFolder\n"
        "from fedlora.flower.site.node_process import become_supernode, held\n"
        f"here = SiteFolder(Path({str(tmp_path)!r}))\nwith held(here) as lock:\n"
        f"    become_supernode([sys.executable, '-c', {words + '; import time; time.sleep(60)'!r}], here, lock)"
    )
    process, mine, end = subprocess.Popen([sys.executable, "-c", becomes]), tmp_path / "mine", time.monotonic() + 30
    try:
        while not (mine.is_file() and mine.read_text()):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        assert mine.read_text() == str(process.pid) and mine.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match=rf"process {process.pid}\)"), held(SiteFolder(tmp_path)):
            pass
    finally:
        process.kill()
        process.wait()
    with held(SiteFolder(tmp_path)):
        pass


WRAPPED = """
import sys, threading, time, types
fake = types.ModuleType("flwr.supernode.cli")
def flower_supernode():
    threading.Thread(target=time.sleep, args=(30,)).start()  # as its API's thread: no daemon
    {body}
fake.flower_supernode = flower_supernode
sys.modules["flwr.supernode.cli"] = fake
sys.argv.append(__file__)  # beside a site.toml
from fedlora.flower.site.supernode import main
main()
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("pass", "the SuperNode ends: the connection"),
        (
            "t = threading.Thread(target=lambda: 1 / 0, name='heart'); t.start(); time.sleep(30)",
            "the SuperNode ends: the thread heart ended",
        ),
    ],
)
def test_a_supernode_never_stays_as_a_shell(
    body: str, words: str, tmp_path: Path, program: Callable[..., Program]
) -> None:
    """flwr's main function returns, or its heartbeat dies, and the process would live on without taking part."""
    (tmp_path / "wrapped.py").write_text(WRAPPED.format(body=body))
    done = program(tmp_path / "wrapped.py").ended(20)
    assert done.returncode == 70 and words in done.stderr


def test_the_command_of_a_supernode(tmp_path: Path) -> None:
    """Absolute, by this interpreter; Flower reads the node's configuration back as it was meant."""
    from flwr.common.config import parse_config_args

    site = SiteFolder(tmp_path / "a site's folder, with blanks")
    command = supernode_command(site, "fl.example.org:443")
    assert command[:4] == [sys.executable, "-m", "fedlora.flower.site.supernode", str(site.site)]
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
