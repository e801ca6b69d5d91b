"""The road of docs/deployment.md on five machines, by the page's own commands: from nothing to an adapter, with a site
and the SuperLink killed on the way, and a stranger at the door. Kind: *end to end*."""

from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("flwr")

from fedlora import read_adapter
from support.machines import SERVER_NAME, machines_needed
from support.page import KINDS, PAGE, blocks
from support.road import SITES, START, Road

pytestmark = [pytest.mark.deployment, machines_needed("nginx", "curl"), pytest.mark.timeout(1200)]


def test_every_block_of_the_page_is_of_a_kind_that_is_run() -> None:
    """A block without a machine would be a command that nobody has tried."""
    found = blocks(PAGE.read_text(encoding="utf-8"))
    assert found and {(block.language, block.whom) for block in found} <= KINDS


def test_the_page_is_followed_on_five_machines_and_ends_with_an_adapter(road: Road) -> None:
    road.walk(*START)
    for site in road.sites:  # nothing but its own is at a site, and none of it at the server
        assert not list(road.fed.rglob("*.csv"))
        assert (site.folder / "site" / "key").stat().st_mode & 0o077 == 0
    road.until_round(1, 300)

    stranger = road.network["stranger"]
    shutil.copy(road.fed / "public" / "ca.crt", stranger.folder / "ca.crt")
    for trust in ("--cacert ca.crt", "--insecure"):
        for path in ("v1/control/list-runs", "v1/control/start-run", "v1/runtime/get-nodes", "health", "docs", ""):
            asked = f"curl -sS -m 10 {trust} -o /dev/null -w '%{{http_code}}' -X POST https://{SERVER_NAME}/{path}"
            assert stranger.shell(asked).out == "403", path
        fleet = f"curl -sS -m 10 {trust} -w '%{{http_code}}' -X POST -H 'content-type: application/protobuf'"
        assert "401" in stranger.shell(f"{fleet} https://{SERVER_NAME}/v1/fleet/pull-messages").out
    port = f"python -c \"import socket; socket.create_connection(('{SERVER_NAME}', 18080), 3)\""
    assert "refused" in stranger.shell(f"{port} || true").out

    killed = road.network["cork"]
    assert killed.kill("flower node") >= 1  # its unit starts it again
    road.until_round(3, 300)
    assert road.server.kill("flower-superlink") >= 1
    road.until_round(6, 300)
    road.wait_said(road.server, "fedlora-server", "complete after 6 rounds", seconds=120)
    road.walk("5. What you see")

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
