"""Faults on real machines: what is done, what comes of it, and what somebody reads. Kind: *attack*.

One federation runs all the while, that of test_road.py, where the main faults are; each test makes another one, asks
for the sentence, mends it, and asks for more rounds of all three sites. They are for `make deployment-all`. What was
said goes into the table of docs/how-to/federation.md (tests/support/faults.py).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from support.certificates import certificates
from support.containers import services
from support.faults import tell
from support.machines import SERVER_NAME, machines_needed
from support.road import PROXY, SERVER, SITE, Road, stopped, write_notes

pytestmark = [
    pytest.mark.deployment_all, machines_needed("nginx", "faketime", "mount"), pytest.mark.timeout(1200)
]  # fmt: skip


def line_with(words: str, text: str) -> str:
    """The line of a command's output that has these words, its table's bars taken off. A wrapped one is not put
    together: commands here have 200 columns."""
    found = [line for line in text.splitlines() if re.search(words, line, re.I)]
    assert found, f"nothing about {words!r} in:\n{text}"
    return " ".join(re.sub(r"[│┃]", " ", found[-1]).split())


@pytest.fixture(autouse=True)
def mended(running: Road) -> Iterator[None]:
    """After a test that failed, the next one finds links, clocks and disks as they were."""
    yield
    for machine in running.network:
        machine.link(up=True)
        (machine.folder / "everything").unlink(missing_ok=True)
        if machine.clock:
            with stopped(machine, SITE):
                machine.clock = ""


# ------------------------------------------------------------------------------------------------ lines and machines


def test_a_site_is_too_slow(running: Road) -> None:
    berlin = running.network["berlin"]
    said = len(running.server.said(SERVER))
    trainers = berlin.pids("flower node")
    assert trainers, "no trainer"
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    line = running.wait_said(running.server, SERVER, "berlin[^\n]*late", said, seconds=240)
    for pid in trainers:
        os.kill(pid, signal.SIGCONT)
    running.until_next_rounds(1, 400)
    tell("a site is slower than the deadline", "it is left out of that round", "the server", line)


def test_a_clock_is_half_a_minute_ahead(running: Road) -> None:
    acme = running.network["acme"]
    said = len(acme.said(SITE))
    with stopped(acme, SITE):
        acme.clock = "+30s"
    line = running.wait_said(acme, SITE, "clock", said, seconds=240)
    with stopped(acme, SITE):
        acme.clock = ""
    running.until_next_rounds(1, 400)
    tell("a site's clock is 30 s ahead", "it is not let in until the clock is right", "the site", line)


def test_the_proxy_is_restarted(running: Road) -> None:
    with stopped(running.server, PROXY):
        time.sleep(8)
    said = running.server.said(SERVER)
    running.until_next_rounds(1, 400)
    last = [line for line in running.server.said(SERVER)[len(said) :].splitlines() if "round" in line]
    tell("the proxy is restarted", "sites try again; nothing is lost", "the server", last[-1])


def test_the_server_is_switched_off_and_on(running: Road) -> None:
    before = running.rounds()[-1]["round"]
    assert running.server.kill() > 3
    time.sleep(3)
    said = len(running.server.said(SERVER))
    assert running.server.run("systemctl", "start", PROXY, SERVER).code == 0  # as systemd does when it boots
    line = running.wait_said(running.server, SERVER, "going on|done", said, seconds=240)
    running.until_next_rounds(1, 400)
    numbers = [one["round"] for one in running.rounds()]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > before
    tell("the server's machine is switched off and on", "it continues after the last stored round", "the server", line)


def test_two_serve_one_folder(running: Road) -> None:
    second = running.server.run("fedlora", "flower", "serve", "fed", seconds=60)
    assert second.code != 0
    line = line_with("already|lock|serve", second.out)
    assert re.search(r"\d{2,}", line)  # the pid of the first
    running.until_next_rounds(1)
    tell("`serve` is started a second time", "the second ends; the first continues", "the server", line)


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


# --------------------------------------------------------------------------------------------------- who is let in


def _of_another_name(public: Path) -> None:
    certificates(public, ["other.example.org", "localhost"], of=public)


def _of_another_authority(public: Path) -> None:
    certificates(public, [SERVER_NAME, "localhost"])


@pytest.mark.parametrize(
    ("made", "says", "fault"),
    [
        (_of_another_name, "certificate is not valid for", "the server's certificate has another name"),
        (_of_another_authority, "certificate", "the server's certificate is of another authority"),
    ],
    ids=["another name", "another authority"],
)
def test_a_certificate_that_sites_do_not_take(
    running: Road, made: Callable[[Path], None], says: str, fault: str
) -> None:
    public, acme = running.fed / "certs", running.network["acme"]
    kept = {path: path.read_bytes() for path in public.iterdir()}
    made(public)
    said = len(acme.said(SITE))
    try:
        with stopped(running.server, PROXY):
            pass
        with stopped(acme, SITE):
            pass
        line = running.wait_said(acme, SITE, says, said, seconds=240)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
        with stopped(running.server, PROXY):
            pass
    running.until_next_rounds(1, 400)
    tell(fault, "sites send nothing", "the site", line)


# ------------------------------------------------------------------------------------------------ the same everywhere


def test_another_tokenizer(running: Road) -> None:
    """Two words change places in a site's tokenizer.json while nobody looks."""
    berlin = running.network["berlin"]
    path = berlin.folder / "model" / "tokenizer.json"
    kept, said = path.read_bytes(), len(berlin.said(SITE))
    with stopped(berlin, SITE):
        path.write_bytes(kept.replace(b'"w1"', b'"w_"').replace(b'"w2"', b'"w1"').replace(b'"w_"', b'"w2"'))
    line = running.wait_said(berlin, SITE, "tokenizer is [0-9a-f]+", said, seconds=240)
    running.until_next_rounds(1, 400, of=("acme", "cork"))
    assert "berlin" not in running.rounds()[-1]["weights"]
    with stopped(berlin, SITE):
        path.write_bytes(kept)
    running.until_next_rounds(1, 400)
    tell("a site has another tokenizer", "it is refused before training", "the site", line)


def _made(running: Road, folder: str, *columns: str) -> Any:
    """`fedlora flower site` at cork, in another folder, with the file notes-FOLDER.csv."""
    cork = running.network["cork"]
    return cork.run(
        "fedlora", "flower", "site", folder, "--name", "cork", "--join", "join.toml", "--data",
        f"notes-{folder}.csv", "--model", "model",
        *columns,
    )  # fmt: skip


def test_classes_of_other_names(running: Road) -> None:
    cork = running.network["cork"]
    write_notes(cork.folder / "notes-renamed.csv", 40, 1, labels=("no", "ja"))
    made = _made(running, "renamed")
    assert made.code != 0 and not (cork.folder / "renamed").exists()
    line = line_with("ja", made.out)
    assert "yes" in made.out and "notes-renamed.csv" in made.out
    tell("a site's data have a class of another name", "its folder is not made", "the site", line)


def test_a_class_is_missing(running: Road) -> None:
    write_notes(running.network["cork"].folder / "notes-one.csv", 40, 1, labels=("no",))
    made = _made(running, "one")
    assert made.code == 0, made.out
    tell("a site's data lack a class", "it takes part; it is told", "the site", line_with("classes|yes", made.out))


def test_a_text_column_of_another_name(running: Road) -> None:
    write_notes(running.network["cork"].folder / "notes-column.csv", 40, 1, text="finding")
    made = _made(running, "column")
    assert made.code != 0
    line = line_with("finding", made.out)
    assert _made(running, "column", "--set", "data.text=finding").code == 0
    tell("a site's text is in another column", "the columns are named; `--set data.text=finding`", "the site", line)
