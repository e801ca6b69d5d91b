"""Faults on real machines, and the containers' commands. Kind: *attack*.

One federation runs all the while, that of test_road.py; each test makes a fault, mends it, and asks for more rounds of
all three sites. They are for `make deployment-all`.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

pytest.importorskip("flwr")

from fedlora.flower.terms import certificates
from support.certificates import server_files
from support.containers import services
from support.machines import SERVER_NAME, Machine, machines_needed
from support.road import PROXY, SERVER, SITE, SITES, Road, stopped, write_notes

pytestmark = [
    pytest.mark.deployment_all, machines_needed("nginx", "curl", "faketime", "mount"), pytest.mark.timeout(1200)
]  # fmt: skip


def knocks_where_it_may_not(stranger: Machine) -> None:
    """With the CA's certificate and without, at every door."""
    ca = stranger.folder / "ca.crt"
    for trust in (f"--cacert {ca}", "--insecure"):
        for path in ("v1/control/list-runs", "v1/control/start-run", "v1/runtime/get-nodes", "health", "docs", ""):
            asked = f"curl -sS -m 10 {trust} -o /dev/null -w '%{{http_code}}' -X POST https://{SERVER_NAME}/{path}"
            assert stranger.shell(asked).out == "403", path
        fleet = f"curl -sS -m 10 {trust} -w '%{{http_code}}' -X POST -H 'content-type: application/protobuf'"
        assert "401" in stranger.shell(f"{fleet} https://{SERVER_NAME}/v1/fleet/pull-messages").out
    port = f"python -c \"import socket; socket.create_connection(('{SERVER_NAME}', 18080), 3)\""
    assert "refused" in stranger.shell(f"{port} || true").out


def test_nobody_trains_who_has_another_model_key_clock_or_certificate(running: Road) -> None:
    """Each site starts with another fault, the stranger has the join file and a model, and then TLS is wrong for all.
    Each is told why, and all is as it was afterwards."""
    road = running
    for site in road.sites:
        assert site.run("systemctl", "stop", SITE).code == 0
    played = len(road.rounds())
    acme, berlin, cork, stranger = (road.network[name] for name in (*SITES, "stranger"))
    weights, key = berlin.folder / "model" / "model.safetensors", cork.folder / "site" / "key"
    public = road.fed / "certs"
    half = key.with_name("key.pub")
    kept = {path: path.read_bytes() for path in (weights, key, half, public / "server.crt", public / "server.key")}
    weights.write_bytes(kept[weights][:-1] + bytes([kept[weights][-1] ^ 1]))
    assert cork.run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "other").code == 0
    key.write_bytes((cork.folder / "other").read_bytes())
    half.write_bytes((cork.folder / "other.pub").read_bytes())
    acme.clock = "+600s"
    shutil.copytree(acme.folder / "model", stranger.folder / "model")
    write_notes(stranger.folder / "notes.csv", 9)
    shutil.copy(road.fed / "join.toml", stranger.folder / "join.toml")
    shutil.copy(road.fed / "certs" / "ca.crt", stranger.folder / "ca.crt")
    for site in road.sites:
        assert site.run("systemctl", "start", SITE).code == 0
    words = "fedlora flower site site --name acme --join join.toml --data notes.csv --model model"
    made = stranger.run(*words.split())
    assert made.code == 0, made.out
    stranger.start("node", "fedlora", "flower", "node", "site")
    knocks_where_it_may_not(stranger)

    road.wait_said(berlin, SITE, "base is [0-9a-f]+")
    road.wait_said(cork, SITE, "this site's key is not registered")
    road.wait_said(acme, SITE, "clock is \\+\\d+ seconds from")
    road.wait_said(stranger, "node", "this site's key is not registered")
    stranger.end("node")
    told = len(cork.said(SITE))
    server_files(public, certificates._kept_authority(public), [SERVER_NAME, "localhost"], begin=-40, end=-1)
    with stopped(road.server, PROXY):
        pass
    road.wait_said(cork, SITE, "certificate of \\S+ is not trusted: certificate has expired", told)
    assert len(road.rounds()) == played

    for site in road.sites:
        assert site.run("systemctl", "stop", SITE).code == 0
    acme.clock = ""
    for path, content in kept.items():
        path.write_bytes(content)
    with stopped(road.server, PROXY):
        pass
    for site in road.sites:
        assert site.run("systemctl", "start", SITE).code == 0
    road.until_next_rounds(1, 400)


def test_a_node_is_killed(running: Road) -> None:
    """With its SuperNode; its unit starts both again."""
    cork = running.network["cork"]
    told = len(cork.said(SITE))
    assert cork.kill("flower node") >= 1
    running.wait_said(cork, SITE, "admitted: online", told, 180)
    running.until_next_rounds(1, 400)


def test_a_cable_is_out_and_the_superlink_is_killed(running: Road) -> None:
    """The others go on meanwhile."""
    cork, server = running.network["cork"], running.server
    told, out = len(server.said(SERVER)), time.monotonic()
    cork.link(up=False)
    assert server.kill("superlink_process") >= 1
    running.wait_said(server, SERVER, "SuperLink ended", told)
    time.sleep(max(0.0, 30 - (time.monotonic() - out)))
    cork.link(up=True)
    running.until_next_rounds(1, 300, of=("acme", "berlin"))
    running.wait_said(server, SERVER, r"round \d+  loss", told)
    running.until_next_rounds(1, 400)


def test_a_site_is_too_slow(running: Road) -> None:
    berlin = running.network["berlin"]
    said = len(running.server.said(SERVER))
    trainers = berlin.pids("flower node")
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
            acme.end("site-container", seconds=60)
            for called in ("server-container", "proxy-container"):
                server.end(called, seconds=60)
    running.until_next_rounds(1, 400)
