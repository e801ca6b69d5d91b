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

from fedlora.flower.bundle import bundle, digest
from fedlora.flower.places import SiteFolder
from fedlora.flower.server.superlink import SuperLink
from fedlora.flower.site.run import fill_site
from fedlora.flower.terms.joining import Address, JoinFile
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from support.small_apps import packed, small_link

pytestmark = [
    pytest.mark.deployment_all,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def made(tmp_path: Path) -> tuple[SuperLink, SiteFolder]:
    """A server's folder, and a site of it."""
    link, here = small_link(tmp_path / "fed"), SiteFolder(tmp_path / "site")
    host, _, port = link.address.rpartition(":")
    settings = FederationSettings(id="fed-1", data={"label_names": ["no", "yes"]})  # type: ignore[arg-type]
    address = Address(name=host, port=int(port), ca=(link.folder.certificates / "ca.crt").read_text())
    join = JoinFile(federation="fed-1", server=address, agreed=settings.agreed(), facts={})
    here.path.mkdir()
    fill_site(here.path, join, Site("acme", {"data": {"train": "notes.csv"}, "model": {"name": "base"}}))
    return link, here


UNCHECKED = """
from fedlora.cli import main
from fedlora.flower.site import checks
checks.checked_site = lambda folder, server: []  # it has neither data nor a base model
main()
"""


class Running:
    """A site's node as a process, started again when it ends, as its unit is; and the lines that it says."""

    def __init__(self, here: SiteFolder, lines: Path) -> None:
        self.lines = lines
        self._command = [sys.executable, "-c", UNCHECKED, "flower", "node", str(here.path)]
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
        with self.lines.open("ab") as file:
            return subprocess.Popen(self._command, stderr=file, stdout=file, env=env, start_new_session=True)

    def until(self, words: str, times: int = 1, path: Path | None = None) -> None:
        """Wait until the node has said these words, or a file has them."""
        end, place = time.monotonic() + 150, path or self.lines
        while not place.is_file() or place.read_text().count(words) < times:
            assert time.monotonic() < end, (words, self.lines.read_text())
            if self.process.poll() is not None:
                self.process = self._started()
            time.sleep(0.2)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def test_a_site_runs_no_app_but_that_of_its_fedlora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another is refused before anything of it is on the site's disk, at both ends in words with both digests."""
    other = packed("other")
    monkeypatch.setattr("fedlora.flower.server.superlink.bundle", lambda: other)
    link, here = made(tmp_path)
    node, replies = Running(here, tmp_path / "lines"), link.folder.path / "replies"
    try:
        link.start()
        link.keep_keys({"acme": here.public_key})
        node.until("admitted: online")
        link.run()
        node.until("waiting: the server's Flower app")
        node.until("this site runs no such app", 2, replies)
        for words in (node.lines.read_text(), replies.read_text()):
            assert digest(other) in words and digest(bundle()) in words, words
        assert "done" not in replies.read_text() and not (here.path / "ran").exists()
        everything = [path for path in here.path.rglob("*") if path.is_file()]
        assert not [path for path in everything if b'"other' in path.read_bytes()]
    finally:
        node.end()
        link.stop()


def test_a_node_waits_is_admitted_outlives_the_superlink_and_is_put_out(tmp_path: Path) -> None:
    """In this order: no server, an unknown key, admitted, the server gone and back, the key taken away, SIGTERM.
    Nothing is left behind."""
    link, here = made(tmp_path)
    running = Running(here, tmp_path / "lines")
    until = running.until
    try:
        until("cannot be reached from here")
        link.start()
        until("this site's key is not registered there")
        link.keep_keys({"acme": here.public_key})
        until("admitted: online")
        assert [(node.name, node.status) for node in link.nodes()] == [("acme", "online")]
        assert link.process is not None
        os.killpg(link.process.pid, signal.SIGKILL)
        link.process.wait()
        until("cannot be reached from here", 2)
        link.start()
        until("admitted: online", 2)
        link.keep_keys({})
        until("this site's key is not registered there", 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        time.sleep(2)  # what a SuperNode has started ends with it
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert not [line for line in left.splitlines() if str(here.path) in line]
    finally:
        running.end()
        link.stop()
