"""The machines that the deployment's tests run on are apart: names, links, clocks, processes. Kind: *contract*."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.machines import Network, machines_needed, until

pytestmark = [pytest.mark.deployment, machines_needed()]

ASK = "import socket, sys; s = socket.create_connection((sys.argv[1], 8000), 2); print(s.recv(9).decode())"
ANSWER = """
import socket, sys
s = socket.create_server((sys.argv[1], 8000))
while True:
    s.accept()[0].send(b"it is me")
"""


def test_machines_reach_one_another_by_name_until_the_cable_is_out(tmp_path: Path) -> None:
    with Network(tmp_path, ["server", "acme"]) as network:
        server, acme = network["server"], network["acme"]
        server.start("open", "python", "-c", ANSWER, "0.0.0.0")
        until(lambda: "me" in acme.run("python", "-c", ASK, "fl.example.org").out, 10, "answered", server, acme)
        assert "refused" in acme.run("python", "-c", ASK, "localhost").out  # its own loopback
        acme.link(up=False)
        assert acme.run("python", "-c", ASK, "fl.example.org").code != 0
        acme.link(up=True)
        until(lambda: "me" in acme.run("python", "-c", ASK, "fl.example.org").out, 10, "answered again", server)
        assert server.pids("socket") and not acme.pids()
        assert server.kill() >= 1 and not server.pids()
    assert not list(Path("/etc/netns").glob(f"{network._prefix}*"))


@machines_needed("faketime")
def test_a_machine_can_have_another_clock(tmp_path: Path) -> None:
    with Network(tmp_path, ["server"]) as network:
        network["server"].clock = "-600s"
        there = float(network["server"].run("python", "-c", "import time; print(time.time())").out)
        assert 590 < time.time() - there < 620


def test_the_stand_in_for_systemd_starts_again_what_dies_and_ends_what_it_started(tmp_path: Path) -> None:
    with Network(tmp_path, ["server"]) as network:
        server = network["server"]
        unit = server.folder / ".units" / "a.service"
        unit.parent.mkdir()
        unit.write_text(
            f"[Service]\nWorkingDirectory={server.folder}\nEnvironment=A=b\nRestart=always\nRestartSec=0.2\n"
            f"ExecStart=/bin/sh -c 'echo began $A; exec sleep 1000'\n"
        )
        assert server.shell("sudo systemctl enable --now a.service").code == 0
        until(lambda: "began b" in server.said("a"), 10, "began", server)
        assert server.kill("sleep 1000") == 1
        until(lambda: server.said("a").count("began") == 2, 10, "began again", server)
        assert "began b" in server.run("journalctl", "-u", "a").out
        assert server.run("systemctl", "stop", "a").code == 0
        assert not server.pids("sleep 1000")
