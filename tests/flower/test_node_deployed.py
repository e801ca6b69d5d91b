"""A site runs no app but that of its fedlora, against Flower's own SuperLink with TLS and node authentication. Kind:
*end to end*, real processes. What a node waits for and outlives: tests/deployment/test_road.py.
"""

from __future__ import annotations

import contextlib
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
    """A site's node as a process, and the lines that it says."""

    def __init__(self, here: SiteFolder, lines: Path) -> None:
        self.lines = lines
        command = [sys.executable, "-c", UNCHECKED, "flower", "node", str(here.path)]
        env = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
        with lines.open("ab") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, env=env, start_new_session=True)

    def until(self, words: str, times: int = 1, path: Path | None = None) -> None:
        """Wait until the node has said these words, or a file has them."""
        end, place = time.monotonic() + 150, path or self.lines
        while not place.is_file() or place.read_text().count(words) < times:
            assert time.monotonic() < end and self.process.poll() is None, (words, self.lines.read_text())
            time.sleep(0.2)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
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
