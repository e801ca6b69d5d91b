"""`status` and `doctor` are started by root, and read what the units may write: whatever lies there, they end in time,
within their memory, and change nothing. Kind: *enumeration*, of the files that they read and of what the app could put
in their place."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

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
        for words in (("flower", "status", fed.path), ("doctor", fed.path), ("doctor", site.path)):
            said = main(*words)
            told = said.out + said.err
            assert said.code in (0, 1, 2) and "Traceback" not in told and "memory" not in told, (path, words, told)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if there:
            kept.rename(path)
