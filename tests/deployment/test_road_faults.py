"""Faults on real machines: what is done, what comes of it, and what somebody reads. Kind: *attack*.

One federation runs all the while, that of test_road.py; each test makes faults, asks for the sentences, mends them, and
asks for more rounds of all three sites. They are for `make deployment-all`: on two cores the first two take
as long as the road. What was said goes into the table of
docs/deployment.md (tests/support/faults.py).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("flwr")

from support.certificates import DAY, certificates
from support.faults import tell
from support.machines import SERVER_NAME, Machine, machines_needed
from support.road import SITES, Road, write_notes

pytestmark = [machines_needed("nginx", "faketime", "mount"), pytest.mark.timeout(1200)]
rest = pytest.mark.deployment_all
SITE, SERVER, PROXY = "fedlora-site", "fedlora-server", "fedlora-proxy"


def line_with(words: str, text: str) -> str:
    """The line of a command's output that has these words, its table's bars taken off. A wrapped one is not put
    together: commands here have 200 columns."""
    found = [line for line in text.splitlines() if re.search(words, line, re.I)]
    assert found, f"nothing about {words!r} in:\n{text}"
    return " ".join(re.sub(r"[│┃]", " ", found[-1]).split())


@contextmanager
def stopped(machine: Machine, unit: str) -> Iterator[None]:
    """The unit, while something is changed; started again after it."""
    assert machine.run("systemctl", "stop", unit).code == 0
    try:
        yield
    finally:
        assert machine.run("systemctl", "start", unit).code == 0


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


# ---------------------------------------------------------------------------------------------- what is met first


@rest
def test_a_link_is_down_a_clock_is_wrong_and_a_stranger_knocks(running: Road) -> None:
    """At once. The stranger has the join file, with the CA's certificate, and the model."""
    acme, cork, stranger = running.network["acme"], running.network["cork"], running.network["stranger"]
    in_time, told = len(acme.said(SITE)), len(running.server.said(SERVER))
    shutil.copytree(acme.folder / "model", stranger.folder / "model")
    write_notes(stranger.folder / "notes.csv", 40, 9)
    shutil.copy(running.fed / "join" / "acme.toml", stranger.folder / "join.toml")
    made = stranger.run(
        "fedlora", "flower", "site", "site", "--join", "join.toml", "--data", "notes.csv", "--model", "model"
    )
    assert made.code == 0, made.out
    cork.link(up=False)
    out = time.monotonic()
    stranger.start("node", "fedlora", "flower", "node", "site")
    with stopped(acme, SITE):
        acme.clock = "-600s"
    time.sleep(max(0.0, 30 - (time.monotonic() - out)))
    cork.link(up=True)

    clock = running.wait_said(acme, SITE, "clock", in_time, 240)
    strange = running.wait_said(stranger, "node", "admit|not registered", seconds=240)
    stranger.end("node")
    running.until_next_rounds(1, 400, of=("berlin", "cork"))
    link = running.wait_said(running.server, SERVER, r"round \d+ of", told)  # the site itself may not notice
    with stopped(acme, SITE):
        acme.clock = ""
    running.until_next_rounds(1, 400)
    assert all(set(one["weights"]) <= set(SITES) for one in running.rounds())
    tell("a site's link is down for 30 s", "the round takes longer; the site is back by itself", "the server", link)
    tell("a site's clock is 10 minutes behind", "it is not let in until the clock is right", "the site", clock)
    tell("a stranger with the join file and a key of his own", "he gets no work", "the stranger", strange)


@rest
def test_other_base_weights_another_key_a_full_disk_and_an_expired_certificate(running: Road) -> None:
    """Two sites are wrong; one is mended, and the rounds go on with two, until the disk is full. Then TLS."""
    acme, berlin, cork = (running.network[name] for name in SITES)
    weights, key = berlin.folder / "model" / "model.safetensors", cork.folder / "site" / "key"
    public = running.fed / "public"
    said = {machine.name: len(machine.said(SITE)) for machine in (acme, berlin, cork)}
    kept = {path: path.read_bytes() for path in (weights, key, public / "server.crt", public / "server.key")}
    with stopped(berlin, SITE):
        weights.write_bytes(kept[weights][:-1] + bytes([kept[weights][-1] ^ 1]))
    with stopped(cork, SITE):
        cork.run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "other")
        key.write_bytes((cork.folder / "other").read_bytes())
    base = running.wait_said(berlin, SITE, "base model|weights", said["berlin"], 240)
    other_key = running.wait_said(cork, SITE, "key", said["cork"], 240)
    with stopped(cork, SITE):
        key.write_bytes(kept[key])
    running.until_next_rounds(1, 400, of=("acme", "cork"))
    assert "berlin" not in running.rounds()[-1]["weights"]

    told = len(running.server.said(SERVER))
    everything = running.server.fill_disk()
    full = running.wait_said(running.server, SERVER, "no space|full|room", told, 300)
    everything.unlink()
    running.until_next_rounds(1, 400, of=("acme", "cork"))

    told_acme = len(acme.said(SITE))
    certificates(public, [SERVER_NAME], begins=-40 * DAY, ends=-DAY, of=public)
    with stopped(running.server, PROXY):
        pass
    expired = running.wait_said(acme, SITE, "certificate", told_acme, 300)

    for path, content in kept.items():
        path.write_bytes(content)
    for machine, unit in ((running.server, PROXY), (berlin, SITE)):
        with stopped(machine, unit):
            pass
    running.until_next_rounds(1, 400)
    tell("a byte of a site's base weights differs", "it is refused before training", "the site", base)
    tell("a site has another key than was admitted", "it gets no work", "the site", other_key)
    tell("the server's disk is full", "it waits for room, and goes on", "the server", full)
    tell("the server's certificate has expired", "sites send nothing until it is renewed", "the site", expired)


# ------------------------------------------------------------------------------------------------ lines and machines


@rest
def test_a_site_is_too_slow(running: Road) -> None:
    berlin = running.network["berlin"]
    said = len(running.server.said(SERVER))
    trainers = berlin.pids("fedlora.flower.site.resident")
    assert trainers, "no trainer"
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    line = running.wait_said(running.server, SERVER, "berlin[^\n]*late", said, seconds=240)
    for pid in trainers:
        os.kill(pid, signal.SIGCONT)
    running.until_next_rounds(1, 400)
    tell("a site is slower than the deadline", "it is left out of that round", "the server", line)


@rest
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


@rest
def test_the_proxy_is_restarted(running: Road) -> None:
    with stopped(running.server, PROXY):
        time.sleep(8)
    said = running.server.said(SERVER)
    running.until_next_rounds(1, 400)
    last = [line for line in running.server.said(SERVER)[len(said) :].splitlines() if "round" in line]
    tell("the proxy is restarted", "sites try again; nothing is lost", "the server", last[-1])


@rest
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
    tell("the server's machine is switched off and on", "it goes on after the last stored round", "the server", line)


@rest
def test_the_superlink_is_killed(running: Road) -> None:
    said = len(running.server.said(SERVER))
    assert running.server.kill("flower-superlink")
    line = running.wait_said(running.server, SERVER, "SuperLink[^\n]*ended|starting again", said)
    running.until_next_rounds(1, 400)
    tell("the SuperLink dies", "it is started again, and the run goes on", "the server", line)


@rest
def test_two_serve_one_folder(running: Road) -> None:
    second = running.server.run("fedlora", "flower", "serve", "fed", seconds=60)
    assert second.code != 0
    line = line_with("already|lock|serve", second.out)
    assert re.search(r"\d{2,}", line)  # the pid of the first
    running.until_next_rounds(1)
    tell("`serve` is started a second time", "the second ends; the first goes on", "the server", line)


@rest
def test_a_sites_disk_is_full(running: Road) -> None:
    berlin = running.network["berlin"]
    said = len(running.server.said(SERVER))
    everything = berlin.fill_disk()
    try:
        line = running.wait_said(
            running.server, SERVER, "berlin[^\n]*(no space|full|room|failed|late|offline)", said, seconds=150
        )
    finally:
        everything.unlink()
    running.until_next_rounds(1, 400)
    tell("a site's disk is full", "its round fails, by name; it is back once there is room", "the server", line)


# --------------------------------------------------------------------------------------------------- who is let in


@rest
def test_a_certificate_of_another_name(running: Road) -> None:
    public, acme = running.fed / "public", running.network["acme"]
    kept = {path: path.read_bytes() for path in (public / "server.crt", public / "server.key")}
    certificates(public, ["other.example.org"], of=public)
    said = len(acme.said(SITE))
    try:
        with stopped(running.server, PROXY):
            pass
        with stopped(acme, SITE):
            pass
        line = running.wait_said(acme, SITE, "other.example.org|another name", said, seconds=240)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
        with stopped(running.server, PROXY):
            pass
    running.until_next_rounds(1, 400)
    tell("the server's certificate has another name", "sites send nothing", "the site", line)


@rest
def test_a_certificate_of_another_authority(running: Road) -> None:
    public, acme = running.fed / "public", running.network["acme"]
    kept = {path: path.read_bytes() for path in public.iterdir()}
    certificates(public, [SERVER_NAME])
    said = len(acme.said(SITE))
    try:
        with stopped(running.server, PROXY):
            pass
        with stopped(acme, SITE):
            pass
        line = running.wait_said(acme, SITE, "certificate", said, seconds=240)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
        with stopped(running.server, PROXY):
            pass
    running.until_next_rounds(1, 400)
    tell("the server's certificate is of another authority", "sites send nothing", "the site", line)


# ------------------------------------------------------------------------------------------------ the same everywhere


def _changed_file(running: Road, name: str, change: Callable[[bytes], bytes], words: str) -> str:
    """What the server says when a file of berlin's base model is changed under a running federation."""
    berlin = running.network["berlin"]
    path = berlin.folder / "model" / name
    kept, said, at_site = path.read_bytes(), len(running.server.said(SERVER)), len(berlin.said(SITE))
    with stopped(berlin, SITE):
        path.write_bytes(change(kept))
    try:
        line = running.wait_said(running.server, SERVER, f"berlin[^\n]*({words})", said, seconds=240)
        assert not any("berlin" in one["weights"] for one in running.rounds()[-1:])
    finally:
        print(berlin.said(SITE)[at_site:])
        with stopped(berlin, SITE):
            path.write_bytes(kept)
    running.until_next_rounds(1, 400)
    return line


@rest
def test_another_tokenizer(running: Road) -> None:
    def swapped(data: bytes) -> bytes:
        return data.replace(b'"w1"', b'"w_"').replace(b'"w2"', b'"w1"').replace(b'"w_"', b'"w2"')

    line = _changed_file(running, "tokenizer.json", swapped, "tokenizer")
    tell("a site has another tokenizer", "it is refused by name, before training", "the server", line)


def _made(running: Road, folder: str, *columns: str) -> Any:
    """`fedlora flower site` at cork, in another folder, with the file notes-FOLDER.csv."""
    cork = running.network["cork"]
    return cork.run(
        "fedlora", "flower", "site", folder, "--join", "join.toml", "--data", f"notes-{folder}.csv", "--model", "model",
        *columns,
    )  # fmt: skip


@rest
def test_classes_of_other_names(running: Road) -> None:
    cork = running.network["cork"]
    write_notes(cork.folder / "notes-renamed.csv", 40, 1, labels=("no", "ja"))
    made = _made(running, "renamed")
    assert made.code != 0 and not (cork.folder / "renamed").exists()
    line = line_with("ja", made.out)
    assert "yes" in made.out and "notes-renamed.csv" in made.out
    tell("a site's data have a class of another name", "its folder is not made", "the site", line)


@rest
def test_a_class_is_missing(running: Road) -> None:
    write_notes(running.network["cork"].folder / "notes-one.csv", 40, 1, labels=("no",))
    made = _made(running, "one")
    assert made.code == 0, made.out
    tell("a site's data lack a class", "it takes part; it is told", "the site", line_with("classes|yes", made.out))


@rest
def test_a_text_column_of_another_name(running: Road) -> None:
    write_notes(running.network["cork"].folder / "notes-column.csv", 40, 1, text="finding")
    made = _made(running, "column")
    assert made.code != 0
    line = line_with("finding", made.out)
    assert _made(running, "column", "--text", "finding").code == 0
    tell("a site's text is in another column", "the columns are named; `--text finding`", "the site", line)
