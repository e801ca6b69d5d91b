"""The road of docs/how-to/federation.md on five machines, by the page's own commands: from nothing to an adapter.

On the way a site's key is replaced, and the SuperLink is killed. More faults: test_road_faults.py. Kind: *end to end*.
"""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("flwr")

from fedlora import read_adapter
from support.machines import Machine, machines_needed, until
from support.page import KINDS, PAGE, blocks
from support.road import SERVER, SITE, SITES, START, Road

pytestmark = [pytest.mark.deployment, machines_needed("nginx", "mount"), pytest.mark.timeout(1200)]


def test_every_block_of_the_page_is_of_a_kind_that_is_run() -> None:
    """A block without a machine would be a command that nobody has tried."""
    found = blocks(PAGE.read_text(encoding="utf-8"))
    assert found and {(block.language, block.whom) for block in found} <= KINDS


def new_key(site: Machine, server: Machine) -> None:
    """The page's "another key", at the site and at the server."""
    made = "cd site && rm key key.pub && ssh-keygen -q -t ecdsa -b 384 -N '' -f key"
    assert site.shell(made).code == 0
    shutil.copy(site.folder / "site" / "key.pub", server.folder / f"{site.name}-new.pub")
    done = server.run("fedlora", "flower", "admit", "fed", site.name, f"{site.name}-new.pub")
    assert done.code == 0, done.out


def test_the_page_is_followed_on_five_machines_and_ends_with_an_adapter(road: Road) -> None:
    """One site's key is replaced before its first round; then the SuperLink is killed, and its unit starts it again."""
    server, berlin = road.server, road.network["berlin"]
    road.walk(*START[:-1])
    for site in road.sites:  # its program is there before the server has admitted it
        road.wait_said(site, SITE, "this site's key is not registered")
        assert site.run("systemctl", "stop", SITE).code == 0
    road.walk(START[-1])
    new_key(berlin, server)
    for site in road.sites:
        assert site.run("systemctl", "start", SITE).code == 0
    for site in road.sites:  # nothing but its own is at a site, and none of it at the server
        assert not list(road.fed.rglob("*.csv"))
        assert (site.folder / "site" / "key").stat().st_mode & 0o077 == 0
        road.wait_said(site, SITE, "admitted: online", seconds=180)
    until(road.rounds, 300, "round 1", *road.network)
    told = len(server.said(SERVER))
    assert server.kill("superlink_process") >= 1
    road.wait_said(server, SERVER, "SuperLink ended", told)
    road.wait_said(server, SERVER, "complete after 2 rounds", seconds=300)
    road.walk("4. Watch the rounds", "5. After the last round")

    assert "{0: 'no', 1: 'yes'}" in road.seen[-1][2].out  # what the page's Python printed: the adapter is in peft
    lines = road.rounds()
    assert [line["round"] for line in lines] == [1, 2]
    assert all(set(line["fates"]) == set(SITES) and len(line["weights"]) > 1 for line in lines)
    adapter, _ = read_adapter(road.fed / "server" / "adapter")
    assert adapter.modules
    summary = json.loads((road.fed / "server" / "summary.json").read_text())
    assert summary["rounds"] == 2
