"""A site's node, kept running. Kinds of evidence: fake SuperNodes that say what flwr 1.41 says, a scripted server, real
processes that are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site import node_process
from fedlora.flower.site.node_log import Said, round_of, said
from fedlora.flower.site.node_process import NodeProcess, held, supernode_command
from fedlora.flower.site.reach import Found
from fedlora.flower.site.work_log import Work, write

ADMITTED = Found("admitted", "fl:443 answers and knows this site's key.", 0.0)
ONLINE = "print('INFO :      SuperNode ID: 7', flush=True)"
STAY = "import time; time.sleep(60)"


class Played:
    """A node whose server answers one thing after the other, and whose SuperNodes are these programs, the last ones
    for ever."""

    def __init__(self, folder: Path, found: Sequence[Found], programs: Sequence[str]) -> None:
        self.lines: list[str] = []
        self.site = SiteFolder(folder)
        self._found, self._programs = list(found), list(programs)
        self.node = NodeProcess(
            self.site, look=self._look, command=self._command, say=self.lines.append, pauses=(0.01, 0.02, 0.04)
        )
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.code = self.node.run()

    def _look(self) -> Found:
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]

    def _command(self) -> list[str]:
        program = self._programs.pop(0) if len(self._programs) > 1 else self._programs[0]
        return [sys.executable, "-c", program]

    def __enter__(self) -> Played:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.node.stop()
        self._thread.join(20)
        assert self.code == 0, self.lines

    def until(self, words: str, times: int = 1) -> None:
        end = time.monotonic() + 20
        while sum(words in line for line in self.lines) < times:
            assert time.monotonic() < end, (words, self.lines)
            time.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_process, "_STEP", 0.02)
    monkeypatch.setattr(node_process, "_STILL_ONLINE", 0.02)


def test_it_waits_until_it_is_admitted_tells_each_reason_once_and_the_rounds(tmp_path: Path) -> None:
    nobody = Found("not admitted", "its key is not registered.")
    down = Found("closed", "nothing listens.")
    program = f"{ONLINE}\nprint('\\x1b[92mINFO \\x1b[0m:      [RUN 12, ROUND fed-1-3-0]', flush=True)\n{STAY}"
    with Played(tmp_path, [down, down, nobody, nobody, nobody, ADMITTED], [program]) as played:
        played.until("round 3: ")
        write(tmp_path, Work("train", 3, 120, 14.21, 0.412))
        played.until("round 3: trained 120 ")
    assert [line.partition(":")[0] for line in played.lines] == [
        "waiting", "waiting", "admitted", "round 3", "round 3", "stopped.",
    ]  # fmt: skip
    assert "nothing listens" in played.lines[0] and "key" in played.lines[1] and "loss 0.4120" in played.lines[4]


def test_a_supernode_that_ends_is_started_again_and_the_reason_told(tmp_path: Path) -> None:
    """Code 0 on its own (flwr's answer to a 401), Flower's box of an error, our wrapper's words, a signal."""
    failing = [
        f"{ONLINE}",
        "print('ERROR :     Exit Code: 302'); print('Unable to parse the private key file.'); raise SystemExit(1)",
        "import sys; print('fedlora: the connection broke off', file=sys.stderr); raise SystemExit(70)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        f"{ONLINE}\n{STAY}",
    ]
    with Played(tmp_path, [ADMITTED], failing) as played:
        played.until("admitted: online", 2)
    ended = [line for line in played.lines if line.startswith("the SuperNode ended")]
    assert len(ended) == 4
    assert "(401)" in ended[0] and "code 302: Unable to parse" in ended[1]
    assert "(the connection broke off)" in ended[2] and "signal SIGKILL" in ended[3]


def test_a_node_that_is_still_taken_for_online_is_told_and_tried_again(tmp_path: Path) -> None:
    refused = "print('ERROR : Exit Code: 305\\n[code: 2004] Failed to activate SuperNode.'); raise SystemExit(1)"
    with Played(tmp_path, [ADMITTED], [refused, refused, f"{ONLINE}\n{STAY}"]) as played:
        played.until("admitted: online")
    assert sum("for online still" in line for line in played.lines) == 1
    assert not [line for line in played.lines if line.startswith("the SuperNode ended")]


def test_a_server_that_goes_and_comes_back_is_told_with_the_reason(tmp_path: Path) -> None:
    lost = "print('WARNING :   Connection attempt failed, retrying in 1.00 seconds', flush=True)"
    back = "print('INFO :      Connection successful after 2.50 seconds and 3 tries.', flush=True)"
    wait = "import time; time.sleep(0.4)"
    gone = Found("no federation", "no SuperLink stands behind it (502).")
    with Played(tmp_path, [ADMITTED, gone], ["\n".join([ONLINE, lost, wait, lost, back, STAY])]) as played:
        played.until("the server is back")
    assert [line.partition(":")[0] for line in played.lines] == [
        "admitted",
        "waiting",
        "the server is back",
        "stopped.",
    ]
    assert "no SuperLink stands behind it (502)" in played.lines[1]


@pytest.mark.parametrize("came", ["Received successfully", "Sent successfully"])
def test_an_absence_ends_with_the_first_call_that_comes_through(came: str, tmp_path: Path) -> None:
    """Another thread's "Connection successful" came minutes later, with work between: "the server is back after 413 s"
    was said of a server that had been there. What only begins to be sent is no sign of life."""
    lost = "print('WARNING :   Connection attempt failed, retrying in 1.00 seconds', flush=True)"
    begins = "print('INFO :   [RUN 1, ROUND fed-4f21c0-3-0]', flush=True)"
    works = f"print('INFO :   {came}', flush=True)"
    late = "print('INFO :      Connection successful after 413.00 seconds and 9 tries.', flush=True)"
    with Played(tmp_path, [ADMITTED], ["\n".join([ONLINE, lost, begins, STAY])]) as played:
        played.until("round 3: work has come")
    assert not [line for line in played.lines if "is back" in line]
    (tmp_path / "second").mkdir()
    with Played(tmp_path / "second", [ADMITTED], ["\n".join([ONLINE, lost, works, late, begins, STAY])]) as played:
        played.until("round 3: work has come")
    back = [line for line in played.lines if "is back" in line]
    assert len(back) == 1 and re.search(r"answers [01] s after", back[0])


def test_a_trouble_that_lasts_is_told_again_and_clocks_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_process, "AGAIN", 0.05)
    late = Found("admitted", "", -42.0)
    found = [Found("clock", "10 minutes behind.")] * 8 + [late]
    with Played(tmp_path, found, [f"{ONLINE}\n{STAY}"]) as played:
        played.until("admitted")
    assert played.lines[0] == "waiting: 10 minutes behind."
    assert any(line.startswith("still waiting, since 0 minutes: 10 ") for line in played.lines)
    assert any("clock is 42 s behind" in line for line in played.lines)


def test_two_cannot_run_in_one_folder(tmp_path: Path) -> None:
    with (
        held(SiteFolder(tmp_path)),
        pytest.raises(ConfigError, match=rf"runs for .* already \(process {os.getpid()}\)"),
        held(SiteFolder(tmp_path)),
    ):
        pass
    with held(SiteFolder(tmp_path)):
        pass


def test_everything_that_it_started_ends_with_it(tmp_path: Path) -> None:
    """Also what a SuperNode has started, and what ignores SIGTERM."""
    pids = tmp_path / "pids"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    program = (
        f"import os, subprocess, sys, time\nc = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{c.pid}}')\n{ONLINE}\ntime.sleep(60)"
    )
    with Played(tmp_path, [ADMITTED], [program]) as played:
        played.until("admitted")
    time.sleep(0.2)
    assert not [pid for pid in pids.read_text().split() if alive(int(pid))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


WRAPPED = """
import sys, threading, time, types
fake = types.ModuleType("flwr.supernode.cli")
def flower_supernode():
    threading.Thread(target=time.sleep, args=(30,)).start()  # as its API's thread: no daemon
    {body}
fake.flower_supernode = flower_supernode
sys.modules["flwr.supernode.cli"] = fake
from fedlora.flower.site.supernode import main
main()
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("pass", "fedlora: the connection"),
        (
            "t = threading.Thread(target=lambda: 1 / 0, name='heart'); t.start(); time.sleep(30)",
            "fedlora: the thread heart ended",
        ),
    ],
)
def test_a_supernode_never_stays_as_a_shell(body: str, words: str) -> None:
    """flwr's main function returns, or its heartbeat dies, and the process would live on without taking part."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WRAPPED.format(body=body)], capture_output=True, text=True, timeout=25)
    assert done.returncode == 70 and words in done.stderr and time.monotonic() - began < 20
    assert said(next(line for line in done.stderr.splitlines() if line.startswith("fedlora:"))) is not None


def test_a_supernode_ends_with_who_started_it(tmp_path: Path) -> None:
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); time.sleep(30)"
    starter = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {WRAPPED.format(body=body)!r}],"
        " env={**os.environ, 'FEDLORA_NODE_PID': str(os.getpid())})\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", starter])
    until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text() != "")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(int((tmp_path / "pid").read_text())))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_command_of_a_supernode(tmp_path: Path) -> None:
    """Absolute, by this interpreter; Flower reads the node's configuration back as it was meant."""
    from flwr.common.config import parse_config_args

    site = SiteFolder(tmp_path / "a site's folder, with blanks")
    command = supernode_command(site, "fl.example.org:443", site.key)
    assert command[:3] == [sys.executable, "-m", "fedlora.flower.site.supernode"]
    config = command[command.index("--node-config") + 1]
    assert parse_config_args([config]) == {"site": str(site.site)}
    assert command[command.index("--auth-supernode-private-key") + 1] == str(site.key)
    assert "--insecure" not in command


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("\x1b[92mINFO \x1b[0m:      SuperNode ID: 18164", Said("online", "18164")),
        ("INFO :      [RUN 99, ROUND 12]", Said("round", "12")),
        ("INFO :      Sent successfully", Said("came through", "Sent successfully")),
        ("ERROR :     Failed to send message ab12: no room", Said("not sent", "no room")),
        ("INFO :      Starting Flower SuperNode", None),
    ],
)
def test_lines_of_a_log(line: str, found: Said | None) -> None:
    assert said(line) == found


def test_the_round_of_a_message_is_that_of_the_servers_group() -> None:
    """`Attempt.group` and `SiteEvaluation` make these names."""
    groups = ["fed-4f21c0-12-1", "fed-4f21c0-12-measure-validation", "odd"]
    assert [round_of(group) for group in groups] == ["12", "12", "odd"]


def test_the_lines_that_are_read_are_those_that_flwr_has() -> None:
    """Each pattern's words stand in the installed flwr: an upgrade that words them otherwise fails here."""
    import flwr

    root = Path(flwr.__file__).parent
    files = ["start_client_internal.py", "fleet_http_connection.py"]
    files = [f"supernode/{name}" for name in files] + ["supercore/retry/http_retry.py", "supercore/exit/exit.py"]
    source = "\n".join((root / name).read_text() for name in files)
    words = [
        "SuperNode ID: %s", "[RUN %s, ROUND %s]", "Sent successfully", "Failed to send message %s: %s",
        "Failed to receive message %s: %s", "Connection attempt failed, retrying in %.2f seconds",
        "Connection successful after %.2f seconds", "Exit Code: {code}", "[code: {flower_error.code}]",
    ]  # fmt: skip
    assert [each for each in words if each not in source] == []
