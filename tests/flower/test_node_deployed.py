"""A site's node against Flower's own SuperLink, with TLS and node authentication. Kind: *end to end*, real processes.

Marked `deployment_all`: it takes a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.flower.places import SiteFolder
from fedlora.flower.serving.superlink import SuperLink
from fedlora.flower.site.join_site import make_site
from fedlora.flower.site.node_process import free_port
from fedlora.flower.terms import certificates
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site

pytestmark = [
    pytest.mark.deployment_all,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def test_a_node_waits_is_admitted_outlives_the_superlink_and_is_put_out(tmp_path: Path) -> None:
    """In this order: no server, an unknown key, admitted, the server gone and back, the key taken away, SIGTERM.
    Nothing is left behind."""
    home, here, port = tmp_path / "fed", SiteFolder(tmp_path / "site"), free_port()
    (home / "flwr").mkdir(parents=True)
    certificates.write_loopback(home / "certs")
    ca = home / "certs" / "ca.crt"
    (home / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "fedlora"\n[superlink.fedlora]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{ca}"\n'
    )
    settings = FederationSettings.from_travelling('{"id": "fed-1", "data": {"labels": ["no", "yes"]}}')
    join = JoinFile("fed-1", "acme", 4, "127.0.0.1", port, ca.read_text(), settings.travelling(), {})
    (tmp_path / "join.toml").write_text(join.text())
    make_site(here.path, tmp_path / "join.toml", Site(name="acme", data="notes.csv", model="base"), {})
    link, lines = SuperLink(home), tmp_path / "lines"
    command = [sys.executable, "-m", "fedlora.cli", "flower", "node", str(here.path), "--no-check"]
    env = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
    with lines.open("wb") as file:
        node = subprocess.Popen(command, stderr=file, env=env, start_new_session=True)

    def until(words: str, times: int = 1) -> None:
        end = time.monotonic() + 90
        while lines.read_text().count(words) < times:
            assert time.monotonic() < end and node.poll() is None, (words, lines.read_text())
            time.sleep(0.2)

    try:
        until("nothing listens at port")
        link.start()
        until("this site's key is not registered there")
        link.register("acme", here.public_key)
        until("admitted: online")
        assert link.online() == ["acme"]
        link.kill()
        until("nothing listens at port", 2)
        link.start()
        until("the server is back after")
        link.unregister("acme")
        until("this site's key is not registered there", 2)
        node.send_signal(signal.SIGTERM)
        assert node.wait(30) == 0 and "stopped." in lines.read_text()
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert not [line for line in left.splitlines() if str(here.path) in line]
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        link.stop()
