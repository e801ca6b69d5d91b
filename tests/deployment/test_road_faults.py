"""Faults on real machines, and the containers' commands. Kind: *attack*.

One federation runs all the while, that of test_road.py, where the main faults are; each test makes another one, mends
it, and asks for more rounds of all three sites. They are for `make deployment-all`.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("flwr")

from support.containers import services
from support.machines import SERVER_NAME, machines_needed
from support.road import PROXY, SERVER, SITE, Road, stopped

pytestmark = [
    pytest.mark.deployment_all, machines_needed("nginx", "mount"), pytest.mark.timeout(1200)
]  # fmt: skip


def test_a_site_is_too_slow(running: Road) -> None:
    berlin = running.network["berlin"]
    said = len(running.server.said(SERVER))
    trainers = berlin.pids("flower node")
    assert trainers, "no trainer"
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    running.wait_said(running.server, SERVER, "berlin[^\n]*late", said, seconds=240)
    for pid in trainers:
        os.kill(pid, signal.SIGCONT)
    running.until_next_rounds(1, 400)


def test_the_proxy_is_restarted(running: Road) -> None:
    with stopped(running.server, PROXY):
        time.sleep(8)
    running.until_next_rounds(1, 400)


def test_the_server_is_switched_off_and_on(running: Road) -> None:
    before = running.rounds()[-1]["round"]
    assert running.server.kill() > 3
    time.sleep(3)
    said = len(running.server.said(SERVER))
    assert running.server.run("systemctl", "start", PROXY, SERVER).code == 0  # as systemd does when it boots
    running.wait_said(running.server, SERVER, "going on|done", said, seconds=240)
    running.until_next_rounds(1, 400)
    numbers = [one["round"] for one in running.rounds()]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > before


def test_the_containers_commands_play_a_round(running: Road) -> None:
    """The own words of examples/deploy, run here without containers: server, proxy and a site, in place of their
    units. The image and the mounts are tested by nobody: there is no daemon."""
    server, acme = running.server, running.network["acme"]
    found = services("server.yaml", FED=running.fed, OWNER="0:0", NAME=SERVER_NAME)
    site = services("site.yaml", SITE="site", OWNER="0:0")["site"]["command"]
    with stopped(acme, SITE), stopped(server, SERVER), stopped(server, PROXY):
        server.start("server-container", "fedlora", *found["server"]["command"])
        server.start("proxy-container", *found["proxy"]["entrypoint"])
        acme.start("site-container", "fedlora", *site)
        try:
            assert site == ["flower", "node", "site"]
            running.until_next_rounds(1, 300)
        finally:
            for machine, called in (
                (acme, "site-container"),
                (server, "server-container"),
                (server, "proxy-container"),
            ):
                machine.end(called, seconds=60)
    running.until_next_rounds(1, 400)
