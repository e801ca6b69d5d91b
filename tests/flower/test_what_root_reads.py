"""What the units may write is read by root's `status` and `doctor`, and written to by whoever calls `serve` or `node`:
whatever lies there, they end in time, within their memory, and change nothing elsewhere. Kind: *enumeration*, of the
files and of what the app could put in their place."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower import children
from fedlora.flower.ownership import serving
from fedlora.flower.places import FederationFolder, SiteFolder
from fedlora.flower.rounds.events import Ended, EventWriter
from fedlora.flower.rounds.playing import played_by_one
from fedlora.flower.site import node_process
from support.command_line import Said
from support.deployed_folders import federation_folder, site_folder

MEMORY = 3 << 30  # beyond what this process has


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


PLANTED: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "an endless file": link("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to nowhere": link("nowhere"),
    "bytes": lambda path: path.write_bytes(b"\xff\x00\n" * 99),
    "depth": lambda path: path.write_text("[" * 100_000),
    "another's JSON": lambda path: path.write_text('{"round": 1e999, "fates": 7, "format": []}\n[1]\n'),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.quick(3)
@pytest.mark.timeout(120)  # of a pipe that nobody writes there is no end
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("what", PLANTED)
def test_nothing_that_the_app_left_holds_up_root(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    fed = federation_folder(tmp_path / "fed")
    site = site_folder(tmp_path / "site", fed.join("one"))
    places = {getattr(there, name) for there in (fed, site) for name in dir(type(there)) if name.islower()
              and isinstance(getattr(type(there), name), property) and name != "written"}  # fmt: skip
    writable = [*fed.written, site.state]
    read = [place for place in places if any(place.is_relative_to(one) and place != one for one in writable)]
    assert {fed.rounds, fed.events, fed.summary, fed.lock, fed.base_cache, site.base_cache} <= {*read}
    for path in [*sorted(read), fed.server / "settings.json"]:
        kept = path.with_name("kept")
        if there := path.exists():
            path.rename(kept)
        PLANTED[what](path)
        ours = path.is_relative_to(fed.path)
        for words in [("flower", "status", fed.path), ("doctor", fed.path)] if ours else [("doctor", site.path)]:
            said = main(*words)
            told = said.out + said.err
            assert said.code in (0, 1, 2) and "Traceback" not in told and "memory" not in told, (path, words, told)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if there:
            kept.rename(path)


def serve(fed: FederationFolder, site: SiteFolder) -> None:
    with serving(fed.lock):
        pass


def rounds(fed: FederationFolder, site: SiteFolder) -> None:
    with played_by_one(fed.server):
        pass


def node(fed: FederationFolder, site: SiteFolder) -> None:
    with node_process.held(site):
        pass


WRITES: dict[str, tuple[str, Callable[[FederationFolder, SiteFolder], object]]] = {
    "fed/state/serve.lock": ("refuses", serve),
    "fed/server/.lock": ("refuses", rounds),
    "site/state/node.lock": ("refuses", node),
    "fed/state/logs/superlink.log": (
        "refuses", lambda fed, site: children.started(["true"], fed.logs / "superlink.log", {**os.environ})),
    "fed/server/events.jsonl": ("refuses", lambda fed, site: EventWriter(fed.events).write(Ended(1, "complete"))),
}  # fmt: skip


@pytest.mark.parametrize("linked", ["the file", "its folder"])
@pytest.mark.parametrize("name", WRITES)
def test_no_link_leads_what_is_written_elsewhere(name: str, linked: str, tmp_path: Path) -> None:
    fed = federation_folder(tmp_path / "fed")
    site = site_folder(tmp_path / "site", fed.join("one"))
    how, write = WRITES[name]
    victim = tmp_path / "victim" / Path(name).name
    victim.parent.mkdir()
    victim.write_text("another's")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if linked == "the file":
        path.symlink_to(victim)
    elif path.parent.name in ("state", "server"):
        pytest.skip("a written folder itself is a mount or root's")
    else:
        shutil.rmtree(path.parent)
        path.parent.symlink_to(victim.parent)
    with pytest.raises(ConfigError, match=path.name) if how == "refuses" else nullcontext():
        write(fed, site)
    assert victim.read_text() == "another's"
