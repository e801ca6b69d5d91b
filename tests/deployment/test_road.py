"""The road of docs/how-to/federation.md on five machines, by the page's own commands: from nothing to an adapter.

On the way every site is wrong at first, a stranger knocks, a site and the SuperLink are killed and a cable is out.
Kind: *end to end*, *attack*.
"""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("flwr")

from fedlora import read_adapter
from support.certificates import DAY, certificates
from support.machines import SERVER_NAME, Machine, machines_needed
from support.page import KINDS, PAGE, blocks
from support.road import PROXY, SERVER, SITE, SITES, START, Road, stopped, write_notes

pytestmark = [
    pytest.mark.deployment, machines_needed("nginx", "curl", "faketime", "mount"), pytest.mark.timeout(1200)
]  # fmt: skip


def test_every_block_of_the_page_is_of_a_kind_that_is_run() -> None:
    """A block without a machine would be a command that nobody has tried."""
    found = blocks(PAGE.read_text(encoding="utf-8"))
    assert found and {(block.language, block.whom) for block in found} <= KINDS


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


def everything_is_wrong_at_first(road: Road) -> None:
    """Each site starts with another fault, the stranger has the join file and a model, and then TLS is wrong for all.
    Nobody trains, each is told why, and all is as it was afterwards."""
    acme, berlin, cork, stranger = (road.network[name] for name in (*SITES, "stranger"))
    weights, key, public = (
        berlin.folder / "model" / "model.safetensors",
        cork.folder / "site" / "key",
        road.fed / "certs",
    )
    half = key.with_name("key.pub")
    kept = {path: path.read_bytes() for path in (weights, key, half, public / "server.crt", public / "server.key")}
    weights.write_bytes(kept[weights][:-1] + bytes([kept[weights][-1] ^ 1]))
    assert cork.run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "other").code == 0
    key.write_bytes((cork.folder / "other").read_bytes())
    half.write_bytes((cork.folder / "other.pub").read_bytes())
    acme.clock = "+600s"
    shutil.copytree(acme.folder / "model", stranger.folder / "model")
    write_notes(stranger.folder / "notes.csv", 40, 9)
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
    certificates(public, [SERVER_NAME, "localhost"], begins=-40 * DAY, ends=-DAY, of=public)
    with stopped(road.server, PROXY):
        pass
    road.wait_said(cork, SITE, "certificate of \\S+ is not trusted: certificate has expired", told)
    assert not road.rounds()

    with ThreadPoolExecutor() as at_once:
        assert [done.code for done in at_once.map(lambda site: site.run("systemctl", "stop", SITE), road.sites)] == [
            0
        ] * 3
    acme.clock = ""
    for path, content in kept.items():
        path.write_bytes(content)
    with stopped(road.server, PROXY):
        pass


def test_the_page_is_followed_on_five_machines_and_ends_with_an_adapter(road: Road) -> None:
    road.walk(*START[:-1])
    for site in road.sites:  # its program is there before the server has admitted it
        road.wait_said(site, SITE, "this site's key is not registered")
        assert site.run("systemctl", "stop", SITE).code == 0
    road.walk(START[-1])
    everything_is_wrong_at_first(road)
    for site in road.sites:
        assert site.run("systemctl", "start", SITE).code == 0
    for site in road.sites:  # nothing but its own is at a site, and none of it at the server
        assert not list(road.fed.rglob("*.csv"))
        assert (site.folder / "site" / "key").stat().st_mode & 0o077 == 0
    road.set_deadline(60)  # a message that a broken line swallows is waited for as long

    cork, server = road.network["cork"], road.server
    road.wait_said(cork, SITE, "admitted: online")
    told_site = len(cork.said(SITE))
    assert cork.kill("flower node") >= 1  # with its SuperNode; its unit starts both again
    road.until_round(1, 300)
    told = len(server.said(SERVER))
    road.wait_said(cork, SITE, "admitted: online", told_site, 180)
    road.until_next_rounds(1, 300)

    told = len(server.said(SERVER))
    cork.link(up=False)
    out = time.monotonic()
    assert server.kill("superlink_process") >= 1
    road.wait_said(server, SERVER, "SuperLink ended", told)
    time.sleep(max(0.0, 30 - (time.monotonic() - out)))
    cork.link(up=True)
    road.until_next_rounds(1, 300, of=("acme", "berlin"))
    road.wait_said(server, SERVER, r"round \d+  loss", told)
    road.until_round(6, 300)
    road.wait_said(server, SERVER, "complete after 6 rounds", seconds=120)
    road.walk("4. Watch the rounds", "5. After the last round")

    assert "{0: 'no', 1: 'yes'}" in road.seen[-1][2].out  # what the page's Python printed: the adapter is in peft
    lines = road.rounds()
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert set(line["fates"]) == set(SITES)
    assert set(lines[-1]["weights"]) == set(SITES)  # cork is back
    adapter, _ = read_adapter(road.fed / "server" / "adapter")
    assert adapter.modules
    summary = json.loads((road.fed / "server" / "summary.json").read_text())
    assert summary["rounds"] == 6
